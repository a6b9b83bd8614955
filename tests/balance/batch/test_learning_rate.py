from itertools import pairwise

import pytest

from trainspec_cli.balance.batch.batch import learning_rate
from trainspec_cli.recipe.keys.training import ScheduleSpec


def rates(schedule: ScheduleSpec, max_steps: int = 100) -> list[float]:
    return [learning_rate(schedule, 2.0, step, max_steps) for step in range(max_steps)]


def test_warmup_rises_to_the_peak_and_never_starts_at_zero():
    got = rates(ScheduleSpec(kind="constant", warmup_steps=4))
    assert got[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert got[-1] == 2.0


def test_cosine_ends_at_the_final_ratio_and_is_halfway_in_the_middle():
    got = rates(ScheduleSpec(kind="cosine", warmup_steps=0, final_lr_ratio=0.1), 101)
    assert got[0] == pytest.approx(2.0)
    assert got[50] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert got[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(got))


def test_wsd_is_stable_then_falls_in_a_straight_line():
    got = rates(ScheduleSpec(kind="wsd", warmup_steps=10, decay_fraction=0.2, final_lr_ratio=0.0))
    assert set(got[10:80]) == {2.0}
    falls = [a - b for a, b in pairwise(got[80:])]
    assert falls == pytest.approx([falls[0]] * len(falls))
    assert got[-1] == pytest.approx(0.0)


def test_warmup_longer_than_the_stable_part_is_not_cut():
    got = rates(ScheduleSpec(kind="wsd", warmup_steps=95, decay_fraction=0.5))
    assert got[94] == 2.0
    assert got[-1] < got[95]


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_a_run_of_one_step_has_a_rate(kind):
    assert learning_rate(ScheduleSpec(kind=kind), 1.0, 0, 1) > 0
