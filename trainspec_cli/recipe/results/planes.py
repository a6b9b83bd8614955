"""A multi-plane fabric in figures, and what failures of its parts cost a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
