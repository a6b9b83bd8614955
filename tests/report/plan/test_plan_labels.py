"""Quantities as people say them."""

from typing import Any

import pytest

from trainspec_cli.report.plan import labels


def test_a_layout_names_what_is_not_one(plan: dict[str, Any]) -> None:
    said = [labels.layout_label(candidate) for candidate in plan["candidates"]]
    assert said == ["replicate 2 · shard 2 · tp 2 · pp 2 · 1f1b · zero 1", "shard 16 · zero 3"]


def test_a_layout_of_one_device_says_so(plan: dict[str, Any]) -> None:
    alone = dict.fromkeys(plan["best"]["layout"], 1)
    assert labels.layout_label({"layout": alone}) == "one device"


@pytest.mark.parametrize(
    ("kilograms", "said"), [(0.0004, "0.4 g"), (12.34, "12.3 kg"), (2500, "2.5 t"), (11_390_000, "11,400 t")]
)
def test_masses(kilograms: float, said: str) -> None:
    assert labels.format_mass(kilograms) == said


@pytest.mark.parametrize(("joules", "said"), [(3600, "1 Wh"), (3.6e9, "1 MWh"), (9.9e13, "27.5 GWh")])
def test_energies(joules: float, said: str) -> None:
    assert labels.format_energy(joules) == said


@pytest.mark.parametrize(("usd", "said"), [(0.5, "$0.50"), (2_041_335, "$2.04M")])
def test_money(usd: float, said: str) -> None:
    assert labels.format_money(usd) == said


def test_parts_too_small_to_see_are_left_out(plan: dict[str, Any]) -> None:
    parts = labels.present({"matmul_s": 1.0, "host_s": 1e-6, "data_s": 0.0}, labels.TIME_PARTS)
    assert parts == [("matmul_s", "matrix products", 1.0)]


def test_experts_are_told_apart_from_all_parameters() -> None:
    model = {"name": "mixtral", "family": "decoder", "params": 46.7e9, "active_params": 12.9e9}
    assert labels.model_label(model) == "mixtral, 46.7B parameters, 12.9B active"
