"""When checkpoints are started, postponed and reported: decisions that follow from what the ranks have agreed on."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lab.engine_runs import CPU, KeptEvents, run_of
from lab.problems import raises

from trainspec_cli.core.errors import MachineError
from trainspec_cli.engine.checkpoint import files
from trainspec_cli.engine.checkpoint.files import Held, TensorPart
from trainspec_cli.engine.checkpoint.manifest import MANIFEST, About
from trainspec_cli.engine.checkpoint.memory import CopyLocation
from trainspec_cli.engine.checkpoint.saver import Saved
from trainspec_cli.engine.comm.compressed import Compression
from trainspec_cli.engine.run import checkpoints as module
from trainspec_cli.engine.run.checkpoints import MEASURING_STEPS, Cadence, Checkpoints
from trainspec_cli.recipe.keys.cluster import ClusterSpec, ReliabilitySpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import CheckpointSpec
from trainspec_cli.recipe.records import ABSENT, to_plain
from trainspec_cli.run.folder import memory
from trainspec_cli.run.folder.event_types.events import (
    CadenceEvent,
    CheckpointEvent,
    EndedMark,
    FailureMark,
    LaunchMark,
    WarningEvent,
)
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir

pytestmark = pytest.mark.usefixtures("one_process")


class OneTensor(Held):
    def parts(self):
        return [TensorPart.whole("w", torch.arange(1000.0))]


class Moved(Held):
    """The state after a change of the layout."""

    def parts(self):
        return [TensorPart.whole("v", torch.arange(7.0))]


def plan_of(checkpoint, mtbf_device_hours=1000.0, world_size=1, replica_groups=1, resilience=ResilienceSpec()):  # noqa: B008
    spec = SimpleNamespace(
        checkpoint=checkpoint,
        train=SimpleNamespace(seed=1),
        cluster=ClusterSpec(reliability=ReliabilitySpec(mtbf_device_hours=mtbf_device_hours)),
        resilience=resilience,
    )
    return SimpleNamespace(spec=spec, layout=Layout(), world_size=world_size, replica_groups=replica_groups)


def make(tmp_path, spec, journal=None, total_steps=10_000):
    state = SimpleNamespace(held=OneTensor([], [], None), device=CPU, compression=Compression())
    write_json(RunDir(tmp_path).run_json, {"memory_secret": "s"})
    plan = plan_of(spec)
    plan.total_steps = total_steps
    return Checkpoints(run_of(plan, state, RunDir(tmp_path), journal or KeptEvents()))


def take_steps(checkpoints, steps, writing=lambda step: False, step_time_s=0.1):
    for step in steps:
        checkpoints.after_step(step, samples=8 * step)
        if not writing(step):
            while checkpoints.writing:
                pass
        checkpoints.note_step(step, step_time_s, writing=writing(step))


def no_room(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_so_many_steps_and_at_the_end(tmp_path, mode):
    journal = KeptEvents()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=3, mode=mode, keep_last=9), journal)
    take_steps(checkpoints, range(1, 9))
    checkpoints.save_last(8, 64)
    assert RunDir(tmp_path).checkpoint_steps() == [3, 6, 8]
    saved = journal.of(CheckpointEvent)
    assert [event.step for event in saved] == [3, 6, 8]
    assert [bool(event.waited_s) for event in saved] == [False, False, True]
    assert journal.of(WarningEvent) == []


def test_one_that_falls_due_while_another_is_written_is_put_off_and_that_is_told_once(tmp_path):
    journal = KeptEvents()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=2, keep_last=9), journal)
    take_steps(checkpoints, range(1, 13), writing=lambda step: step in (3, 4))
    checkpoints.save_last(12, 96)
    assert RunDir(tmp_path).checkpoint_steps() == [2, 6, 8, 10, 12]
    (warning,) = journal.of(WarningEvent)
    assert "at step 4 was postponed to step 6" in warning.message


def test_the_samples_taken_come_back(tmp_path):
    checkpoints = make(tmp_path, CheckpointSpec())
    checkpoints.save_last(5, 37)
    assert (RunDir(tmp_path).checkpoint(5) / MANIFEST).is_file()
    assert make(tmp_path, CheckpointSpec()).resume().manifest.about.samples == 37


def test_between_checkpoints_copies_are_kept_in_memory_until_the_run_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    journal, spec = KeptEvents(), CheckpointSpec(interval_steps=4, memory_interval_steps=2, keep_last=9)
    checkpoints, run_dir = make(tmp_path / "run", spec, journal), RunDir(tmp_path / "run")
    assert checkpoints.resume() is None
    take_steps(checkpoints, range(1, 8))
    assert [event.step for event in journal.events] == [4], "a copy in memory is no checkpoint"
    again = make(tmp_path / "run", spec)
    restored = again.resume()
    assert (restored.manifest.step, restored.manifest.about.samples) == (6, 48)
    assert restored.manifest.about.recipe_digest == "digest"
    again.after_step(7, samples=56)
    assert memory.newest_copy(run_dir) == 6
    take_steps(again, [8])
    assert run_dir.checkpoint_steps() == [4, 8]
    marks = memory.memory_folder(run_dir).glob("slot*/rank*.json")
    assert sorted(read_json(mark)["about"]["step"] for mark in marks) == [6, 8], "what it resumed from stays meanwhile"
    again.save_last(9, 72)
    assert run_dir.checkpoint_steps() == [4, 8, 9]
    assert memory.find_copies(run_dir) is None


def test_a_copy_that_falls_due_while_a_checkpoint_is_written_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    journal, spec = KeptEvents(), CheckpointSpec(interval_steps=4, memory_interval_steps=5, keep_last=9)
    checkpoints = make(tmp_path / "run", spec, journal)
    take_steps(checkpoints, range(1, 6), writing=lambda step: step in (4, 5))
    take_steps(checkpoints, range(6, 7))
    assert memory.newest_copy(RunDir(tmp_path / "run")) == 4
    assert journal.of(WarningEvent) == []


def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_the_last_one_an_error(tmp_path, monkeypatch):
    journal = KeptEvents()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=2, mode="sync", keep_last=9), journal)
    take_steps(checkpoints, range(1, 3))
    whole = files.write_manifest
    monkeypatch.setattr(files, "write_manifest", no_room)
    take_steps(checkpoints, range(3, 5))
    (warning,) = journal.of(WarningEvent)
    assert warning.step == 4
    assert "checkpoint of step 4 " in warning.message and "rank 0: No space left on device" in warning.message
    assert [event.step for event in journal.of(CheckpointEvent)] == [2]
    with raises(MachineError, "cannot_save", "step 5 "):
        checkpoints.save_last(5, 40)
    monkeypatch.setattr(files, "write_manifest", whole)
    checkpoints.save_last(6, 48)
    assert RunDir(tmp_path).checkpoint_steps() == [2, 6]


def test_the_best_one_is_kept_until_a_better_one_is_written(tmp_path, monkeypatch):
    """The better one cannot be written: the one before it stays, also when those after it are written."""
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=2, mode="sync", keep_last=1, keep_best=True))
    take_steps(checkpoints, [1])
    checkpoints.save_kept(1, 8)
    with monkeypatch.context() as full:
        full.setattr(files, "write_manifest", no_room)
        take_steps(checkpoints, [2, 3])
        checkpoints.save_kept(3, 24)
    take_steps(checkpoints, range(4, 9))
    assert RunDir(tmp_path).checkpoint_steps() == [1, 8]


def test_a_replica_group_that_does_not_write_begins_none_later(tmp_path):
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=2, mode="sync", keep_last=9))
    for step in range(1, 8):
        checkpoints.after_step(step, 8 * step, writes=step in (3, 5, 6, 7))
        checkpoints.note_step(step, 0.1, writing=False)
    assert RunDir(tmp_path).checkpoint_steps() == [6]


def test_a_run_that_ends_at_a_checkpoint_writes_no_second_one(tmp_path):
    journal = KeptEvents()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=3, mode="sync"), journal)
    take_steps(checkpoints, range(1, 4))
    checkpoints.save_last(3, 24)
    assert [event.step for event in journal.of(CheckpointEvent)] == [3]
    resumed = make(tmp_path, CheckpointSpec(interval_steps=3), journal)
    resumed.resume()
    resumed.save_last(3, 24)
    assert len(journal.events) == 1, "what the run resumed from is on disk already"


def test_without_an_interval_only_the_end_is_written(tmp_path):
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=None))
    take_steps(checkpoints, range(1, 30))
    checkpoints.save_last(29, 29)
    assert RunDir(tmp_path).checkpoint_steps() == [29]


@pytest.mark.parametrize(("local", "ranks_per_node"), [("2", 2), (None, 6)])
def test_a_rank_finds_its_node_by_the_ranks_that_a_node_has(tmp_path, monkeypatch, local, ranks_per_node):
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    monkeypatch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 5, get_world_size=lambda: 6))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    checkpoints = make(tmp_path / "run", CheckpointSpec(memory_interval_steps=2))
    assert checkpoints._memory == CopyLocation(memory.memory_folder(RunDir(tmp_path / "run")), 5, 6, ranks_per_node)


def test_what_a_checkpoint_took_is_recorded_in_its_own_fields(tmp_path, monkeypatch):
    """How long training waited, and how long until all was on disk."""
    journal = KeptEvents()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=1, mode="sync"), journal)
    monkeypatch.setattr(checkpoints._saver, "save", lambda about: Saved(about, 1234, blocked_s=0.5, written_s=3.0))
    checkpoints.after_step(7, 56)
    (event,) = journal.of(CheckpointEvent)
    assert (event.step, event.path) == (7, str(RunDir(tmp_path).checkpoint(7)))
    assert (event.bytes, event.seconds, event.written_s, event.waited_s) == (1234, 0.5, 3.0, ABSENT)
    checkpoints.save_last(8, 64)
    assert journal.of(CheckpointEvent)[-1].waited_s == 3.0, "the last one holds up the run's end, and no step"


def test_putting_off_is_told_of_once_however_often_it_comes(tmp_path):
    journal = KeptEvents()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=2, keep_last=9), journal)
    take_steps(checkpoints, range(1, 13), writing=lambda step: step in (3, 4, 7, 8))
    assert len(journal.of(WarningEvent)) == 1
    assert [event.step for event in journal.of(CheckpointEvent)] == [2, 6, 10]


def test_auto_counts_from_the_checkpoint_that_the_run_resumed_from(tmp_path):
    make(tmp_path, CheckpointSpec(None)).save_last(25, 200)
    resumed = make(tmp_path, CheckpointSpec(interval_steps="auto", mode="sync", keep_last=9))
    resumed.resume()
    take_steps(resumed, range(26, 33), step_time_s=15.0)
    assert RunDir(tmp_path).checkpoint_steps() == [25, 29], "60 s, at 15 s per step"


def test_what_a_run_resumed_from_in_memory_is_written_to_disk_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    spec = CheckpointSpec(interval_steps=100, memory_interval_steps=2)
    take_steps(make(tmp_path / "run", spec), range(1, 7))
    resumed = make(tmp_path / "run", spec)
    assert resumed.resume().manifest.step == 6
    resumed.save_last(6, 48)
    assert RunDir(tmp_path / "run").checkpoint_steps() == [6]


def test_after_a_change_of_layout_the_new_state_is_written_and_restored(tmp_path, monkeypatch):
    """In the other slot of the nodes' memory: the copy of before stays until the next one is whole. And what was kept
    stays kept."""
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    spec = CheckpointSpec(interval_steps=4, memory_interval_steps=2, keep_last=1, keep_best=True)
    checkpoints, run_dir = make(tmp_path / "run", spec), RunDir(tmp_path / "run")
    take_steps(checkpoints, range(1, 4))
    checkpoints.save_kept(3, 24)
    checkpoints.finish_writing()
    before = checkpoints._saver
    moved = SimpleNamespace(held=Moved([], [], None), device=CPU, compression=Compression())
    checkpoints._run.state = moved
    take_steps(checkpoints, range(4, 9))
    assert checkpoints._saver is not before and checkpoints._saver is checkpoints._saver
    assert run_dir.checkpoint_steps() == [3, 8]
    entries = read_json(run_dir.checkpoint(8) / MANIFEST)["tensors"]
    assert entries["v"]["shape"] == [7] and "w" not in entries
    marks = memory.memory_folder(run_dir).glob("slot*/rank*.json")
    assert sorted(read_json(mark)["about"]["step"] for mark in marks) == [6, 8]


# interval_steps: auto


def test_auto_tells_of_its_choice(tmp_path):
    journal = KeptEvents()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps="auto", mode="sync", keep_last=9), journal)
    take_steps(checkpoints, range(1, 5), step_time_s=20.0)
    (chosen,) = journal.of(CadenceEvent)
    assert (chosen.step, chosen.step_time_s, chosen.mtbf_s) == (4, pytest.approx(20.0), 3.6e6)
    assert chosen.interval_steps in range(1, 31), "ten minutes at the most"


@pytest.mark.parametrize(("step_time_s", "first"), [(0.5, 120), (25.0, 4), (100.0, 4)])
def test_auto_writes_the_first_after_a_minute_and_of_a_shorter_run_the_last_alone(tmp_path, step_time_s, first):
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps="auto", mode="sync"))
    take_steps(checkpoints, range(1, first), step_time_s=step_time_s)
    assert RunDir(tmp_path).checkpoint_steps() == []
    take_steps(checkpoints, [first], step_time_s=step_time_s)
    assert RunDir(tmp_path).checkpoint_steps() == [first]


@pytest.mark.parametrize(("total_steps", "prepared"), [(599, 0), (600, 1)])
def test_auto_makes_room_for_a_copy_only_where_one_will_be_written(tmp_path, monkeypatch, total_steps, prepared):
    checkpoints, asked = make(tmp_path, CheckpointSpec(interval_steps="auto"), total_steps=total_steps), []
    monkeypatch.setattr(checkpoints._saver, "prepare", lambda: asked.append(1))
    checkpoints.resume()
    take_steps(checkpoints, range(1, 10))
    assert len(asked) == prepared


def test_auto_begins_to_count_at_the_step_that_a_run_resumes_from():
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto")))
    cadence.start_at(25)
    for _ in range(MEASURING_STEPS):
        cadence.note_step(6.0, writing=False)
    assert [step for step in range(26, 60) if cadence.is_due(step)] == [35, 45, 55]


def test_where_no_failure_throws_the_run_back_ten_minutes_are_lost_at_most():
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=math.inf))
    cadence.note_step(0.5, writing=True)
    chosen = cadence.learn(saved(1.0, 2.0))
    assert (chosen.mtbf_s, chosen.step_time_s, chosen.drag_s) == (None, 0.5, 0.0)
    assert [step for step in range(1, 3000) if cadence.is_due(step)] == [1200, 2400]


@pytest.mark.parametrize(
    ("mode", "groups", "mtbf_s"), [("restart", 4, 900.0), ("elastic", 1, 900.0), ("elastic", 4, 900.0 / 0.05)]
)
def test_failures_that_throw_a_run_back_are_those_of_all_devices_or_of_all_groups(mode, groups, mtbf_s):
    """4 devices fail once an hour each; a twentieth of the failures affects the whole job."""
    resilience = ResilienceSpec(mode=mode)
    plan = plan_of(CheckpointSpec(interval_steps="auto"), 1.0, 4, groups, resilience)
    plan.spec.cluster = ClusterSpec(reliability=ReliabilitySpec(mtbf_device_hours=1.0, job_wide_fraction=0.05))
    cadence = Cadence(plan)
    cadence.note_step(0.5, writing=False)
    assert cadence.learn(saved(1.0, 2.0)).mtbf_s == pytest.approx(mtbf_s)


def test_a_failure_that_was_just_seen_counts_for_more_than_the_clusters_figure(monkeypatch):
    """One device that fails every 8,184 days, by the cluster's figure; the run failed 2 minutes after its launch."""
    days = 8184
    monkeypatch.setattr(module.time, "time", lambda: 1060.0)
    marks = [LaunchMark(time=100.0), FailureMark(time=220.0), EndedMark(time=230.0), LaunchMark(time=1000.0)]
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=days * 24.0), marks)
    cadence.note_step(0.5, writing=False)
    chosen = cadence.learn(saved(1.0, 2.0))
    assert (chosen.failures, chosen.observed_s) == (1, 180.0)
    assert 180.0 < chosen.mtbf_s < 3600.0
    assert chosen.interval_steps < 300
    unharmed = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=days * 24.0), marks[3:])
    unharmed.note_step(0.5, writing=False)
    chosen = unharmed.learn(saved(1.0, 2.0))
    assert (chosen.failures, chosen.mtbf_s) == (ABSENT, days * 86400.0)


def test_only_rank_0s_figures_count(monkeypatch):
    """What it tells replaces the interval of the others, which have measured something else."""
    told = []
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=1.0))
    cadence.note_step(0.5, writing=False)
    of_rank_0 = to_plain(replace(cadence._best(saved(9.0, 9.0)), interval_steps=33))
    monkeypatch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 1))
    monkeypatch.setattr(module, "broadcast_json", lambda own, read: told.append(own) or read(of_rank_0))
    assert cadence.learn(saved(1.0, 2.0)).interval_steps == 33
    assert told == [None]
    assert [step for step in range(1, 70) if cadence.is_due(step)] == [33, 66]


def test_a_fixed_interval_is_not_learned():
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps=7)))
    cadence.note_step(0.5, writing=False)
    assert cadence.learn(saved(1.0, 2.0)) is None
    assert [step for step in range(1, 22) if cadence.is_due(step)] == [7, 14, 21]


def saved(blocked_s: float, written_s: float) -> Saved:
    return Saved(About(MEASURING_STEPS, 0, 0, ""), 1, blocked_s, written_s)


def test_auto_measures_one_and_then_goes_by_its_cost_and_the_failure_rate():
    """Daly: sqrt(2 x 2 s x 3600 s) = 120 s, nearly; at 0.5 s per step that is some 240 steps."""
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=1.0))
    assert [cadence.note_step(0.5, writing=False) for _ in range(20)] == [None, None, 120, *[None] * 17]
    assert [step for step in range(1, 200) if cadence.is_due(step)] == [120]
    for _ in range(4):
        cadence.note_step(0.75, writing=True)
    chosen = cadence.learn(saved(1.0, 3.0))
    assert chosen.drag_s == pytest.approx(1.0)
    assert chosen.step_time_s == 0.5
    assert 235 <= chosen.interval_steps <= 245
    assert not any(cadence.is_due(step) for step in range(200, 120 + chosen.interval_steps))
    assert cadence.is_due(120 + chosen.interval_steps)


def test_auto_counts_the_slower_steps_beside_each_checkpoint_once():
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=1.0))
    for slow_steps in (4, 2):
        for _ in range(20):
            cadence.note_step(0.5, writing=False)
        for _ in range(slow_steps):
            cadence.note_step(0.75, writing=True)
        chosen = cadence.learn(saved(1.0, 3.0))
        assert chosen.drag_s == pytest.approx(0.25 * slow_steps)


def test_auto_never_writes_oftener_than_one_takes_to_be_whole():
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=0.01))
    cadence.note_step(0.5, writing=False)
    assert cadence.learn(saved(0.001, 60.0)).interval_steps == 120


def test_auto_keeps_its_interval_when_one_fails_and_tells_only_of_changes():
    cadence = Cadence(plan_of(replace(CheckpointSpec(), interval_steps="auto")))
    cadence.note_step(0.5, writing=False)
    assert cadence.learn(replace(saved(1.0, 2.0), error=MachineError("no room"))) is None
    assert cadence.learn(saved(1.0, 2.0)) is not None
    assert cadence.learn(saved(1.0, 2.0)) is None
