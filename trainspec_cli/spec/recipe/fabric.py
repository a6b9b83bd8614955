"""The network between devices, as tiers: what joins a few devices, what joins those groups, and so on to the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainspec_cli.spec.field_types import NonNegativeFloat, PositiveFloat, PositiveInt, Range

NetworkKind = Literal["infiniband", "roce", "efa", "omnipath", "ethernet"]
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
    """What collectives reach of the bandwidth depends on it; null: `cluster.nic_kind`. Not of the first tier."""


@dataclass(frozen=True)
class FabricSpec:
    """Tiers of a network, innermost first. Without tiers one network reaches every device at the NICs' speed."""

    name: str = ""
    tiers: tuple[TierSpec, ...] = ()
    nic_wiring: NicWiring | None = None
    """How the NICs of a node with several are joined: rails, each number of NIC to a switch of its own; one_switch, all
    to the same one; null: not known."""
    nccl_tuner: bool = False
    """Workers are told where the run's table for NCCL's example tuner plugin is (`NCCL_TUNER_CONFIG_FILE`); only those
    who have built and loaded that plugin have a use for it."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each value by key; `default` for the rest."""
