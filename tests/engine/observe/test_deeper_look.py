"""A rank that looks at itself when the supervisor asks for it."""

from __future__ import annotations

import json
import time

import pytest
import torch
from lab.supervisor import PlayedSupervisor

from trainspec_cli.engine.observe import deeper_look, stack_samples
from trainspec_cli.engine.observe.deeper_look import LOOK_STEPS, TRACE_BYTES, DeeperLook
from trainspec_cli.recipe.results.verdict import LookOrder
from trainspec_cli.run.folder.event_types.events import LookEvent, WarningEvent
from trainspec_cli.run.folder.paths import RunDir

PATIENCE_S = 60.0
SPIN = LookOrder(number=1, looker=2, cause="slow_device", rank=2)


class Steps:
    """Rank 2 of a run, which computes a little and stays at one line for the rest of each step."""

    def __init__(self, run: RunDir):
        self.run, self.events, self.step = run, [], 0
        self.supervisor = PlayedSupervisor()
        self.look = DeeperLook(run, self, self.supervisor, 2, torch.device("cpu"))
        self.look.start()

    def write(self, event):
        self.events.append(event)

    def make(self):
        self.step += 1
        torch.ones(32, 32) @ torch.ones(32, 32)
        time.sleep(0.05)
        self.look.after_step(self.step)

    def until(self, condition):
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s
            self.make()


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.setattr(deeper_look, "POLL_S", 0.01)
    made = []

    def begin():
        made.append(Steps(RunDir(tmp_path)))
        return made[-1]

    yield begin
    for one in made:
        one.look.close()
        one.look.join()


def test_a_look_names_the_line_and_the_operations_of_whole_steps(steps):
    rank = steps()
    rank.until(lambda: rank.step == 3)
    rank.supervisor.deliver(SPIN)
    rank.until(lambda: rank.events)
    (event,) = rank.events
    assert isinstance(event, LookEvent)
    look = event.look
    assert look.order == SPIN and look.last_step - look.first_step + 1 == LOOK_STEPS and look.first_step > 4
    assert "time.sleep(0.05)" in look.lines[0].text and look.lines[0].share > 0.5
    assert "aten::mm" in [one.name for one in look.operations]
    assert [rank.look.was_profiled(step) for step in (look.first_step - 1, look.first_step, look.last_step)] == [
        False,
        True,
        True,
    ]
    assert not rank.look.was_profiled(look.last_step + 1)
    text = (rank.run.root / look.file).read_text()
    assert len(text) <= TRACE_BYTES and json.loads(text)["order"]["looker"] == 2
    for _ in range(5):
        rank.make()
    assert len(rank.events) == 1, "it is taken once"


def test_a_rank_that_hangs_is_sampled_without_a_step(steps, monkeypatch):
    monkeypatch.setattr(deeper_look, "STALLED_S", 0.1)
    monkeypatch.setattr(stack_samples.PySpy, "find", lambda: None)
    rank = steps()
    rank.make()
    rank.supervisor.deliver(LookOrder(number=1, looker=2, cause="hang", rank=2))
    end_s = time.monotonic() + PATIENCE_S
    while not rank.events and time.monotonic() < end_s:
        time.sleep(0.01)
    look = rank.events[0].look
    assert (look.first_step, look.last_step, look.operations) == (2, 1, ())
    assert look.lines[0].text == "time.sleep(0.01)"


def test_a_run_that_ends_in_view_ends_the_profile_and_reports_nothing(steps):
    rank = steps()
    rank.supervisor.deliver(SPIN)
    rank.until(lambda: rank.look._begun is not None)
    rank.look.close()
    rank.look.join()
    assert rank.events == [] and not torch.autograd._profiler_enabled()


def test_a_profiler_that_runs_already_is_left_alone_and_said(steps):
    rank = steps()
    with torch.autograd.profiler.profile():
        rank.supervisor.deliver(SPIN)
        rank.until(lambda: rank.events)
        assert torch.autograd._profiler_enabled()
    assert isinstance(rank.events[0], WarningEvent) and "no profile" in rank.events[0].message


def test_a_full_disk_ends_no_training(steps, monkeypatch):
    rank = steps()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deeper_look, "write_text", full)
    rank.supervisor.deliver(SPIN)
    rank.until(lambda: rank.events)
    look = rank.events[0].look
    assert look.file is None and look.notes[0].endswith(": No space left on device") and len(look.notes) == 1
    assert look.operations
