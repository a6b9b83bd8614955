"""The samples and the rate of each step, against step-by-step walks, integrals and published ramps."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.drawing import slow_after

from trainspec_cli.balance.batch.batch import (
    OPTIMIZER_RULES,
    BatchPhase,
    BatchSchedule,
    BatchStage,
    StepBatch,
    count_steps,
    learning_rate,
    run_phases,
    schedule_batches,
    step_batch,
)
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import (
    OPTIMIZERS,
    BatchingSpec,
    BatchScheduleSpec,
    OptimSpec,
    RampStage,
    ScheduleSpec,
)

COSINE = ScheduleSpec(kind="cosine", warmup_steps=0, final_lr_ratio=0.1)


def make_schedule(
    batch: BatchScheduleSpec,
    lr: ScheduleSpec = COSINE,
    *,
    max_steps: int = 1000,
    start: int = 64,
    seq_len: int = 8,
    optimizer: str = "adamw",
) -> BatchSchedule:
    spec = RunSpec(
        model=DecoderModel(1, 64, 2, 2, 32, 128, 512),
        data=DataSpec(seq_len=seq_len, source="text"),
        optim=OptimSpec(lr=2.0, name=optimizer, schedule=lr),  # type: ignore[arg-type]
        batching=BatchingSpec(global_batch_size=start, schedule=batch),
        train=TrainSection(max_steps=max_steps),
    )
    return schedule_batches(spec)


def walk(schedule: BatchSchedule) -> list[StepBatch]:
    """The steps of a whole run, one after the other."""
    steps: list[StepBatch] = []
    trained = 0
    while trained < schedule.run_samples:
        steps.append(step_batch(schedule, trained))
        trained += steps[-1].samples
    return steps


def ramp(*stages: tuple[int, int], lr_rule: str = "optimizer") -> BatchScheduleSpec:
    made = tuple(RampStage(from_tokens, size) for from_tokens, size in stages)
    return BatchScheduleSpec(kind="ramp", stages=made, lr_rule=lr_rule)  # type: ignore[arg-type]


# A constant batch


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_a_constant_batch_has_the_rates_of_the_schedule_to_the_bit(kind) -> None:
    lr = ScheduleSpec(kind=kind, warmup_steps=7)
    steps = walk(make_schedule(BatchScheduleSpec(), lr, max_steps=50, start=24))
    assert steps == [StepBatch(24, learning_rate(lr, 2.0, step, 50)) for step in range(50)]


def test_a_run_that_has_trained_its_samples_has_no_further_step() -> None:
    schedule = make_schedule(BatchScheduleSpec(), max_steps=10, start=4)
    assert step_batch(schedule, 36).samples == 4
    with pytest.raises(ValueError, match=" 40 samples"):
        step_batch(schedule, 40)


def test_a_run_that_lacks_samples_of_a_lost_group_ends_with_what_is_left() -> None:
    assert step_batch(make_schedule(BatchScheduleSpec(), max_steps=10, start=4), 39).samples == 1


# Every schedule


def rising(steps: list[tuple[int, int]]) -> BatchScheduleSpec:
    tokens, sizes = (list(accumulate(column)) for column in zip(*steps, strict=True))
    return ramp(*((at, 12 + size) for at, size in zip(tokens, sizes, strict=True)))


SCHEDULES = st.one_of(
    st.builds(
        BatchScheduleSpec,
        kind=st.just("seesaw"),
        growth=st.floats(1.05, 4),
        max_global_batch_size=st.integers(64, 5000),
    ),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 200)), min_size=1, max_size=5).map(rising),
)


@given(batch=SCHEDULES, max_steps=st.integers(1, 300), final=st.sampled_from([0.0, 0.1, 0.5]), warmup=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_a_run_trains_its_samples_in_the_steps_that_are_counted(batch, max_steps, final, warmup) -> None:
    lr = ScheduleSpec(kind="cosine", warmup_steps=min(warmup, max_steps - 1), final_lr_ratio=final)
    schedule = make_schedule(batch, lr, max_steps=max_steps, start=12)
    sizes = [step.samples for step in walk(schedule)]
    assert sum(sizes) == 12 * max_steps
    assert min(sizes) >= 12
    assert len(sizes) == count_steps(schedule)
    assert sizes[:-1] == sorted(sizes[:-1])
    counted = [phase.step_samples for phase in run_phases(schedule) for _ in range(phase.steps)]
    assert counted[:-1] == sizes[:-1]
    assert all(step.lr <= 2.0 * math.sqrt(step.samples / 12) for step in walk(schedule))


# Ramps


def test_a_ramp_changes_with_the_first_step_after_so_many_tokens() -> None:
    schedule = make_schedule(ramp((8 * 100, 96), (8 * 500, 128)), start=64)
    assert [schedule.size_at(samples) for samples in (0, 99, 100, 499, 500, 10**6)] == [64, 64, 96, 96, 128, 128]


def test_tokens_that_are_no_whole_sample_are_rounded_up() -> None:
    schedule = make_schedule(ramp((801, 128)))
    assert (schedule.size_at(100), schedule.size_at(101)) == (64, 128)


def test_llama_3_405b() -> None:
    """4M tokens per step, 8M from 252M on, 16M from 2.87T on, of 15.6T (arXiv:2407.21783, section 3.4.1)."""
    stages = ramp((252 * 10**6, 1024), (287 * 10**10, 2048), lr_rule="none")
    schedule = make_schedule(stages, max_steps=3_719_330, start=512, seq_len=8192)
    assert schedule.run_samples * 8192 == pytest.approx(15.6e12, rel=1e-6)
    first, second, third = run_phases(schedule)
    assert first == BatchPhase(512, math.ceil(252e6 / 2**22))
    assert second.steps == pytest.approx((2.87e12 - 252e6) / 2**23, abs=1)
    assert third.steps == pytest.approx((15.6e12 - 2.87e12) / 2**24, abs=2)


def test_stages_beyond_the_end_are_never_reached() -> None:
    schedule = make_schedule(ramp((8 * 64 * 2000, 128)), max_steps=1000)
    assert run_phases(schedule) == (BatchPhase(64, 1000),)


def test_stages_within_one_step_are_passed_over() -> None:
    schedule = make_schedule(ramp((8, 96), (16, 128), (24, 256)), max_steps=100)
    assert [phase.step_samples for phase in run_phases(schedule)] == [64, 256]


@pytest.mark.parametrize(
    ("optimizer", "lr_rule", "factor"),
    [
        ("adamw", "optimizer", 2.0),
        ("sgd", "optimizer", 4.0),
        ("adamw", "linear", 4.0),
        ("sgd", "sqrt", 2.0),
        ("sgd", "none", 1.0),
    ],
)
def test_the_rate_follows_a_ramp_as_the_optimizer_or_the_recipe_has_it(optimizer, lr_rule, factor) -> None:
    schedule = make_schedule(ramp((8, 256), lr_rule=lr_rule), ScheduleSpec(kind="constant"), optimizer=optimizer)
    assert step_batch(schedule, 0).lr == 2.0
    assert step_batch(schedule, 64).lr == 2.0 * factor


def test_every_optimizer_has_a_rule() -> None:
    assert set(OPTIMIZERS) == OPTIMIZER_RULES.keys()


def test_a_larger_batch_has_the_rate_in_the_middle_of_the_steps_that_it_stands_for() -> None:
    lr = ScheduleSpec(kind="wsd", decay_fraction=1.0, final_lr_ratio=0.0)
    schedule = make_schedule(ramp((8, 64 * 5), lr_rule="none"), lr, max_steps=101)
    mean_of_five = sum(learning_rate(lr, 2.0, step, 101) for step in range(1, 6)) / 5
    assert step_batch(schedule, 64).lr == pytest.approx(mean_of_five)


def test_a_large_batch_at_the_end_of_the_warm_up_has_no_more_than_the_peak() -> None:
    lr = ScheduleSpec(kind="constant", warmup_steps=10)
    schedule = make_schedule(ramp((8, 128), lr_rule="none"), lr)
    assert max(step.lr for step in walk(schedule)) == 2.0


# Seesaw


def seesaw(growth: float = 1.5, largest: int | None = None) -> BatchScheduleSpec:
    return BatchScheduleSpec(kind="seesaw", growth=growth, max_global_batch_size=largest)


@pytest.mark.parametrize("final", slow_after(1, [0.0, 0.1, 0.2]))
@pytest.mark.parametrize("growth", [1.5, 1.2])
def test_seesaw_saves_three_in_ten_of_the_steps_of_a_cosine(final: float, growth: float) -> None:
    lr = ScheduleSpec(kind="cosine", final_lr_ratio=final)
    schedule = make_schedule(seesaw(growth, 64_000), lr, max_steps=20_000)
    assert count_steps(schedule) <= 0.7 * 20_000
    assert sum(step.samples for step in walk(schedule)) == 20_000 * 64


EIGHTHS = 1 / 16
"""How far sizes in eighths of the first lag behind a batch without sizes, at most and on average."""


@pytest.mark.parametrize("final", [0.05, 0.1, 0.5])
def test_with_fine_steps_seesaw_makes_little_more_steps_than_the_mean_of_the_schedule(final: float) -> None:
    lr = ScheduleSpec(kind="cosine", final_lr_ratio=final)
    schedule = make_schedule(seesaw(1.05), lr, max_steps=10_000, start=8000)
    assert 1 <= count_steps(schedule) / 10_000 / ((1 + final) / 2) <= 1 + EIGHTHS


def test_a_quarter_of_a_cosine_would_make_2_over_pi_of_the_steps(monkeypatch) -> None:
    """The published limit (arXiv:2510.14717) is that of a rate which falls as cos(pi/2 t)."""

    def quarter(schedule, peak_lr, step, max_steps):
        return peak_lr * math.cos(math.pi / 2 * step / max_steps)

    monkeypatch.setattr("trainspec_cli.balance.batch.batch.learning_rate", quarter)
    lr = ScheduleSpec(kind="cosine", final_lr_ratio=0.0)
    schedule = make_schedule(seesaw(1.05, 8000 * 1000), lr, max_steps=10_000, start=8000)
    assert 1 <= count_steps(schedule) / 10_000 / (2 / math.pi) <= 1 + EIGHTHS


@pytest.mark.parametrize(("optimizer", "exponent"), [("adamw", 0.5), ("sgd", 0.0)])
def test_seesaw_replaces_a_lower_rate_by_a_larger_batch(optimizer: str, exponent: float) -> None:
    """Where the schedule multiplies the rate by a: a larger batch by 1/a, and a^exponent of the rate."""
    schedule = make_schedule(seesaw(2.0), max_steps=100_000, optimizer=optimizer)
    assert [stage.step_samples for stage in schedule.stages] == [64, 128, 256, 512]
    for stage in schedule.stages:
        a = learning_rate(COSINE, 1.0, stage.from_samples / 64, 100_000)
        step = step_batch(schedule, stage.from_samples)
        assert step.samples == pytest.approx(64 / a, rel=1e-3)
        assert step.lr == pytest.approx(2.0 * a**exponent, rel=1e-3)


def test_the_batch_is_never_larger_than_the_lower_rate_asks_for() -> None:
    schedule = make_schedule(seesaw(1.2), max_steps=5000)
    trained = 0
    for step in walk(schedule)[:-1]:
        assert step.samples <= 64 / learning_rate(COSINE, 1.0, trained / 64, 5000) * (1 + 1e-9)
        trained += step.samples


def test_beyond_the_largest_size_the_rate_falls_on() -> None:
    schedule = make_schedule(seesaw(2.0, 128), max_steps=10_000)
    steps = walk(schedule)
    assert {step.samples for step in steps[:-1]} == {64, 128}
    assert steps[-1].lr == pytest.approx(2.0 * 0.1 * math.sqrt(2), rel=1e-3)


def test_the_batch_stays_while_the_rate_warms_up() -> None:
    lr = ScheduleSpec(kind="cosine", warmup_steps=200, final_lr_ratio=0.1)
    schedule = make_schedule(seesaw(), lr)
    first = next(step for step in range(200, 1000) if learning_rate(lr, 1.0, step, 1000) <= 64 / 96)
    assert schedule.stages[1] == BatchStage(first * 64, 96)
    assert [step.lr for step in walk(schedule)[:3]] == [0.01, 0.02, 0.03]


def test_no_size_is_larger_than_the_run() -> None:
    schedule = make_schedule(seesaw(2.0), ScheduleSpec(kind="cosine", final_lr_ratio=0.0), max_steps=10)
    assert max(stage.step_samples for stage in schedule.stages) <= 640


def test_seesaw_of_a_late_decay_grows_late() -> None:
    lr = ScheduleSpec(kind="wsd", decay_fraction=0.2, final_lr_ratio=0.0)
    schedule = make_schedule(seesaw(1.05, 10**9), lr, max_steps=10_000, start=8000)
    assert schedule.stages[1].from_samples >= 8000 * 8000
    assert count_steps(schedule) / 10_000 == pytest.approx(0.8 + 0.2 / 2, rel=0.01)


def test_a_run_of_a_million_million_steps_is_counted_at_once() -> None:
    schedule = make_schedule(seesaw(1.05), max_steps=10**12, start=10**9)
    assert 0.5 < count_steps(schedule) / 10**12 < 0.6


# Noise


def test_a_size_that_is_decided_during_the_run_counts() -> None:
    schedule = make_schedule(BatchScheduleSpec(kind="noise", max_global_batch_size=256), ScheduleSpec(kind="constant"))
    assert step_batch(schedule, 6400, 256) == StepBatch(256, 4.0)
    assert step_batch(schedule, 6400) == StepBatch(64, 2.0)
    assert count_steps(schedule) == 1000
