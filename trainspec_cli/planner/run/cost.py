"""Energy, carbon and money of a number of devices over a wall time, in parts; and of a forecast, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainspec_cli.planner.run.uncertainty import propagate, within
from trainspec_cli.recipe.keys.cluster import ClusterSpec, CostSpec, PowerSpec, SiteSpec
from trainspec_cli.recipe.results.forecast import Goodput, Interval
from trainspec_cli.recipe.results.plan import StepTime

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0
HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True)
class Occupation:
    """Parts of a device's wall time, summing to 1."""

    busy: float
    """It computes."""
    waiting: float
    """Fraction of the time that is spent waiting for a collective, a pipeline stage, data or a checkpoint."""
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
        "machines": used_years * cost.device_price_usd * (1 - cost.resale_ratio) / cost.useful_years,
        "operation": used_years * operation_usd_per_year(cost.device_price_usd, cost),
        "electricity": energy / JOULES_PER_KWH * site.electricity_usd_per_kwh,
    }


def operation_usd_per_year(device_price_usd: float, cost: CostSpec) -> float:
    """Return what an owned device takes in a year beside electricity: repairs, staff and space."""
    ratio_usd = device_price_usd * cost.operation_ratio
    return ratio_usd + cost.staff_usd_per_device_year + cost.space_usd_per_device_year


# Of a forecast, with intervals


WAITING_PHASES = ("tp_comm_s", "cp_comm_s", "ep_comm_s", "pp_comm_s", "dp_comm_s", "bubble_s", "data_s", "host_s")


def occupation(useful: Goodput, time: StepTime) -> Occupation:
    """How a device spends the run: a step's own phases, checkpoints and stalls as waiting, restarts as idle."""
    waiting_part = sum(getattr(time, phase) for phase in WAITING_PHASES) / time.total_s if time.total_s else 0.0
    lost = useful.lost
    idle = lost.get("restart", 0.0) + lost.get("shrunk", 0.0)
    held_up = lost.get("checkpoint", 0.0) + lost.get("stall", 0.0)
    training = 1 - idle - held_up
    return Occupation(training * (1 - waiting_part), training * waiting_part + held_up, idle)


def expect_energy(
    cluster: ClusterSpec, devices: int, wall_time_s: Interval, spent: Occupation
) -> tuple[Interval | None, dict[str, float]]:
    """-> the energy and its parts; None where the accelerator's power is not known."""
    if cluster.accelerator is None or not cluster.accelerator.tdp_w:
        return None, {}
    tdp_w = cluster.accelerator.tdp_w
    power = cluster.power

    def parts(of: Mapping[str, float]) -> dict[str, float]:
        drawn = PowerSpec(busy=of["busy"], waiting=of["waiting"], idle=of["idle"], host=of["host"])
        ratio = device_power_ratio(drawn, spent)
        return energy_joules(devices, tdp_w, of["wall_s"], ratio, drawn.host, max(1.0, of["pue"]))

    known = power.known_within
    inputs = {name: within(getattr(power, name), known.get(name, 1)) for name in ("busy", "waiting", "idle", "host")}
    inputs["wall_s"] = wall_time_s
    inputs["pue"] = within(cluster.site.pue, cluster.site.known_within.get("pue", 1))
    middle = parts({name: interval.value for name, interval in inputs.items()})
    return propagate(lambda of: sum(parts(of).values()), inputs), middle


Cost = tuple[Interval | None, dict[str, float]]
"""An energy or a price, and its parts; None where it is not known."""


def add_costs(costs: Sequence[Cost]) -> Cost:
    """Return the sum of the costs of several pools, which rest on the same wall time; None where one is not known."""
    # All pools share the wall time, which moves their costs together: ends add up to ends.
    known = [interval for interval, _ in costs if interval is not None]
    if len(known) < len(costs):
        return None, {}
    parts: dict[str, float] = {}
    for _, own in costs:
        parts = {name: parts.get(name, 0.0) + value for name, value in own.items()}
    return Interval(*(sum(getattr(interval, end) for interval in known) for end in ("value", "low", "high"))), parts


def expect_carbon(cluster: ClusterSpec, energy: Interval | None) -> Interval | None:
    if energy is None:
        return None
    grid = within(cluster.site.carbon_g_per_kwh, cluster.site.known_within.get("carbon_g_per_kwh", 1))
    return propagate(lambda of: carbon_kg(of["energy"], of["grid"]), {"energy": energy, "grid": grid})


def expect_money(
    cluster: ClusterSpec, devices: int, wall_time_s: Interval, energy: Interval | None
) -> tuple[Interval | None, dict[str, float]]:
    """-> the price and its parts; None where none is known, or the energy of machines that are owned. Spare nodes that
    stand by are paid for too."""
    spares = (cluster.reliability.spare_nodes or 0) * devices / cluster.num_nodes
    paid_devices = devices + spares
    if cluster.cost.owned:
        return _expect_ownership(cluster, paid_devices, wall_time_s, energy)
    price = rental_price(cluster)
    if not price:
        return None, {}
    inputs = {
        "wall_s": wall_time_s,
        "price": within(price, cluster.cost.known_within.get("price_usd_per_device_hour", 1)),
    }
    parts = rent_usd(paid_devices, wall_time_s.value, price)
    return propagate(lambda of: rent_usd(paid_devices, of["wall_s"], of["price"])["rent"], inputs), parts


def rental_price(cluster: ClusterSpec) -> float:
    """Dollars a device-hour: the cluster's own, else one seen for the accelerator; 0 when neither is known."""
    if cluster.cost.price_usd_per_device_hour is not None:
        return cluster.cost.price_usd_per_device_hour
    return cluster.accelerator.price_usd_per_hour if cluster.accelerator else 0.0


def _expect_ownership(
    cluster: ClusterSpec, devices: float, wall_time_s: Interval, energy: Interval | None
) -> tuple[Interval | None, dict[str, float]]:
    if cluster.cost.device_price_usd is None or energy is None:
        return None, {}
    keys = ("device_price_usd", "useful_years", "utilisation", "operation_ratio")
    known = cluster.cost.known_within
    inputs = {key: within(getattr(cluster.cost, key), known.get(key, 1)) for key in keys}
    inputs |= {"wall_s": wall_time_s, "energy": energy}

    def parts(of: Mapping[str, float]) -> dict[str, float]:
        bought = replace(
            cluster.cost,
            device_price_usd=of["device_price_usd"],
            useful_years=of["useful_years"],
            utilisation=of["utilisation"],
            operation_ratio=of["operation_ratio"],
        )
        return ownership_usd(devices, of["wall_s"], of["energy"], bought, cluster.site)

    middle = parts({name: interval.value for name, interval in inputs.items()})
    return propagate(lambda of: sum(parts(of).values()), inputs), middle
