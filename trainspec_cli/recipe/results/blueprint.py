"""The communication blueprint of a layout on a fabric: where nodes are placed, and how each exchange is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.keys.layout import Layout

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


# A multi-plane fabric in figures, and what failures of its parts cost a job.


Part = Literal["link", "port", "t1_switch", "t0_switch", "plane", "transceiver"]
"""link: between a T0 and a T1 switch; port: of a NIC, or its cable; plane: all of its switches."""


@dataclass(frozen=True)
class PlanesFigures:
    """A fabric of so many planes, built of one kind of switch."""

    planes: int
    radix: int
    """Ports of a switch, each of a plane's speed."""
    switch_tiers: int
    port_gbit_per_s: float
    most_nics: int
    """The most NICs that the tiers can join."""
    switches_per_nic: float
    optics_per_nic: float
    """Transceivers of a NIC's speed: two ends for each tier of links."""
    one_hop_nics: int
    """NICs below one T0 switch."""
    lost_speed: dict[Part, float]
    """Part of a job's speed that is lost while one such part of the fabric is down; 1 where the job ends."""


@dataclass(frozen=True)
class SprayedEvent:
    """The effect of a failure of some parts on a job whose queue pairs spray over every plane, simulated by counts."""

    name: str
    lowest_speed: float
    """Fraction of the undisturbed speed, once the paths that were lost are no longer used."""
    slow_s: float
    """Time until the job has its speed again."""
    lost_s: float
    """Time of undisturbed training that is lost."""
    touched: float
    """Part of the queue pairs that had a path through it."""
    most_bad_paths: int
    """Entropy values, of all queue pairs, that were not used at one time."""
    ends_job: bool


@dataclass(frozen=True)
class PlanesPlan:
    """A multi-plane fabric for a job, beside the fabric of one plane that joins as many NICs."""

    nics: int
    figures: PlanesFigures
    single: PlanesFigures
    t1_switches: int
    """Switches of the first tier in each plane, as many as the job's NICs need."""
    events: tuple[SprayedEvent, ...]
    dips_per_day: float
    """Failures of the network that cost a dip, and would end a job on one plane."""
    dip_share: float
    """Part of the time that they cost."""


# A plan over pools of unlike nodes beside the plans on some of them.


@dataclass(frozen=True)
class PoolChoice:
    """The best plan on some of the pools."""

    pools: tuple[str, ...]
    devices: int
    division: str
    """`samples`: every pool has whole replicas, which share a step's samples by speed. `layers`: pipelines go through
    the pools, whose stages have layers by speed. `alone`: one pool."""
    layout: Layout | None
    """None where nothing fits."""
    step_time_s: float | None
    tokens_per_s: float | None
    """Samples, for a model of images."""
    wall_time_s: float | None
    """Of the whole run, failures included."""
    usd_per_token: float | None
    """None where a price is not known."""
    joules_per_token: float | None
    """None where the power of an accelerator is not known."""


@dataclass(frozen=True)
class PoolsPlan:
    """The plan on all pools beside those on fewer."""

    choices: tuple[PoolChoice, ...]
    """On all pools first."""
    verdict: str
    """Whether leaving pools out is faster, or cheaper for each token."""
