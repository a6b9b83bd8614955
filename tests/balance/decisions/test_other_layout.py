"""When a run changes to another layout: once waiting has cost what the change costs, and what is left wins it back."""

from __future__ import annotations

import pytest

from trainspec_cli.balance.decisions.balance import PAUSE_S, PAUSE_STEPS
from trainspec_cli.balance.decisions.other_layout import LayoutScheduler
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import LayoutProposal

DATA, TENSOR = Layout(dp_shard=4), Layout(tp=4)
STEP_S = 10.0
UNMEASURED_S = PAUSE_S + PAUSE_STEPS * STEP_S


def proposal(layout: Layout = DATA, before_s: float = 2.0, expected_s: float = 1.5) -> LayoutProposal:
    """Planned seconds are a fifth of what is measured: their ratio counts."""
    return LayoutProposal(layout, 4, 2, 8, None, before_s, expected_s, "rank 3 is slow")


def first_step(
    scheduler: LayoutScheduler, steps: int = 100, pause_s: float | None = None, each: int = 1
) -> tuple[int, LayoutProposal] | None:
    """Return at which step something is decided in a run of `steps`, and what."""
    for step in range(each, steps + 1, each):
        if decided := scheduler.note_steps(each, STEP_S, steps - step, pause_s):
            return step, decided
    return None


@pytest.mark.parametrize(
    ("expected_s", "pause_s", "steps", "each", "at"),
    [
        (1.5, None, 100, 1, 3),  # 2.5 s per step are saved, and the change is taken to cost 7 s
        (1.0, None, 100, 1, 2),
        (1.9, None, 100, 1, 14),
        (1.9, None, 27, 1, None),  # the 13 steps that are left save 6.5 s
        (1.5, 50.0, 100, 1, 20),  # the last change took that
        (1.5, 50.0, 39, 1, None),
        (1.5, 50.0, 40, 1, 20),
        (1.5, 1.0, 100, 1, 1),
        (1.5, None, 100, 5, 5),  # looked at every fifth step
    ],
)
def test_it_waits_until_the_loss_has_come_to_the_cost(
    expected_s: float, pause_s: float | None, steps: int, each: int, at: int | None
) -> None:
    scheduler = LayoutScheduler()
    scheduler.want(proposal(expected_s=expected_s))
    found = first_step(scheduler, steps, pause_s, each)
    assert (found and found[0]) == at
    if found:
        assert (found[1].before_s, found[1].expected_s) == pytest.approx((STEP_S, STEP_S * expected_s / 2))
        assert found[1].layout == DATA


def test_nothing_is_decided_where_nothing_is_wanted() -> None:
    scheduler = LayoutScheduler()
    assert first_step(scheduler) is None
    scheduler.want(proposal())
    scheduler.want(None)
    assert first_step(scheduler) is None


def test_a_rank_that_recovers_in_time_leaves_no_loss_behind() -> None:
    scheduler = LayoutScheduler()
    for _ in range(20):
        scheduler.want(proposal())
        assert first_step(scheduler, 2) is None
        scheduler.want(None)
        assert first_step(scheduler, 2) is None


def test_the_loss_goes_on_where_another_layout_has_become_best() -> None:
    scheduler = LayoutScheduler()
    scheduler.want(proposal())
    assert [scheduler.note_steps(1, STEP_S, 100) for _ in range(2)] == [None] * 2
    scheduler.want(proposal(TENSOR))
    decided = scheduler.note_steps(1, STEP_S, 100)
    assert decided is not None and decided.layout == TENSOR


def test_what_is_decided_is_not_repeated_until_speeds_have_been_usual_or_another_layout_is_best() -> None:
    scheduler = LayoutScheduler()
    scheduler.want(proposal())
    assert first_step(scheduler)
    scheduler.want(proposal())
    assert first_step(scheduler) is None
    scheduler.want(proposal(TENSOR))
    assert first_step(scheduler)
    scheduler.want(None)
    scheduler.want(proposal())
    assert first_step(scheduler)


def test_a_layout_that_failed_is_not_proposed_again() -> None:
    scheduler = LayoutScheduler()
    scheduler.want(proposal())
    scheduler.refuse(DATA)
    assert first_step(scheduler) is None
    for wanted in (None, proposal()):
        scheduler.want(wanted)
        assert first_step(scheduler) is None
    scheduler.want(proposal(TENSOR))
    scheduler.refuse(DATA)
    assert first_step(scheduler)
