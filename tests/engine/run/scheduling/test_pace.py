"""How many samples each step has, and what of that a checkpoint keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.balance.batch.batch import (
    BatchPace,
    NoiseAverage,
    PartSquares,
    count_steps,
    learning_rate,
    schedule_batches,
)
from trainspec_cli.engine.run.scheduling.step_scheduler import StepPace
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.engine.run.training_run import TrainProgress
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage, ScheduleSpec

STEPS, BATCH, SEQ_LEN = 40, 8, 4
OPTIM = OptimSpec(lr=1e-2, schedule=ScheduleSpec(kind="cosine", warmup_steps=4, final_lr_ratio=0.1))


def pace_of(tokens: int | None = None, **schedule: Any) -> StepPace:
    return StepPace(spec_of(tokens, **schedule))


def spec_of(tokens: int | None = None, **schedule: Any) -> RunSpec:
    return RunSpec(
        model=DecoderModel(1, 32, 2, 1, 16, 48, 50),
        data=DataSpec(seq_len=SEQ_LEN, source="python_stdlib"),
        optim=OPTIM,
        batching=BatchingSpec(global_batch_size=BATCH, schedule=BatchScheduleSpec(**schedule)),
        train=TrainSection(max_steps=STEPS, tokens=tokens),
    )


def walk(pace: StepPace, noise: float | None = None) -> list[int]:
    """Return the samples of all steps; `noise` is the scale that each of them shows."""
    progress, sizes = TrainProgress(), []
    while batch := pace.batch(progress):
        sizes.append(batch.samples)
        progress = TrainProgress(progress.step + 1, progress.samples + batch.samples)
        if noise is not None:
            square = 1 + noise / batch.samples  # of |mu|^2 = 1
            pace.note_step(progress.step, batch.samples, [PartSquares(1 + 2 * noise / batch.samples, square, 2)])
    return sizes


def test_a_constant_batch_ends_with_the_last_step_however_many_samples_were_seen() -> None:
    """While a replica group is away, steps may have fewer."""
    pace = pace_of()
    for step in (0, 3, STEPS - 1):
        batch = pace.batch(TrainProgress(step, samples=step))
        assert batch is not None
        assert (batch.samples, batch.lr) == (BATCH, learning_rate(OPTIM.schedule, OPTIM.lr, step, STEPS))
    assert pace.batch(TrainProgress(STEPS, samples=3)) is None


def test_a_constant_batch_ends_with_the_last_token_where_tokens_are_asked_for() -> None:
    """Steps that had fewer samples are made up for; where all were whole, every step is as it would be."""
    pace = pace_of(tokens=STEPS * BATCH * SEQ_LEN)
    assert walk(pace) == [BATCH] * STEPS
    for step in (0, 3, STEPS - 1):
        assert pace.batch(TrainProgress(step, step * BATCH)) == pace_of().batch(TrainProgress(step, step * BATCH))
    late = pace.batch(TrainProgress(STEPS, samples=STEPS * BATCH - 3))
    assert late is not None and late.samples == 3
    assert pace.batch(TrainProgress(STEPS + 1, samples=STEPS * BATCH)) is None


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "ramp", "stages": (RampStage(10 * BATCH * SEQ_LEN, 16), RampStage(20 * BATCH * SEQ_LEN, 32))},
        {"kind": "seesaw"},
    ],
)
def test_a_growing_batch_trains_the_same_samples_in_fewer_steps(schedule: dict[str, Any]) -> None:
    pace = pace_of(**schedule)
    sizes = walk(pace)
    assert sum(sizes) == STEPS * BATCH
    assert len(sizes) == count_steps(schedule_batches(pace._spec)) < STEPS
    assert sizes[:10] == [BATCH] * 10 and max(sizes[:-1]) > BATCH
    assert pace.kept is None


def test_the_steps_to_come_lie_side_by_side_up_to_the_end() -> None:
    pace = pace_of(kind="ramp", stages=(RampStage(2 * BATCH * SEQ_LEN, 16),))
    assert pace.coming(TrainProgress(), 4) == [(0, 8), (8, 8), (16, 16), (32, 16)]
    last = STEPS * BATCH - 16
    assert pace.coming(TrainProgress(20, last), 4) == [(last, 16)]
    assert pace.coming(TrainProgress(21, STEPS * BATCH), 4) == []


def test_a_batch_follows_the_noise_every_so_many_steps() -> None:
    wanted = {"kind": "noise", "interval_steps": 5, "smoothing_steps": 2, "max_global_batch_size": 18}
    sizes = walk(pace_of(**wanted), noise=15.0)
    assert sizes[:5] == [8] * 5 and set(sizes[5:-1]) == {12}
    assert set(walk(pace_of(**wanted), noise=4.0)) == {8}
    assert set(walk(pace_of(**wanted), noise=1e6)[10:-1]) == {18}
    assert set(walk(pace_of(), noise=1e6)) == {8}, "it is measured under a constant batch, which stays"


def test_a_resumed_run_decides_the_same() -> None:
    wanted: dict[str, Any] = {"kind": "noise", "interval_steps": 2, "smoothing_steps": 3, "max_global_batch_size": 64}
    whole, again = pace_of(**wanted), pace_of(**wanted)
    progress = TrainProgress()
    for step in range(1, 8):
        batch = whole.batch(progress)
        assert batch is not None
        whole.note_step(step, batch.samples, [PartSquares(3.0 * step, 1.0 + step / 50, 2)])
        progress = TrainProgress(step, progress.samples + batch.samples)
    assert whole.kept is not None and whole.kept.size > BATCH
    again.state = whole.kept
    assert again.coming(progress, 3) == whole.coming(progress, 3)
    assert again.note_step(8, 8, [PartSquares(5.0, 2.0, 2)]) == whole.note_step(8, 8, [PartSquares(5.0, 2.0, 2)])
    assert again.kept == whole.kept != BatchPace(BATCH, NoiseAverage())


def warn(noise: float, samples: int, **schedule: Any) -> list[str | None]:
    """Return the warnings of three steps of `samples`, each after a measurement, averaged over two."""
    pace, told = pace_of(**{"kind": "seesaw", "smoothing_steps": 2} | schedule), []
    for step in range(1, 4):
        pace.note_step(step, samples, [PartSquares(1 + 2 * noise / samples, 1 + noise / samples, 2)])
        told.append(pace.warning(samples))
    return told


def test_a_batch_that_outgrows_the_noise_is_told_once_with_what_to_type() -> None:
    first, told, again = warn(42.0, 27)
    assert (first, again) == (None, None), "one step is no average, and once is enough"
    for fact in ("27 samples", "(42 over 2 steps)", "batching.schedule.max_global_batch_size=18"):
        assert fact in told
    assert warn(55.0, 27) == [None] * 3


def test_a_batch_that_begins_too_large_is_told_to_begin_smaller_with_as_many_samples() -> None:
    """The rate of a quarter of the batch is half the rate."""
    _, told, _ = warn(10.0, 12)
    assert told is not None and "batching.global_batch_size=2 train.max_steps=160 optim.lr=0.005," in told
    _, told, _ = warn(0.5, 12)
    assert told is not None and "batching.global_batch_size=1 train.max_steps=320 optim.lr=0.00354," in told


def test_a_ramp_that_outgrows_the_noise_is_told_of_its_stages() -> None:
    _, told, _ = warn(10.0, 16, kind="ramp", stages=(RampStage(40, 16),))
    assert told is not None and told.count("batching.schedule.stages") == 1


def test_noise_shows_between_parts_alone() -> None:
    pace = pace_of()
    assert pace.note_step(1, 8, [PartSquares(2.0, 1.0, 1)]) is None
    assert pace.note_step(1, 8, [PartSquares(2.0, 1.0, 0)]) is None
    assert pace.state.noise == NoiseAverage()
    assert pace.note_step(2, 8, [PartSquares(1.0, 1.0, 2)]) == 0.0
    assert pace_of().note_step(1, 8, [PartSquares(4.0, 1.0, 2)]) == math.inf, "the gradient is lost in the noise"


@pytest.mark.parametrize(
    ("layout", "groups", "measured"),
    [
        (Layout(dp_shard=2), 1, True),
        (Layout(dp_replicate=2, dp_shard=2, zero_stage=1), 1, True),
        (Layout(dp_shard=2, pp=2), 1, True),
        (Layout(), 1, False),
        (Layout(pp=2), 1, False),
        (Layout(dp_shard=2, tp=2), 1, True),
        (Layout(dp_shard=2, cp=2), 1, False),
        (Layout(dp_shard=4, ep=2), 1, True),
        (Layout(dp_shard=2, ep=2, zero_stage=1), 1, False),
        (Layout(dp_shard=2), 2, True),
        (Layout(), 2, True),
    ],
)
def test_noise_is_measured_where_it_shows_and_costs_no_exchange_of_all_gradients(
    layout: Layout, groups: int, measured: bool
) -> None:
    assert measures_noise(spec_of(), layout, groups) is measured
    following = spec_of(kind="noise", max_global_batch_size=64)
    measured = measured or layout.cp > 1
    assert measures_noise(following, layout, groups) is measured, "what a batch follows is measured at any cost"


def measures_noise(spec: RunSpec, layout: Layout, groups: int = 1) -> bool:
    """Return whether a trainer measures the noise of the gradients in the layout in force."""
    plan = SimpleNamespace(layout=layout, replica_groups=groups, grad_accum_steps=1)
    trainer: Any = SimpleNamespace(spec=spec, pace=StepPace(spec), run=SimpleNamespace(plan=plan))
    return Trainer.measures_noise.fget(trainer)  # type: ignore[attr-defined]


def test_a_tied_embedding_that_two_stages_sum_after_each_micro_batch_hides_the_noise() -> None:
    plain = spec_of()
    tied = replace(plain, model=replace(plain.model, tied_embeddings=True))
    once = Layout(dp_shard=2, pp=2, zero_stage=1)
    for layout, measured in ((Layout(dp_shard=2, pp=2), False), (once, True), (Layout(dp_shard=2), True)):
        assert measures_noise(tied, layout) is measured
