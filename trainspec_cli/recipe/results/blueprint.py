"""The communication blueprint of a layout on a fabric: where nodes are placed, and how each exchange is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Algorithm = Literal["ring", "hierarchical", "tree", "direct"]
"""ring: one flat ring through all ranks; hierarchical: a ring in each tier, innermost first and back; tree: up and down
a tree over nodes; direct: every pair by itself (all-to-all, sends)."""


@dataclass(frozen=True)
class BlueprintTier:
    name: str
    elements: int
    """Such elements the cluster has: scale-up domains, leaf switches, ..."""
    devices: int
    """Below one element, or of the whole cluster where that has fewer."""
    gbit_per_s: float
    """A device's share, one way, oversubscription taken off."""


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange of a training step."""

    axis: str
    operation: Operation
    ranks: int
    tier: str
    """The outermost that it crosses."""
    message_bytes: float
    per_step: float
    """Number of times that one rank does it in a step."""
    algorithm: Algorithm
    time_s: float
    """Time of one, by that algorithm."""
    ring_s: float
    """Time of one, by a flat ring; the same for what has no ring."""
    bucket_bytes: float | None = None
    """Best size where gradients and parameters go in buckets: sqrt(S a B) of S bytes in all, latency a, bandwidth B."""


@dataclass(frozen=True)
class Setting:
    """One variable of the workers' environment, with why it is set and who says so."""

    name: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class TunerRow:
    """A line for NCCL's example tuner plugin: the algorithm of a collective between two sizes."""

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: Literal["ring", "tree"]
    nodes: int
    """-1: any number; of ranks too."""
    ranks: int
    reason: str


@dataclass(frozen=True)
class Blueprint:
    fabric: str
    tiers: tuple[BlueprintTier, ...]
    """Innermost first."""
    order: tuple[str, ...]
    """Axes of more than one rank, outermost first, as they lie on the nodes sorted by tier."""
    node_places: tuple[int, ...]
    """For each node by its number in the job, its place among the nodes sorted by tier. Empty: the order of the numbers
    is as good as any."""
    step_s: float
    """Planned, with nodes at these places."""
    unplaced_step_s: float
    """Planned, with nodes in the order of their numbers."""
    exchanges: tuple[Exchange, ...]
    settings: tuple[Setting, ...] = ()
    tuner: tuple[TunerRow, ...] = ()
    sorts_nodes: bool = False
    """The cost depends on which nodes lie together: Slurm's nodes are to be sorted by switch."""

    @property
    def sums_replicas_in_tiers(self) -> bool:
        """Gradients are summed over replicas inside each node first."""
        return any(
            exchange.operation == "all_reduce" and exchange.algorithm == "hierarchical"
            for exchange in self.exchanges
            if exchange.axis in ("dp", "dp_replicate")
        )
