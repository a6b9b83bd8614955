"""Energy, carbon and money of a number of devices over a wall time. Parts, not totals."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.spec.recipe.cost import CostSpec, PowerSpec, SiteSpec

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0
HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True)
class Occupation:
    """Parts of a device's wall time, summing to 1."""

    busy: float
    """It computes."""
    waiting: float
    """For a collective, a pipeline stage, data or a checkpoint."""
    idle: float
    """The job is down."""


def device_power_ratio(power: PowerSpec, occupation: Occupation) -> float:
    """Mean power of an accelerator over its thermal design power.

    Linear in the time spent in each state. At busy 1 with its host that is 1.35 of TDP; an eight-H100 node in
    training was measured at 1.38 (76% of 10.2 kW over 8 x 700 W, arXiv:2506.14551).
    """
    return power.busy * occupation.busy + power.waiting * occupation.waiting + power.idle * occupation.idle


def energy_joules(
    devices: float, tdp_w: float, wall_s: float, device_ratio: float, host_ratio: float, pue: float
) -> dict[str, float]:
    """Energy by what draws it: the accelerators, the rest of their nodes, and the building around them.

    n P t x ratio for each; the building takes (PUE - 1) of what the machines draw.
    """
    full_joules = devices * tdp_w * wall_s
    machines_joules = full_joules * (device_ratio + host_ratio)
    return {
        "accelerators": full_joules * device_ratio,
        "hosts": full_joules * host_ratio,
        "building": machines_joules * (pue - 1),
    }


def carbon_kg(energy: float, grid_g_per_kwh: float) -> float:
    """CO2 equivalent of `energy` joules from a grid, by location; making the machines is not counted."""
    return energy / JOULES_PER_KWH * grid_g_per_kwh / 1000


def rent_usd(devices: float, wall_s: float, price_usd_per_device_hour: float) -> dict[str, float]:
    """Down time is paid for as well."""
    return {"rent": devices * wall_s / SECONDS_PER_HOUR * price_usd_per_device_hour}


def ownership_usd(devices: float, wall_s: float, energy: float, cost: CostSpec, site: SiteSpec) -> dict[str, float]:
    """The run's share of machines that were bought: straight-line over the hours in which they are used."""
    if cost.device_price_usd is None:
        raise ValueError("owned machines need cluster.cost.device_price_usd")
    used_years = devices * wall_s / SECONDS_PER_HOUR / HOURS_PER_YEAR / cost.utilisation
    return {
        "machines": used_years * cost.device_price_usd / cost.useful_years,
        "operation": used_years * cost.device_price_usd * cost.operation_ratio,
        "electricity": energy / JOULES_PER_KWH * site.electricity_usd_per_kwh,
    }
