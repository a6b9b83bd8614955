import random

import pytest

from trainspec_cli.run.recovery.watch import WINDOW, slope_per_step, steps_until_full

STEPS = [10 * i for i in range(WINDOW)]
MB = 1e6


def noisy(level):
    chance = random.Random(3)
    return [level(i) + chance.uniform(-2, 2) * MB for i in range(WINDOW)]


def test_a_leak_is_seen_through_noise():
    readings = noisy(lambda i: 500 * MB + 3 * MB * i)
    assert slope_per_step(STEPS, readings) == pytest.approx(0.3 * MB, rel=0.1)
    assert steps_until_full(STEPS, readings, 90 * MB) == pytest.approx(300, rel=0.1)


@pytest.mark.parametrize(
    "level",
    [
        lambda i: 500 * MB,
        lambda i: 500 * MB + 200 * MB * (i > 20),
        lambda i: 500 * MB + 50 * MB * min(i, 12),
        lambda i: 500 * MB + 100 * MB * (i % 6),
        lambda i: 500 * MB - 3 * MB * i,
    ],
    ids=["flat", "one jump", "a cache that fills", "waves", "falling"],
)
def test_what_is_no_leak_is_none(level):
    assert steps_until_full(STEPS, noisy(level), MB) is None


def test_too_few_readings_say_nothing():
    assert steps_until_full(STEPS[:-1], [MB * i for i in range(WINDOW - 1)], MB) is None


@pytest.mark.parametrize(("falls", "found"), [(1, True), (2, False)])
def test_one_eighth_of_the_window_may_fall_while_the_others_grow(falls: int, found: bool) -> None:
    """Six of the seven differences between neighbouring eighths are 86%, five are 71%; 80% must be rises."""
    levels = [0.0]
    for change in (1, 1, -1 if falls == 2 else 1, 1, -1, 1, 1):
        levels.append(levels[-1] + 10 * MB * change)
    readings = [levels[i // (WINDOW // 8)] for i in range(WINDOW)]
    assert (steps_until_full(STEPS, readings, 90 * MB) is not None) == found
