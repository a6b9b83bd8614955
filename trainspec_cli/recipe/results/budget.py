"""The budget of a portfolio of runs over some years: buying machines, and renting them in three ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["owned", "on_demand", "reserved", "spot"]
WAYS: tuple[Way, ...] = ("owned", "on_demand", "reserved", "spot")


@dataclass(frozen=True)
class BudgetedRun:
    """One kind of run of the portfolio, as it is planned."""

    name: str
    per_year: tuple[float, ...]
    """How often it is made in each year."""
    devices: int
    wall_s: float
    spot_wall_s: float | None
    """Its time on devices that the cloud takes back now and then; None where it would never end."""
    tokens: float
    energy_joules: float
    usd: dict[str, float]
    """What one such run costs, by way: its share of all device-hours."""
    usd_per_million_tokens: dict[str, float]


@dataclass(frozen=True)
class BudgetYear:
    year: int
    """From 1."""
    device_hours: float
    fleet_devices: int
    """Devices that the year's runs take, at the utilisation that can be kept."""
    bought_devices: int
    sold_devices: int
    utilisation: float
    """The part of the fleet's hours in which a run uses them."""
    owned_usd: dict[str, float]
    """Cash of the year by cause; what a sale brings is negative."""
    usd: dict[str, float]
    """Cash of the year, by way."""


@dataclass(frozen=True)
class Sensitivity:
    """What the whole costs by each way where one input is at its bounds."""

    key: str
    low: float
    high: float
    low_usd: dict[str, float]
    high_usd: dict[str, float]


@dataclass(frozen=True)
class Budget:
    cluster: str
    accelerator: str
    runs: tuple[BudgetedRun, ...]
    years: tuple[BudgetYear, ...]
    usd: dict[str, float]
    """Of all years, by way; owned less what the machines are still worth at the end."""
    worth_usd: float
    """Value of the machines at the end: straight-line between price and resale."""
    break_even_months: float | None
    """After which buying has cost less cash than renting by the hour; None: not in `useful_years`."""
    break_even_utilisation: float | None
    """Use of a device, as a part of its life, above which buying costs less than renting by the hour; None: no use is
    enough."""
    cumulated_usd: dict[str, tuple[float, ...]]
    """Cash up to the end of each month, by way, from the beginning."""
    sensitivities: tuple[Sensitivity, ...]

    @property
    def cheapest(self) -> str:
        return min(self.usd, key=lambda way: self.usd[way])
