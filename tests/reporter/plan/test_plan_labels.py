"""Quantities as people say them."""

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.forecast import Interval
from trainspec_cli.reporter.plan import labels
from trainspec_cli.reporter.plan.labels import PlanReport


def test_a_layout_names_what_is_not_one(plan: PlanReport) -> None:
    said = [labels.layout_label(candidate.layout) for candidate in plan.capacity.candidates]
    assert said == ["replicate 2 · shard 2 · tp 2 · pp 2 · 1f1b · zero 1", "shard 16 · zero 3"]


def test_a_layout_of_one_device_says_so() -> None:
    assert labels.layout_label(Layout()) == "one device"


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


def test_parts_too_small_to_see_are_left_out() -> None:
    parts = labels.present({"matmul_s": 1.0, "host_s": 1e-6, "data_s": 0.0}, labels.TIME_PARTS)
    assert parts == [("matmul_s", "matrix products", 1.0)]


def test_experts_are_told_apart_from_all_parameters(plan: PlanReport) -> None:
    capacity = replace(plan.capacity, params=46_700_000_000, active_params=12_900_000_000)
    assert labels.model_label(replace(plan, capacity=capacity)) == "llama3_8b, 46.7B parameters, 12.9B active"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"wall_time_s": 3600.0}, "with resilience=elastic: 1 h 0 min"),
        (
            {"layout": "shard 8", "wall_time_s": 60.0},
            "with resilience=elastic in shard 8: 1 min 0 s",
        ),
    ],
)
def test_another_way_of_recovering(plan: PlanReport, other: dict[str, Any], said: str) -> None:
    assert plan.run is not None
    assert labels.alternative_label(replace(plan.run.alternatives[0], **other)) == said


def test_a_pipeline_of_several_chunks_a_rank() -> None:
    layout = Layout(pp=8, tp=2, pipeline_schedule="zero_bubble", virtual_stages=2)
    assert labels.layout_label(layout) == "tp 2 · pp 8 · zero-bubble x2"


@pytest.mark.parametrize(("value", "said"), [(99.94, "99.9"), (100, "100"), (2810.4, "2,810"), (0.12345, "0.123")])
def test_rates(value: float, said: str) -> None:
    assert labels.format_rate(value) == said


def test_a_model_and_its_devices(plan: PlanReport) -> None:
    def on(num_nodes: int, world_size: int) -> PlanReport:
        spec = replace(plan.spec, cluster=replace(plan.spec.cluster, num_nodes=num_nodes))
        return replace(plan, spec=spec, capacity=replace(plan.capacity, world_size=world_size))

    assert labels.devices_label(on(1, 8)) == "8 H100-SXM-80GB on 1 node"
    assert labels.devices_label(on(1200, 9600)) == "9,600 H100-SXM-80GB on 1,200 nodes"
    nameless = replace(plan.spec, model=replace(plan.spec.model, name=""))
    assert labels.model_label(replace(plan, spec=nameless)) == "decoder, 8.03B parameters"


def test_quantities(plan: PlanReport) -> None:
    assert (labels.format_money(999.5), labels.format_money(1000)) == ("$999.50", "$1k")
    assert (labels.format_mass(1), labels.format_mass(999), labels.format_mass(1000)) == ("1 kg", "999 kg", "1 t")
    assert (labels.percent(0.1234), labels.percent(0.1234, 2), labels.goodput_percent(0.9876)) == (
        "12%",
        "12.34%",
        "98.8%",
    )
    assert labels.format_range(Interval(1.5, 1.0, 2.0), labels.format_money) == "$1.00 to $2.00"
    assert labels.format_range(None, labels.format_money) == ""
    assert (labels.format_grouped(11390.0), labels.format_grouped(0.5), labels.gib(1.5 * 2**30)) == (
        "11,400",
        "0.5",
        "1.5",
    )
    candidate = replace(plan.capacity.candidates[0], micro_batch_size=2, grad_accum_steps=8)
    assert labels.micro_batch_label(candidate) == "2 x 8"


def test_parts_of_nothing_are_none() -> None:
    assert labels.present({"matmul_s": 0.0}, labels.TIME_PARTS) == []
    assert labels.present({}, labels.TIME_PARTS) == []


def test_stages_that_are_not_cut_evenly() -> None:
    assert labels.stages_label(None) == ""
    assert labels.stages_label((3, 4, 4, 4, 2)) == "3, 4 x 3, 2"
    assert labels.stages_label([1, 1]) == "1 x 2"


def test_how_small_a_part_may_be_hangs_on_the_whole() -> None:
    for scale in (1.0, 1e12):
        parts = {"matmul_s": scale, "host_s": 6e-4 * scale, "data_s": 4e-4 * scale}
        assert [key for key, _, _ in labels.present(parts, labels.TIME_PARTS)] == ["matmul_s", "host_s"]
    assert labels.present({"matmul_s": 0.0}, labels.TIME_PARTS) == []


@pytest.mark.parametrize(("usd", "said"), [(999.99, "$999.99"), (1000.0, "$1k")])
def test_money_is_rounded_from_a_thousand_on(usd: float, said: str) -> None:
    assert labels.format_money(usd) == said


@pytest.mark.parametrize(("kilograms", "said"), [(1.0, "1 kg"), (999.0, "999 kg"), (1000.0, "1 t")])
def test_masses_at_their_bounds(kilograms: float, said: str) -> None:
    assert labels.format_mass(kilograms) == said
