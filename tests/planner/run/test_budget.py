"""Budgets against closed forms: when buying pays, how many devices and when, and what is left."""

import math
from dataclasses import replace

import pytest

from trainspec_cli.planner.run.budget import (
    PortfolioRun,
    break_even_months,
    break_even_utilisation,
    cash_of_years,
    make_budget,
    spot_reliability,
)
from trainspec_cli.recipe.keys.cluster import (
    AcceleratorSpec,
    ClusterSpec,
    CostSpec,
    PowerSpec,
    ReliabilitySpec,
    SiteSpec,
)
from trainspec_cli.recipe.results.tables import Budget

HOUR_S, YEAR_H, KWH = 3600.0, 8766.0, 3.6e6
COST = CostSpec(
    device_price_usd=30_000,
    price_usd_per_device_hour=2.0,
    useful_years=4,
    utilisation=0.8,
    operation_ratio=0.05,
    staff_usd_per_device_year=400,
    space_usd_per_device_year=600,
    resale_ratio=0.2,
    reserved_ratio=0.7,
    spot_ratio=0.4,
)
CLUSTER = ClusterSpec(
    num_nodes=8,
    accelerator=AcceleratorSpec("chip", "maker", 100.0, 80.0, 3.0, tdp_w=700.0),
    power=PowerSpec(busy=0.9, waiting=0.5, idle=0.1, host=0.4),
    site=SiteSpec(pue=1.25, electricity_usd_per_kwh=0.1),
    cost=COST,
)
BUSY_KWH = 0.7 * 1.3 * 1.25
IDLE_KWH = 0.7 * 0.5 * 1.25


def make_run(use: float, devices: int = 64, **changes: object) -> PortfolioRun:
    """A run that takes the part `use` of a year of its devices."""
    hours = use * YEAR_H
    joules = devices * hours * BUSY_KWH * KWH
    run = PortfolioRun("run", (1.0,), devices, hours * HOUR_S, 1.5 * hours * HOUR_S, 1e12, joules)
    return replace(run, **changes)  # type: ignore[arg-type]


def budget(use: float, cost: CostSpec = COST, years: int = 4, **changes: object) -> Budget:
    return make_budget(replace(CLUSTER, cost=cost), 8, [make_run(use, **changes)], years)


def yearly_upkeep(use: float) -> float:
    """Of a device, without its price: 5% and 1000 dollars, and electricity, idle or busy."""
    return 30_000 * 0.05 + 1000 + 0.1 * YEAR_H * (use * BUSY_KWH + (1 - use) * IDLE_KWH)


@pytest.mark.parametrize("use", [0.5, 0.65, 0.8])
@pytest.mark.parametrize("price", [15_000, 30_000])
def test_buying_pays_after_the_price_over_what_it_saves_a_month(use: float, price: float) -> None:
    cost = replace(COST, device_price_usd=price, resale_ratio=0.0, operation_ratio=0.0)
    upkeep = 1000 + 0.1 * YEAR_H * (use * BUSY_KWH + (1 - use) * IDLE_KWH)
    expected = price / ((2.0 * use * YEAR_H - upkeep) / 12)
    found = budget(use, cost).break_even_months
    assert found == (pytest.approx(expected) if expected <= 48 else None)


def test_buying_never_pays_what_is_hardly_used_and_pays_at_once_what_costs_nothing() -> None:
    assert budget(0.05).break_even_months is None
    assert budget(0.5, replace(COST, device_price_usd=0.0)).break_even_months == 0.0


def test_a_later_purchase_moves_the_month_in_which_buying_has_paid() -> None:
    assert break_even_months([0, 10, 10, 20, 20, 20], [0, 6, 12, 18, 24, 30]) == pytest.approx(3 + 2 / 6)


@pytest.mark.parametrize("price", [10_000.0, 30_000.0, 45_000.0])
def test_at_the_utilisation_that_breaks_even_both_ways_cost_the_same(price: float) -> None:
    """Of a fleet that lives its whole life, as the table of years adds it up."""
    cluster = replace(CLUSTER, cost=replace(COST, device_price_usd=price))
    use = break_even_utilisation(cluster, BUSY_KWH * KWH)
    assert use is not None and 0 < use < 1
    found = make_budget(cluster, 8, [make_run(use)], 4)
    assert found.usd["owned"] == pytest.approx(found.usd["on_demand"], rel=1e-9)
    assert found.break_even_utilisation == pytest.approx(use)


def test_the_utilisation_that_breaks_even_is_the_closed_form() -> None:
    """Fixed dollars a year over the hours of a year times what an hour's use saves."""
    fixed = 30_000 * 0.8 / 4 + 30_000 * 0.05 + 1000 + YEAR_H * IDLE_KWH * 0.1
    expected = fixed / (YEAR_H * (2.0 - (BUSY_KWH - IDLE_KWH) * 0.1))
    assert budget(0.5).break_even_utilisation == pytest.approx(expected)
    for rent in (0.01, 0.5):
        cheap = replace(COST, price_usd_per_device_hour=rent)
        assert budget(0.5, cheap).break_even_utilisation is None, "no use of it is enough"


def test_four_years_of_each_way_by_hand() -> None:
    found = budget(0.5)
    assert found.usd["owned"] == pytest.approx(64 * (30_000 * 0.8 + 4 * yearly_upkeep(0.5)))
    assert found.usd["on_demand"] == pytest.approx(64 * 4 * YEAR_H * 0.5 * 2.0)
    assert found.usd["reserved"] == pytest.approx(64 * 4 * YEAR_H * 2.0 * 0.7)
    assert found.usd["spot"] == pytest.approx(1.5 * 64 * 4 * YEAR_H * 0.5 * 2.0 * 0.4)
    assert found.cheapest == "spot"
    assert found.worth_usd == 0


def test_every_dollar_of_a_year_has_a_cause_and_every_month_its_part() -> None:
    found = budget(0.5, years=6)
    for year in found.years:
        assert sum(year.owned_usd.values()) == pytest.approx(year.usd["owned"])
    for way, months in found.cumulated_usd.items():
        assert len(months) == 73
        assert months[-1] == pytest.approx(sum(year.usd[way] for year in found.years))
    assert found.cumulated_usd["owned"][1] > 64 * 30_000


def test_machines_are_bought_when_they_are_needed_and_sold_after_their_life() -> None:
    run = make_run(0.5, per_year=(1.0, 2.0, 4.0))
    rows = cash_of_years(CLUSTER, 8, [run], 7)
    assert [row.fleet_devices for row in rows] == [64, 80, *[160] * 5]
    assert [row.bought_devices for row in rows] == [64, 16, 80, 0, 64, 16, 80]
    assert [row.sold_devices for row in rows] == [0, 0, 0, 64, 16, 80, 0]
    assert rows[2].utilisation == pytest.approx(4 * 0.5 * 64 / 160)
    assert rows[3].owned_usd["resale"] == pytest.approx(-64 * 30_000 * 0.2)


def test_what_is_left_at_the_end_is_worth_its_straight_line() -> None:
    found = budget(0.5, years=1)
    assert found.worth_usd == pytest.approx(64 * 30_000 * (1 - 0.8 / 4))
    assert found.usd["owned"] == pytest.approx(64 * (30_000 * 0.8 / 4 + yearly_upkeep(0.5)))


def test_more_use_than_can_be_kept_takes_more_devices() -> None:
    assert budget(0.8).years[0].fleet_devices == 64
    assert budget(0.81).years[0].fleet_devices == 72


def test_runs_share_what_all_costs_by_their_hours() -> None:
    runs = [make_run(0.2, name="long"), make_run(0.1, devices=32, name="short", per_year=(2.0,))]
    found = make_budget(CLUSTER, 8, runs, 4)
    for way, total in found.usd.items():
        assert 4 * (found.runs[0].usd[way] + 2 * found.runs[1].usd[way]) == pytest.approx(total)
    assert found.runs[0].usd["owned"] == pytest.approx(4 * found.runs[1].usd["owned"])
    assert found.runs[0].usd_per_million_tokens["spot"] == pytest.approx(found.runs[0].usd["spot"] / 1e6)


def test_a_year_without_runs_needs_nothing() -> None:
    rows = cash_of_years(CLUSTER, 8, [make_run(0.5, per_year=(0.0, 1.0))], 2)
    assert [row.bought_devices for row in rows] == [0, 64]
    assert set(rows[0].usd.values()) == {0.0}


def test_a_run_that_spot_never_ends_leaves_that_way_out() -> None:
    found = budget(0.5, spot_wall_s=None)
    assert set(found.usd) == {"owned", "on_demand", "reserved"} == set(found.cumulated_usd)


def test_spot_adds_its_interruptions_to_the_failures() -> None:
    failing = ReliabilitySpec(mtbf_device_hours=30_000, swap_s=100, job_wide_fraction=0.2)
    spot = spot_reliability(
        replace(CLUSTER, reliability=failing, cost=replace(COST, spot_mtbf_device_hours=10_000, spot_wait_s=500))
    )
    assert spot.mtbf_device_hours == pytest.approx(7500)
    assert spot.swap_s == pytest.approx(0.25 * 100 + 0.75 * 500)
    assert spot.job_wide_fraction == pytest.approx(0.05)
    rare = replace(CLUSTER, reliability=failing, cost=replace(COST, spot_mtbf_device_hours=1e15))
    assert spot_reliability(rare).mtbf_device_hours == pytest.approx(30_000)


def test_each_input_moves_what_it_belongs_to() -> None:
    within = {"device_price_usd": 1.5, "price_usd_per_device_hour": 2.0, "reserved_ratio": 1.2, "utilisation": 1.5}
    found = budget(0.5, replace(COST, known_within=within))
    moved = {each.key.rpartition(".")[2]: each for each in found.sensitivities}
    assert set(moved) == {*within, "runs per year"}
    price = moved["device_price_usd"]
    assert (price.low, price.high) == pytest.approx((20_000, 45_000))
    assert price.high_usd["owned"] - price.low_usd["owned"] == pytest.approx(64 * 25_000 * (0.8 + 4 * 0.05))
    assert price.high_usd["spot"] == pytest.approx(price.low_usd["spot"])
    assert moved["price_usd_per_device_hour"].high_usd["on_demand"] == pytest.approx(2 * found.usd["on_demand"])
    assert moved["reserved_ratio"].low_usd["reserved"] == pytest.approx(found.usd["reserved"] / 1.2)
    assert moved["utilisation"].high == 1.0
    assert moved["runs per year"].low_usd["on_demand"] == pytest.approx(found.usd["on_demand"] / 2)


def test_the_price_of_renting_is_the_accelerators_where_the_cluster_has_none() -> None:
    chip = AcceleratorSpec("chip", "maker", 100.0, 80.0, 3.0, tdp_w=700.0, price_usd_per_hour=3.0)
    cluster = replace(CLUSTER, accelerator=chip, cost=replace(COST, price_usd_per_device_hour=None))
    assert make_budget(cluster, 8, [make_run(0.5)], 1).usd["on_demand"] == pytest.approx(64 * YEAR_H * 0.5 * 3.0)


def test_a_budget_without_a_price_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster\.cost\.device_price_usd"):
        budget(0.5, replace(COST, device_price_usd=None))
    assert math.isfinite(budget(0.5).usd["owned"])
