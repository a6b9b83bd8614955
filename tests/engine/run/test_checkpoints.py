"""When checkpoints are begun, put off and told of: decisions by what the ranks have agreed on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trainspec_cli.engine.checkpoint.manifest import MANIFEST, About
from trainspec_cli.engine.checkpoint.parts import Held, TensorPart
from trainspec_cli.engine.checkpoint.saver import Saved
from trainspec_cli.engine.run.checkpoints import MEASURING_STEPS, Cadence, Checkpoints
from trainspec_cli.errors import MachineError
from trainspec_cli.rundir.event_types import CheckpointEvent, WarningEvent
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.recipe.checkpoint import CheckpointSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec, ReliabilitySpec
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.resilience import ResilienceSpec

pytestmark = pytest.mark.usefixtures("one_process")
CPU = torch.device("cpu")


class OneTensor(Held):
    def parts(self):
        return [TensorPart.whole("w", torch.arange(1000.0))]


class Kept:
    """A journal that keeps what is written."""

    def __init__(self):
        self.events = []

    def write(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def plan_of(checkpoint, mtbf_device_hours=1000.0):
    spec = SimpleNamespace(
        checkpoint=checkpoint,
        train=SimpleNamespace(seed=1),
        cluster=ClusterSpec(reliability=ReliabilitySpec(mtbf_device_hours=mtbf_device_hours)),
        resilience=ResilienceSpec(),
    )
    return SimpleNamespace(spec=spec, layout=Layout(), world_size=1)


def make(tmp_path, spec, journal=None):
    state = SimpleNamespace(held=OneTensor([], [], None), device=CPU)
    return Checkpoints(plan_of(spec), RunDir(tmp_path), state, "digest", journal or Kept())


def take_steps(checkpoints, steps, writing=lambda step: False):
    for step in steps:
        checkpoints.after_step(step, samples=8 * step)
        if not writing(step):
            while checkpoints.writing:
                pass
        checkpoints.note_step(step, 0.1, writing=writing(step))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_so_many_steps_and_at_the_end(tmp_path, mode):
    journal = Kept()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=3, mode=mode, keep_last=9), journal)
    take_steps(checkpoints, range(1, 9))
    checkpoints.save_last(8, 64)
    assert RunDir(tmp_path).checkpoint_steps() == [3, 6, 8]
    saved = journal.of(CheckpointEvent)
    assert [event.step for event in saved] == [3, 6, 8]
    assert [bool(event.waited_s) for event in saved] == [False, False, True]
    assert journal.of(WarningEvent) == []


def test_one_that_falls_due_while_another_is_written_is_put_off_and_that_is_told_once(tmp_path):
    journal = Kept()
    checkpoints = make(tmp_path, CheckpointSpec(interval_steps=2, keep_last=9), journal)
    take_steps(checkpoints, range(1, 13), writing=lambda step: step in (3, 4))
    checkpoints.save_last(12, 96)
    assert RunDir(tmp_path).checkpoint_steps() == [2, 6, 8, 10, 12]
    (warning,) = journal.of(WarningEvent)
    assert "the checkpoint due at step 4 was put off to step 6" in warning.message


def test_the_samples_taken_come_back(tmp_path):
    checkpoints = make(tmp_path, CheckpointSpec())
    checkpoints.save_last(5, 37)
    assert (RunDir(tmp_path).checkpoint(5) / MANIFEST).is_file()
    assert make(tmp_path, CheckpointSpec()).resume().manifest.about.samples == 37


# interval_steps: auto


def saved(blocked_s: float, written_s: float) -> Saved:
    return Saved(About(MEASURING_STEPS, 0, 0, ""), 1, blocked_s, written_s)


def test_auto_measures_one_and_then_goes_by_its_cost_and_the_failure_rate():
    """Daly: sqrt(2 x 2 s x 3600 s) = 120 s, nearly; at 0.5 s a step that is some 240 steps."""
    cadence = Cadence(plan_of(CheckpointSpec(interval_steps="auto"), mtbf_device_hours=1.0))
    assert [step for step in range(1, MEASURING_STEPS + 1) if cadence.is_due(step)] == [MEASURING_STEPS]
    for _ in range(20):
        cadence.note_step(0.5, writing=False)
    for _ in range(4):
        cadence.note_step(0.75, writing=True)
    chosen = cadence.learn(saved(1.0, 3.0))
    assert chosen.drag_s == pytest.approx(1.0)
    assert chosen.step_time_s == 0.5
    assert 235 <= chosen.interval_steps <= 245
    assert not any(cadence.is_due(step) for step in range(MEASURING_STEPS + 1, 200))
    assert cadence.is_due(MEASURING_STEPS + chosen.interval_steps)


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
