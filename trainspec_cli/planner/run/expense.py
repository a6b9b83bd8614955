"""What the forecast of a run costs: energy, carbon and money with their intervals, from the formulas of `cost`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainspec_cli.planner.run import cost
from trainspec_cli.planner.run.uncertainty import propagate, within
from trainspec_cli.spec.recipe.cluster import ClusterSpec
from trainspec_cli.spec.recipe.cost import PowerSpec
from trainspec_cli.spec.results.forecast import Goodput, Interval
from trainspec_cli.spec.results.prediction import StepTime

WAITING_PHASES = ("tp_comm_s", "cp_comm_s", "ep_comm_s", "pp_comm_s", "dp_comm_s", "bubble_s", "data_s", "host_s")


def occupation(useful: Goodput, time: StepTime) -> cost.Occupation:
    """How a device spends the run: a step's own phases, checkpoints and stalls as waiting, restarts as idle."""
    waiting_part = sum(getattr(time, phase) for phase in WAITING_PHASES) / time.total_s if time.total_s else 0.0
    lost = useful.lost
    idle = lost.get("restart", 0.0) + lost.get("shrunk", 0.0)
    held_up = lost.get("checkpoint", 0.0) + lost.get("stall", 0.0)
    training = 1 - idle - held_up
    return cost.Occupation(training * (1 - waiting_part), training * waiting_part + held_up, idle)


def expect_energy(
    cluster: ClusterSpec, devices: int, wall_time_s: Interval, spent: cost.Occupation
) -> tuple[Interval | None, dict[str, float]]:
    """-> the energy and its parts; None where the accelerator's power is not known."""
    if cluster.accelerator is None or not cluster.accelerator.tdp_w:
        return None, {}
    tdp_w, power = cluster.accelerator.tdp_w, cluster.power

    def parts(of: Mapping[str, float]) -> dict[str, float]:
        drawn = PowerSpec(busy=of["busy"], waiting=of["waiting"], idle=of["idle"], host=of["host"])
        ratio = cost.device_power_ratio(drawn, spent)
        return cost.energy_joules(devices, tdp_w, of["wall_s"], ratio, drawn.host, max(1.0, of["pue"]))

    known = power.known_within
    inputs = {name: within(getattr(power, name), known.get(name, 1)) for name in ("busy", "waiting", "idle", "host")}
    inputs["wall_s"] = wall_time_s
    inputs["pue"] = within(cluster.site.pue, cluster.site.known_within.get("pue", 1))
    middle = parts({name: interval.value for name, interval in inputs.items()})
    return propagate(lambda of: sum(parts(of).values()), inputs), middle


def expect_carbon(cluster: ClusterSpec, energy: Interval | None) -> Interval | None:
    if energy is None:
        return None
    grid = within(cluster.site.carbon_g_per_kwh, cluster.site.known_within.get("carbon_g_per_kwh", 1))
    return propagate(lambda of: cost.carbon_kg(of["energy"], of["grid"]), {"energy": energy, "grid": grid})


def expect_money(
    cluster: ClusterSpec, devices: int, wall_time_s: Interval, energy: Interval | None
) -> tuple[Interval | None, dict[str, float]]:
    """-> the price and its parts; None where none is known. Spare nodes that stand by are paid for too."""
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
    parts = cost.rent_usd(paid_devices, wall_time_s.value, price)
    return propagate(lambda of: cost.rent_usd(paid_devices, of["wall_s"], of["price"])["rent"], inputs), parts


def rental_price(cluster: ClusterSpec) -> float:
    """Dollars a device-hour: the cluster's own, else one seen for the accelerator; 0 when neither is known."""
    if cluster.cost.price_usd_per_device_hour is not None:
        return cluster.cost.price_usd_per_device_hour
    return cluster.accelerator.price_usd_per_hour if cluster.accelerator else 0.0


def _expect_ownership(
    cluster: ClusterSpec, devices: float, wall_time_s: Interval, energy: Interval | None
) -> tuple[Interval | None, dict[str, float]]:
    if cluster.cost.device_price_usd is None:
        return None, {}
    keys = ("device_price_usd", "useful_years", "utilisation", "operation_ratio")
    known = cluster.cost.known_within
    inputs = {key: within(getattr(cluster.cost, key), known.get(key, 1)) for key in keys}
    inputs |= {"wall_s": wall_time_s, "energy": energy or Interval(0, 0, 0)}

    def parts(of: Mapping[str, float]) -> dict[str, float]:
        bought = replace(
            cluster.cost,
            device_price_usd=of["device_price_usd"],
            useful_years=of["useful_years"],
            utilisation=of["utilisation"],
            operation_ratio=of["operation_ratio"],
        )
        return cost.ownership_usd(devices, of["wall_s"], of["energy"], bought, cluster.site)

    middle = parts({name: interval.value for name, interval in inputs.items()})
    return propagate(lambda of: sum(parts(of).values()), inputs), middle
