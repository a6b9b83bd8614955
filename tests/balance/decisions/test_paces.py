"""How much longer than usual ranks compute, through changes of layout and of the ranks themselves."""

from __future__ import annotations

import pytest

from trainspec_cli.balance.decisions.speeds import PaceTracker
from trainspec_cli.recipe.keys.layout import Layout

DATA, PIPELINE, BOTH = Layout(dp_shard=4), Layout(pp=4), Layout(pp=2, dp_shard=2)


def test_ranks_of_the_same_work_are_told_apart_from_the_first() -> None:
    assert PaceTracker(0.1).note(DATA, [2.0, 2.1, 4.0, 2.0]) == (1.0, 1.0, 2.0, 1.0)
    assert PaceTracker(0.1).note(BOTH, [2.0, 2.0, 5.0, 10.0]) == (1.0, 1.0, 1.0, 2.0)


def test_a_stage_that_was_cut_badly_is_no_slow_rank() -> None:
    paces = PaceTracker(0.1)
    assert paces.note(PIPELINE, [2.0, 2.0, 2.0, 3.0]) == (1.0,) * 4
    assert paces.note(PIPELINE, [2.0, 2.0, 2.0, 6.0]) == (1.0, 1.0, 1.0, 2.0)
    assert paces.note(PIPELINE, [2.0, 2.0, 2.0, 3.1]) == (1.0,) * 4


def test_all_ranks_of_a_stage_may_become_slow() -> None:
    paces = PaceTracker(0.1)
    paces.note(BOTH, [2.0, 2.0, 2.0, 2.0])
    assert paces.note(BOTH, [2.0, 2.0, 3.0, 3.0]) == (1.0, 1.0, 1.5, 1.5)


def test_a_slow_rank_is_known_again_in_another_layout_where_it_has_a_stage_to_itself() -> None:
    paces = PaceTracker(0.1)
    paces.note(DATA, [2.0] * 4)
    assert paces.note(DATA, [2.0, 2.0, 2.0, 4.0]) == (1.0, 1.0, 1.0, 2.0)
    assert paces.note(PIPELINE, [8.0, 8.0, 8.0, 20.0]) == (1.0, 1.0, 1.0, 2.0)
    assert paces.note(PIPELINE, [8.0, 8.0, 8.0, 10.0]) == (1.0,) * 4
    assert paces.note(DATA, [2.0] * 4) == (1.0,) * 4


def test_a_run_of_other_ranks_knows_nothing_of_the_ranks_before() -> None:
    paces = PaceTracker(0.1)
    paces.note(Layout(dp_shard=2), [2.0, 6.0])
    assert paces.note(PIPELINE, [8.0] * 4) == (1.0,) * 4


@pytest.mark.parametrize(("time_s", "pace"), [(2.19, 1.0), (2.25, 1.125), (1.75, 0.875)])
def test_what_is_within_the_change_that_is_asked_for_counts_as_usual(time_s: float, pace: float) -> None:
    paces = PaceTracker(0.1)
    paces.note(DATA, [2.0] * 4)
    assert paces.note(DATA, [2.0, 2.0, 2.0, time_s])[3] == pytest.approx(pace)
