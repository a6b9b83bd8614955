"""Quantities as people say them."""

from dataclasses import replace
from typing import Any

import pytest
from lab.recorded import Recorded

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.forecast import Interval
from trainspec_cli.reporter.plan import labels
from trainspec_cli.reporter.plan.labels import PlanReport


@pytest.mark.parametrize(
    ("say", "said"),
    [
        (labels.format_mass, {0.0004: "0.4 g", 1: "1 kg", 12.34: "12.3 kg", 999: "999 kg", 1000: "1 t", 2500: "2.5 t"}),
        (labels.format_energy, {3600: "1 Wh", 3.6e9: "1 MWh", 9.9e13: "27.5 GWh"}),
        (labels.format_money, {0.5: "$0.50", 999.99: "$999.99", 1000: "$1k", 2_041_335: "$2.04M"}),
        (labels.format_rate, {99.94: "99.9", 100: "100", 2810.4: "2,810", 0.12345: "0.123"}),
        (labels.format_grouped, {11390.0: "11,400", 0.5: "0.5"}),
        (labels.percent, {0.1234: "12%"}),
        (labels.goodput_percent, {0.9876: "98.8%"}),
        (labels.gib, {1.5 * 2**30: "1.5"}),
    ],
)
def test_quantities(say: labels.Formatter, said: dict[float, str]) -> None:
    assert {value: say(value) for value in said} == said


def test_a_range_is_said_as_its_bounds() -> None:
    assert labels.format_range(Interval(1.5, 1.0, 2.0), labels.format_money) == "$1.00 to $2.00"
    assert labels.format_range(None, labels.format_money) == ""


def test_a_layout_names_what_is_not_one(recorded: Recorded) -> None:
    chunks = Layout(pp=8, tp=2, pipeline_schedule="zero_bubble", virtual_stages=2)
    recorded(*(labels.layout_label(layout) for layout in (Layout(), Layout(dp_shard=16), chunks)))


def test_parts_too_small_beside_the_whole_are_left_out() -> None:
    for scale in (1.0, 1e12):
        parts = {"matmul_s": scale, "host_s": 6e-4 * scale, "data_s": 4e-4 * scale}
        assert [key for key, _, _ in labels.present(parts, labels.TIME_PARTS)] == ["matmul_s", "host_s"]
    assert labels.present({"matmul_s": 0.0}, labels.TIME_PARTS) == labels.present({}, labels.TIME_PARTS) == []


def test_experts_are_told_apart_from_all_parameters(plan: PlanReport) -> None:
    capacity = replace(plan.capacity, params=46_700_000_000, active_params=12_900_000_000)
    assert labels.model_label(replace(plan, capacity=capacity)) == "llama3_8b, 46.7B parameters, 12.9B active"


def test_another_way_of_recovering(plan: PlanReport, recorded: Recorded) -> None:
    assert plan.run is not None
    changes: list[dict[str, Any]] = [{"wall_time_s": 3600.0}, {"layout": "shard 8", "wall_time_s": 60.0}]
    (other,) = plan.run.alternatives
    recorded(*(labels.alternative_label(replace(other, **changed)) for changed in changes))


def test_a_model_and_its_devices(plan: PlanReport, recorded: Recorded) -> None:
    def on(num_nodes: int, world_size: int) -> PlanReport:
        spec = replace(plan.spec, cluster=replace(plan.spec.cluster, num_nodes=num_nodes))
        return replace(plan, spec=spec, capacity=replace(plan.capacity, world_size=world_size))

    recorded(labels.devices_label(on(1, 8)), labels.devices_label(on(1200, 9600)))
    nameless = replace(plan.spec, model=replace(plan.spec.model, name=""))
    assert labels.model_label(replace(plan, spec=nameless)) == "decoder, 8.03B parameters"


def test_stages_that_are_not_cut_evenly() -> None:
    assert labels.stages_label(None) == ""
    assert labels.stages_label((3, 4, 4, 4, 2)) == "3, 4 x 3, 2"
    assert labels.stages_label([1, 1]) == "1 x 2"
