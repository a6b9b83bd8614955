"""Energy, carbon and money against worked examples that others published."""

from dataclasses import replace

import pytest

from trainspec_cli.planner.run.cost import (
    Occupation,
    carbon_kg,
    device_power_ratio,
    energy_joules,
    expect_carbon,
    expect_energy,
    expect_money,
    occupation,
    ownership_usd,
    rent_usd,
    rental_price,
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
TDP_ALONE = {"device_ratio": 1.0, "host_ratio": 0.0}


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def test_bloom_as_published() -> None:
    """BLOOM (arXiv:2211.02001): 1,082,990 GPU-hours at 400 W are 433,196 kWh, and 24.7 t at 57 g/kWh."""
    energy = total(energy_joules(1, 400, 1_082_990 * HOUR_S, **TDP_ALONE, pue=1.0))
    assert energy / MWH == pytest.approx(433.196, rel=1e-5)
    assert carbon_kg(energy, 57) / 1000 == pytest.approx(24.7, rel=0.002)


def test_gpt3_as_published() -> None:
    """GPT-3 (arXiv:2104.10350): 10,000 V100 at 330 W with their hosts for 14.8 days at PUE 1.10; 1,287 MWh, 552 t."""
    energy = total(energy_joules(10_000, 330, 14.8 * 24 * HOUR_S, **TDP_ALONE, pue=1.10))
    assert energy / MWH == pytest.approx(1287, rel=0.003)
    assert carbon_kg(energy, 429) / 1000 == pytest.approx(552, rel=0.003)


@pytest.mark.parametrize(
    ("gpu_hours", "tdp_w", "published_t"),
    [(39.3e6, 700, 11_390), (7.7e6, 700, 2290), (3.3e6, 400, 539)],
    ids=["llama 3.1", "llama 3", "llama 2"],
)
def test_llama_model_cards(gpu_hours: float, tdp_w: float, published_t: float) -> None:
    """The cards state hours, TDP and tonnes; 0.415 kg/kWh, PUE included, explains all three within 3%."""
    energy = total(energy_joules(1, tdp_w, gpu_hours * HOUR_S, **TDP_ALONE, pue=1.0))
    assert carbon_kg(energy, 415) / 1000 == pytest.approx(published_t, rel=0.03)


def test_an_h100_node_at_work_draws_what_was_measured() -> None:
    """Eight H100 in training draw 76% of the 10.2 kW that the node is rated at (arXiv:2506.14551)."""
    power = PowerSpec()
    ratio = device_power_ratio(power, Occupation(busy=1, waiting=0, idle=0)) + power.host
    assert 8 * 700 * ratio == pytest.approx(0.76 * 10_200, rel=0.05)


def test_idle_and_waiting_devices_draw_less() -> None:
    power = PowerSpec(busy=0.9, waiting=0.5, idle=0.1)
    assert device_power_ratio(power, Occupation(busy=0.6, waiting=0.3, idle=0.1)) == pytest.approx(0.7)


def test_energy_by_what_draws_it() -> None:
    parts = energy_joules(16, 700, HOUR_S, device_ratio=0.8, host_ratio=0.4, pue=1.5)
    assert parts["accelerators"] / MWH == pytest.approx(16 * 0.7e-3 * 0.8)
    assert parts["hosts"] == pytest.approx(parts["accelerators"] / 2)
    assert parts["building"] == pytest.approx(0.5 * (parts["accelerators"] + parts["hosts"]))


def test_rent_is_paid_by_the_device_hour() -> None:
    assert rent_usd(1024, 10 * HOUR_S, 2.5) == {"rent": 25_600}


def test_ownership_over_the_whole_life_costs_the_price_the_upkeep_and_the_current() -> None:
    cost = CostSpec(owned=True, device_price_usd=30_000, useful_years=4, utilisation=0.5, operation_ratio=0.1)
    used_hours = 4 * 8766 * 0.5
    energy = 10 * MWH
    parts = ownership_usd(2, used_hours * HOUR_S, energy, cost, SiteSpec(electricity_usd_per_kwh=0.1))
    assert parts == pytest.approx({"machines": 60_000, "operation": 4 * 6000, "electricity": 1000})


def test_renting_breaks_even_with_owning_at_the_closed_form() -> None:
    """Per hour, ownership costs price x (1 / years + operation) / (8766 x utilisation): that rent is the break-even."""
    cost = CostSpec(owned=True, device_price_usd=40_000, useful_years=4, utilisation=0.8, operation_ratio=0.08)
    rent = 40_000 * (1 / 4 + 0.08) / (8766 * 0.8)
    owned = ownership_usd(64, 100 * HOUR_S, 0.0, cost, SiteSpec())
    assert total(owned) == pytest.approx(rent_usd(64, 100 * HOUR_S, rent)["rent"])


def test_owning_without_a_price_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster\.cost\.device_price_usd"):
        ownership_usd(1, 1, 0, CostSpec(owned=True), SiteSpec())


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
