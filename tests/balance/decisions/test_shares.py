"""When samples are divided otherwise, in simulated runs: ranks of known speeds and noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from lab.recorded import Recorded

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.shares import (
    COST_STEPS,
    ChangeCost,
    ShareChange,
    ShareScheduler,
    describe_rates,
    describe_speeds,
    equalise,
    exchange_each_s,
    group_weights,
)
from trainspec_cli.balance.decisions.speeds import CONFIRMING_STEPS, Speed, SpeedTracker, computing_s
from trainspec_cli.recipe.keys.layout import Layout

RANKS = 4
Slowdown = Callable[[int, int], float]
"""(rank, step) -> how many times as long it takes."""


@dataclass
class Simulated:
    """A run of `RANKS` ranks that compute a sample in a second, and a micro-batch's start in `fixed_s`."""

    slowdown: Slowdown
    samples: int = 32
    noise: float = 0.0
    fixed_s: float = 0.0
    largest: int = 64
    micro_batch_size: int = 8
    keeps_micro_batches: bool = False
    seed: int = 0
    garbage_s: Slowdown = lambda *_: 0.0
    counts_garbage: bool = True
    changes: list[tuple[int, ShareChange]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    largest_seen: int = 0

    def run(self, steps: int) -> Simulated:
        draw, even = random.Random(self.seed), Division((1.0,) * RANKS, self.micro_batch_size)
        scheduler = ShareScheduler(even, self.largest, 0.1, keeps_micro_batches=self.keeps_micro_batches)
        trackers = [SpeedTracker(0.1) for _ in range(RANKS)]
        for step in range(steps):
            times_s = []
            for rank, tracker in enumerate(trackers):
                own = scheduler.division.of_rank(rank, 0, self.samples)
                seconds = len(own.sizes) * self.fixed_s + own.samples
                seconds *= self.slowdown(rank, step) * draw.lognormvariate(0, self.noise)
                collected_s = self.garbage_s(rank, step)
                seconds += collected_s
                parts_s = {"forward": seconds / 3, "backward": seconds * 2 / 3}
                known_s = collected_s if self.counts_garbage else 0.0
                tracker.note(own.samples, len(own.sizes), computing_s(parts_s, known_s))
                times_s.append(seconds)
                self.largest_seen = max(self.largest_seen, *own.sizes)
            self.step_s.append(max(times_s))
            change = scheduler.note_step(self.samples, [tracker.speed for tracker in trackers], 0.0)
            if change:
                self.changes.append((step, change))
        return self

    @property
    def counts(self) -> list[tuple[int, ...]]:
        return [change.division.counts(self.samples) for _, change in self.changes]


def slow_from_30_to_150(rank: int, step: int) -> float:
    return 1.8 if rank == 2 and 30 <= step < 150 else 1.0


def two_of_which_one_leaves(rank: int, step: int) -> float:
    return (2.0 if rank == 2 and step >= 30 else 1.0) * (1.6 if rank == 0 and 60 <= step < 150 else 1.0)


def test_a_slow_rank_gets_less_and_its_share_back_when_it_recovers() -> None:
    run = Simulated(slow_from_30_to_150).run(300)
    assert run.counts == [(9, 9, 5, 9), (8, 8, 8, 8)]
    (slow, change), (recovered, _) = run.changes
    confirmed = 30 + CONFIRMING_STEPS - 1
    assert confirmed <= slow <= confirmed + 3
    assert 150 + CONFIRMING_STEPS - 1 <= recovered < 170
    assert (change.before_s, change.after_s) == pytest.approx((14.4, 9.0))
    assert run.step_s[slow + 1] == 9.0
    assert run.step_s[-1] == 8.0


@pytest.mark.parametrize("fixed_s", [0.0, 2.0])
@pytest.mark.parametrize(("samples", "noise"), [(32, 0.0), (32, 0.03), (256, 0.05)])
def test_two_disturbances_of_which_one_leaves_settle(samples: int, noise: float, fixed_s: float) -> None:
    """Within a few changes each, and then for good; the time at the end is near the best for whole samples."""
    for seed in range(4):
        run = Simulated(two_of_which_one_leaves, samples, noise, fixed_s, largest=128, seed=seed, micro_batch_size=64)
        run.run(300)
        assert 2 <= len(run.changes) <= 5
        assert run.changes[-1][0] < 200
        ends = [speed * (count + fixed_s) for speed, count in zip((1, 1, 2, 1), run.counts[-1], strict=True)]
        assert max(ends) <= 1.12 * (2 / 7 * (samples + 4 * fixed_s) + 2)


@pytest.mark.clause("SCHED-6")
def test_a_thousand_healthy_steps_with_noise_give_no_directive() -> None:
    for seed in range(5):
        healthy = Simulated(lambda rank, step: 1.0, 1024, 0.05, largest=512, micro_batch_size=256, seed=seed)
        assert healthy.run(1000).counts == []


def packed_s(draw: random.Random, spread: float) -> float:
    """Time of a sample that is packed with documents, whose attention grows with the square of their lengths."""
    left, attention = 1.0, 0.0
    while left > 0:
        length = min(left, draw.lognormvariate(-3, spread))
        left, attention = left - length, attention + length**2
    return 1 + attention


@pytest.mark.clause("SCHED-6")
@pytest.mark.parametrize(("samples", "spread"), [(1, 1.0), (1, 2.0), (8, 2.0)])
def test_a_thousand_healthy_steps_of_very_different_lengths_give_no_directive(samples: int, spread: float) -> None:
    """Long steps, and changes that cost nothing."""
    draw, scheduler = random.Random(0), ShareScheduler(Division((1.0,) * 8, 8), 16, 0.1)
    trackers, paces = [SpeedTracker(0.1, 1.0) for _ in range(8)], []
    for _ in range(1000):
        for tracker in trackers:
            paces.append(sum(packed_s(draw, spread) for _ in range(samples)) / samples)
            tracker.note(samples, 1, 60 * samples * paces[-1])
        assert scheduler.note_step(8 * samples, [tracker.speed for tracker in trackers], 0.0, change_s=0.0) is None
    assert max(paces) > 1.25 * min(paces)


def test_what_a_ranks_noise_explains_is_no_other_speed() -> None:
    usual, sure, unsure = Speed(0.0, 1.0), Speed(0.0, 2.0, noise=0.4), Speed(0.0, 2.0, noise=0.6)
    assert equalise([usual, usual, sure, unsure], 1, 8, 0.1) == (usual, usual, sure, usual)


def test_ranks_that_always_differ_a_little_are_left_alone() -> None:
    unequal = Simulated(lambda rank, step: 1.08 if rank == 1 else 1.0, 1024, largest=512, micro_batch_size=256)
    assert unequal.run(100).counts == []


@pytest.mark.clause("SCHED-7")
def test_no_micro_batch_is_larger_than_memory_allows() -> None:
    run = Simulated(slow_from_30_to_150, largest=8).run(120)
    assert run.counts == [(9, 9, 5, 9)]
    assert run.largest_seen == 8


def test_a_model_with_batch_norm_keeps_its_micro_batches() -> None:
    assert Simulated(slow_from_30_to_150, largest=8, keeps_micro_batches=True).run(120).counts == []
    kept = Simulated(slow_from_30_to_150, samples=64, largest=16, keeps_micro_batches=True).run(120)
    assert kept.counts == [(18, 18, 10, 18)]
    (_, change), *_ = kept.changes
    assert change.division.count_micro_batches(64) == 2


# When a change is made

EVEN = Division((1.0,) * RANKS, micro_batch_size=256)


def speeds(*slow_s: float) -> list[Speed | None]:
    return [Speed(0.0, seconds) for seconds in slow_s]


@pytest.mark.parametrize("slow", [1.2, 1.4, 2.0, 4.0])
def test_as_much_is_lost_before_a_change_as_it_costs(slow: float) -> None:
    scheduler, lost_s = ShareScheduler(EVEN, 512, 0.1), 0.0
    for _ in range(1000):
        change = scheduler.note_step(1024, speeds(1, 1, slow, 1), 0.0)
        if change:
            break
        lost_s += 256 * slow - 1024 / (3 + 1 / slow)
    assert change is not None
    cost_s, saving_s = COST_STEPS * change.after_s, change.before_s - change.after_s
    assert lost_s < cost_s <= lost_s + saving_s * 1.05


@pytest.mark.parametrize(("change_s", "calls"), [(math.inf, 5), (150.0, 3), (90.0, 2), (0.0, 1)])
def test_a_change_waits_for_what_it_was_seen_to_cost(change_s: float, calls: int) -> None:
    """60 s are lost in each step; a step of 273 s is the most that a change costs, and a tenth of it the least."""
    scheduler = ShareScheduler(EVEN, 512, 0.1)
    slow = speeds(1, 1, 1.3, 1)
    assert calls == next(n for n in range(1, 100) if scheduler.note_step(1024, slow, 0.0, change_s=change_s))


def test_a_change_costs_what_its_first_step_takes_beyond_the_next() -> None:
    cost = ChangeCost()
    cost.note(8, 2, 9.0)
    assert cost.seconds == math.inf
    for seconds in (4.0, 3.0, 90.0):
        cost.note(8, 2, seconds)
        assert cost.seconds == 5.0
    cost.note(6, 2, 3.5)
    assert cost.seconds == 5.0
    cost.note(6, 2, 3.0)
    assert cost.seconds == 0.5
    cost.note(9, 2, 3.0)
    cost.note(9, 2, 4.0)
    assert cost.seconds == 0.0


def test_figures_that_come_every_few_steps_count_for_all_of_them() -> None:
    often, seldom = ShareScheduler(EVEN, 512, 0.1), ShareScheduler(EVEN, 512, 0.1)
    slow = speeds(1, 1, 1.3, 1)
    needed = next(step for step in range(1, 100) if often.note_step(1024, slow, 0.0))
    assert needed == 5
    calls = next(call for call in range(1, 100) if seldom.note_step(1024, slow, 0.0, steps=4))
    assert calls == 2


def test_what_was_lost_is_forgotten_when_the_ranks_are_well_again() -> None:
    scheduler = ShareScheduler(EVEN, 512, 0.1)
    for _ in range(20):
        for _ in range(4):
            assert scheduler.note_step(1024, speeds(1, 1, 1.3, 1), 0.0) is None
        assert scheduler.note_step(1024, speeds(1, 1, 1, 1), 0.0) is None


def test_a_change_is_made_once_and_the_division_is_then_in_force() -> None:
    scheduler = ShareScheduler(EVEN, 512, 0.1)
    found = [scheduler.note_step(1024, speeds(1, 1, 2, 1), 0.0) for _ in range(50)]
    (change,) = [one for one in found if one]
    assert scheduler.division == change.division
    assert scheduler.division.counts(1024) == (293, 293, 146, 292)


def test_the_even_division_is_gone_back_to_for_a_small_gain() -> None:
    """302 samples instead of 300 on the slowest: less than a change away from even would be made for."""
    scheduler = ShareScheduler(EVEN, 512, 0.1)
    scheduler.follow(Division((260.0, 260.0, 248.0, 256.0), 512))
    found = [scheduler.note_step(1024, speeds(1, 1, 1, 1), 0.0) for _ in range(100)]
    assert [one.division for one in found if one] == [EVEN]
    assert found[0] is None


def test_an_uneven_division_is_not_changed_for_a_small_gain() -> None:
    scheduler = ShareScheduler(EVEN, 512, 0.1)
    scheduler.follow(Division((290.0, 290.0, 154.0, 290.0), 512))
    assert not any(scheduler.note_step(1024, speeds(1, 1, 1.9, 1), 0.0) for _ in range(200))


def test_nothing_is_decided_while_a_speed_is_not_known() -> None:
    scheduler = ShareScheduler(EVEN, 512, 0.1)
    unknown = [*speeds(1, 1, 4), None]
    assert not any(scheduler.note_step(1024, unknown, 0.0) for _ in range(20))


def test_a_followed_division_is_the_start_of_what_comes() -> None:
    """The ranks' speeds ask for what is in force already."""
    scheduler = ShareScheduler(EVEN, 512, 0.1)
    scheduler.follow(Division((293.0, 292.0, 147.0, 292.0), 512))
    assert not any(scheduler.note_step(1024, speeds(1, 1, 2, 1), 0.0) for _ in range(50))


def test_ranks_about_as_fast_as_the_median_count_as_equal() -> None:
    own = Speed(0.5, 1.0)
    measured = [Speed(0.0, 1.09), Speed(0.0, 1.0), own, Speed(0.0, 2.0), Speed(0.0, 0.8)]
    usual = measured[0]  # 10.9 s for 10 samples; the others 10, 10.5, 20 and 8
    assert equalise(measured, 1, 10, 0.1) == (own, own, own, measured[3], measured[4])
    assert equalise(measured, 1, 10, 0.02) == (usual, measured[1], own, measured[3], measured[4])


def test_the_rank_that_differs_most_is_the_reason(recorded: Recorded) -> None:
    slow = [Speed(0, 0.02), Speed(0, 0.05), Speed(0, 0.03), Speed(0, 0.02)]
    fast = [Speed(0, 0.02), Speed(0, 0.02), Speed(0, 0.03), Speed(0, 0.005)]
    recorded(*map(describe_speeds, (slow, fast, [Speed(0, 0.02)] * 2)))


def test_a_change_counts_the_exchanges_of_its_micro_batches() -> None:
    """Slow by 2, 8 samples per micro-batch: two micro-batches each way, and their exchanges, are in both times."""
    scheduler = ShareScheduler(Division((1.0,) * RANKS, micro_batch_size=8), 8, 0.1)
    change = next(found for _ in range(100) if (found := scheduler.note_step(64, speeds(1, 1, 2, 1), 3.0)))
    counts, micro_batches = change.division.counts(64), change.division.count_micro_batches(64)
    assert change.before_s == 2 * 16 + 2 * 3.0
    assert change.after_s == max(counts[2] * 2, counts[0]) + micro_batches * 3.0 < change.before_s


@pytest.mark.parametrize(
    ("layout", "each_s"),
    [
        (Layout(dp_shard=4, zero_stage=3), 2.5),
        (Layout(dp_shard=4, zero_stage=2), 2.5),
        (Layout(dp_replicate=2, dp_shard=4, zero_stage=3), 2.5),
        (Layout(dp_replicate=2, dp_shard=4, zero_stage=2), 0.0),
        (Layout(dp_shard=4, zero_stage=1), 0.0),
        (Layout(dp_replicate=4), 0.0),
    ],
    ids=str,
)
def test_what_is_exchanged_once_a_step_costs_a_micro_batch_nothing(layout: Layout, each_s: float) -> None:
    assert exchange_each_s(layout, 2.5) == each_s


# Shares of replica groups


@pytest.mark.parametrize(
    ("rates", "weights"),
    [
        ((10.0, 10.9, 10.5), (10.5, 10.5, 10.5)),
        ((10.0, 12.0, 10.5), (10.0, 12.0, 10.5)),
        ((10.0, 11.0, 11.0), (11.0, 11.0, 11.0)),
        ((0.0, 20.0, 10.0, 12.0), (12.0, 20.0, 10.0, 12.0)),
        ((0.0, 10.0, 0.0), (10.0, 10.0, 10.0)),
        ((0.0, 0.0), (1.0, 1.0)),
    ],
    ids=str,
)
def test_groups_take_part_by_their_rates_unless_they_are_about_equal(
    rates: tuple[float, ...], weights: tuple[float, ...]
) -> None:
    """A tenth more is about equal; a rate that is not known yet is taken for the median of the known ones."""
    assert group_weights(rates, 0.1) == weights


def test_the_group_that_differs_most_is_the_reason(recorded: Recorded) -> None:
    recorded(
        describe_rates((0, 2, 3), (25.0, 12.5, 30.0)),
        describe_rates((0, 2, 3), (25.0, 24.0, 100.0)),
        describe_rates((0, 1), (20.0, 20.0)),
    )


def test_a_rank_that_collects_garbage_keeps_its_samples():
    """With fewer of them it would be as late; it received fewer while garbage collection counted as computing."""

    def garbage_s(rank: int, step: int) -> float:
        return 4.0 * (rank == 2 and step >= 30)

    def run(*, counts_garbage: bool) -> Simulated:
        run = Simulated(lambda *_: 1.0, noise=0.02, garbage_s=garbage_s, counts_garbage=counts_garbage)
        return run.run(100)

    assert run(counts_garbage=True).changes == []
    assert run(counts_garbage=False).changes
