"""Energy, carbon and money against worked examples that others published."""

import pytest

from trainspec_cli.planner.run.cost import (
    Occupation,
    carbon_kg,
    device_power_ratio,
    energy_joules,
    ownership_usd,
    rent_usd,
)
from trainspec_cli.spec.recipe.cluster import CostSpec, PowerSpec, SiteSpec

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
