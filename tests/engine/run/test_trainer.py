"""The trainer's loop: what it asks of its coordinator, and what it writes, by what the coordinator answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import Division, OwnSamples
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine import digest as marks
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.loader import Staging, Traffic, cut_micro_batches, positions_of
from trainspec_cli.engine.digest import MicroBatch, weights_sha256
from trainspec_cli.engine.observe.counters import Peak
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.engine.parallel.noise import SampleParts
from trainspec_cli.engine.run.coordinator import (
    GroupBatches,
    RunContext,
    SingleGroup,
    StepSamples,
    StepStart,
    TrainProgress,
)
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.sources import WrittenSample
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.run import CheckpointSpec, DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage, ScheduleSpec
from trainspec_cli.run.folder.accounting import best_checkpoint
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult

STEPS, BATCH, TOKENS = 6, 2, 16
SPEC = RunSpec(
    model=DecoderModel(2, 32, 2, 1, 16, 48, 50),
    data=DataSpec(seq_len=TOKENS, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3, schedule=ScheduleSpec(kind="constant")),
    batching=BatchingSpec(global_batch_size=BATCH, micro_batch_size=1),
    train=TrainSection(max_steps=STEPS, eval_interval_steps=2),
    checkpoint=CheckpointSpec(interval_steps=2, mode="sync", keep_last=9),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)
MACHINE = Machine("host", cpu_cores=1, memory_bytes=2**34, bf16=False)


class Source:
    """Tokens drawn by their position."""

    def __init__(self) -> None:
        self.staging = Staging(torch.device("cpu"))
        self.evaluations = 0
        self.losses = [1.0]
        """What the evaluations measure, one after another; then the last one again."""

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        samples = [_sample(int(position)) for position in positions_of(own)]
        return cut_micro_batches(tuple(torch.cat(field) for field in zip(*samples, strict=True)), own)

    def first_text(self, position: int) -> None:
        """Tokens without a tokenizer have no text."""

    def counted(self, positions: np.ndarray) -> int:
        return TOKENS * len(positions)

    def evaluate(self, step: int) -> EvalEvent:
        loss = self.losses[min(self.evaluations, len(self.losses) - 1)]
        self.evaluations += 1
        return EvalEvent(step=step, heldout_loss=loss, heldout_bits_per_byte=None)

    def summarise(self, result: RunResult, evaluated: EvalEvent | None) -> RunResult:
        if evaluated is None:
            return result
        return replace(result, heldout_loss=evaluated.heldout_loss, heldout_bits_per_byte=None)

    def write_sample(self) -> None:
        return None


def _sample(position: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(position)
    return tuple(torch.randint(50, (1, TOKENS), generator=generator) for _ in range(2))


class Scripted:
    """A coordinator that follows a script; it reads samples by the position it is given, as replica groups do."""

    restores_at_start, waits_for_groups, stop_flag = False, True, False
    leads, finished_without, group, merges_at_end = True, False, 3, False

    def __init__(self, run: RunContext):
        self.run, self.journal = run, Journal(run.run_dir, 0, run.plan.spec)
        self.batches = GroupBatches(run)
        self.starts: dict[int, Callable[[TrainProgress], StepStart]] = {}
        """Try -> how it begins."""
        self.refused: set[int] = set()
        """Tries that the groups do not commit."""
        self.follows_until = STEPS
        """Steps after which this group does not lead any more."""
        self.taken_by_others = 0
        """Samples of each step that the other groups take."""
        self.tries = 0
        self.taken: list[int] = []
        self.noted: list[int] = []
        self.gradients: list[list[Tensor]] = []
        self.has_left = False

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        self.tries += 1
        self.leads = progress.step < self.follows_until
        return self.starts.get(self.tries, StepStart)(progress)

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        (start, samples), *_ = steps
        self.taken.append(start)
        own, micro_batches = self.batches.take(*steps)
        tokens = self.batches.count_targets(start, samples)
        taken = samples + self.taken_by_others
        return StepSamples(micro_batches, own, self.batches.division, tokens, taken, samples, 0.5, group=self.group)

    def bring_together(self, progress: TrainProgress) -> None:
        pass

    def merged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_passes(self, state: TrainState, micro_batches: int) -> None:
        pass

    def abandon_passes(self, state: TrainState) -> None:
        pass

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        self.gradients.append([share.gradient.clone() for share in state.shares])  # type: ignore[union-attr]

    def commit(self) -> bool:
        return self.tries not in self.refused

    def note_step(self, step: int, step_time_s: float) -> None:
        self.noted.append(step)

    def leave(self) -> None:
        self.has_left = True
        self.batches.close()


@pytest.fixture
def context(one_process: None, tmp_path: Path) -> RunContext:
    torch.manual_seed(0)
    made = replace(plan(SPEC, MACHINE), peak_flops=1e9)
    state = build_train_state(made, torch.device("cpu"))
    for share in state.shares:
        torch.nn.init.normal_(share.local, std=0.1)
    run_dir = RunDir(tmp_path / "run")
    write_json(run_dir.run_json, {"recipe": "scripted", "created_at": 0.0})
    return RunContext(made, run_dir, Source(), state, "", StopRequest())


@pytest.fixture
def scripted(context: RunContext) -> Scripted:
    return Scripted(context)


def events(run: RunContext, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.run_dir.events(0)) if event["type"] == kind]


def digest(run: RunContext) -> str:
    return weights_sha256(run.state.shares, run.state.mesh.group("pp"))


def test_an_ordinary_run_makes_each_step_once_and_leaves_its_result(context: RunContext) -> None:
    Trainer(context, SingleGroup(context)).run()
    assert [event["step"] for event in events(context, "step")] == list(range(1, STEPS + 1))
    assert [event["step"] for event in events(context, "eval")] == [2, 4, 6]
    assert context.run_dir.checkpoint_steps() == [2, 4, 6]
    result = read_json(context.run_dir.result_json)
    assert list(result) == [
        *(
            "spec_version",
            "status",
            "exit_code",
            "steps",
            "final_loss",
            "heldout_loss",
            "heldout_bits_per_byte",
            "tokens_per_s",
            "mfu",
        ),
        *("peak_memory_bytes", "wire_bytes", "weights_sha256", "goodput", "time_s"),
    ]
    assert (result["status"], result["exit_code"], result["steps"]) == ("done", 0, STEPS)
    assert result["final_loss"] == events(context, "step")[-1]["loss"]
    assert result["weights_sha256"] == digest(context)
    assert result["tokens_per_s"] > 0


def following(context: RunContext, losses: list[float], checkpoint: CheckpointSpec, **train: int) -> RunContext:
    """A run that evaluates after each step, with these held-out losses."""
    context.source.losses = losses  # type: ignore[attr-defined]
    section = TrainSection(max_steps=STEPS, eval_interval_steps=1, **train)
    spec = replace(context.plan.spec, train=section, checkpoint=checkpoint)
    return replace(context, plan=replace(context.plan, spec=spec))


def warnings(run: RunContext) -> list[str]:
    return [event["message"] for event in events(run, "warning")]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_checkpoint_is_kept_beside_the_last_ones(context: RunContext, mode: Literal["sync", "async"]) -> None:
    wanted = CheckpointSpec(interval_steps=None, mode=mode, keep_last=1, keep_best=True)
    run = following(context, [4.0, 3.0, 3.5, 3.2, 3.6, 3.4], wanted)
    Trainer(run, SingleGroup(run)).run()
    assert run.run_dir.checkpoint_steps() == [2, 6]
    assert best_checkpoint(run.run_dir) == 2
    assert len(events(run, "checkpoint")) == 3, "each new best one, and the last"


def test_a_checkpoint_that_is_due_at_the_best_step_is_written_once_and_kept(context: RunContext) -> None:
    run = following(context, [4.0, 3.0, 3.5], CheckpointSpec(2, "sync", keep_last=1, keep_best=True))
    Trainer(run, SingleGroup(run)).run()
    assert [event["step"] for event in events(run, "checkpoint")] == [1, 2, 4, 6]
    assert run.run_dir.checkpoint_steps() == [2, 6]


def test_a_run_that_goes_on_knows_the_best_checkpoint_of_before(context: RunContext) -> None:
    run = following(context, [3.0, 4.0, 3.5], CheckpointSpec(None, "sync", keep_last=1, keep_best=True))
    run_until_stopped(run, after_step=3)
    assert run.run_dir.checkpoint_steps() == [1, 3]
    Trainer(run, SingleGroup(run)).run()
    assert run.run_dir.checkpoint_steps() == [1, 6], "3.5 is no new best one"


def test_a_run_whose_heldout_loss_does_not_fall_any_more_is_done(context: RunContext) -> None:
    run = following(context, [4.0, 3.0, 3.0, 3.1], CheckpointSpec(None, "sync"), early_stop_evals=2)
    Trainer(run, SingleGroup(run)).run()
    result = read_json(run.run_dir.result_json)
    assert (result["status"], result["exit_code"], result["steps"]) == ("done", 0, 4)
    assert warnings(run) == ["the run ends here: the held-out loss was lowest, 3, at step 2, 2 evaluations ago"]
    assert run.run_dir.checkpoint_steps() == [4]


def test_an_early_end_that_died_before_it_was_done_ends_again(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of the last step is whole, and the run has no result yet."""
    run = following(context, [4.0, 3.0, 3.0, 3.1], CheckpointSpec(None, "sync"), early_stop_evals=2)
    with monkeypatch.context() as patch:
        patch.setattr(context.source, "write_sample", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Trainer(run, SingleGroup(run)).run()
    assert run.run_dir.checkpoint_steps() == [4] and not run.run_dir.result_json.exists()
    Trainer(run, SingleGroup(run)).run()
    assert [event["step"] for event in events(run, "step")] == [1, 2, 3, 4]
    result = read_json(run.run_dir.result_json)
    assert (result["status"], result["steps"], result["heldout_loss"]) == ("done", 4, 3.1)
    assert warnings(run)[1:] == [f"{warnings(run)[0]}; train.early_stop_evals=null trains on"]


def test_a_run_that_ended_early_trains_on_where_that_is_asked_for(context: RunContext) -> None:
    run = following(context, [4.0, 3.0, 3.0, 3.1], CheckpointSpec(None, "sync"), early_stop_evals=2)
    Trainer(run, SingleGroup(run)).run()
    patient = following(run, [3.1], CheckpointSpec(None, "sync"), early_stop_evals=4)
    Trainer(patient, SingleGroup(patient)).run()
    assert [event["step"] for event in events(run, "step")] == list(range(1, STEPS + 1))


def test_an_evaluation_that_the_run_had_no_time_for_is_made_when_it_goes_on(context: RunContext) -> None:
    """Its step was saved before it; an early end may hang on it."""
    run = following(context, [4.0, 3.0], CheckpointSpec(1, "sync"), early_stop_evals=2)
    run_until_stopped(run, after_step=2)
    assert [event["step"] for event in events(run, "eval")] == [1]
    Trainer(run, SingleGroup(run)).run()
    assert [event["step"] for event in events(run, "eval")] == [1, 2, 3, 4]
    assert read_json(run.run_dir.result_json)["steps"] == 4


def test_a_heldout_loss_that_rises_is_said_once(context: RunContext) -> None:
    run = following(context, [3.0, 3.1, 3.2, 3.3, 3.4], CheckpointSpec(None, "sync"))
    Trainer(run, SingleGroup(run)).run()
    (said,) = events(run, "warning")
    assert said["step"] == 3
    assert said["message"].startswith("the held-out loss rises: it was lowest, 3, at step 1; checkpoint.keep_best=true")


def test_a_sample_is_that_of_the_step_it_was_written_after(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context.source, "write_sample", lambda: WrittenSample("def ", "def f(): pass"))
    Trainer(context, SingleGroup(context)).run()
    written = [(event["step"], event["prompt"], event["text"]) for event in events(context, "sample")]
    assert written == [(STEPS, "def ", "def f(): pass")]


def test_evaluations_and_samples_take_none_of_a_steps_time(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    evaluate, beat = context.source.evaluate, StepWatch.beat
    monkeypatch.setattr(marks, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(context.source, "evaluate", lambda step: spend(60.0) or evaluate(step))
    monkeypatch.setattr(context.source, "write_sample", lambda: spend(30.0))
    monkeypatch.setattr(StepWatch, "beat", lambda watch, step: spend(0.25) or beat(watch, step))
    Trainer(context, SingleGroup(context)).run()
    assert [event["step_time_s"] for event in events(context, "step")] == [0.25] * STEPS


def test_it_goes_on_from_a_checkpoint_where_it_stopped(context: RunContext) -> None:
    run_until_stopped(context, after_step=3)
    assert read_json(context.run_dir.result_json)["status"] == "stopped"
    assert context.run_dir.checkpoint_steps() == [2, 3]
    for share in context.state.shares:
        torch.nn.init.zeros_(share.local)
    Trainer(context, SingleGroup(context)).run()
    assert [event["step"] for event in events(context, "step")] == list(range(1, STEPS + 1))
    assert [event["restored_from"] for event in events(context, "start")] == [
        None,
        str(context.run_dir.checkpoint(3)),
    ]
    assert events(context, "end")[-1]["status"] == "done"


def run_until_stopped(context: RunContext, after_step: int) -> None:
    trainer = Trainer(context, SingleGroup(context))
    right = trainer.watch.beat

    def beat(step: int) -> None:
        right(step)
        context.stop.requested = step >= after_step - 1

    trainer.watch.beat = beat  # type: ignore[method-assign]
    trainer.run()
    context.stop.requested = False


def test_a_step_that_is_not_committed_changes_nothing_and_is_made_again(
    context: RunContext, scripted: Scripted
) -> None:
    scripted.refused = {1, 4, 5}
    Trainer(context, scripted).run()
    assert scripted.tries == STEPS + 3
    assert scripted.taken == [0, 0, 2, 4, 4, 4, 6, 8, 10]
    for first, again in ((0, 1), (3, 4), (4, 5)):
        for ours, theirs in zip(scripted.gradients[first], scripted.gradients[again], strict=True):
            assert torch.equal(ours, theirs), "the refused try's gradients are not added to those of the next"
    assert scripted.noted == list(range(1, STEPS + 1))
    assert [event["step"] for event in events(context, "eval")] == [2, 4, 6], "once each, whatever was tried again"
    assert scripted.has_left


def test_a_refused_step_leaves_no_gradients_and_no_visits(one_process: None) -> None:
    """Experts' visits of a step that is made again are counted with that one."""
    experts = ExpertSpec(num_experts=2, top_k=1, expert_ffn_size=8, balance_rate=0.1)
    made = plan(replace(SPEC, model=replace(SPEC.model, experts=experts)), MACHINE)
    state = build_train_state(made, torch.device("cpu"))
    before = [share.local.clone() for share in state.shares]
    seen: list[int] = []

    def reduce(state: TrainState, _loss: Tensor) -> None:
        seen.extend(int(router.tokens_per_expert_E.sum()) for router in state.routers)

    groups = SimpleNamespace(begin_passes=lambda *_: None, reduce=reduce, commit=lambda: False)
    for _ in range(2):
        outcome = train_step(state, [_sample(0)], global_tokens=TOKENS, clip_norm=None, groups=groups)
        assert outcome is None
    assert seen == [TOKENS] * 4, "two layers, and each try counts anew"
    assert all(share.gradient is None for share in state.shares)
    assert all(torch.equal(share.local, old) for share, old in zip(state.shares, before, strict=True))


def test_steps_report_what_the_coordinator_adds(context: RunContext, scripted: Scripted) -> None:
    """And the samples that all groups took together, which the next step's positions follow."""
    scripted.taken_by_others = 4
    Trainer(context, scripted).run()
    steps, whole = events(context, "step"), BATCH + 4
    assert {(event["lr"], event["group"]) for event in steps} == {(5e-4, 3)}
    assert {(event["samples"], event["tokens"]) for event in steps} == {(whole, whole * TOKENS)}
    assert scripted.taken == [step * whole for step in range(STEPS)]
    assert {group["lr"] for group in context.state.optimizer.param_groups} == {5e-4}


def test_a_healed_group_goes_on_from_where_the_others_are(context: RunContext, scripted: Scripted) -> None:
    scripted.starts[2] = lambda _progress: StepStart(TrainProgress(4, 8))
    Trainer(context, scripted).run()
    assert scripted.taken == [0, 8, 10]
    assert [event["step"] for event in events(context, "step")] == [1, 5, 6]
    assert context.run_dir.checkpoint_steps() == [6]


def test_a_group_that_is_asked_to_stop_keeps_what_it_healed_to(context: RunContext, scripted: Scripted) -> None:
    scripted.starts[2] = lambda _progress: StepStart(TrainProgress(3, 6), stop=True)
    Trainer(context, scripted).run()
    assert scripted.taken == [0]
    assert context.run_dir.checkpoint_steps() == [3]
    assert (read_json(context.run_dir.result_json)["status"], scripted.has_left) == ("stopped", True)


def test_the_leading_group_alone_writes_checkpoints(context: RunContext, scripted: Scripted) -> None:
    scripted.follows_until = 3
    Trainer(context, scripted).run()
    assert context.run_dir.checkpoint_steps() == [2]


def test_a_group_that_came_too_late_leaves_the_others_result(context: RunContext, scripted: Scripted) -> None:
    write_json(context.run_dir.result_json, {"status": "done", "steps": 9})
    scripted.finished_without = True
    scripted.starts[1] = lambda progress: StepStart(progress, stop=True)
    Trainer(context, scripted).run()
    assert read_json(context.run_dir.result_json) == {"status": "done", "steps": 9}
    assert context.run_dir.checkpoint_steps() == [] and events(context, "end") == []
    assert scripted.has_left


def test_the_coordinator_is_left_when_a_step_raises(context: RunContext, scripted: Scripted) -> None:
    def fail(_progress: TrainProgress) -> StepStart:
        raise RuntimeError("no quorum")

    scripted.starts[3] = fail
    trainer = Trainer(context, scripted)
    with pytest.raises(RuntimeError, match="no quorum"):
        trainer.run()
    trainer.watch.close()
    assert scripted.has_left


@pytest.mark.slow
def test_an_ordinary_run_imports_nothing_of_replica_groups() -> None:
    """Their modules would make every start longer."""
    script = (
        "import sys, trainspec_cli.engine.run.trainer\n"
        "print([name for name in sys.modules if 'engine.elastic' in name or name.endswith('replica_groups')])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


# The noise of the gradients, as if two ranks had measured it


NOISE = 15.0
"""Samples."""


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step's gradients show the same noise scale, between two parts of its samples."""

    def measured(state: TrainState, *arguments: Any, parts: SampleParts, **others: Any) -> Any:
        outcome = train_step(state, *arguments, parts=parts, **others)
        assert outcome is not None
        ratio = (1 + 2 * NOISE / parts.step_samples) / (1 + NOISE / parts.step_samples)
        weighted_square = ratio * outcome.grad_norm.double() ** 2
        return replace(outcome, noise=torch.tensor([weighted_square, 0.0, 2.0, 0.0, 0.0], dtype=torch.float64))

    monkeypatch.setattr("trainspec_cli.engine.run.trainer.train_step", measured)
    monkeypatch.setattr("trainspec_cli.engine.run.scheduling.step_scheduler.noise_hindrance", lambda *_: "")


def following_noise(folder: Path) -> RunContext:
    """In steps that grow to 8 at most."""
    return growing(folder, kind="noise", interval_steps=2, smoothing_steps=3, max_global_batch_size=8)


def growing(folder: Path, **schedule: Any) -> RunContext:
    """30 x 2 samples."""
    torch.manual_seed(0)
    spec = replace(
        SPEC, batching=replace(SPEC.batching, schedule=BatchScheduleSpec(**schedule)), train=TrainSection(max_steps=30)
    )
    made = replace(plan(SPEC, MACHINE), spec=spec, peak_flops=1e9)
    state = build_train_state(made, torch.device("cpu"))
    for share in state.shares:
        torch.nn.init.normal_(share.local, std=0.1)
    run_dir = RunDir(folder)
    write_json(run_dir.run_json, {"recipe": "noisy", "created_at": 0.0})
    return RunContext(made, run_dir, Source(), state, "", StopRequest())


def test_a_resumed_run_goes_on_with_the_sizes_of_one_that_was_left_alone(
    one_process: None, noisy: None, tmp_path: Path
) -> None:
    """Stopped between two decisions, with averages of a few steps."""
    whole, stopped = following_noise(tmp_path / "whole"), following_noise(tmp_path / "stopped")
    Trainer(whole, SingleGroup(whole)).run()
    run_until_stopped(stopped, after_step=5)
    Trainer(stopped, SingleGroup(stopped)).run()
    told = [[(event["samples"], event["noise_scale"]) for event in events(run, "step")] for run in (whole, stopped)]
    assert told[0] == told[1]
    sizes = [samples for samples, _ in told[0]]
    assert sum(sizes) == 60
    assert sizes[:3] == [2, 2, 3] and max(sizes[:-1]) == 7, "one size up every other step"
    assert [scale for _, scale in told[0]] == pytest.approx([NOISE] * len(sizes), rel=1e-4)
    assert digest(whole) == digest(stopped)


def test_a_batch_that_grows_beyond_the_noise_leaves_one_warning(one_process: None, noisy: None, tmp_path: Path) -> None:
    stages = (RampStage(4 * TOKENS, 6), RampStage(16 * TOKENS, 20))
    run = growing(tmp_path, kind="ramp", smoothing_steps=3, stages=stages)
    Trainer(run, SingleGroup(run)).run()
    assert [event["samples"] for event in events(run, "step")] == [2, 2, 6, 6, 20, 20, 4]
    (warning,) = events(run, "warning")
    assert warning["step"] == 5
    assert "grown to 20 samples, more than half the gradient noise scale (15 over 3 steps)" in warning["message"]


def test_a_constant_batch_reports_the_noise_and_keeps_none_of_it(context: RunContext, noisy: None) -> None:
    Trainer(context, SingleGroup(context)).run()
    assert [event["noise_scale"] for event in events(context, "step")] == pytest.approx([NOISE] * STEPS, rel=1e-4)
    assert read_json(context.run_dir.manifest(STEPS))["about"]["pace"] is None


def test_what_shows_no_noise_reports_none(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that computes all samples of a step together; null would mean that it is infinite."""
    monkeypatch.setattr("trainspec_cli.engine.run.scheduling.step_scheduler.noise_hindrance", lambda *_: "")
    Trainer(context, SingleGroup(context)).run()
    assert not any("noise_scale" in event for event in events(context, "step"))


# What a step's event says, and what follows from it


def test_an_event_has_the_tokens_of_its_step_and_a_start_what_it_counts_with(context: RunContext) -> None:
    Trainer(context, SingleGroup(context)).run()
    steps = events(context, "step")
    assert {(event["tokens"], event["samples"], event["skipped"]) for event in steps} == {
        (BATCH * TOKENS, BATCH, False)
    }
    (start,) = events(context, "start")
    plan = context.plan
    assert (start["step"], start["world_size"], start["unit"]) == (0, 1, "tokens")
    assert (start["params"], start["adapter_params"]) == (plan.params, plan.adapter_params)
    assert start["flops_per_token"] == plan.flops_per_token
    assert (start["peak_flops"], start["pid"], start["host"]) == (1e9, os.getpid(), socket.gethostname())
    assert all(sum(event["time_s"].values()) == pytest.approx(event["step_time_s"]) for event in steps)


def test_a_runs_watch_ends_with_it(context: RunContext) -> None:
    trainer = Trainer(context, SingleGroup(context))
    trainer.run()
    assert trainer.watch._closed.is_set()


def test_samples_are_written_between_steps_and_at_the_end(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(context.plan.spec, train=TrainSection(max_steps=STEPS, sample_interval_steps=4))
    sampled = replace(context, plan=replace(context.plan, spec=spec))
    monkeypatch.setattr(context.source, "write_sample", lambda: WrittenSample("p", "t"))
    Trainer(sampled, SingleGroup(sampled)).run()
    assert [event["step"] for event in events(context, "sample")] == [4, STEPS]
    assert [event["step"] for event in events(context, "eval")] == [STEPS], "without an interval at the end alone"


def test_a_run_that_is_done_already_is_evaluated_again_for_its_result(context: RunContext) -> None:
    Trainer(context, SingleGroup(context)).run()
    first = read_json(context.run_dir.result_json)
    context.run_dir.result_json.unlink()
    context.source.evaluations = 0  # type: ignore[attr-defined]
    Trainer(context, SingleGroup(context)).run()
    again = read_json(context.run_dir.result_json)
    assert (again["status"], again["heldout_loss"], again["weights_sha256"]) == ("done", 1.0, first["weights_sha256"])
    assert context.source.evaluations == 1  # type: ignore[attr-defined]
    assert len(events(context, "step")) == STEPS


@pytest.fixture
def not_finite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """not_finite(3, 4): the updates of these steps are skipped."""

    def skip(*steps: int) -> None:
        made = iter(range(1, STEPS + 1))

        def skipping(*arguments: Any, **others: Any) -> Any:
            outcome = train_step(*arguments, **others)
            assert outcome is not None
            return replace(outcome, skipped=torch.tensor(1.0)) if next(made) in steps else outcome

        monkeypatch.setattr("trainspec_cli.engine.run.trainer.train_step", skipping)

    return skip


def test_a_skipped_update_is_told_of_and_harms_nothing(context: RunContext, not_finite: Callable[..., None]) -> None:
    not_finite(3)
    Trainer(context, SingleGroup(context)).run()
    (warning,) = events(context, "warning")
    assert (warning["step"], warning["message"]) == (3, "loss or gradient not finite: update skipped")
    assert [event["step"] for event in events(context, "step") if event["skipped"]] == [3]
    assert read_json(context.run_dir.result_json)["status"] == "done"


def test_a_run_that_skips_as_many_updates_as_are_allowed_ends(
    context: RunContext, not_finite: Callable[..., None]
) -> None:
    not_finite(3, 4)
    spec = replace(context.plan.spec, train=TrainSection(max_steps=STEPS, max_skipped_steps=2))
    bounded = replace(context, plan=replace(context.plan, spec=spec))
    trainer = Trainer(bounded, SingleGroup(bounded))
    with pytest.raises(WorkerError, match="for 2 steps in a row, up to step 4"):
        trainer.run()
    trainer.watch.close()
    assert not context.run_dir.result_json.exists()


def test_a_model_that_came_to_nothing_leaves_no_checkpoint_of_it(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier ones stay, to go on from."""
    monkeypatch.setattr(context.source, "evaluate", lambda step: EvalEvent(step=step, heldout_loss=float("nan")))
    spec = replace(context.plan.spec, checkpoint=CheckpointSpec(interval_steps=4, mode="sync"))
    failing = replace(context, plan=replace(context.plan, spec=spec))
    trainer = Trainer(failing, SingleGroup(failing))
    with pytest.raises(WorkerError, match="the held-out loss after the last step is not finite"):
        trainer.run()
    trainer.watch.close()
    assert context.run_dir.checkpoint_steps() == [4]


def test_a_leak_is_a_warning_of_its_step(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []

    class Watch:
        def __init__(self, device: torch.device, first_step: int, last_step: int):
            given.append((first_step, last_step))

        def check(self, step: int, micro_batch_size: int) -> str | None:
            return "host memory grows" if step == 4 and micro_batch_size else None

    monkeypatch.setattr("trainspec_cli.engine.run.trainer.MemoryWatch", Watch)
    Trainer(context, SingleGroup(context)).run()
    assert [(event["step"], event["message"]) for event in events(context, "warning")] == [(4, "host memory grows")]
    assert given == [(0, STEPS)]


def test_allocations_are_those_of_the_step_alone(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device had given before a step is not counted again."""
    counts = iter([100, 100, 103, 103, 110, 110, 110])
    monkeypatch.setattr("trainspec_cli.engine.run.trainer.device_allocations", lambda device: next(counts))
    monkeypatch.setattr(context.source.staging, "cut", Traffic)
    Trainer(context, SingleGroup(context)).run()
    assert [event["allocations"] for event in events(context, "step")] == [0, 3, 0, 7, 0, 0]


def test_the_scheduler_divides_each_step_and_its_rate_is_the_groups(context: RunContext) -> None:
    group = SingleGroup(context)
    trainer = Trainer(context, group)
    asked: list[int] = []
    noted: list[tuple[int, int, int]] = []

    def divide(step: int) -> Division:
        asked.append(step)
        return Division((1.0,), micro_batch_size=2 if step > 2 else 1)

    def note_step(step: int, own: OwnSamples, parts_s: Any, samples: int, figures: Tensor, **seen: Any) -> None:
        noted.append((step, len(own.sizes), samples))
        trainer.scheduler.rate = 10.0 * step

    trainer.scheduler.divide = divide  # type: ignore[method-assign]
    trainer.scheduler.note_step = note_step  # type: ignore[method-assign]
    trainer.run()
    assert asked == list(range(STEPS))
    assert noted == [(step, 2 if step <= 3 else 1, BATCH) for step in range(1, STEPS + 1)]
    assert group.batches.rate == 10.0 * STEPS


def test_on_a_gpu_a_step_is_recorded_when_the_next_has_begun(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for its figures; before an evaluation and at the end none is left."""
    order: list[str] = []
    monkeypatch.setattr(marks, "mark", lambda on_gpu: 0.0)
    trainer = Trainer(context, SingleGroup(context))
    monkeypatch.setattr("trainspec_cli.engine.observe.clock.mark", lambda on_gpu: 0.0)
    beat, record, evaluate = trainer.watch.beat, trainer._record, context.source.evaluate
    monkeypatch.setattr(trainer.watch, "beat", lambda step: order.append(f"made {step}") or beat(step))
    monkeypatch.setattr(trainer, "_record", lambda done: order.append(f"recorded {done.step}") or record(done))
    monkeypatch.setattr(context.source, "evaluate", lambda step: order.append("evaluated") or evaluate(step))
    trainer.clock.on_gpu = True
    trainer.run()
    first = ["made 1", "made 2", "recorded 1", "recorded 2", "evaluated"]
    assert order[:5] == first
    assert order == [
        word.replace("1", str(n + 1)).replace("2", str(n + 2)) if n else word for n in (0, 2, 4) for word in first
    ]
    assert [event["step"] for event in events(context, "step")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("known", "flops", "source"), [(5e12, 5e12, "the data sheet"), (None, 7.0, "measured")])
def test_the_peak_is_the_plans_or_measured(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, known: float | None, flops: float, source: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "trainspec_cli.engine.run.trainer.measure_peak", lambda *given: asked.append(given) or Peak(7.0, "measured")
    )
    made = replace(context, plan=replace(context.plan, peak_flops=known, peak_source="the data sheet", compute="bf16"))
    assert Trainer(made, SingleGroup(made)).tally.peak == Peak(flops, source)
    assert asked == ([] if known else [(torch.device("cpu"), torch.bfloat16)])
