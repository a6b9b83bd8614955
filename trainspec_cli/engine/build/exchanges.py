"""A plan's communication: process groups, codecs, timers and byte counters."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from trainspec_cli.engine.comm.codec import WireMeter
from trainspec_cli.engine.comm.compressed import Compression
from trainspec_cli.engine.comm.exchange import Peers, Purpose, Tiers, TimeCollective
from trainspec_cli.engine.mesh import Mesh, split_by_tier
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.observe.links import LinkTimers
from trainspec_cli.engine.parallel.data_parallel import ModuleLosses
from trainspec_cli.engine.parallel.gradient_sums import GradientSums, Route
from trainspec_cli.recipe.results.plan import Plan

STEP_EXCHANGES: Mapping[str, Collection[str]] = {
    # Activations of regions with split matrices are summed, or with sequence parallelism gathered and scattered
    # (comm/exchange.py). The loss over a split vocabulary (parallel/context.py) and, after the backward passes,
    # gradients of parameters that every rank holds in full (run/step.py: sum_late) are summed too. Muon exchanges parts
    # of matrices (optim/whole.py).
    "tp": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    # Keys and values are sent around a ring, or redistributed by head (parallel/context.py). Parameters are also
    # sharded over these ranks (parallel/data_parallel.py). The gradient noise (parallel/noise.py) and the
    # load-balancing loss of experts (parallel/pipeline.py) are summed.
    "cp": ("send", "receive", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"),
    # Tokens are sent to their experts' ranks and back, after their counts have been exchanged (parallel/expert.py).
    "ep": ("all_to_all",),
    # Activations and their gradients are sent between stages (parallel/pipeline.py). Gradients of an embedding shared
    # by the first and the last stage are summed (build/assemble.py).
    "pp": ("send", "receive", "all_reduce"),
    # Parameters are gathered and gradients reduced: by FSDP2 on a GPU (parallel/data_parallel.py), on a CPU in a
    # separate thread (parallel/gradient_sums.py), where ranks exchange rows instead of using gloo's reduce-scatter
    # (comm/exchange.py). Muon exchanges parts of matrices (optim/whole.py).
    "dp_shard": ("all_gather", "reduce_scatter", "all_to_all"),
    "expert_shard": ("all_gather", "reduce_scatter", "all_to_all"),
    # Gradients are summed over replicas, in a single all-reduce or tier by tier, where rows are exchanged and sums
    # gathered.
    "dp_replicate": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    # Loss, norm, noise and the ranks' reports are exchanged at the end of the step (run/step.py). Experts' token counts
    # (parallel/pipeline.py) and the statistics of batch normalisation (models/layers.py) are summed over the ranks of a
    # pipeline stage.
    "all": ("all_reduce",),
}
"""The collectives that a step uses inside a replica group, by axis. Compressed gradients use all-to-alls and
all-gathers instead of all-reduces (comm/compressed.py). In addition, replica groups sum gradients with one another
(elastic/cross_group.py)."""


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of data parallelism, with their timers and byte counters."""

    clock: StepClock
    links: LinkTimers
    wire: WireMeter
    compression: Compression
    losses: list[ModuleLosses] = field(default_factory=list)
    replica_tiers: Tiers | None = None
    """Tiers of the gradient sum over replicas, if the blueprint uses them; None for a single all-reduce."""
    sums: GradientSums | None = None
    """Sums gradients in a separate thread, if the mesh has process groups for that."""
    routes: Mapping[str, Route | None] = field(default_factory=dict)
    """Routes of `sums`, by shard axis."""

    def of(self, purpose: Purpose, axis: str, group: dist.ProcessGroup) -> TimeCollective:
        """Return the timer and byte counter for the exchanges of `group`, which is this rank's group along `axis`."""
        return self.counted(purpose, self.links.of(axis, group))

    def peers_along(self, mesh: Mesh, axis: str) -> Peers:
        """Return this rank's peers along `axis`, and time the exchanges with them."""
        group = mesh.group(axis)
        is_ring = axis == "cp" and mesh.layout.context_method == "ring"
        return Peers(group, self.links.of(axis, group, is_hidden=is_ring))

    def gradient_peers(self, mesh: Mesh, axis: str) -> Peers:
        """Return the peers of the gradient sum along `axis`, and count the bytes exchanged with them as gradient
        traffic."""
        group = mesh.group(axis)
        return Peers(group, self.of("gradients", axis, group))

    def counted(self, purpose: Purpose, time: TimeCollective) -> TimeCollective:
        @contextmanager
        def timed(sent_bytes: float | None = None) -> Iterator[bool]:
            with self.wire.purpose(purpose), time(sent_bytes) as has_to_end:
                yield has_to_end

        return timed


def build_exchanges(plan: Plan, mesh: Mesh, device: torch.device, clock: StepClock, wire: WireMeter) -> Exchanges:
    """Create the exchanges of a plan. Called collectively by all ranks."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    compression = Compression(
        inside=plan.comm.gradients,
        across=plan.comm.across_nodes,
        is_inside=lambda group: len({rank // per_node for rank in dist.get_process_group_ranks(group)}) == 1,
        device=device,
        # If there are several replica groups, only one writes checkpoints, and it does not have the others' error
        # feedback.
        saved_as=f"{plan.layout.describe()}.rank{dist.get_rank()}" if plan.replica_groups == 1 else "",
    )
    wire.find_connections()
    wire.reserve(mesh.connections_of_sums, "gradients")

    tiers = None
    if plan.layout.dp_replicate > 1 and plan.blueprint is not None and plan.blueprint.sums_replicas_in_tiers:
        places = plan.blueprint.node_places

        def place_of(rank: int) -> int:
            node, number = divmod(rank, per_node)
            return (places[node] if places else node) * per_node + number

        sizes = [tier.devices for tier in plan.blueprint.tiers]
        levels = split_by_tier(mesh.links()["dp_replicate"], place_of, sizes)
        if levels is not None:
            tiers = Tiers(tuple(dist.new_subgroups_by_enumeration(groups)[0] for groups in levels))
    exchanges = Exchanges(clock, LinkTimers(clock), wire, compression, replica_tiers=tiers)
    if not mesh.sums:
        return exchanges

    def peers(axis: str) -> Peers | None:
        if (group := mesh.sums.get(axis)) is None:
            return None
        time_exchange = exchanges.counted("gradients", exchanges.links.of_held_back(axis, group))
        return Peers(group, time_exchange, tiers if axis == "dp_replicate" else None)

    replicas = peers("dp_replicate")
    shards = {axis: peers(axis) for axis in ("dp_shard", "expert_shard")}
    routes = {axis: Route(one, replicas) if one or replicas else None for axis, one in shards.items()}
    return replace(exchanges, sums=GradientSums(clock.collective, clock.note_beside), routes=routes)
