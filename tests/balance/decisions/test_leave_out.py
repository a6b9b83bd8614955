"""Leaving a node out: when it pays, and what is expected of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.balance.batch.division import even_division
from trainspec_cli.balance.decisions.shares import (
    Gain,
    LeaveOutScheduler,
    RankTimes,
    added_work,
    best_shares_s,
    data_rows,
    gain_without_slowest,
)
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.recipe.keys.layout import Layout

GAIN = Gain(node=1, pace=4.0, before_s=2.2, kept_s=2.0, expected_s=1.0)


def evenly(*paces: float) -> RankTimes:
    """Ranks that each take a second for their samples, as many as the others have, times their pace."""
    return RankTimes(paces, paces, paces)


@pytest.mark.parametrize(
    ("paces", "ranks_per_node", "rest_s", "best_s", "work", "expected"),
    [
        ((1, 4, 1), 1, 0.1, math.inf, 1.5, (1, 4.0, 4.1, 1.6)),  # two do the work of three
        ((1, 4, 1), 1, 0.1, math.inf, 1.0, (1, 4.0, 4.1, 1.1)),  # a spare node takes its place
        ((1, 4, 1), 1, 0.1, 1.4, 1.5, None),  # shares win more
        ((1, 4, 1), 1, 0.1, 1.4, 1.0, (1, 4.0, 1.5, 1.1)),  # but less than a spare node
        ((1, 1.4, 1), 1, 0.1, math.inf, 1.5, None),  # the others would take longer with its work than they wait
        ((1, 1.7, 1), 1, 0.1, math.inf, 1.5, (1, 1.7, 1.8, 1.6)),
        ((1, 1.7, 1), 1, 0.5, math.inf, 1.5, None),  # a tenth of the step is not saved
        ((1, 1, 1), 1, 5.0, math.inf, 1.0, None),  # no rank is slow
        ((1, 1, 3, 1, 1, 1), 2, 0.0, math.inf, 1.5, (1, 3.0, 3.0, 1.5)),  # one device of the second node
        ((1, 1, 5, 1, 2, 4.8), 2, 0.0, math.inf, 1.0, None),  # another node stays as slow
        ((1, 1, 5, 1, 2, 3), 2, 0.0, math.inf, 1.0, (1, 5.0, 5.0, 3.0)),
        ((3, 9), 2, 0.0, math.inf, 1.0, None),  # there is one node
    ],
)
def test_what_is_won_without_the_slowest_node(paces, ranks_per_node, rest_s, best_s, work, expected) -> None:
    gain = gain_without_slowest(evenly(*paces), ranks_per_node, max(paces) + rest_s, best_s, work)
    if expected is None:
        assert gain is None
    else:
        node, pace, kept_s, expected_s = expected
        assert gain == Gain(node, pace, max(paces) + rest_s, pytest.approx(kept_s), pytest.approx(expected_s))


def test_shares_that_are_in_force_count_as_what_the_run_takes_with_the_node() -> None:
    """The slow rank has few samples already, so that all compute for 1.2 s: what is left to win is little."""
    times = RankTimes(in_force_s=(1.2, 1.2, 1.2), even_s=(1.0, 4.0, 1.0), paces=(1.0, 4.0, 1.0))
    assert gain_without_slowest(times, 1, 1.3, math.inf, 1.5) is None
    gain = gain_without_slowest(times, 1, 1.3, math.inf, 1.0)
    assert gain is not None and gain.saved_s == pytest.approx(0.2)


def test_the_work_of_a_stage_that_is_left_out_is_done_at_the_usual_pace() -> None:
    """Two stages, of which the second has more work and is twice as slow as usual."""
    times = RankTimes(in_force_s=(1.0, 6.0), even_s=(1.0, 6.0), paces=(1.0, 2.0))
    gain = gain_without_slowest(times, 1, 6.0, math.inf, 1.0)
    assert gain is not None and gain.expected_s == 3.0


@pytest.mark.parametrize(
    ("before", "after", "samples", "expected"),
    [
        (Layout(dp_replicate=4), Layout(dp_replicate=3), 12, 4 / 3),
        (Layout(dp_replicate=3), Layout(dp_replicate=2), 3, 2.0),  # one rank has two of the three
        (Layout(dp_replicate=3), Layout(dp_replicate=2), 4, 2 / (4 / 3)),
        (Layout(dp_shard=2, tp=2), Layout(dp_shard=2), 8, 2.0),
        (Layout(pp=3), Layout(pp=2), 8, 1.5),
        (Layout(cp=2), Layout(cp=2), 5, 1.0),
    ],
)
def test_the_work_of_those_that_are_left(before: Layout, after: Layout, samples: int, expected: float) -> None:
    assert added_work(before, after, samples) == pytest.approx(expected)


def test_ranks_that_work_on_the_same_samples() -> None:
    assert data_rows(Layout(pp=2, dp_replicate=2, tp=2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert data_rows(Layout(dp_shard=3)) == [[0], [1], [2]]


def test_the_best_shares_are_as_slow_as_the_slowest_rank_of_each_row() -> None:
    """Of two tensor parallel pairs one has a rank that is three times as slow: it gets a quarter of the samples."""
    layout, slow = Layout(dp_replicate=2, tp=2), Speed(0.0, 3.0)
    speeds = [Speed(0.0, 1.0)] * 3 + [slow]
    even = even_division(layout, 4, keeps_micro_batches=False)
    assert best_shares_s(layout, even, 8, speeds, 8) == pytest.approx(6.0)
    assert best_shares_s(layout, even, 8, speeds, 4) == pytest.approx(6.0)
    assert best_shares_s(layout, even, 2, speeds, 8) == pytest.approx(3.0), "it has one sample at least"


def decide(scheduler: LeaveOutScheduler, *, gain: Gain | None = GAIN, steps=1, remaining=1000, cost_s=10.0):
    return scheduler.note_steps(gain, steps, remaining, cost_s)


def test_a_node_is_left_out_once_as_much_was_lost_as_a_start_costs() -> None:
    scheduler = LeaveOutScheduler()
    assert [decide(scheduler) for _ in range(9)] == [None] * 9
    assert decide(scheduler) == GAIN
    assert decide(scheduler, steps=1000) is None, "that is decided"


def test_what_was_lost_before_the_node_was_well_again_does_not_count() -> None:
    scheduler = LeaveOutScheduler()
    assert decide(scheduler, steps=9) is None
    assert decide(scheduler, gain=None) is None
    assert decide(scheduler, steps=9) is None
    assert decide(scheduler, gain=replace(GAIN, node=2), steps=9) is None, "nor with another node"
    assert decide(scheduler, gain=replace(GAIN, node=2)) == replace(GAIN, node=2)


def test_the_steps_that_are_left_must_win_the_start_back() -> None:
    scheduler = LeaveOutScheduler()
    assert decide(scheduler, steps=100, remaining=9) is None
    assert decide(scheduler, remaining=10) == GAIN


def test_advice_is_repeated_for_another_node_and_after_the_node_was_well() -> None:
    scheduler = LeaveOutScheduler()
    other = replace(GAIN, node=0)
    assert decide(scheduler, steps=10) == GAIN
    assert decide(scheduler, gain=other, steps=10) == other
    assert decide(scheduler, gain=None) is None
    assert decide(scheduler, gain=other, steps=10) == other


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    paces=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=8),
    rest_s=st.floats(0.0, 5.0),
    work=st.floats(1.0, 3.0),
    best_s=st.floats(0.5, 30.0),
)
def test_what_is_decided_saves_a_tenth_and_names_the_slowest(paces, rest_s, work, best_s) -> None:
    step_s = max(paces) + rest_s
    gain = gain_without_slowest(evenly(*paces), 1, step_s, best_s, work)
    if gain is not None:
        assert paces[gain.node] == max(paces) == gain.pace
        assert 0 < gain.expected_s <= 0.9 * gain.kept_s * (1 + 1e-9)
        assert gain.kept_s <= gain.before_s == step_s
        others = [pace for place, pace in enumerate(paces) if place != gain.node]
        assert gain.expected_s == pytest.approx(work * max([1.0, *others]) + rest_s)
