"""The communication blueprint of a layout on a fabric: node placement and the algorithm of each exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.keys.layout import Layout

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Algorithm = Literal["ring", "hierarchical", "tree", "direct"]
"""ring: one flat ring through all ranks. hierarchical: a ring in each tier, from the innermost one outwards and back.
tree: up and down a tree of nodes. direct: every pair separately (all-to-all, sends)."""


@dataclass(frozen=True)
class BlueprintTier:
    name: str
    elements: int
    """Number of elements of the tier in the cluster, such as scale-up domains or leaf switches."""
    devices: int
    """Number of devices below one element, or all devices of the cluster if it has fewer."""
    gbit_per_s: float
    """A device's share of the bandwidth, in one direction, after oversubscription."""


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange in a training step."""

    axis: str
    operation: Operation
    ranks: int
    tier: str
    """The outermost tier that it crosses."""
    message_bytes: float
    per_step: float
    """Number of times per step that one rank performs the exchange."""
    algorithm: Algorithm
    time_s: float
    """Duration of one exchange with `algorithm`."""
    ring_s: float
    """Duration of one exchange with a flat ring; equal to `time_s` for exchanges without a ring."""
    bucket_bytes: float | None = None
    """Best bucket size for gradients and parameters: sqrt(S a B) for S bytes in total, latency a and bandwidth B."""


@dataclass(frozen=True)
class Setting:
    """One environment variable for the workers, with its reason and source."""

    name: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class TunerRow:
    """A line for NCCL's example tuner plugin: the algorithm of a collective for a range of sizes."""

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: Literal["ring", "tree"]
    nodes: int
    """Number of nodes to which the row applies; -1: any number. The same convention holds for `ranks`."""
    ranks: int
    reason: str


@dataclass(frozen=True)
class Blueprint:
    fabric: str
    tiers: tuple[BlueprintTier, ...]
    """The tiers, innermost first."""
    order: tuple[str, ...]
    """Axes with more than one rank, outermost first, as placed on the nodes sorted by tier."""
    node_places: tuple[int, ...]
    """Each node's position among the nodes sorted by tier, indexed by its number in the job. Empty if numerical order
    is just as good."""
    step_s: float
    """Planned step time with the nodes at these positions."""
    unplaced_step_s: float
    """Planned step time with the nodes in numerical order."""
    exchanges: tuple[Exchange, ...]
    settings: tuple[Setting, ...] = ()
    tuner: tuple[TunerRow, ...] = ()
    sorts_nodes: bool = False
    """True if the cost depends on which nodes are close to one another; Slurm's nodes should then be sorted by
    switch."""

    @property
    def sums_replicas_in_tiers(self) -> bool:
        """Return whether gradients are first summed over replicas inside each node."""
        return any(
            exchange.operation == "all_reduce" and exchange.algorithm == "hierarchical"
            for exchange in self.exchanges
            if exchange.axis in ("dp", "dp_replicate")
        )


# Dimensions of a multi-plane fabric, and how failures of its parts affect a job.


Part = Literal["link", "port", "t1_switch", "t0_switch", "plane", "transceiver"]
"""link: between a T0 and a T1 switch. port: a NIC's port or its cable. plane: all switches of a plane."""


@dataclass(frozen=True)
class PlanesFigures:
    """A fabric with this many planes, built from one kind of switch."""

    planes: int
    radix: int
    """Number of ports of a switch, each at the speed of one plane."""
    switch_tiers: int
    port_gbit_per_s: float
    most_nics: int
    """Maximum number of NICs that the tiers can connect."""
    switches_per_nic: float
    optics_per_nic: float
    """Number of transceivers of a NIC's speed that the fabric needs per NIC: two for each tier of links."""
    one_hop_nics: int
    """Number of NICs below one T0 switch."""
    lost_speed: dict[Part, float]
    """Fraction of a job's speed that is lost while one part of this kind is down; 1 if the job ends."""


@dataclass(frozen=True)
class SprayedEvent:
    """The effect of failed parts on a job whose queue pairs spray packets over all planes, from a simulation that
    counts paths."""

    name: str
    lowest_speed: float
    """Lowest speed, as a fraction of the undisturbed speed, once the lost paths are no longer used."""
    slow_s: float
    """Time until the job is back at full speed."""
    lost_s: float
    """Total time lost, expressed as seconds of undisturbed training."""
    touched: float
    """Fraction of the queue pairs that had a path through the failed parts."""
    most_bad_paths: int
    """Maximum number of entropy values, across all queue pairs, that were out of use at the same time."""
    ends_job: bool


@dataclass(frozen=True)
class PlanesPlan:
    """A multi-plane fabric for a job, compared with a single-plane fabric for the same number of NICs."""

    nics: int
    figures: PlanesFigures
    single: PlanesFigures
    t1_switches: int
    """Number of T1 switches in each plane that the job's NICs need."""
    events: tuple[SprayedEvent, ...]
    dips_per_day: float
    """Network failures per day that cause a dip in speed but would end a job on a single plane."""
    dip_share: float
    """Fraction of time lost to these dips."""


# A plan over pools of different nodes, compared with plans on subsets of the pools.


@dataclass(frozen=True)
class PoolChoice:
    """The best plan on a subset of the pools."""

    pools: tuple[str, ...]
    devices: int
    division: str
    """`samples`: every pool has complete replicas, and a step's samples are divided by speed. `layers`: pipelines pass
    through the pools, with layers assigned by speed. `alone`: only one pool."""
    layout: Layout | None
    """None if nothing fits."""
    step_time_s: float | None
    tokens_per_s: float | None
    """Tokens per second; for an image model, samples per second."""
    wall_time_s: float | None
    """Duration of the run, including failures."""
    usd_per_token: float | None
    """None if a price is unknown."""
    joules_per_token: float | None
    """None if the power of an accelerator is unknown."""


@dataclass(frozen=True)
class PoolsPlan:
    """The plan on all pools, compared with plans on subsets of them."""

    choices: tuple[PoolChoice, ...]
    """The plan on all pools comes first."""
    verdict: str
    """A sentence that states whether using fewer pools is faster, or cheaper per token."""
