"""Build a plan's model stages and optimizer and place them in the mesh; each phase once, in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainspec_cli.engine.build.kernel_loading import apply_kernels, load_kernel
from trainspec_cli.engine.build.materialise import allocate, build_model, materialise, start_buffers
from trainspec_cli.engine.build.own_code import try_own_block, use_own_loss
from trainspec_cli.engine.checkpoint.parts import Held
from trainspec_cli.engine.comm.codec import PARAMETER_CODECS, Codec
from trainspec_cli.engine.comm.compressed import Compression
from trainspec_cli.engine.comm.exchange import Peers, Purpose, Tiers, TimeCollective
from trainspec_cli.engine.comm.wire_bytes import WireMeter
from trainspec_cli.engine.mesh import Mesh, build_mesh, split_by_tier
from trainspec_cli.engine.models.experts import sort_by_expert
from trainspec_cli.engine.models.lora import apply_lora
from trainspec_cli.engine.models.quantised import place_quantised
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.observe.links import LinkTimers
from trainspec_cli.engine.optim.optimizer import build_optimizer, without_memory
from trainspec_cli.engine.optim.own import build_own_optimizer
from trainspec_cli.engine.parallel.balance import routers_of, sum_over_sequence
from trainspec_cli.engine.parallel.context import apply_context_parallel, held_positions
from trainspec_cli.engine.parallel.data_parallel import DataParallel, apply_data_parallel
from trainspec_cli.engine.parallel.expert import apply_expert_parallel
from trainspec_cli.engine.parallel.float8 import apply_float8
from trainspec_cli.engine.parallel.gradient_sums import GradientSums, Route
from trainspec_cli.engine.parallel.lost_gradients import ModuleLosses
from trainspec_cli.engine.parallel.noise import Held as HeldGradient
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.pipeline import Hidden, Lines, WeightQueue
from trainspec_cli.engine.parallel.recompute import apply_recompute
from trainspec_cli.engine.parallel.tensor import apply_tensor_parallel, partial_parameters
from trainspec_cli.engine.quantised_shares import is_quantised, quantised_parameters
from trainspec_cli.engine.shares import Cut, Share
from trainspec_cli.policy.pipeline import Kind, cut_layers
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class Throttle:
    """Passes that take longer than they need: an injected fault, of which there usually is none."""

    parts: Mapping[int, float]
    """The part of the model's layers in each stage of this rank."""
    sample_s: float = 0.0
    """How much longer all passes of one sample through all layers take."""

    def wait(self, kind: Kind, stage: int, samples: int) -> None:
        """Wait for what a pass of that kind takes longer; the whole backward costs two forwards."""
        if self.sample_s:
            time.sleep(self.sample_s * self.parts[stage] * samples * (2 if kind == "backward" else 1) / 3)


@dataclass
class Allowance:
    """Memory for so many samples at a time: an injected fault, of which there usually is none."""

    samples: int | None = None

    def check(self, kind: Kind, samples: int) -> None:
        """Raise what an allocation would in the backward of a micro-batch that is too large."""
        if self.samples is not None and samples > self.samples and kind.startswith("backward"):
            raise torch.OutOfMemoryError(f"a fault that the recipe asked for: {samples} samples do not fit")


@dataclass(frozen=True)
class Stages:
    """The stages that this rank holds, and its lines to the others."""

    layout: Layout
    parts: dict[int, Any]
    """Stage -> its part of the model."""
    lines: Lines
    queue: WeightQueue
    hidden: Hidden
    clock: StepClock
    throttle: Throttle
    allowance: Allowance
    noise: NoiseProbe


@dataclass(frozen=True)
class LateSum:
    """Gradients that are summed over a group once the backwards are done."""

    shares: Sequence[Share]
    peers: Peers


@dataclass
class TrainState:
    """All that a rank trains with: its stages of the model, their shares, the optimizer and the mesh they lie in."""

    device: torch.device
    mesh: Mesh
    clock: StepClock
    links: LinkTimers
    stages: Stages
    shares: list[Share]
    optimizer: torch.optim.Optimizer
    late_sums: Sequence[LateSum]
    positions_S: Tensor | None
    """The positions of each sequence that this rank holds; None: all."""
    routers: Sequence[Any]
    """Routers of the experts that are to be kept evenly visited."""
    spread_experts: Collection[str] = ()
    """Names of the parameters that ep spreads."""
    compression: Compression = field(default_factory=Compression)
    wire: WireMeter = field(default_factory=WireMeter)
    sums: GradientSums | None = None
    """The sums of gradients over data-parallel ranks beside the backward; None on a GPU, and where one rank has all."""
    losses: list[ModuleLosses] = field(default_factory=list)
    """The losses of compressed exchanges of gradients, by module."""
    beyond: dict[str, Tensor] = field(default_factory=dict)
    """What a coordinator keeps beside the model and has saved, by a name that no other rank or layout has."""

    @property
    def parts(self) -> list[Any]:
        return list(self.stages.parts.values())

    def await_sums(self) -> Callable[[], object]:
        """Return what waits, in any thread, for the sums of gradients over data-parallel ranks that have begun."""
        return self.sums.await_added() if self.sums is not None else lambda: None

    @property
    def held(self) -> Held:
        return Held(self.shares, self.parts, self.optimizer, self.compression.saved | self.beyond)


@dataclass(frozen=True)
class Exchanges:
    """How exchanges of data parallelism travel, and what times and counts them."""

    clock: StepClock
    links: LinkTimers
    wire: WireMeter
    compression: Compression
    losses: list[ModuleLosses] = field(default_factory=list)
    replica_tiers: Tiers | None = None
    """Tiers in which gradients are summed over replicas; None: one all-reduce."""
    sums: GradientSums | None = None
    routes: Mapping[str, Route | None] = field(default_factory=dict)
    """Ways of `sums`, by the axis of the shards."""

    def of(self, purpose: Purpose, axis: str, group: dist.ProcessGroup) -> TimeCollective:
        """Return what times the exchanges of `group`, this rank's along `axis`, and counts their bytes."""
        return self.counted(purpose, self.links.of(axis, group))

    def counted(self, purpose: Purpose, time: TimeCollective) -> TimeCollective:
        @contextmanager
        def timed(sent_bytes: float | None = None) -> Iterator[bool]:
            with self.wire.purpose(purpose), time(sent_bytes) as has_to_end:
                yield has_to_end

        return timed


def build_compression(plan: Plan, device: torch.device) -> Compression:
    """Build the codecs. Of several replica groups one alone writes checkpoints, without the feedback of the others."""
    per_node = _ranks_per_node()
    return Compression(
        inside=plan.comm.gradients,
        across=plan.comm.across_nodes,
        rank=plan.comm.rank,
        is_inside=lambda group: len({rank // per_node for rank in dist.get_process_group_ranks(group)}) == 1,
        device=device,
        saved_as=f"{plan.layout.describe()}.rank{dist.get_rank()}" if plan.replica_groups == 1 else "",
    )


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _replica_tiers(plan: Plan, mesh: Mesh) -> Tiers | None:
    """Return the tiers of `dp_replicate` where the blueprint sums in them. Called by every rank together."""
    if plan.layout.dp_replicate == 1 or plan.blueprint is None or not plan.blueprint.sums_replicas_in_tiers:
        return None
    per_node, places = _ranks_per_node(), plan.blueprint.node_places

    def place_of(rank: int) -> int:
        node, number = divmod(rank, per_node)
        return (places[node] if places else node) * per_node + number

    sizes = [tier.devices for tier in plan.blueprint.tiers]
    levels = split_by_tier(mesh.links()["dp_replicate"], place_of, sizes)
    if levels is None:
        return None
    return Tiers(tuple(dist.new_subgroups_by_enumeration(groups)[0] for groups in levels))


def build_train_state(
    plan: Plan,
    device: torch.device,
    mesh: Mesh | None = None,
    clock: StepClock | None = None,
    wire: WireMeter | None = None,
    *,
    fill: bool = True,
) -> TrainState:
    """Each stage on meta: kernels -> fp8 -> cut -> recompute -> compile -> shard -> materialise; then the optimizer.

    `clock` and `wire` are those of the state which this one takes the place of. Not `fill`: parameters have no values
    yet, and moments no memory either, since `reshard` brings both.
    """
    mesh, clock = mesh or build_mesh(plan.layout, device.type), clock or StepClock(device)
    positions_S = _positions(plan, mesh)
    parts, shares, partials = {}, [], []
    wire, compression = wire or WireMeter(), build_compression(plan, device)
    wire.find_connections()
    wire.reserve(mesh.connections_of_sums, "gradients")
    links = LinkTimers(clock)
    tiers = _replica_tiers(plan, mesh)
    exchanges = _with_sums(Exchanges(clock, links, wire, compression, replica_tiers=tiers), mesh)
    cp, tp = (_peers(mesh, links, axis) for axis in ("cp", "tp"))
    queue, noise = WeightQueue(), NoiseProbe(device, cp, tp, Peers(mesh.ends, clock.collective))
    for stage in plan.layout.stages_of_rank(mesh.rank("pp")):
        part, cuts, partial = _spread_stage(plan, mesh, exchanges, noise, stage)
        use_own_loss(part, plan, device)
        if plan.layout.splits_backward:
            queue.apply(part)
        parts[stage] = part
        allocate(part, device, offload=plan.offload != "none")
        named = (*part.named_parameters(), *quantised_parameters(part))
        held = [_share(plan, name, parameter, cuts) for name, parameter in named]
        if fill:
            try_own_block(plan, (_layers_of(plan, stage) or range(1))[0], DTYPES[plan.compute], device)
            materialise(part, held, device, plan.spec.train.seed, positions_S)
        else:
            start_buffers(part, device, plan.spec.train.seed, positions_S)
        shares += held
        partials += [share for share in held if share.name in partial and share.is_trained]
    return TrainState(
        device=device,
        mesh=mesh,
        clock=clock,
        links=links,
        stages=_join_stages(plan, parts, Lines(mesh.group("pp"), mesh.upstream, device), queue, clock, noise),
        shares=shares,
        optimizer=_build_plan_optimizer(plan, shares, clock, fill=fill),
        late_sums=_late_sums(plan, mesh, exchanges, shares, partials),
        positions_S=positions_S,
        routers=routers_of(list(parts.values())),
        spread_experts=_spread_experts(mesh, shares),
        compression=compression,
        wire=wire,
        sums=exchanges.sums,
        losses=exchanges.losses,
    )


def _with_sums(exchanges: Exchanges, mesh: Mesh) -> Exchanges:
    """Return `exchanges` with sums of gradients in a thread of their own, where the mesh has groups for that."""
    if not mesh.sums:
        return exchanges

    def peers(axis: str) -> Peers | None:
        if (group := mesh.sums.get(axis)) is None:
            return None
        return Peers(group, exchanges.counted("gradients", exchanges.links.of_held_back(axis, group)))

    replicas = peers("dp_replicate")
    if replicas is not None:
        replicas = replace(replicas, tiers=exchanges.replica_tiers)
    shards = {axis: peers(axis) for axis in ("dp_shard", "expert_shard")}
    routes = {axis: Route(one, replicas) if one or replicas else None for axis, one in shards.items()}
    return replace(exchanges, sums=GradientSums(exchanges.clock), routes=routes)


def _join_stages(
    plan: Plan, parts: dict[int, Any], lines: Lines, queue: WeightQueue, clock: StepClock, noise: NoiseProbe
) -> Stages:
    throttle = Throttle({stage: _part_of_layers(plan, stage) for stage in parts})
    return Stages(plan.layout, parts, lines, queue, _hidden(plan), clock, throttle, Allowance(), noise)


def _build_plan_optimizer(
    plan: Plan, shares: Sequence[Share], clock: StepClock, *, fill: bool
) -> torch.optim.Optimizer:
    """Build the optimizer of the trained shares; moments have no memory yet if not `fill`."""
    trained = [share for share in shares if share.is_trained]
    zeros = torch.zeros_like if fill else without_memory
    if plan.spec.optim.is_own:
        return build_own_optimizer(trained, plan.spec, zeros=zeros)
    update = load_kernel("adamw", plan.kernels.adamw)
    return build_optimizer(trained, plan.spec.optim, update, zeros, clock.collective)


def _spread_stage(
    plan: Plan, mesh: Mesh, exchanges: Exchanges, noise: NoiseProbe, stage: int
) -> tuple[Any, dict[str, Cut], list[str]]:
    """One stage of the model, spread over the mesh's other axes.

    -> (the module, which parameters are cut how, names of those whose gradients are partial over tp).
    """
    with torch.device("meta"):
        part = build_model(plan.spec.model, plan.spec.data.seq_len, _layers_of(plan, stage))
        apply_lora(part, plan.spec.lora)
    apply_kernels(part, plan.kernels)
    if plan.spec.precision.matmul == "fp8":
        apply_float8(part.block_modules(), emulate=plan.device == "cpu")
    cuts, partial = _cut(part, plan.layout, mesh, exchanges.links)
    place_quantised(part, cuts)
    for norm in part.norm_modules():
        norm.ranks = Peers(mesh.stage.get_group(), exchanges.clock.collective)
    apply_recompute(part.block_modules(), plan.recompute, compiled=plan.spec.compile)
    if plan.spec.compile:
        for module in part.compile_modules():
            module.compile()
    experts = [module.experts for module in part.expert_modules()]
    expert_shard = mesh.experts["expert_shard"] if mesh.experts else None
    held = {name: _held(plan, name, cuts, partial) for name, _ in part.named_parameters()}
    how = _data_parallel(plan, mesh, exchanges, noise, held, f"stage{stage}")
    apply_data_parallel(part, experts, mesh.shard, expert_shard, how)
    return part, cuts, partial


def _held(plan: Plan, name: str, cuts: Mapping[str, Cut], partial: Sequence[str]) -> HeldGradient:
    """Return how the ranks of tp, or the pipeline's ends, hold the gradient of a parameter."""
    if _is_twin(plan, name):
        return "twin"
    if name in partial:
        return "partial"
    return "own" if name in cuts or plan.layout.tp == 1 else "copied"


def _layers_of(plan: Plan, stage: int) -> range | None:
    """Return the layers of `stage`; None stands for all of them."""
    if plan.layout.num_stages == 1:
        return None
    return cut_layers(plan.spec.model.num_layers, plan.layout)[stage]


def _part_of_layers(plan: Plan, stage: int) -> float:
    layers = _layers_of(plan, stage)
    return 1.0 if layers is None else len(layers) / plan.spec.model.num_layers


def _peers(mesh: Mesh, links: LinkTimers, axis: str) -> Peers:
    group, is_ring = mesh.group(axis), axis == "cp" and mesh.layout.context_method == "ring"
    return Peers(group, links.of(axis, group, is_hidden=is_ring))


def _cut(part: Any, layout: Layout, mesh: Mesh, links: LinkTimers) -> tuple[dict[str, Cut], list[str]]:
    """Expert, tensor and context parallelism; -> (cuts, names of partial parameters)."""
    cp, tp = (_peers(mesh, links, axis) for axis in ("cp", "tp"))
    cuts: dict[str, Cut] = {}
    partial: list[str] = []
    if layout.ep > 1:
        group = mesh.expert_group("ep")
        cuts |= apply_expert_parallel(part, Peers(group, links.of("ep", group)), sort_by_expert)
    if layout.tp > 1:
        cuts |= apply_tensor_parallel(part, tp, sequence_parallel=layout.sequence_parallel)
        partial = partial_parameters(part, sequence_parallel=layout.sequence_parallel, cuts=cuts)
    if layout.cp > 1:
        apply_context_parallel(part, cp, layout.context_method)
    if layout.cp > 1 or layout.tp > 1:
        sum_over_sequence(routers_of([part]), [cp, tp])
    return cuts, partial


def _data_parallel(
    plan: Plan, mesh: Mesh, exchanges: Exchanges, noise: NoiseProbe, held: Mapping[str, HeldGradient], name: str
) -> DataParallel:
    return DataParallel(
        compute=DTYPES[plan.compute],
        reduce=DTYPES[plan.spec.precision.reduce],
        free_after_forward=not plan.layout.keeps_parameters,
        offload=plan.offload != "none",
        replicas=replace(_peers_for_gradients(mesh, exchanges, "dp_replicate"), tiers=exchanges.replica_tiers),
        time=exchanges.of,
        noise=noise,
        held_by=held.__getitem__,
        compression=exchanges.compression,
        parameter_codec=_parameter_codec(plan),
        sums=exchanges.sums,
        route=exchanges.routes.get,
        losses=exchanges.losses,
        name=name,
    )


def _parameter_codec(plan: Plan) -> Codec | None:
    """Return None where parameters travel as they are computed with."""
    chosen = plan.comm.parameters
    return None if chosen in ("full", plan.compute) else PARAMETER_CODECS[chosen]


def _share(plan: Plan, name: str, parameter: nn.Parameter, cuts: dict[str, Cut]) -> Share:
    """Return how a parameter is shared. Replicas hold copies, and so do the ranks of tp where a parameter is not cut,
    and those of all data parallelism where it is quantised; a tied embedding stands twice."""
    layout = plan.layout
    copies = layout.dp_replicate * (1 if name in cuts else layout.tp) * (layout.shards if is_quantised(name) else 1)
    return Share(name, parameter, cuts.get(name), copies * (2 if _is_twin(plan, name) else 1))


def _is_twin(plan: Plan, name: str) -> bool:
    return plan.spec.model.tied_embeddings and name == "embed.weight" and plan.layout.num_stages > 1


def _spread_experts(mesh: Mesh, shares: Sequence[Share]) -> set[str]:
    if mesh.experts is None:
        return set()
    group = mesh.expert_group("ep").group_name
    return {share.name for share in shares if share.cut and share.cut.group.group_name == group}


def _positions(plan: Plan, mesh: Mesh) -> Tensor | None:
    layout = plan.layout
    if layout.cp == 1:
        return None
    return held_positions(plan.spec.data.seq_len, layout.context_method, mesh.rank("cp"), layout.cp)


def _hidden(plan: Plan) -> Hidden:
    layout = plan.layout
    parts = layout.tp if layout.sequence_parallel else 1
    return Hidden(plan.spec.model.hidden_size, parts, DTYPES[plan.compute])


def _peers_for_gradients(mesh: Mesh, exchanges: Exchanges, axis: str) -> Peers:
    group = mesh.group(axis)
    return Peers(group, exchanges.of("gradients", axis, group))


def _late_sums(
    plan: Plan, mesh: Mesh, exchanges: Exchanges, shares: Sequence[Share], partials: Sequence[Share]
) -> list[LateSum]:
    twins = [share for share in shares if _is_twin(plan, share.name) and share.is_trained]
    ends = Peers(mesh.ends, exchanges.counted("gradients", exchanges.clock.collective))
    sums = ((partials, _peers_for_gradients(mesh, exchanges, "tp")), (twins, ends))
    return [LateSum(summed, peers) for summed, peers in sums if summed]
