"""Budget a portfolio of runs over several years as cash flow: purchased machines, and three ways to rent.

Runs follow each other without gaps, except for the gaps that `utilisation` allows. Prices are constant, and interest is
ignored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from trainspec_cli.planner.run.forecast import (
    HOURS_PER_YEAR,
    JOULES_PER_KWH,
    SECONDS_PER_HOUR,
    operation_usd_per_year,
    rental_price,
)
from trainspec_cli.recipe.keys.cluster import ClusterSpec, ReliabilitySpec
from trainspec_cli.recipe.results.tables import WAYS, Budget, BudgetedRun, BudgetYear, Sensitivity, Way

MONTHS = 12
SENSITIVE = (
    "device_price_usd",
    "price_usd_per_device_hour",
    "useful_years",
    "utilisation",
    "operation_ratio",
    "reserved_ratio",
    "spot_ratio",
)
"""Keys of `cluster.cost` that are varied between their bounds."""


@dataclass(frozen=True)
class PortfolioRun:
    """A planned run, and how many times per year it is run (the last number applies to all later years)."""

    name: str
    per_year: tuple[float, ...]
    devices: int
    wall_s: float
    spot_wall_s: float | None
    tokens: float
    energy_joules: float

    def times(self, year: int) -> float:
        return self.per_year[min(year, len(self.per_year) - 1)]

    @property
    def device_hours(self) -> float:
        return self.devices * self.wall_s / SECONDS_PER_HOUR


def spot_reliability(cluster: ClusterSpec) -> ReliabilitySpec:
    """Return the cluster's failure rates, including preemptions of spot nodes. Both are random, so their rates add up,
    and the mean wait for a node is weighted by these rates. Only failures can end all groups."""
    failing = cluster.reliability
    cost = cluster.cost
    mtbf = 1 / (1 / failing.mtbf_device_hours + 1 / cost.spot_mtbf_device_hours)
    failed = mtbf / failing.mtbf_device_hours
    return replace(
        failing,
        mtbf_device_hours=mtbf,
        swap_s=failed * failing.swap_s + (1 - failed) * cost.spot_wait_s,
        job_wide_fraction=failed * failing.job_wide_fraction,
    )


def make_budget(cluster: ClusterSpec, node_devices: int, runs: Sequence[PortfolioRun], years: int) -> Budget:
    """Return the portfolio's cost for each way of buying or renting. The cluster must have a purchase price and a
    rental price."""
    table = cash_of_years(cluster, node_devices, runs, years)
    worth_usd = _worth(cluster, table)
    usd = _totals(cluster, table)
    hours = sum(row.device_hours for row in table)
    # Machines are paid for at the start of a year and sold at its end.
    ways = [way for way in WAYS if all(way in row.usd for row in table)]
    months: dict[str, tuple[float, ...]] = {way: tuple(accumulate(_monthly(table, way), initial=0.0)) for way in ways}
    own_hours = sum(run.device_hours * sum(run.per_year) for run in runs)
    joules_per_hour = sum(run.energy_joules * sum(run.per_year) for run in runs) / own_hours if own_hours else 0.0
    budgeted = []
    for run in runs:
        shares = {way: total * run.device_hours / hours if hours else 0.0 for way, total in usd.items()}
        one = BudgetedRun(
            name=run.name,
            per_year=tuple(run.times(year) for year in range(years)),
            devices=run.devices,
            wall_s=run.wall_s,
            spot_wall_s=run.spot_wall_s,
            tokens=run.tokens,
            energy_joules=run.energy_joules,
            usd=shares,
            usd_per_million_tokens={way: share / run.tokens * 1e6 for way, share in shares.items()},
        )
        budgeted.append(one)
    return Budget(
        cluster=cluster.name,
        accelerator=cluster.accelerator.name if cluster.accelerator else "",
        runs=tuple(budgeted),
        years=tuple(table),
        usd=usd,
        worth_usd=worth_usd,
        break_even_months=break_even_months(months["owned"], months["on_demand"]),
        break_even_utilisation=break_even_utilisation(cluster, joules_per_hour),
        cumulated_usd=months,
        sensitivities=tuple(_sensitivities(cluster, node_devices, runs, years)),
    )


def cash_of_years(
    cluster: ClusterSpec, node_devices: int, runs: Sequence[PortfolioRun], years: int
) -> list[BudgetYear]:
    """Return the cash flow of each year. Devices are bought when they are needed, and sold at the end of their life."""
    life = max(1, round(cluster.cost.useful_years))
    bought: list[int] = []
    rows = []
    for year in range(years):
        hours = sum(run.times(year) * run.device_hours for run in runs)
        fleet = fleet_devices(runs, year, hours, cluster.cost.utilisation, node_devices)
        owned = sum(bought[max(0, year - life + 1) :])
        bought.append(max(0, fleet - owned))
        present = owned + bought[-1]
        sold = bought[year - life + 1] if year >= life - 1 else 0
        rent = rental_price(cluster)
        cost = cluster.cost
        price = _price(cluster)
        idle_hours = max(0.0, present * HOURS_PER_YEAR - hours)
        joules = sum(run.times(year) * run.energy_joules for run in runs) + idle_hours * _idle_joules(cluster)
        parts = {
            "machines": bought[-1] * price,
            "operation": present * price * cost.operation_ratio,
            "staff": present * cost.staff_usd_per_device_year,
            "space": present * cost.space_usd_per_device_year,
            "electricity": joules / JOULES_PER_KWH * cluster.site.electricity_usd_per_kwh,
            "resale": 0.0 - sold * price * cost.resale_ratio,
        }
        # A run that never ends on spot devices has an infinite cost in the years that include it.
        walls_s = ((run, math.inf if run.spot_wall_s is None else run.spot_wall_s) for run in runs if run.times(year))
        spot_hours = sum(run.times(year) * (run.devices * wall_s / SECONDS_PER_HOUR) for run, wall_s in walls_s)
        cash: dict[str, float] = {
            "owned": sum(parts.values()),
            "on_demand": hours * rent,
            "reserved": fleet * HOURS_PER_YEAR * rent * cluster.cost.reserved_ratio,
        }
        if math.isfinite(spot_hours):
            cash["spot"] = spot_hours * rent * cluster.cost.spot_ratio
        used = hours / (present * HOURS_PER_YEAR) if present else 0.0
        rows.append(BudgetYear(year + 1, hours, fleet, bought[-1], sold, used, parts, cash))
    return rows


def fleet_devices(runs: Sequence[PortfolioRun], year: int, hours: float, utilisation: float, node_devices: int) -> int:
    """Return the number of devices needed for a year's runs, as complete nodes: enough for the largest run and for the
    total number of hours."""
    largest = max((run.devices for run in runs if run.times(year)), default=0)
    needed = max(largest, hours / (HOURS_PER_YEAR * utilisation))
    return math.ceil(needed / node_devices - 1e-9) * node_devices


def _price(cluster: ClusterSpec) -> float:
    if cluster.cost.device_price_usd is None:
        raise ValueError("a budget needs cluster.cost.device_price_usd")
    return cluster.cost.device_price_usd


def _idle_joules(cluster: ClusterSpec) -> float:
    """Return the energy used per hour by an idle device, including its share of host and building overhead."""
    tdp_w = cluster.accelerator.tdp_w if cluster.accelerator else 0.0
    return tdp_w * (cluster.power.idle + cluster.power.host) * cluster.site.pue * SECONDS_PER_HOUR


def _worth(cluster: ClusterSpec, table: Sequence[BudgetYear]) -> float:
    """Return the value of the devices at the end, based on linear depreciation."""
    life = max(1, round(cluster.cost.useful_years))
    loss = 1 - cluster.cost.resale_ratio
    ages = ((len(table) - row.year + 1, row.bought_devices) for row in table)
    return sum(number * _price(cluster) * (1 - loss * age / life) for age, number in ages if age < life)


def _totals(cluster: ClusterSpec, table: Sequence[BudgetYear]) -> dict[str, float]:
    """Return the total cash cost for each way of buying or renting machines; the remaining value of owned machines is
    subtracted. Ways that are missing in any year are omitted."""
    ways = [way for way in WAYS if all(way in row.usd for row in table)]
    usd = {str(way): sum(row.usd[way] for row in table) for way in ways}
    usd["owned"] -= _worth(cluster, table)
    return usd


def _monthly(table: Sequence[BudgetYear], way: Way) -> list[float]:
    cash = []
    for row in table:
        first = row.owned_usd["machines"] if way == "owned" else 0.0
        last = row.owned_usd["resale"] if way == "owned" else 0.0
        months = [(row.usd[way] - first - last) / MONTHS] * MONTHS
        months[0] += first
        months[-1] += last
        cash += months
    return cash


def break_even_months(owned: Sequence[float], rented: Sequence[float]) -> float | None:
    """Return the month after which cumulative rent stays above the cost of buying, interpolated linearly. It is 0 if
    rent is higher from the start, and None if it never is. Later purchases may reverse the order, so the last crossing
    counts."""
    gaps = [paid - rent for paid, rent in zip(owned, rented, strict=True)]
    last = max((month for month, gap in enumerate(gaps) if gap > 0), default=None)
    if last is None:
        return 0.0
    return None if last == len(gaps) - 1 else last + gaps[last] / (gaps[last] - gaps[last + 1])


def break_even_utilisation(cluster: ClusterSpec, joules_per_hour: float) -> float | None:
    """Return the utilisation over a device's life above which owning costs less than renting by the hour; None if it
    never does.

    Except for electricity, owned devices cost the same whether they are used or not."""
    cost = cluster.cost
    price = _price(cluster)
    fixed = price * (1 - cost.resale_ratio) / cost.useful_years + operation_usd_per_year(price, cost)
    per_joule = cluster.site.electricity_usd_per_kwh / JOULES_PER_KWH
    fixed += HOURS_PER_YEAR * _idle_joules(cluster) * per_joule
    saved_per_hour = rental_price(cluster) - (joules_per_hour - _idle_joules(cluster)) * per_joule
    if saved_per_hour <= 0:
        return None
    use = fixed / (HOURS_PER_YEAR * saved_per_hour)
    return use if use <= 1 else None


def _sensitivities(
    cluster: ClusterSpec, node_devices: int, runs: Sequence[PortfolioRun], years: int
) -> list[Sensitivity]:
    """Vary each price, and the number of runs, between its bounds."""
    cost = replace(cluster.cost, price_usd_per_device_hour=rental_price(cluster))
    found = []
    for key in SENSITIVE:
        factor = cost.known_within.get(key, 1.0)
        value = float(getattr(cost, key))
        if factor > 1 and value:
            ends = (value / factor, min(1.0, value * factor) if key == "utilisation" else value * factor)
            low, high = (
                _totals(changed, cash_of_years(changed, node_devices, runs, years))
                for changed in (replace(cluster, cost=replace(cost, **{key: end})) for end in ends)  # type: ignore[arg-type]
            )
            found.append(Sensitivity(f"cluster.cost.{key}", *ends, low, high))
    fewer, more = (
        [replace(run, per_year=tuple(times * by for times in run.per_year)) for run in runs] for by in (0.5, 2.0)
    )
    half, double = (_totals(cluster, cash_of_years(cluster, node_devices, some, years)) for some in (fewer, more))
    return [*found, Sensitivity("runs per year", 0.5, 2.0, half, double)]
