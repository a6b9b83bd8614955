"""The cost of a run: site, power and price."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from trainspec_cli.spec.numbers import NonNegativeFloat, PositiveFloat, Range


@dataclass(frozen=True)
class SiteSpec:
    """The building and the grid behind it."""

    name: str = "world average"
    pue: Annotated[float, Range(1)] = 1.2
    """Power usage effectiveness: power into the building over power into the machines."""
    carbon_g_per_kwh: NonNegativeFloat = 475.0
    """Intensity of the local grid (purchased certificates are not counted)."""
    electricity_usd_per_kwh: NonNegativeFloat = 0.08
    """Paid for owned machines; a rent includes it."""
    known_within: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()


@dataclass(frozen=True)
class PowerSpec:
    """Power of a node, as fractions of the thermal design power (TDP) of its accelerators."""

    busy: NonNegativeFloat = 0.9
    """An accelerator that computes."""
    waiting: NonNegativeFloat = 0.5
    """One that waits for a collective, a pipeline stage or data."""
    idle: NonNegativeFloat = 0.15
    """One without work: the job is down."""
    host: NonNegativeFloat = 0.45
    """The rest of the node (CPUs, switches, NICs, fans), whatever the accelerators do."""
    known_within: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()


@dataclass(frozen=True)
class CostSpec:
    """Money: a rent, or a share of the purchase."""

    price_usd_per_device_hour: NonNegativeFloat | None = None
    """Rent; null: the accelerator's own."""
    owned: bool = False
    """Bought machines: their price over their useful hours, plus electricity and operation."""
    device_price_usd: NonNegativeFloat | None = None
    """owned: one device with its share of node, network and storage."""
    useful_years: PositiveFloat = 4.0
    utilisation: Annotated[float, Range(0, 1, includes_low=False)] = 0.8
    """Fraction of those years in which some job pays for the device."""
    operation_ratio: NonNegativeFloat = 0.08
    """Staff, space and repairs per year, over the price."""
    known_within: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
