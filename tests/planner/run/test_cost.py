"""Energy, carbon and money against worked examples that others published."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from trainspec_cli.planner.run.forecast import (
    Occupation,
    expect_carbon,
    expect_energy,
    expect_money,
    occupation,
    propagate,
    rental_price,
    within,
)
from trainspec_cli.recipe.keys.cluster import (
    AcceleratorSpec,
    ClusterSpec,
    CostSpec,
    PowerSpec,
    ReliabilitySpec,
    SiteSpec,
)
from trainspec_cli.recipe.results.forecast import Goodput, Interval
from trainspec_cli.recipe.results.plan import StepTime

HOUR_S = 3600.0
MWH = 3.6e9


def exact(value: float) -> Interval:
    return Interval(value, value, value)


@pytest.mark.parametrize(
    ("devices", "tdp_w", "hours", "pue", "grid", "mwh", "tonnes", "rel"),
    [
        (1, 400, 1_082_990, 1.0, 57, 433.196, 24.7, 0.002),
        (10_000, 330, 14.8 * 24, 1.10, 429, 1287, 552, 0.003),
        (1, 700, 39.3e6, 1.0, 415, 27_510, 11_390, 0.03),
        (1, 700, 7.7e6, 1.0, 415, 5390, 2290, 0.03),
        (1, 400, 3.3e6, 1.0, 415, 1320, 539, 0.03),
    ],
    ids=["BLOOM (arXiv:2211.02001)", "GPT-3 (arXiv:2104.10350)", "llama 3.1", "llama 3", "llama 2"],
)
def test_energy_and_carbon_as_published(
    devices: int, tdp_w: float, hours: float, pue: float, grid: float, mwh: float, tonnes: float, rel: float
) -> None:
    """At the thermal design power alone. Llama's cards state hours, TDP and tonnes; 0.415 kg/kWh, PUE included,
    explains all three within 3%."""
    chip = AcceleratorSpec("chip", "maker", 100.0, 80.0, 3.0, tdp_w=tdp_w)
    cluster = ClusterSpec(
        accelerator=chip, power=PowerSpec(busy=1.0, host=0.0), site=SiteSpec(pue=pue, carbon_g_per_kwh=grid)
    )
    energy, _ = expect_energy(cluster, devices, exact(hours * HOUR_S), Occupation(1, 0, 0))
    carbon = expect_carbon(cluster, energy)
    assert energy is not None and carbon is not None
    assert energy.value / MWH == pytest.approx(mwh, rel=0.003)
    assert carbon.value / 1000 == pytest.approx(tonnes, rel=rel)


def test_an_h100_node_at_work_draws_what_was_measured() -> None:
    """Eight H100 in training draw 76% of the 10.2 kW that the node is rated at (arXiv:2506.14551)."""
    chip = AcceleratorSpec("chip", "maker", 100.0, 80.0, 3.0, tdp_w=700.0)
    _, parts = expect_energy(ClusterSpec(accelerator=chip), 8, exact(1.0), Occupation(busy=1, waiting=0, idle=0))
    assert parts["accelerators"] + parts["hosts"] == pytest.approx(0.76 * 10_200, rel=0.05)


# Of a forecast

CLUSTER = ClusterSpec(
    num_nodes=4,
    accelerator=AcceleratorSpec("chip", "maker", 100.0, 80.0, 3.0, tdp_w=700.0, price_usd_per_hour=2.0),
    power=PowerSpec(busy=0.9, waiting=0.5, idle=0.1, host=0.4),
    site=SiteSpec(pue=1.25, carbon_g_per_kwh=500.0, electricity_usd_per_kwh=0.1),
)
SPENT = Occupation(busy=0.5, waiting=0.3, idle=0.2)
TEN_HOURS = Interval(10 * HOUR_S, 5 * HOUR_S, 20 * HOUR_S)
FULL_KWH = 16 * 0.7 * 10
"""Of 16 devices at their full power."""


def bounds(interval: Interval | None) -> tuple[float, float, float]:
    assert interval is not None
    return interval.low, interval.value, interval.high


@pytest.mark.parametrize(
    "phase", ["tp_comm_s", "cp_comm_s", "ep_comm_s", "pp_comm_s", "dp_comm_s", "bubble_s", "data_s", "host_s"]
)
def test_a_step_waits_in_its_exchanges_its_bubble_for_data_and_for_the_host(phase: str) -> None:
    time = StepTime(matmul_s=1, attention_s=1, memory_bound_s=1, recompute_s=1, optimizer_s=1)
    useful = Goodput("restart", Interval(1, 1, 1), {}, 0, 1, 1, 1, 1, 0, 0, 0, 1)
    assert occupation(useful, time) == Occupation(1, 0, 0)
    assert occupation(useful, replace(time, **{phase: 3.0})) == Occupation(5 / 8, 3 / 8, 0)
    assert occupation(useful, StepTime()) == Occupation(1, 0, 0)


def test_expected_energy_and_carbon_by_hand() -> None:
    energy, parts = expect_energy(CLUSTER, 16, TEN_HOURS, SPENT)
    accelerators, hosts = FULL_KWH * (0.45 + 0.15 + 0.02), FULL_KWH * 0.4
    kwh = {"accelerators": accelerators, "hosts": hosts, "building": 0.25 * (accelerators + hosts)}
    assert parts == pytest.approx({name: 3.6e6 * each for name, each in kwh.items()})
    whole = sum(kwh.values())
    assert bounds(energy) == pytest.approx((1.8e6 * whole, 3.6e6 * whole, 7.2e6 * whole))
    assert bounds(expect_carbon(CLUSTER, energy)) == pytest.approx((whole / 4, whole / 2, whole))


def test_a_spare_node_is_on_and_idle() -> None:
    spared = replace(CLUSTER, reliability=ReliabilitySpec(spare_nodes=1))
    parts, without = (expect_energy(cluster, 16, TEN_HOURS, SPENT)[1] for cluster in (spared, CLUSTER))
    kwh = FULL_KWH / 4
    more = {"accelerators": 0.1 * kwh, "hosts": 0.4 * kwh, "building": 0.25 * 0.5 * kwh}
    assert {name: parts[name] - without[name] for name in parts} == pytest.approx(
        {k: 3.6e6 * v for k, v in more.items()}
    )


@pytest.mark.parametrize(
    ("room", "key", "share"),
    [("power", "busy", 0.45 / 1.02), ("power", "waiting", 0.15 / 1.02), ("power", "idle", 0.02 / 1.02),
     ("power", "host", 0.4 / 1.02), ("site", "pue", 1.0)],
)  # fmt: skip
def test_what_is_not_known_well_widens_the_energy(room: str, key: str, share: float) -> None:
    """Known within a tenth, each moves the energy by its share of it."""
    unsure = replace(CLUSTER, **{room: replace(getattr(CLUSTER, room), known_within={key: 1.1})})
    energy, _ = expect_energy(unsure, 16, Interval(1, 1, 1), SPENT)
    assert energy is not None
    assert energy.high / energy.value == pytest.approx(1 + 0.1 * share)


def test_no_building_takes_less_than_its_machines() -> None:
    assert expect_energy(replace(CLUSTER, site=SiteSpec(pue=0.5)), 16, TEN_HOURS, SPENT)[1]["building"] == 0


def test_energy_of_an_unknown_power_is_none() -> None:
    nameless = replace(CLUSTER, accelerator=replace(CLUSTER.accelerator, tdp_w=0.0))  # type: ignore[type-var]
    for cluster in (nameless, replace(CLUSTER, accelerator=None)):
        assert expect_energy(cluster, 16, TEN_HOURS, SPENT) == (None, {})
    assert expect_carbon(CLUSTER, None) is None


def test_carbon_is_known_as_well_as_its_grid() -> None:
    unsure = replace(CLUSTER, site=replace(CLUSTER.site, known_within={"carbon_g_per_kwh": 2.0}))
    assert bounds(expect_carbon(unsure, Interval(3.6e6, 3.6e6, 3.6e6))) == pytest.approx((0.25, 0.5, 1.0))


def test_rent_with_its_spares_and_interval() -> None:
    """16 devices of 4 nodes, and those of a spare node."""
    money, parts = expect_money(CLUSTER, 16, TEN_HOURS, None)
    assert (bounds(money), parts) == (pytest.approx((160, 320, 640)), pytest.approx({"rent": 320}))
    spared = replace(CLUSTER, reliability=ReliabilitySpec(spare_nodes=1))
    assert expect_money(spared, 16, TEN_HOURS, None)[1] == pytest.approx({"rent": 400})
    unsure = replace(CLUSTER, cost=CostSpec(price_usd_per_device_hour=3, known_within={"price_usd_per_device_hour": 2}))
    money, parts = expect_money(unsure, 16, Interval(HOUR_S, HOUR_S, HOUR_S), None)
    assert (bounds(money), parts) == (pytest.approx((24, 48, 96)), pytest.approx({"rent": 48}))


def test_a_clusters_own_price_comes_before_the_accelerators_even_where_it_is_nothing() -> None:
    assert rental_price(CLUSTER) == 2
    assert rental_price(replace(CLUSTER, cost=CostSpec(price_usd_per_device_hour=0.0))) == 0
    assert rental_price(replace(CLUSTER, accelerator=None)) == 0
    assert expect_money(replace(CLUSTER, accelerator=None), 16, TEN_HOURS, None) == (None, {})


def test_owned_machines_and_what_is_not_known_of_them() -> None:
    """16 devices over a year of use are 16 of the 4 x 0.5 device-years that each is bought for."""
    year = Interval(8766 * HOUR_S, 8766 * HOUR_S, 8766 * HOUR_S)
    cost = CostSpec(owned=True, device_price_usd=1000, useful_years=4, utilisation=0.5, operation_ratio=0.1)
    owned, energy = replace(CLUSTER, cost=cost), Interval(3.6e9, 3.6e9, 3.6e9)
    money, parts = expect_money(owned, 16, year, energy)
    assert parts == pytest.approx({"machines": 8000, "operation": 3200, "electricity": 100})
    assert bounds(money) == pytest.approx((11_300,) * 3)
    assert expect_money(owned, 16, year, None) == (None, {}), "nobody knows what the electricity costs"
    shares = {"device_price_usd": 11_200, "operation_ratio": 3200}
    for key, moved in shares.items():
        unsure = replace(owned, cost=replace(cost, known_within={key: 1.5}))
        assert bounds(expect_money(unsure, 16, year, energy)[0])[2] == pytest.approx(11_300 + 0.5 * moved)
    for key, moved in {"utilisation": 11_200, "useful_years": 8000}.items():
        unsure = replace(owned, cost=replace(cost, known_within={key: 2.0}))
        assert bounds(expect_money(unsure, 16, year, energy)[0])[2] == pytest.approx(11_300 + moved)
    assert expect_money(replace(owned, cost=CostSpec(owned=True)), 16, year, energy) == (None, {})


def test_renting_breaks_even_with_owning_at_the_closed_form() -> None:
    """Per hour, ownership costs price x (1 / years + operation) / (8766 x utilisation): that rent is the break-even."""
    cost = CostSpec(owned=True, device_price_usd=40_000, useful_years=4, utilisation=0.8, operation_ratio=0.08)
    rent = CostSpec(price_usd_per_device_hour=40_000 * (1 / 4 + 0.08) / (8766 * 0.8))
    owned, rented = (
        expect_money(replace(CLUSTER, cost=one), 64, exact(100 * HOUR_S), exact(0.0))[1] for one in (cost, rent)
    )
    assert sum(owned.values()) == pytest.approx(sum(rented.values()))


# Intervals against sampling and against closed forms


def test_a_factor_bounds_both_ways() -> None:
    interval = within(10, 2)
    assert (interval.low, interval.value, interval.high) == (5, 10, 20)


def test_what_is_exact_stays_exact() -> None:
    result = propagate(lambda of: of["a"] * of["b"], {"a": within(3, 1), "b": within(4, 1)})
    assert (result.low, result.value, result.high) == (12, 12, 12)


def test_factors_of_a_product_add_in_quadrature_of_their_logarithms() -> None:
    result = propagate(lambda of: of["a"] / of["b"], {"a": within(6, 1.5), "b": within(2, 1.2)})
    factor = math.exp(math.hypot(math.log(1.5), math.log(1.2)))
    assert result.value == 3
    assert result.high == pytest.approx(3 * factor)
    assert result.low == pytest.approx(3 / factor)


def test_nine_in_ten_samples_of_a_sum_times_a_factor_lie_inside() -> None:
    inputs = {"a": within(5, 1.3), "b": within(2, 1.8), "c": within(7, 1.2)}
    interval = propagate(lambda of: (of["a"] + of["b"]) * of["c"], inputs)
    chance = random.Random(0)

    def sample(name: str) -> float:
        return inputs[name].value * (inputs[name].high / inputs[name].value) ** (chance.gauss(0, 1) / 1.645)

    results = [(sample("a") + sample("b")) * sample("c") for _ in range(5000)]
    inside = sum(interval.low <= result <= interval.high for result in results) / len(results)
    assert inside == pytest.approx(0.9, abs=0.02)
