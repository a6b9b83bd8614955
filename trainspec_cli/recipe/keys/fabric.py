"""The network between devices, as tiers: what joins a few devices, what joins those groups, and so on to the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainspec_cli.recipe.field_types import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Range

NetworkKind = Literal["infiniband", "roce", "efa", "omnipath", "ethernet", "measured"]
"""measured: of any kind; its rate is what collectives reach, by measurement."""
NicWiring = Literal["rails", "one_switch"]


@dataclass(frozen=True)
class TierSpec:
    """One tier of the network. The first is the scale-up domain, whose devices share the fast links."""

    name: str
    devices: PositiveInt | None = None
    """Devices below one element of the tier (one NVLink domain, one leaf switch, one site). null: for the first tier
    `cluster.scaleup_devices`, for the last one all devices of the cluster; those between say it."""
    gbit_per_s: PositiveFloat | None = None
    """A device's share of the bandwidth through this tier, each way. null: for the first tier the accelerator's links,
    for the others `cluster.nic_gbit_per_s`."""
    oversubscription: Annotated[float, Range(1)] = 1.0
    """How much more the devices below an element can send than the element passes on; 3 is written 3:1."""
    latency_us: NonNegativeFloat | None = None
    """Added by each message that crosses the tier, one way; null: the planner's own figure for a hop."""
    kind: NetworkKind | None = None
    """The kind of network, which decides what part of the bandwidth collectives reach; null: `cluster.nic_kind`. The
    first tier has none."""


@dataclass(frozen=True)
class PlanesSpec:
    """A network of several planes (multipath reliable connection, arXiv:2605.04333).

    Each plane is a whole fabric at a part of the NICs' speed, with one port of every NIC; queue pairs spray their
    packets over paths of all planes.
    """

    planes: PositiveInt
    """1: an ordinary fabric, to compare with."""
    nic_gbit_per_s: PositiveFloat
    """Bandwidth of a NIC, all its ports together. Each device has one NIC."""
    switch_tbit_per_s: PositiveFloat
    """Bandwidth of a switch, one direction: its ports times their speed."""
    switch_tiers: Literal[2, 3] = 2
    """Tiers of switches in each plane."""
    entropy_values: PositiveInt = 256
    """Paths that a queue pair sprays over, spread evenly over the planes."""
    flap_s: PositiveFloat = 60.0
    """How long a link that flaps is down."""
    network_fraction: Fraction = 0.084
    """Fraction of failures ending a job on an ordinary fabric that are of links and switches; planes survive them."""
    fatal_fraction: Fraction = 0.0
    """Fraction of those that are failures of a NIC's own transceiver, which carries all of its ports: its queue pairs
    end, and the job with them. No rate is published; 0 is the best case."""


@dataclass(frozen=True)
class FabricSpec:
    """Tiers of a network, innermost first. Without tiers one network reaches every device at the NICs' speed."""

    name: str = ""
    """The fabric's name, as plans show it."""
    tiers: tuple[TierSpec, ...] = ()
    """The tiers of links, the innermost first; empty: the links within nodes, and the network between them."""
    nic_wiring: NicWiring | None = None
    """How the NICs of a node with several are joined: rails, each number of NIC to a switch of its own; one_switch, all
    to the same one; null: not known."""
    planes: PlanesSpec | None = None
    """null: an ordinary fabric, of one plane."""
    nccl_tuner: bool = False
    """Workers learn where the run's table for NCCL's example tuner plugin is (`NCCL_TUNER_CONFIG_FILE`); only those
    who have built and loaded that plugin have a use for it."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key; `default` for the rest."""
