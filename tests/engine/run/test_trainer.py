"""The trainer's loop: what it asks of its coordinator, and what it writes, by what the coordinator answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from lab.engine_runs import CPU, MACHINE, DrawnTokens, begin_folder, events_of, fill, run_of, trainer_of, with_spec
from lab.problems import raises
from torch import Tensor

from trainspec_cli.balance.batch.division import Division, OwnSamples
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine import digest as marks
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.loader import Traffic
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.observe.counters import Peak
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.engine.parallel.noise import SampleParts
from trainspec_cli.engine.run import step
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples, StepStart
from trainspec_cli.engine.run.sources import DataSource, WrittenSample
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.run import CheckpointSpec, DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage, ScheduleSpec
from trainspec_cli.recipe.results.plan import PlannedLayout
from trainspec_cli.run.folder.accounting import best_checkpoint
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.recovery.memory import build_ladder

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


def train(run: TrainingRun, source: DrawnTokens | None = None) -> None:
    trainer_of(run, source or evaluated()).train()


def evaluated(*losses: float) -> DrawnTokens:
    """Tokens whose evaluations measure these losses."""
    return DrawnTokens(TOKENS, losses=losses or (1.0,))


class Scripted(Coordinator):
    """A coordinator that follows a script; it reads samples by the position it is given, as replica groups do."""

    restores_at_start = False
    waits_for_groups = True

    def __init__(self, run: TrainingRun, source: DataSource):
        super().__init__(run, source)
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

    @property
    def stop_flag(self) -> bool:
        return False

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        self.tries += 1
        self.leads = progress.step < self.follows_until
        return self.starts.get(self.tries, StepStart)(progress)

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        self.taken.append(steps[0][0])
        alone = super().take(steps)
        return replace(alone, step_samples=alone.step_samples + self.taken_by_others, lr_factor=0.5, group=3)

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        self.gradients.append([share.gradient.clone() for share in state.shares])  # type: ignore[union-attr]

    def commit(self) -> bool:
        return self.tries not in self.refused

    def note_step(self, step: int, step_time_s: float) -> None:
        self.noted.append(step)

    def leave(self) -> None:
        self.has_left = True
        super().leave()


def made(spec: RunSpec, run_dir: RunDir) -> TrainingRun:
    """Return a run of one process whose parameters are drawn from a seed."""
    torch.manual_seed(0)
    planned = replace(plan(SPEC, MACHINE), spec=spec, peak_flops=1e9)
    state = build_train_state(planned, CPU)
    fill(state)
    return run_of(planned, state, begin_folder(run_dir))


@pytest.fixture
def context(one_process: None, tmp_path: Path) -> TrainingRun:
    return made(SPEC, RunDir(tmp_path / "run"))


@pytest.fixture
def source() -> DrawnTokens:
    return evaluated()


@pytest.fixture
def scripted(context: TrainingRun) -> Scripted:
    context.group = 3
    return Scripted(context, evaluated())


def digest(run: TrainingRun) -> str:
    return weights_sha256(run.state.shares, run.state.mesh.group("pp"))


def test_an_ordinary_run_makes_each_step_once_and_leaves_its_result(context: TrainingRun) -> None:
    train(context)
    assert [event["step"] for event in events_of(context, "step")] == list(range(1, STEPS + 1))
    assert [event["step"] for event in events_of(context, "eval")] == [2, 4, 6]
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
    assert result["final_loss"] == events_of(context, "step")[-1]["loss"]
    assert result["weights_sha256"] == digest(context)
    assert result["tokens_per_s"] > 0


def test_a_change_of_the_layout_is_seen_by_all_that_take_part_in_a_step(context: TrainingRun) -> None:
    """From step 4, both samples are one micro-batch, of a state in other tensors."""
    before = context.plan
    other = PlannedLayout(3, replace(before.layout, zero_stage=1), micro_batch_size=2, grad_accum_steps=1)
    context.plan = replace(before, changes=(other,), memory_ladder=build_ladder(before.memory_setting))
    source = evaluated()
    read: list[tuple[int, ...]] = []
    kept_read = source.read
    source.read = lambda own: read.append(own.sizes) or kept_read(own)  # type: ignore[method-assign, func-returns-value]
    trainer = trainer_of(context, source)
    old = context.state
    of_one_layout = (trainer.scheduler, trainer.links, trainer.buckets, trainer.relief, trainer.memory)
    trainer.train()
    assert context.state is not old and context.plan == context.plan.with_layout(other)
    assert (read[0], read[-1]) == ((1, 1), (2,)), "the coordinator divides, and the source reads, by the plan in force"
    now = (trainer.scheduler, trainer.links, trainer.buckets, trainer.relief, trainer.memory)
    assert not any(one is was for one, was in zip(now, of_one_layout, strict=True))
    assert trainer.relief._setting.micro_batch_size == 2
    assert [event["step"] for event in events_of(context, "directive")] == [3]
    trained = digest(context)
    assert read_json(context.run_dir.result_json)["weights_sha256"] == trained
    fill(context.state)
    trainer.checkpoints.resume()
    assert digest(context) == trained, "the checkpoint is of the new state, and is restored into it"


def following(context: TrainingRun, checkpoint: CheckpointSpec, **train: int) -> TrainingRun:
    """A run that evaluates after each step."""
    section = TrainSection(max_steps=STEPS, eval_interval_steps=1, **train)
    return with_spec(context, train=section, checkpoint=checkpoint)


def warnings(run: TrainingRun) -> list[str]:
    return [event["message"] for event in events_of(run, "warning")]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_checkpoint_is_kept_beside_the_last_ones(context: TrainingRun, mode: Literal["sync", "async"]) -> None:
    wanted = CheckpointSpec(interval_steps=None, mode=mode, keep_last=1, keep_best=True)
    run = following(context, wanted)
    source = evaluated(4.0, 3.0, 3.5, 3.2, 3.6, 3.4)
    train(run, source)
    assert run.run_dir.checkpoint_steps() == [2, 6]
    assert best_checkpoint(run.run_dir) == 2
    assert len(events_of(run, "checkpoint")) == 3, "each new best one, and the last"


def test_a_checkpoint_that_is_due_at_the_best_step_is_written_once_and_kept(context: TrainingRun) -> None:
    run = following(context, CheckpointSpec(2, "sync", keep_last=1, keep_best=True))
    source = evaluated(4.0, 3.0, 3.5)
    train(run, source)
    assert [event["step"] for event in events_of(run, "checkpoint")] == [1, 2, 4, 6]
    assert run.run_dir.checkpoint_steps() == [2, 6]


def test_a_run_that_goes_on_knows_the_best_checkpoint_of_before(context: TrainingRun) -> None:
    run = following(context, CheckpointSpec(None, "sync", keep_last=1, keep_best=True))
    source = evaluated(3.0, 4.0, 3.5)
    run_until_stopped(run, source, after_step=3)
    assert run.run_dir.checkpoint_steps() == [1, 3]
    train(run, source)
    assert run.run_dir.checkpoint_steps() == [1, 6], "3.5 is no new best one"


def test_a_run_whose_heldout_loss_does_not_fall_any_more_is_done(context: TrainingRun) -> None:
    run = following(context, CheckpointSpec(None, "sync"), early_stop_evals=2)
    source = evaluated(4.0, 3.0, 3.0, 3.1)
    train(run, source)
    result = read_json(run.run_dir.result_json)
    assert (result["status"], result["exit_code"], result["steps"]) == ("done", 0, 4)
    (message,) = warnings(run)
    for fact in ("lowest, 3, at step 2,", " 2 evaluations"):
        assert fact in message
    assert run.run_dir.checkpoint_steps() == [4]


def test_an_early_end_that_died_before_it_was_done_ends_again(
    context: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of the last step is whole, and the run has no result yet."""
    run = following(context, CheckpointSpec(None, "sync"), early_stop_evals=2)
    source = evaluated(4.0, 3.0, 3.0, 3.1)
    with monkeypatch.context() as patch:
        patch.setattr(source, "write_sample", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(run, source)
    assert run.run_dir.checkpoint_steps() == [4] and not run.run_dir.result_json.exists()
    train(run, source)
    assert [event["step"] for event in events_of(run, "step")] == [1, 2, 3, 4]
    result = read_json(run.run_dir.result_json)
    assert (result["status"], result["steps"], result["heldout_loss"]) == ("done", 4, 3.1)
    assert len(warnings(run)) == 2 and warnings(run)[1].startswith(f"{warnings(run)[0]}; train.early_stop_evals=null ")


def test_a_run_that_ended_early_trains_on_where_that_is_asked_for(context: TrainingRun) -> None:
    run = following(context, CheckpointSpec(None, "sync"), early_stop_evals=2)
    source = evaluated(4.0, 3.0, 3.0, 3.1)
    train(run, source)
    patient = following(run, CheckpointSpec(None, "sync"), early_stop_evals=4)
    source = evaluated(3.1)
    train(patient, source)
    assert [event["step"] for event in events_of(run, "step")] == list(range(1, STEPS + 1))


def test_an_evaluation_that_the_run_had_no_time_for_is_made_when_it_goes_on(context: TrainingRun) -> None:
    """Its step was saved before it; an early end may hang on it."""
    run = following(context, CheckpointSpec(1, "sync"), early_stop_evals=2)
    source = evaluated(4.0, 3.0)
    run_until_stopped(run, source, after_step=2)
    assert [event["step"] for event in events_of(run, "eval")] == [1]
    train(run, source)
    assert [event["step"] for event in events_of(run, "eval")] == [1, 2, 3, 4]
    assert read_json(run.run_dir.result_json)["steps"] == 4


def test_a_heldout_loss_that_rises_is_said_once(context: TrainingRun) -> None:
    run = following(context, CheckpointSpec(None, "sync"))
    source = evaluated(3.0, 3.1, 3.2, 3.3, 3.4)
    train(run, source)
    (said,) = events_of(run, "warning")
    assert said["step"] == 3
    for fact in ("lowest, 3, at step 1; ", "checkpoint.keep_best=true"):
        assert fact in said["message"]


def test_a_sample_is_that_of_the_step_it_was_written_after(
    context: TrainingRun, source: DrawnTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "write_sample", lambda: WrittenSample("def ", "def f(): pass"))
    train(context, source)
    written = [(event["step"], event["prompt"], event["text"]) for event in events_of(context, "sample")]
    assert written == [(STEPS, "def ", "def f(): pass")]


def test_evaluations_and_samples_take_none_of_a_steps_time(
    context: TrainingRun, source: DrawnTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    evaluate, beat = source.evaluate, StepWatch.beat
    monkeypatch.setattr(marks, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(source, "evaluate", lambda step: spend(60.0) or evaluate(step))
    monkeypatch.setattr(source, "write_sample", lambda: spend(30.0))
    monkeypatch.setattr(StepWatch, "beat", lambda watch, step: spend(0.25) or beat(watch, step))
    train(context, source)
    assert [event["step_time_s"] for event in events_of(context, "step")] == [0.25] * STEPS


def test_it_goes_on_from_a_checkpoint_where_it_stopped(context: TrainingRun) -> None:
    run_until_stopped(context, evaluated(), after_step=3)
    assert read_json(context.run_dir.result_json)["status"] == "stopped"
    assert context.run_dir.checkpoint_steps() == [2, 3]
    for share in context.state.shares:
        torch.nn.init.zeros_(share.local)
    train(context)
    assert [event["step"] for event in events_of(context, "step")] == list(range(1, STEPS + 1))
    assert [event["restored_from"] for event in events_of(context, "start")] == [
        None,
        str(context.run_dir.checkpoint(3)),
    ]
    assert events_of(context, "end")[-1]["status"] == "done"


def run_until_stopped(context: TrainingRun, source: DrawnTokens, after_step: int) -> None:
    trainer = trainer_of(context, source)
    right = trainer.watch.beat

    def beat(step: int) -> None:
        right(step)
        context.stop.requested = step >= after_step - 1

    trainer.watch.beat = beat  # type: ignore[method-assign]
    trainer.train()
    context.stop.requested = False


def test_a_step_that_is_not_committed_changes_nothing_and_is_made_again(
    context: TrainingRun, scripted: Scripted
) -> None:
    scripted.refused = {1, 4, 5}
    trainer_of(context, scripted._source, scripted).train()
    assert scripted.tries == STEPS + 3
    assert scripted.taken == [0, 0, 2, 4, 4, 4, 6, 8, 10]
    for first, again in ((0, 1), (3, 4), (4, 5)):
        for ours, theirs in zip(scripted.gradients[first], scripted.gradients[again], strict=True):
            assert torch.equal(ours, theirs), "the refused try's gradients are not added to those of the next"
    assert scripted.noted == list(range(1, STEPS + 1))
    assert [event["step"] for event in events_of(context, "eval")] == [2, 4, 6], "once each, whatever was tried again"
    assert scripted.has_left


def test_a_refused_step_leaves_no_gradients_and_no_visits(one_process: None) -> None:
    """Experts' visits of a step that is made again are counted with that one."""
    experts = ExpertSpec(num_experts=2, top_k=1, expert_ffn_size=8, balance_rate=0.1)
    made = plan(replace(SPEC, model=replace(SPEC.model, experts=experts)), MACHINE)
    state = build_train_state(made, CPU)
    before = [share.local.clone() for share in state.shares]
    seen: list[int] = []

    def reduce(state: TrainState, _loss: Tensor) -> None:
        seen.extend(int(router.tokens_per_expert_E.sum()) for router in state.routers)

    groups = SimpleNamespace(begin_passes=lambda *_: None, reduce=reduce, commit=lambda: False)
    for _ in range(2):
        outcome = train_step(state, [evaluated().sample(0)], global_tokens=TOKENS, clip_norm=None, groups=groups)
        assert outcome is None
    assert seen == [TOKENS] * 4, "two layers, and each try counts anew"
    assert all(share.gradient is None for share in state.shares)
    assert all(torch.equal(share.local, old) for share, old in zip(state.shares, before, strict=True))


def test_steps_report_what_the_coordinator_adds(context: TrainingRun, scripted: Scripted) -> None:
    """And the samples that all groups took together, which the next step's positions follow."""
    scripted.taken_by_others = 4
    trainer_of(context, scripted._source, scripted).train()
    steps, whole = events_of(context, "step"), BATCH + 4
    assert {(event["lr"], event["group"]) for event in steps} == {(5e-4, 3)}
    assert {(event["samples"], event["tokens"]) for event in steps} == {(whole, whole * TOKENS)}
    assert scripted.taken == [step * whole for step in range(STEPS)]
    assert {group["lr"] for group in context.state.optimizer.param_groups} == {5e-4}


def test_a_healed_group_goes_on_from_where_the_others_are(context: TrainingRun, scripted: Scripted) -> None:
    scripted.starts[2] = lambda _progress: StepStart(TrainProgress(4, 8))
    trainer_of(context, scripted._source, scripted).train()
    assert scripted.taken == [0, 8, 10]
    assert [event["step"] for event in events_of(context, "step")] == [1, 5, 6]
    assert context.run_dir.checkpoint_steps() == [6]


def test_a_group_that_is_asked_to_stop_keeps_what_it_healed_to(context: TrainingRun, scripted: Scripted) -> None:
    scripted.starts[2] = lambda _progress: StepStart(TrainProgress(3, 6), stop=True)
    trainer_of(context, scripted._source, scripted).train()
    assert scripted.taken == [0]
    assert context.run_dir.checkpoint_steps() == [3]
    assert (read_json(context.run_dir.result_json)["status"], scripted.has_left) == ("stopped", True)


def test_the_leading_group_alone_writes_checkpoints(context: TrainingRun, scripted: Scripted) -> None:
    scripted.follows_until = 3
    trainer_of(context, scripted._source, scripted).train()
    assert context.run_dir.checkpoint_steps() == [2]


def test_a_group_that_came_too_late_leaves_the_others_result(context: TrainingRun, scripted: Scripted) -> None:
    write_json(context.run_dir.result_json, {"status": "done", "steps": 9})
    scripted.finished_without = True
    scripted.starts[1] = lambda progress: StepStart(progress, stop=True)
    trainer_of(context, scripted._source, scripted).train()
    assert read_json(context.run_dir.result_json) == {"status": "done", "steps": 9}
    assert context.run_dir.checkpoint_steps() == [] and events_of(context, "end") == []
    assert scripted.has_left


def test_the_coordinator_is_left_when_a_step_raises(context: TrainingRun, scripted: Scripted) -> None:
    def fail(_progress: TrainProgress) -> StepStart:
        raise RuntimeError("no quorum")

    scripted.starts[3] = fail
    trainer = trainer_of(context, scripted._source, scripted)
    with pytest.raises(RuntimeError, match="no quorum"):
        trainer.train()
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
    monkeypatch.setattr("trainspec_cli.engine.run.trainer.noise_hindrance", lambda *_: "")


def following_noise(folder: Path) -> TrainingRun:
    """In steps that grow to 8 at most."""
    return growing(folder, kind="noise", interval_steps=2, smoothing_steps=3, max_global_batch_size=8)


def growing(folder: Path, **schedule: Any) -> TrainingRun:
    """30 x 2 samples."""
    batching = replace(SPEC.batching, schedule=BatchScheduleSpec(**schedule))
    return made(replace(SPEC, batching=batching, train=TrainSection(max_steps=30)), RunDir(folder))


def test_a_resumed_run_goes_on_with_the_sizes_of_one_that_was_left_alone(
    one_process: None, noisy: None, tmp_path: Path
) -> None:
    """Stopped between two decisions, with averages of a few steps."""
    whole, stopped = following_noise(tmp_path / "whole"), following_noise(tmp_path / "stopped")
    train(whole)
    run_until_stopped(stopped, evaluated(), after_step=5)
    train(stopped)
    told = [[(event["samples"], event["noise_scale"]) for event in events_of(run, "step")] for run in (whole, stopped)]
    assert told[0] == told[1]
    sizes = [samples for samples, _ in told[0]]
    assert sum(sizes) == 60
    assert sizes[:3] == [2, 2, 3] and max(sizes[:-1]) == 7, "one size up every other step"
    assert [scale for _, scale in told[0]] == pytest.approx([NOISE] * len(sizes), rel=1e-4)
    assert digest(whole) == digest(stopped)


def test_a_batch_that_grows_beyond_the_noise_leaves_one_warning(one_process: None, noisy: None, tmp_path: Path) -> None:
    stages = (RampStage(4 * TOKENS, 6), RampStage(16 * TOKENS, 20))
    run = growing(tmp_path, kind="ramp", smoothing_steps=3, stages=stages)
    train(run)
    assert [event["samples"] for event in events_of(run, "step")] == [2, 2, 6, 6, 20, 20, 4]
    (warning,) = events_of(run, "warning")
    assert warning["step"] == 5
    assert "to 20 samples" in warning["message"] and "(15 over 3 steps)" in warning["message"]


def test_a_constant_batch_reports_the_noise_and_keeps_none_of_it(context: TrainingRun, noisy: None) -> None:
    train(context)
    assert [event["noise_scale"] for event in events_of(context, "step")] == pytest.approx([NOISE] * STEPS, rel=1e-4)
    assert read_json(context.run_dir.manifest(STEPS))["about"]["pace"] is None


def test_what_shows_no_noise_reports_none(context: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that computes all samples of a step together; null would mean that it is infinite."""
    monkeypatch.setattr("trainspec_cli.engine.run.trainer.noise_hindrance", lambda *_: "")
    train(context)
    assert not any("noise_scale" in event for event in events_of(context, "step"))


# What a step's event says, and what follows from it


def test_an_event_has_the_tokens_of_its_step_and_a_start_what_it_counts_with(context: TrainingRun) -> None:
    train(context)
    steps = events_of(context, "step")
    assert {(event["tokens"], event["samples"], event["skipped"]) for event in steps} == {
        (BATCH * TOKENS, BATCH, False)
    }
    (start,) = events_of(context, "start")
    plan = context.plan
    assert (start["step"], start["world_size"], start["unit"]) == (0, 1, "tokens")
    assert (start["params"], start["adapter_params"]) == (plan.params, plan.adapter_params)
    assert start["flops_per_token"] == plan.flops_per_token
    assert (start["peak_flops"], start["pid"], start["host"]) == (1e9, os.getpid(), socket.gethostname())
    assert all(sum(event["time_s"].values()) == pytest.approx(event["step_time_s"]) for event in steps)


def test_a_runs_watch_ends_with_it(context: TrainingRun) -> None:
    trainer = trainer_of(context, evaluated())
    trainer.train()
    assert trainer.watch._closed.is_set()


def test_samples_are_written_between_steps_and_at_the_end(
    context: TrainingRun, source: DrawnTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = with_spec(context, train=TrainSection(max_steps=STEPS, sample_interval_steps=4))
    monkeypatch.setattr(source, "write_sample", lambda: WrittenSample("p", "t"))
    train(sampled, source)
    assert [event["step"] for event in events_of(context, "sample")] == [4, STEPS]
    assert [event["step"] for event in events_of(context, "eval")] == [STEPS], "without an interval at the end alone"


def test_a_run_that_is_done_already_is_evaluated_again_for_its_result(
    context: TrainingRun, source: DrawnTokens
) -> None:
    train(context, source)
    first = read_json(context.run_dir.result_json)
    context.run_dir.result_json.unlink()
    source.evaluations = 0  # type: ignore[attr-defined]
    train(context, source)
    again = read_json(context.run_dir.result_json)
    assert (again["status"], again["heldout_loss"], again["weights_sha256"]) == ("done", 1.0, first["weights_sha256"])
    assert source.evaluations == 1  # type: ignore[attr-defined]
    assert len(events_of(context, "step")) == STEPS


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


def test_a_skipped_update_is_told_of_and_harms_nothing(context: TrainingRun, not_finite: Callable[..., None]) -> None:
    not_finite(3)
    train(context)
    (warning,) = events_of(context, "warning")
    assert warning["step"] == 3 and "update skipped" in warning["message"]
    assert [event["step"] for event in events_of(context, "step") if event["skipped"]] == [3]
    assert read_json(context.run_dir.result_json)["status"] == "done"


def test_a_run_that_skips_as_many_updates_as_are_allowed_ends(
    context: TrainingRun, not_finite: Callable[..., None]
) -> None:
    not_finite(3, 4)
    bounded = with_spec(context, train=TrainSection(max_steps=STEPS, max_skipped_steps=2))
    trainer = trainer_of(bounded, evaluated())
    with raises(WorkerError, "not_finite", "for 2 steps", "up to step 4"):
        trainer.train()
    trainer.watch.close()
    assert not context.run_dir.result_json.exists()


def test_a_model_that_came_to_nothing_leaves_no_checkpoint_of_it(
    context: TrainingRun, source: DrawnTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier ones stay, to go on from."""
    monkeypatch.setattr(source, "evaluate", lambda step: EvalEvent(step=step, heldout_loss=float("nan")))
    failing = with_spec(context, checkpoint=CheckpointSpec(interval_steps=4, mode="sync"))
    trainer = trainer_of(failing, source)
    with raises(WorkerError, "not_finite", "held-out loss"):
        trainer.train()
    trainer.watch.close()
    assert context.run_dir.checkpoint_steps() == [4]


def test_a_leak_is_a_warning_of_its_step(context: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []

    class Watch:
        def __init__(self, device: torch.device, first_step: int, last_step: int):
            given.append((first_step, last_step))

        def check(self, step: int, micro_batch_size: int) -> str | None:
            return "host memory grows" if step == 4 and micro_batch_size else None

    monkeypatch.setattr("trainspec_cli.engine.run.trainer.MemoryWatch", Watch)
    train(context)
    assert [(event["step"], event["message"]) for event in events_of(context, "warning")] == [(4, "host memory grows")]
    assert given == [(0, STEPS)]


def test_allocations_are_those_of_the_step_alone(
    context: TrainingRun, source: DrawnTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that was allocated before a step is not counted again."""
    counts = iter([100, 100, 103, 103, 110, 110, 110])
    monkeypatch.setattr("trainspec_cli.engine.run.trainer.device_allocations", lambda device: next(counts))
    monkeypatch.setattr(source.staging, "cut", Traffic)
    train(context, source)
    assert [event["allocations"] for event in events_of(context, "step")] == [0, 3, 0, 7, 0, 0]


def test_the_scheduler_divides_each_step_and_its_rate_is_the_groups(context: TrainingRun) -> None:
    trainer = trainer_of(context, evaluated())
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
    trainer.train()
    assert asked == list(range(STEPS))
    assert noted == [(step, 2 if step <= 3 else 1, BATCH) for step in range(1, STEPS + 1)]
    assert trainer.coordinator.rate == 10.0 * STEPS


def test_on_a_gpu_a_step_is_recorded_when_the_passes_of_the_next_are_queued(
    context: TrainingRun, source: DrawnTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has work while the host waits for its figures; before an evaluation and at the end none is left."""
    order: list[str] = []
    monkeypatch.setattr(marks, "mark", lambda on_gpu: 0.0)
    trainer = trainer_of(context, source)
    monkeypatch.setattr("trainspec_cli.engine.observe.clock.mark", lambda on_gpu: 0.0)
    beat, record, evaluate = trainer.watch.beat, trainer._record, source.evaluate
    monkeypatch.setattr(trainer.watch, "beat", lambda step: order.append(f"made {step}") or beat(step))
    monkeypatch.setattr(trainer, "_record", lambda done: order.append(f"recorded {done.step}") or record(done))
    monkeypatch.setattr(source, "evaluate", lambda step: order.append("evaluated") or evaluate(step))
    compute = step.compute_gradients
    monkeypatch.setattr(step, "compute_gradients", lambda *given: order.append("passes") or compute(*given))
    trainer.clock.on_gpu = True
    trainer.train()
    first = ["passes", "made 1", "passes", "recorded 1", "made 2", "recorded 2", "evaluated"]
    assert order == [
        word.replace("1", str(n + 1)).replace("2", str(n + 2)) if n else word for n in (0, 2, 4) for word in first
    ]
    assert [event["step"] for event in events_of(context, "step")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("known", "flops", "source"), [(5e12, 5e12, "the data sheet"), (None, 7.0, "measured")])
def test_the_peak_is_the_plans_or_measured(
    context: TrainingRun, monkeypatch: pytest.MonkeyPatch, known: float | None, flops: float, source: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "trainspec_cli.engine.run.trainer.measure_peak", lambda *given: asked.append(given) or Peak(7.0, "measured")
    )
    made = replace(context, plan=replace(context.plan, peak_flops=known, peak_source="the data sheet", compute="bf16"))
    assert trainer_of(made, evaluated()).tally.peak == Peak(flops, source)
    assert asked == ([] if known else [(CPU, torch.bfloat16)])
