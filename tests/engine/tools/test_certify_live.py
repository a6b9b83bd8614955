"""Runs that the trainer makes for certify: what they leave behind of each step, and how they begin again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lab.engine_runs import CPU, run_of

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.run.coordinator import Coordinator
from trainspec_cli.engine.run.scheduling.relayout import Meshes
from trainspec_cli.engine.run.shortage import OutOfMemory
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.engine.tools import certify_worker
from trainspec_cli.engine.tools.certify_worker import (
    DrawnSource,
    Killed,
    LiveFaults,
    SharedAllowance,
    Trail,
    WatchedGroup,
    run_live,
)
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage
from trainspec_cli.recipe.results.tools import CertifyRun
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult
from trainspec_cli.run.recovery.memory import build_ladder
from trainspec_cli.wings.certify.cases import Case, build_plan


def plan_with_ladder() -> Plan:
    plan = build_plan(Case("dense"), "cpu")
    return replace(plan, memory_ladder=build_ladder(plan.memory_setting))


def state_of(data_rank: int = 0, positions: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(device=CPU, positions_S=positions, mesh=SimpleNamespace(data_rank=data_rank))


@pytest.mark.parametrize(("family", "targets"), [("dense", 3 * 64), ("resnet", 3)])
def test_the_trainer_reads_what_is_drawn_from_the_seed(family: str, targets: int) -> None:
    plan = build_plan(Case(family), "cpu")
    source = DrawnSource(run_of(plan, state_of(), RunDir("unused")))
    whole = source.read(OwnSamples((0,), (8,)))[0]
    (part,) = source.read(OwnSamples((5,), (3,)))
    assert all(torch.equal(some, of_all[5:8]) for some, of_all in zip(part, whole, strict=True))
    assert source.counted(np.arange(3)) == targets
    assert (source.evaluate(7), source.write_sample()) == (None, None)
    result = RunResult(status="done")
    assert source.summarise(result, None) is result


def test_a_rank_of_another_layout_reads_its_part_of_each_sequence() -> None:
    plan = build_plan(Case("dense"), "cpu")
    source = DrawnSource(run_of(plan, state_of(), RunDir("unused")))
    (whole,) = source.read(OwnSamples((0,), (2,)))
    source.run.state = state_of(positions=torch.tensor([7, 3]))
    (part,) = source.read(OwnSamples((0,), (2,)))
    assert torch.equal(part[0], whole[0][:, [7, 3]])


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[WatchedGroup, TrainingRun, Trail]:
    """A group whose ordinary part takes two micro-batches, of 2 samples and of one."""
    own = OwnSamples((8, 12), (2, 1))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(Coordinator, "take", lambda self, steps: SimpleNamespace(own=own))
    run = run_of(
        replace(build_plan(Case("dense"), "cpu"), layout=Layout(dp_shard=2)), state_of(data_rank=1), RunDir(tmp_path)
    )
    trail = Trail()
    return WatchedGroup(run, DrawnSource(run), trail), run, trail


def make_step(group: WatchedGroup, step: int) -> None:
    group.begin(TrainProgress(step), lambda: TrainProgress())
    group.take([(0, 8)])
    group.commit()


def test_a_step_counts_once_its_gradients_are_there(group: tuple[WatchedGroup, TrainingRun, Trail]) -> None:
    watched, run, trail = group
    watched.begin(TrainProgress(4), lambda: TrainProgress())
    watched.take([(0, 8)])
    assert trail.steps == {}
    watched.commit()
    assert trail.steps[4].taken == (1, (8, 9, 12))
    assert (trail.steps[4].layout, trail.steps[4].largest_micro_batch) == (Layout(dp_shard=2), 2)
    run.state, run.plan = state_of(data_rank=0), replace(run.plan, layout=Layout(tp=2))
    make_step(watched, 5)
    assert (trail.steps[5].taken, trail.steps[5].layout) == ((0, (8, 9, 12)), Layout(tp=2))
    assert sorted(trail.steps) == [4, 5]


def test_what_is_written_between_steps_is_counted_apart_from_logs_and_checkpoints(
    group: tuple[WatchedGroup, TrainingRun, Trail], tmp_path: Path
) -> None:
    watched, _, trail = group
    make_step(watched, 0)
    (tmp_path / "checkpoint").write_bytes(bytes(1000))
    watched.begin(TrainProgress(1), lambda: TrainProgress())
    (tmp_path / "directives.jsonl").write_text("{}\n")
    watched.take([(0, 8)])
    assert trail.written_bytes == 0
    (tmp_path / "kept").write_bytes(bytes(7))
    watched.take([(0, 8)])
    watched.take([(0, 8)])
    assert trail.written_bytes == 7


@pytest.mark.parametrize(("killed_at", "dies"), [(4, [(4, 3)]), (2, [(2, 3)]), (None, [])])
def test_a_kill_comes_when_half_of_the_state_has_moved(
    killed_at: int | None, dies: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    faults = LiveFaults(build_plan(Case("dense"), "cpu"), RunDir(tmp_path), killed_at)
    died = []
    for step in (2, 4):
        prepare = faults.during_move(step)
        for bucket in range(6):
            try:
                prepare(bucket, 6)
            except Killed:
                died.append((step, bucket))
    assert died == dies


class Starts:
    """Stands in for the trainer: start after start ends as `endings` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, endings: list[BaseException | None]):
        self.endings, self.given = iter(endings), list[tuple[int, int | None]]()
        self.closed = 0
        """The number of starts whose watch was closed."""
        monkeypatch.setattr(certify_worker, "_start", self.start)
        monkeypatch.setattr(certify_worker, "weights_sha256", lambda shares, group: "ab")
        monkeypatch.setattr(certify_worker, "taken_by_all", lambda taken: tuple(own for _, own in taken))

    def start(self, plan: Plan, run_dir: Any, device: Any, meshes: Any, trail: Trail, killed_at: int | None) -> Any:
        self.given.append((plan.micro_batch_size, killed_at))
        first = 3 * (len(self.given) - 1)
        events = [SimpleNamespace(step=first + number, loss=float(10 * len(self.given))) for number in (1, 2, 3, 4)]

        def train() -> None:
            for step in range(first, first + 4):
                made = certify_worker.MadeStep((0, (step, len(self.given))), plan.layout, plan.micro_batch_size)
                trail.steps[step] = made
            if ending := next(self.endings):
                raise ending

        state = SimpleNamespace(shares=(), mesh=SimpleNamespace(group=lambda axis: None))
        return SimpleNamespace(
            train=train,
            run=SimpleNamespace(state=state),
            progress=TrainProgress(first),
            tally=SimpleNamespace(steps=events),
            unread=None,
            watch=SimpleNamespace(close=self.close),
        )

    def close(self) -> None:
        self.closed += 1


def asked(killed_at: int | None) -> CertifyRun:
    return CertifyRun(plan_with_ladder(), 8, True, None, 0.1, None, False, None, live=True, killed_at=killed_at)


def test_a_run_that_is_killed_starts_again_and_is_not_killed_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = Starts(monkeypatch, [Killed(), None])
    _, trained, live = run_live(asked(4), RunDir(tmp_path), CPU, Meshes())
    assert starts.given == [(4, 4), (4, None)]
    assert live.starts == (0, 3)
    assert trained.losses == (10.0, 10.0, 10.0, 20.0, 20.0, 20.0, 20.0), "a step that is made again counts once"
    assert trained.taken[2:4] == ((2, 1), (3, 2))
    assert starts.closed == 2


def test_a_run_without_memory_starts_again_with_smaller_micro_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = [OutOfMemory(Shortage(MemorySetting(size, "none", "none"), "one"), "no memory", "") for size in (4, 2)]
    starts = Starts(monkeypatch, [*short, None])
    _, _, live = run_live(asked(None), RunDir(tmp_path), CPU, Meshes())
    assert [size for size, _ in starts.given] == [4, 2, 1]
    assert live.starts == (0, 3, 6)
    assert live.largest_micro_batches == (4, 4, 4, 2, 2, 2, 1, 1, 1, 1)


def test_a_run_that_nothing_helps_ends_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    least = plan_with_ladder().memory_ladder[-1]
    starts = Starts(monkeypatch, [OutOfMemory(Shortage(least, "one"), "no memory", "")])
    with pytest.raises(OutOfMemory, match="no memory"):
        run_live(asked(None), RunDir(tmp_path), CPU, Meshes())
    assert len(starts.given) == 1


def test_ranks_leave_a_step_without_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[bool] = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: met.append(True))
    allowance = SharedAllowance(samples=2)
    allowance.check("forward", 4)
    allowance.check("backward", 2)
    assert met == []
    with pytest.raises(torch.OutOfMemoryError, match="4 samples"):
        allowance.check("backward", 4)
    assert met == [True]
