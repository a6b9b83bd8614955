"""Build a plan's model stages and optimizer and place them in the mesh; each phase once, in order."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.engine.build.exchanges import Exchanges, build_exchanges
from trainspec_cli.engine.build.own_code import try_own_block, use_own_loss
from trainspec_cli.engine.build.train_state import DTYPES, Allowance, LateSum, Stages, Throttle, TrainState
from trainspec_cli.engine.comm.codec import PARAMETER_CODECS, Codec, WireMeter
from trainspec_cli.engine.comm.exchange import Peers
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.engine.models.experts import sort_by_expert
from trainspec_cli.engine.models.lora import apply_lora
from trainspec_cli.engine.models.quantised import place_quantised
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.optim.optimizer import build_optimizer, without_memory
from trainspec_cli.engine.optim.own import build_own_optimizer
from trainspec_cli.engine.parallel.context import (
    apply_context_parallel,
    apply_tensor_parallel,
    held_positions,
    partial_parameters,
)
from trainspec_cli.engine.parallel.data_parallel import DataParallel, apply_data_parallel
from trainspec_cli.engine.parallel.expert import apply_expert_parallel, apply_float8, apply_recompute
from trainspec_cli.engine.parallel.noise import Held as HeldGradient
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.pipeline import Hidden, Lines, WeightQueue, routers_of, sum_over_sequence
from trainspec_cli.engine.shares import Cut, Share, is_quantised, quantised_parameters, split_quantised
from trainspec_cli.planner.pipeline import cut_layers
from trainspec_cli.recipe.keys.kernels import KERNELS, Backend, KernelSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ModelSpec
from trainspec_cli.recipe.results.plan import Plan

# A model or a stage of one: built on meta, allocated, and filled with its first values.


def build_model(model: ModelSpec, seq_len: int, layers: range | None = None) -> Any:
    """Build the whole model, or the pipeline stage with `layers`."""
    return import_module(model.record.builder).build(model, seq_len, layers)


def allocate(model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Move the model from meta to `device`; with `offload` its parameters go to host memory."""
    model.to_empty(device="cpu" if offload else device)
    if offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def materialise(
    model: Any, shares: Sequence[Share], device: torch.device, seed: int, positions_S: Tensor | None = None
) -> None:
    """Fill `model`, allocated, of which `shares` are the parameters; `positions_S` where it sees part of a sequence.

    Each parameter has a generator of its own, seeded by the run's seed and its name, so that its values depend
    neither on the layout nor on the order; one full parameter at a time is held.
    """

    def first_values(name: str, full: Tensor) -> Tensor:
        model.init_parameter(name, full, parameter_generator(seed, name, device))
        return full

    model.seed = seed
    plain, quantised = split_quantised(shares)
    for share in plain:
        full = torch.empty(share.full_shape, dtype=share.parameter.dtype, device=device)
        share.local.copy_(share.part_of(first_values(share.name, full)))
    for matrix in quantised:
        matrix.fill(first_values(matrix.name, torch.empty(matrix.full_shape, device=device)))
    start_buffers(model, device, seed, positions_S)


@torch.no_grad()
def start_buffers(model: Any, device: torch.device, seed: int, positions_S: Tensor | None) -> None:
    model.seed = seed
    model.init_buffers()
    if positions_S is not None:
        model.positions_S = positions_S.to(device)


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


# Find the function that a kernel backend's name stands for, and put it into a model, whose modules hold their
# operations by name.


ENGINE = __package__.rpartition(".")[0]


def load_kernel(op: str, backend: str) -> Callable[..., Any]:
    """Raises ImportError where its package is not installed."""
    return load_source(KERNELS[op][backend])


def load_source(backend: Backend) -> Callable[..., Any]:
    module, _, name = backend.source.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{ENGINE}.{module}"), name)
    if backend.options:
        function = partial(function, **backend.options)
    return compiled_in_training(function) if backend.fused else function


def apply_kernels(part: nn.Module, kernels: KernelSpec) -> None:
    """Put what was chosen in the place of the defaults, in every module that has the operation."""
    for op, backend in kernels.changed.items():
        function = load_kernel(op, backend)
        for module in modules_with(part, op):
            setattr(module, op, function)


def modules_with(part: nn.Module, op: str) -> list[nn.Module]:
    """Return the engine's own modules that have the operation: a user's may mean another thing by it."""
    return [module for module in part.modules() if _engine_has(type(module), op)]


def _engine_has(kind: type, op: str) -> bool:
    definer = next((base for base in kind.__mro__ if op in vars(base)), None)
    return definer is not None and definer.__module__.startswith(ENGINE)


def compiled_in_training(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for each shape separately, so that results do not depend on earlier shapes.

    Without gradients the plain function is called: evaluation has its own shapes, and each would be compiled.
    """
    fused = torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*inputs: Any) -> Any:
        return fused(*inputs) if torch.is_grad_enabled() else function(*inputs)

    return call


# One stage of a plan's model, spread over the axes of the mesh.


def spread_stage(
    plan: Plan, mesh: Mesh, exchanges: Exchanges, noise: NoiseProbe, stage: int
) -> tuple[Any, dict[str, Cut], list[str]]:
    """One stage of the model, spread over the mesh's other axes.

    -> (the module, which parameters are cut how, names of those whose gradients are partial over tp).
    """
    with torch.device("meta"):
        part = build_model(plan.spec.model, plan.spec.data.seq_len, layers_of(plan, stage))
        apply_lora(part, plan.spec.lora)
    apply_kernels(part, plan.kernels)
    if plan.spec.precision.matmul == "fp8":
        apply_float8(part.block_modules(), emulate=plan.device == "cpu")
    cuts, partial = _cut(part, plan.layout, mesh, exchanges)
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
    if is_twin(plan, name):
        return "twin"
    if name in partial:
        return "partial"
    return "own" if name in cuts or plan.layout.tp == 1 else "copied"


def _cut(part: Any, layout: Layout, mesh: Mesh, exchanges: Exchanges) -> tuple[dict[str, Cut], list[str]]:
    """Expert, tensor and context parallelism; -> (cuts, names of partial parameters)."""
    cp, tp = (exchanges.peers_along(mesh, axis) for axis in ("cp", "tp"))
    cuts: dict[str, Cut] = {}
    partial: list[str] = []
    if layout.ep > 1:
        group = mesh.expert_group("ep")
        cuts |= apply_expert_parallel(part, Peers(group, exchanges.links.of("ep", group)), sort_by_expert)
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
        replicas=replace(exchanges.gradient_peers(mesh, "dp_replicate"), tiers=exchanges.replica_tiers),
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


def layers_of(plan: Plan, stage: int) -> range | None:
    """Return the layers of `stage`; None stands for all of them."""
    if plan.layout.num_stages == 1:
        return None
    return cut_layers(plan.spec.model.num_layers, plan.layout)[stage]


def is_twin(plan: Plan, name: str) -> bool:
    return plan.spec.model.tied_embeddings and name == "embed.weight" and plan.layout.num_stages > 1


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
    mesh = mesh or build_mesh(plan.layout, device.type)
    clock = clock or StepClock(device)
    layout = plan.layout
    compute = DTYPES[plan.compute]
    positions_S = None
    if layout.cp > 1:
        positions_S = held_positions(plan.spec.data.seq_len, layout.context_method, mesh.rank("cp"), layout.cp)
    parts: dict[int, Any] = {}
    parts_of_layers: dict[int, float] = {}
    shares: list[Share] = []
    partials: list[Share] = []
    exchanges = build_exchanges(plan, mesh, device, clock, wire or WireMeter())
    cp, tp = (exchanges.peers_along(mesh, axis) for axis in ("cp", "tp"))
    queue = WeightQueue()
    noise = NoiseProbe(device, cp, tp, Peers(mesh.ends, clock.collective))
    for stage in layout.stages_of_rank(mesh.rank("pp")):
        part, cuts, partial = spread_stage(plan, mesh, exchanges, noise, stage)
        use_own_loss(part, plan, device)
        if layout.splits_backward:
            queue.apply(part)
        parts[stage] = part
        layers = layers_of(plan, stage)
        parts_of_layers[stage] = 1.0 if layers is None else len(layers) / plan.spec.model.num_layers
        allocate(part, device, offload=plan.offload != "none")
        named = (*part.named_parameters(), *quantised_parameters(part))
        held = [_share(plan, name, parameter, cuts) for name, parameter in named]
        if fill:
            try_own_block(plan, (layers or range(1))[0], compute, device)
            materialise(part, held, device, plan.spec.train.seed, positions_S)
        else:
            start_buffers(part, device, plan.spec.train.seed, positions_S)
        shares += held
        partials += [share for share in held if share.name in partial and share.is_trained]
    trained = [share for share in shares if share.is_trained]
    zeros = torch.zeros_like if fill else without_memory
    optimizer: torch.optim.Optimizer
    if plan.spec.optim.is_own:
        optimizer = build_own_optimizer(trained, plan.spec, zeros=zeros)
    else:
        update = load_kernel("adamw", plan.kernels.adamw)
        optimizer = build_optimizer(trained, plan.spec.optim, update, zeros, clock.collective, compute)
    # Gradients that no backward sums: of parameters that every rank of tp holds whole, and of a tied embedding, whose
    # two copies lie at the two ends of a pipeline.
    twins = [share for share in trained if is_twin(plan, share.name)]
    ends = Peers(mesh.ends, exchanges.counted("gradients", clock.collective))
    late = ((partials, exchanges.gradient_peers(mesh, "tp")), (twins, ends))
    return TrainState(
        device=device,
        mesh=mesh,
        clock=clock,
        links=exchanges.links,
        stages=Stages(
            layout=layout,
            parts=parts,
            lines=Lines(mesh.group("pp"), mesh.upstream, device),
            queue=queue,
            hidden=Hidden(plan.spec.model.hidden_size, layout.tp if layout.sequence_parallel else 1, compute),
            clock=clock,
            throttle=Throttle(parts_of_layers),
            allowance=Allowance(),
            noise=noise,
        ),
        shares=shares,
        optimizer=optimizer,
        late_sums=[LateSum(summed, peers) for summed, peers in late if summed],
        positions_S=positions_S,
        routers=routers_of(list(parts.values())),
        spread_experts=_spread_experts(mesh, shares),
        compression=exchanges.compression,
        wire=exchanges.wire,
        sums=exchanges.sums,
        losses=exchanges.losses,
    )


def _share(plan: Plan, name: str, parameter: nn.Parameter, cuts: dict[str, Cut]) -> Share:
    """Return how a parameter is shared. Replicas hold copies, and so do the ranks of tp where a parameter is not cut,
    and those of all data parallelism where it is quantised; a tied embedding stands twice."""
    layout = plan.layout
    copies = layout.dp_replicate * (1 if name in cuts else layout.tp) * (layout.shards if is_quantised(name) else 1)
    return Share(name, parameter, cuts.get(name), copies * (2 if is_twin(plan, name) else 1))


def _spread_experts(mesh: Mesh, shares: Sequence[Share]) -> set[str]:
    if mesh.experts is None:
        return set()
    group = mesh.expert_group("ep").group_name
    return {share.name for share in shares if share.cut and share.cut.group.group_name == group}
