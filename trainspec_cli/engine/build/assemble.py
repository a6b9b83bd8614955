"""Build a plan's model stages and optimizer and place them in the mesh; each phase once, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainspec_cli.engine.build.exchanges import build_exchanges
from trainspec_cli.engine.build.kernel_loading import load_kernel
from trainspec_cli.engine.build.materialise import allocate, materialise, start_buffers
from trainspec_cli.engine.build.own_code import try_own_block, use_own_loss
from trainspec_cli.engine.build.stage import is_twin, layers_of, spread_stage
from trainspec_cli.engine.build.train_state import DTYPES, Allowance, LateSum, Stages, Throttle, TrainState
from trainspec_cli.engine.comm.exchange import Peers
from trainspec_cli.engine.comm.wire_bytes import WireMeter
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.optim.optimizer import build_optimizer, without_memory
from trainspec_cli.engine.optim.own import build_own_optimizer
from trainspec_cli.engine.parallel.balance import routers_of
from trainspec_cli.engine.parallel.context import held_positions
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.pipeline import Hidden, Lines, WeightQueue
from trainspec_cli.engine.quantised_shares import is_quantised, quantised_parameters
from trainspec_cli.engine.shares import Cut, Share
from trainspec_cli.recipe.results.plan import Plan


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
    layout, compute = plan.layout, DTYPES[plan.compute]
    positions_S = None
    if layout.cp > 1:
        positions_S = held_positions(plan.spec.data.seq_len, layout.context_method, mesh.rank("cp"), layout.cp)
    parts: dict[int, Any] = {}
    parts_of_layers: dict[int, float] = {}
    shares: list[Share] = []
    partials: list[Share] = []
    exchanges = build_exchanges(plan, mesh, device, clock, wire or WireMeter())
    cp, tp = (exchanges.peers_along(mesh, axis) for axis in ("cp", "tp"))
    queue, noise = WeightQueue(), NoiseProbe(device, cp, tp, Peers(mesh.ends, clock.collective))
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
