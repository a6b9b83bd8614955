"""What follows from the held-out losses of a run."""

import math

import pytest

from trainspec_cli.engine.run.evaluate import HeldoutLosses


def follow(*losses: float | None) -> HeldoutLosses:
    followed = HeldoutLosses()
    for number, loss in enumerate(losses, 1):
        followed = followed.after(10 * number, loss)
    return followed


def test_the_best_is_remembered_and_how_many_evaluations_ago_it_was() -> None:
    followed = follow(3.0, 2.0, 2.5, 2.0)
    assert (followed.best_step, followed.best_loss, followed.since_best) == (20, 2.0, 2), (
        "an equal loss is no better one"
    )
    assert followed.describe_best() == "lowest, 2, at step 20"


def test_a_run_ends_after_as_many_evaluations_as_it_has_patience_for() -> None:
    followed = follow(3.0, 2.0, 2.5, 2.0)
    assert [followed.has_ended(patience) for patience in (None, 1, 2, 3)] == [False, True, True, False]
    assert followed.last_step == 40


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_the_best(loss: float | None) -> None:
    assert follow(loss, 5.0, loss).best_step == 20
    never = follow(loss, loss, loss)
    assert (never.best_step, never.since_best, never.is_rising) == (None, 3, False)
    assert never.describe_best() == "never finite"


@pytest.mark.parametrize(
    ("losses", "rises"),
    [
        ((2.0, 2.1, 2.2), True),
        ((2.0, 2.2), False),
        ((2.0, 2.2, 2.1, 2.2), False),
        ((2.0, 2.005, 2.01), False),
        ((4.0, 2.0, 3.0, 3.5, 1.9), False),
        ((2.0, 2.1, math.inf), True),
    ],
)
def test_it_rises_after_two_evaluations_that_are_worse_each_time_by_more_than_a_hundredth(
    losses: tuple[float, ...], rises: bool
) -> None:
    assert follow(*losses).is_rising is rises
