"""The samples of a replica group in each step, as this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab import engine_runs
from lab.engine_runs import CPU, Numbered
from lab.waiting import wait_for

from trainspec_cli.engine.data.loader import PREFETCHED_STEPS
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.run.coordinator import Coordinator
from trainspec_cli.engine.run.scheduling.step_scheduler import StepPace
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage
from trainspec_cli.run.folder.paths import RunDir

STEPS, BATCH = 5, 7


def run_of(
    folder: Path,
    rank: int,
    micro_batch_size: int,
    layout: Layout,
    schedule: BatchScheduleSpec = BatchScheduleSpec(),  # noqa: B008
) -> TrainingRun:
    spec = RunSpec(
        model=DecoderModel(1, 32, 2, 1, 16, 48, 50),
        data=DataSpec(seq_len=1, source="python_stdlib"),
        optim=OptimSpec(lr=1.0),
        batching=BatchingSpec(global_batch_size=BATCH, schedule=schedule),
        train=TrainSection(max_steps=STEPS),
    )
    plan: Any = SimpleNamespace(spec=spec, layout=layout, micro_batch_size=micro_batch_size)
    state: Any = SimpleNamespace(clock=StepClock(CPU), mesh=SimpleNamespace(data_rank=rank))
    return engine_runs.run_of(plan, state, RunDir(folder))


Open = Callable[..., Coordinator]


@pytest.fixture
def open_rank(tmp_path: Path) -> Iterator[Open]:
    """Open the coordinator of a rank, whose samples count twice; it is left after the test."""
    opened: list[Coordinator] = []

    def open_rank(rank: int, micro_batch_size: int, **layout: Any) -> Coordinator:
        opened.append(Coordinator(run_of(tmp_path, rank, micro_batch_size, Layout(**layout)), Numbered(2)))
        return opened[-1]

    yield open_rank
    for coordinator in opened:
        coordinator.leave()


def numbers(micro_batches: list[MicroBatch]) -> list[list[int]]:
    return [part.tolist() for (part,) in micro_batches]


def taken(coordinator: Coordinator, start: int, samples: int) -> list[list[int]]:
    own, micro_batches = coordinator.read((start, samples))
    assert [len(part) for (part,) in micro_batches] == list(own.sizes)
    return numbers(micro_batches)


def test_the_ranks_of_a_group_take_every_sample_of_its_portion_once(open_rank: Open) -> None:
    ranks = [open_rank(rank, 2, dp_replicate=3) for rank in range(3)]
    assert [taken(rank, 100, 10) for rank in ranks] == [
        [[100, 101], [105, 106]],
        [[102, 103], [107]],
        [[104], [108, 109]],
    ]
    assert ranks[0].count_targets(100, 10) == 20


def test_a_group_with_fewer_samples_than_ranks_leaves_some_without(open_rank: Open) -> None:
    ranks = [open_rank(rank, 2, dp_shard=3) for rank in range(3)]
    assert [taken(rank, 40, 2) for rank in ranks] == [[[40]], [[41]], [[]]]
    assert [taken(rank, 42, 0) for rank in ranks] == [[[]]] * 3


def test_an_interleaved_pipeline_takes_micro_batches_in_turns(open_rank: Open) -> None:
    rank = open_rank(0, 2, pp=4, pipeline_schedule="interleaved", virtual_stages=2)
    assert taken(rank, 0, 6) == [[0, 1], [2, 3], [4], [5]]
    assert taken(rank, 6, 2) == [[6], [7], [], []]
    assert taken(open_rank(0, 2, pp=4), 0, 6) == [[0, 1], [2, 3], [4, 5]]


def test_steps_that_are_foreseen_are_read_once(open_rank: Open) -> None:
    coordinator, steps = open_rank(0, 4), [(0, 3), (3, 5), (8, 1), (9, 2)]
    for number, (start, samples) in enumerate(steps):
        own, micro_batches = coordinator.read((start, samples), *steps[number + 1 : number + 1 + PREFETCHED_STEPS])
        (first, *_), *_ = numbers(micro_batches)
        assert (own.samples, first) == (samples, start)
    source: Any = coordinator._source
    assert [own.starts[0] for own in source.asked] == [0, 3, 8, 9]


def test_the_only_group_takes_the_whole_batch_from_where_the_run_is(tmp_path: Path) -> None:
    run = run_of(tmp_path, 0, 4, Layout())
    source = Numbered(2)
    group, pace = Coordinator(run, source), StepPace(run.plan.spec)
    for step in range(2, STEPS):  # as after a checkpoint of step 2 with 11 samples
        position = 11 + (step - 2) * BATCH
        samples = group.take(pace.coming(TrainProgress(step, position), 1 + PREFETCHED_STEPS))
        assert numbers(samples.micro_batches) == [
            [position, position + 1, position + 2, position + 3],
            [position + 4, position + 5, position + 6],
        ]
        assert (samples.global_tokens, samples.step_samples, samples.group_samples) == (2 * BATCH, BATCH, BATCH)
        assert (samples.own.starts, samples.own.sizes, samples.lr_factor) == ((position, position + 4), (4, 3), 1.0)
        assert samples.division == group.division
    group.leave()
    assert [own.starts[0] for own in source.asked] == [11, 18, 25], "no step is read beyond the end"


def test_the_only_group_takes_what_the_schedule_says_up_to_the_last_sample(tmp_path: Path) -> None:
    """5 steps of 7 samples become 7, 9, 9, and 10, because a step of 9 would leave too few for another."""
    run = run_of(tmp_path, 0, 5, Layout(), BatchScheduleSpec(kind="ramp", stages=(RampStage(BATCH, 9),)))
    source = Numbered()
    group, pace, progress, read = Coordinator(run, source), StepPace(run.plan.spec), TrainProgress(), []
    while pace.batch(progress):
        samples = group.take(pace.coming(progress, 1 + PREFETCHED_STEPS))
        read.append([number for part in numbers(samples.micro_batches) for number in part])
        assert samples.step_samples == samples.group_samples == samples.own.samples == len(read[-1])
        assert samples.global_tokens == len(read[-1])
        progress = TrainProgress(progress.step + 1, progress.samples + samples.step_samples)
    group.leave()
    assert [len(step) for step in read] == [7, 9, 9, 10]
    assert [number for step in read for number in step] == list(range(STEPS * BATCH))
    assert [own.samples for own in source.asked] == [7, 9, 9, 10], "each step is read once, and none beyond the end"


def test_a_new_division_holds_from_the_next_step_on(open_rank: Open) -> None:
    """Samples read ahead for the old one are read again."""
    ranks = [open_rank(rank, 4, dp_replicate=2) for rank in range(2)]
    assert [numbers(rank.read((0, 4), (4, 4))[1]) for rank in ranks] == [[[0, 1]], [[2, 3]]]
    for rank in ranks:
        rank.division = replace(rank.division, weights=(3.0, 1.0), micro_batches=2)
    assert [numbers(rank.read((4, 4))[1]) for rank in ranks] == [[[4, 5], [6]], [[], [7]]]


def test_another_layout_is_read_for_from_the_next_step_on(open_rank: Open) -> None:
    """Samples read ahead for the previous layout are read again, even if a rank has the same ones."""
    coordinator = open_rank(0, 4, dp_replicate=2)
    run, source = coordinator._run, coordinator._source
    assert isinstance(source, Numbered)
    assert numbers(coordinator.read((0, 4), (4, 4))[1]) == [[0, 1]]
    wait_for(lambda: len(source.asked) == 2)
    run.plan = replace_layout(run.plan, Layout(dp_replicate=2, cp=2))
    assert numbers(coordinator.read((4, 4))[1]) == [[4, 5]]
    assert [own.starts[0] for own in source.asked] == [0, 4, 4]
    run.plan = replace_layout(run.plan, Layout(dp_replicate=2))
    run.state.mesh.data_rank = 1  # type: ignore[misc]
    assert numbers(coordinator.read((8, 4))[1]) == [[10, 11]]


def replace_layout(plan: Any, layout: Layout) -> Any:
    return SimpleNamespace(**vars(plan) | {"layout": layout})
