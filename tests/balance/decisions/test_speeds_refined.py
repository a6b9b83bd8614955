"""Speeds are refined from the steps that follow, and shapes that say nothing new teach nothing new."""

from trainspec_cli.balance.decisions.speeds import (
    CONFIRMING_STEPS,
    FIRST_STEPS,
    REFINING_STEPS,
    SKIPPED_STEPS,
    Speed,
    SpeedTracker,
    StepShape,
    slowest,
)


def seen(tracker: SpeedTracker, samples: int, micro_batches: int, seconds: list[float]) -> SpeedTracker:
    for compute_s in seconds:
        tracker.note(samples, micro_batches, compute_s)
    return tracker


def test_a_few_unlucky_confirming_steps_are_corrected_by_the_following_ones() -> None:
    tracker = seen(SpeedTracker(0.1), 8, 1, [8.0] * (SKIPPED_STEPS + FIRST_STEPS))
    seen(tracker, 8, 1, [16.8] * CONFIRMING_STEPS)
    assert tracker.speed == Speed(0.0, 2.1)
    seen(tracker, 8, 1, [16.0] * REFINING_STEPS)
    assert tracker.speed is not None and abs(tracker.speed.per_sample_s - 2.0) < 1e-12


def test_a_speed_is_refined_once_and_then_stays_while_nothing_changes() -> None:
    tracker = seen(SpeedTracker(0.1), 8, 1, [8.0] * (7 + REFINING_STEPS))
    speed = tracker.speed
    seen(tracker, 8, 1, [8.3] * 60)
    assert tracker.speed is speed


def test_one_micro_batch_more_of_the_same_size_is_no_evidence_of_a_fixed_part() -> None:
    """Its time differs from the one before by noise alone, which would be taken for seconds of fixed time."""
    assert not StepShape(32, 32).differs(StepShape(32, 33))
    assert not StepShape(33, 33).differs(StepShape(32, 32))
    assert StepShape(16, 32).differs(StepShape(32, 32))
    tracker = seen(SpeedTracker(0.1), 32, 32, [32.0] * 20)
    seen(tracker, 32, 33, [32.6] * 8)
    assert tracker.speed == Speed(0.0, 1.0)


def test_ranks_that_work_on_the_same_samples_are_as_slow_as_their_slowest() -> None:
    steep, flat = Speed(0.0, 1.0), Speed(3.0, 0.1)
    assert slowest([steep, flat], 2) is flat and slowest([steep, flat], 20) is steep
    assert slowest([steep, None], 2) is None
