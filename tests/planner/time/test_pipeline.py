"""Pipelines: the closed forms agree with the schedule's simulation."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.time.pipeline import bubble_s, simulate_1f1b, stage_layers
from trainspec_cli.spec.recipe.layout import Layout


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (4, 4), (4, 16), (8, 64)])
def test_even_stages_wait_as_the_closed_form_says(stages: int, micro_batches: int) -> None:
    simulated = simulate_1f1b([1.0] * stages, [2.0] * stages, micro_batches)
    closed = 3.0 * micro_batches + bubble_s([3.0] * stages, Layout(pp=stages))
    assert simulated == pytest.approx(closed)


def test_one_slow_stage_sets_the_pace() -> None:
    forward, backward = [1.0, 1.0, 1.0, 1.4], [2.0, 2.0, 2.0, 2.8]
    simulated = simulate_1f1b(forward, backward, 32)
    closed = 4.2 * 32 + bubble_s([3.0, 3.0, 3.0, 4.2], Layout(pp=4))
    assert simulated == pytest.approx(closed, rel=0.03)


def test_schedules_shrink_the_bubble() -> None:
    times = [3.0] * 4
    plain = bubble_s(times, Layout(pp=4))
    interleaved = bubble_s(times, Layout(pp=4, pipeline_schedule="interleaved", virtual_stages=3))
    assert interleaved == pytest.approx(plain / 3)
    assert bubble_s(times, Layout(pp=4, pipeline_schedule="zero_bubble")) < plain / 2


def test_spare_layers_stay_away_from_the_head() -> None:
    assert stage_layers(32, Layout(pp=4)) == (8, 8, 8, 8)
    assert stage_layers(126, Layout(pp=8), head_layers=2.0) == (16, 16, 16, 16, 16, 16, 16, 14)
    assert stage_layers(61, Layout(pp=16), head_layers=2.5)[-1] < 4
    assert stage_layers(10, Layout(pp=2, stage_layers=(6, 4))) == (6, 4)
