"""Pipelines: the closed forms agree with a simulation of the schedule's own actions."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.time.step import bubble_s
from trainspec_cli.policy.pipeline import Action, actions
from trainspec_cli.spec.recipe.layout import Layout


def simulate_1f1b(forward_s: list[float], backward_s: list[float], micro_batches: int) -> float:
    """Seconds of one step, event by event: a pass starts when its stage is free and its input has come."""
    stages, took = len(forward_s), {"forward": forward_s, "backward": backward_s}
    orders = [list(order) for order in actions(Layout(pp=stages), micro_batches)]
    free, done = [0.0] * stages, {}
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (needed := inputs_of(order[0], stages - 1)) <= done.keys():
                action = order.pop(0)
                free[stage] = max(free[stage], *map(done.get, needed), 0.0) + took[action.kind][stage]
                done[action] = free[stage]
    return max(free)


def inputs_of(action: Action, last: int) -> set[Action]:
    if action.kind == "forward":
        return {Action("forward", action.stage - 1, action.micro_batch)} if action.stage else set()
    if action.stage == last:
        return {Action("forward", last, action.micro_batch)}
    return {Action("backward", action.stage + 1, action.micro_batch)}


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
