"""Which samples a replica group takes for each step, as this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.data.loader import PREFETCHED_STEPS, Staging, cut_micro_batches, positions_of
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.run.coordinator import GroupBatches, RunContext, SingleGroup, TrainProgress
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.scheduling.step_scheduler import StepPace
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage
from trainspec_cli.run.folder.paths import RunDir

CPU = torch.device("cpu")
STEPS, BATCH = 5, 7


class Numbered:
    """A sample is its position, and counts twice."""

    def __init__(self) -> None:
        self.staging = Staging(CPU)
        self.asked: list[OwnSamples] = []

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        self.asked.append(own)
        return cut_micro_batches((torch.from_numpy(positions_of(own)),), own)

    def counted(self, positions: np.ndarray) -> int:
        return 2 * len(positions)


def run_of(
    folder: Path,
    rank: int,
    micro_batch_size: int,
    layout: Layout,
    schedule: BatchScheduleSpec = BatchScheduleSpec(),  # noqa: B008
) -> RunContext:
    spec = RunSpec(
        model=DecoderModel(1, 32, 2, 1, 16, 48, 50),
        data=DataSpec(seq_len=1, source="python_stdlib"),
        optim=OptimSpec(lr=1.0),
        batching=BatchingSpec(global_batch_size=BATCH, schedule=schedule),
        train=TrainSection(max_steps=STEPS),
    )
    plan: Any = SimpleNamespace(
        spec=spec, layout=layout, micro_batch_size=micro_batch_size, replica_groups=1, grad_accum_steps=1
    )
    state: Any = SimpleNamespace(clock=StepClock(CPU), mesh=SimpleNamespace(data_rank=rank))
    return RunContext(plan, RunDir(folder), Numbered(), state, "", StopRequest())  # type: ignore[arg-type]


Open = Callable[..., GroupBatches]


@pytest.fixture
def open_batches(tmp_path: Path) -> Iterator[Open]:
    """Open the batches of a rank; they are closed after the test."""
    opened: list[GroupBatches] = []

    def open_rank(rank: int, micro_batch_size: int, **layout: Any) -> GroupBatches:
        opened.append(GroupBatches(run_of(tmp_path, rank, micro_batch_size, Layout(**layout))))
        return opened[-1]

    yield open_rank
    for batches in opened:
        batches.close()


def numbers(micro_batches: list[MicroBatch]) -> list[list[int]]:
    return [part.tolist() for (part,) in micro_batches]


def taken(batches: GroupBatches, start: int, samples: int) -> list[list[int]]:
    own, micro_batches = batches.take((start, samples))
    assert [len(part) for (part,) in micro_batches] == list(own.sizes)
    return numbers(micro_batches)


def test_the_ranks_of_a_group_take_every_sample_of_its_portion_once(open_batches: Open) -> None:
    ranks = [open_batches(rank, 2, dp_replicate=3) for rank in range(3)]
    assert [taken(rank, 100, 10) for rank in ranks] == [
        [[100, 101], [105, 106]],
        [[102, 103], [107]],
        [[104], [108, 109]],
    ]
    assert ranks[0].count_targets(100, 10) == 20


def test_a_group_with_fewer_samples_than_ranks_leaves_some_without(open_batches: Open) -> None:
    ranks = [open_batches(rank, 2, dp_shard=3) for rank in range(3)]
    assert [taken(rank, 40, 2) for rank in ranks] == [[[40]], [[41]], [[]]]
    assert [taken(rank, 42, 0) for rank in ranks] == [[[]]] * 3


def test_an_interleaved_pipeline_takes_micro_batches_in_turns(open_batches: Open) -> None:
    rank = open_batches(0, 2, pp=4, pipeline_schedule="interleaved", virtual_stages=2)
    assert taken(rank, 0, 6) == [[0, 1], [2, 3], [4], [5]]
    assert taken(rank, 6, 2) == [[6], [7], [], []]
    assert taken(open_batches(0, 2, pp=4), 0, 6) == [[0, 1], [2, 3], [4, 5]]


def test_steps_that_are_foreseen_are_read_once(open_batches: Open) -> None:
    batches, steps = open_batches(0, 4), [(0, 3), (3, 5), (8, 1), (9, 2)]
    for number, (start, samples) in enumerate(steps):
        own, micro_batches = batches.take((start, samples), *steps[number + 1 : number + 1 + PREFETCHED_STEPS])
        (first, *_), *_ = numbers(micro_batches)
        assert (own.samples, first) == (samples, start)
    source: Any = batches._source
    assert [own.starts[0] for own in source.asked] == [0, 3, 8, 9]


def test_the_only_group_takes_the_whole_batch_from_where_the_run_is(one_process: None, tmp_path: Path) -> None:
    run = run_of(tmp_path, 0, 4, Layout())
    group, pace = SingleGroup(run), StepPace(run.plan)
    for step in range(2, STEPS):  # as after a checkpoint of step 2 with 11 samples
        position = 11 + (step - 2) * BATCH
        samples = group.take(pace.coming(TrainProgress(step, position), 1 + PREFETCHED_STEPS))
        assert numbers(samples.micro_batches) == [
            [position, position + 1, position + 2, position + 3],
            [position + 4, position + 5, position + 6],
        ]
        assert (samples.global_tokens, samples.step_samples, samples.group_samples) == (2 * BATCH, BATCH, BATCH)
        assert (samples.own.starts, samples.own.sizes, samples.lr_factor) == ((position, position + 4), (4, 3), 1.0)
        assert samples.division == group.batches.division
    group.leave()
    source: Any = run.source
    assert [own.starts[0] for own in source.asked] == [11, 18, 25], "no step is read beyond the end"


def test_the_only_group_takes_what_the_schedule_says_up_to_the_last_sample(one_process: None, tmp_path: Path) -> None:
    """5 steps of 7 samples become 7, 9, 9, and the 10 of which a step of 9 would leave too few for another."""
    run = run_of(tmp_path, 0, 5, Layout(), BatchScheduleSpec(kind="ramp", stages=(RampStage(BATCH, 9),)))
    group, pace, progress, read = SingleGroup(run), StepPace(run.plan), TrainProgress(), []
    while pace.batch(progress):
        samples = group.take(pace.coming(progress, 1 + PREFETCHED_STEPS))
        read.append([number for part in numbers(samples.micro_batches) for number in part])
        assert samples.step_samples == samples.group_samples == samples.own.samples == len(read[-1])
        assert samples.global_tokens == 2 * len(read[-1])
        progress = TrainProgress(progress.step + 1, progress.samples + samples.step_samples)
    group.leave()
    assert [len(step) for step in read] == [7, 9, 9, 10]
    assert [number for step in read for number in step] == list(range(STEPS * BATCH))
    source: Any = run.source
    assert [own.samples for own in source.asked] == [7, 9, 9, 10], "each step is read once, and none beyond the end"


def test_a_new_division_holds_from_the_next_step_on(open_batches: Open) -> None:
    """What was foreseen by the old one is read again."""
    ranks = [open_batches(rank, 4, dp_replicate=2) for rank in range(2)]
    assert [numbers(rank.take((0, 4), (4, 4))[1]) for rank in ranks] == [[[0, 1]], [[2, 3]]]
    for rank in ranks:
        rank.division = replace(rank.division, weights=(3.0, 1.0), micro_batches=2)
    assert [numbers(rank.take((4, 4))[1]) for rank in ranks] == [[[4, 5], [6]], [[], [7]]]
