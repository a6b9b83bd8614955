import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lab.waiting import PATIENCE_S

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.comm.forking import Background
from trainspec_cli.engine.data import loader
from trainspec_cli.engine.observe import watch
from trainspec_cli.engine.observe.watch import StepWatch, describe
from trainspec_cli.run.folder.event_types.events import HangEvent, StallEvent, WarningEvent
from trainspec_cli.run.folder.events import EventWriter, read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import WorkerErrorRecord, read_error
from trainspec_cli.run.recovery.collectives import read_recorder

WORKER = Path(__file__).parent / "hanging_worker.py"


@pytest.mark.slow
def test_a_sleeping_rank_is_named_with_its_stack_and_the_collective_the_other_waits_in(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), tmp_path],
            env=os.environ | {"TORCH_FR_BUFFER_SIZE": "50"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert ranks[0].wait() == 5
    ranks[1].kill()
    run_dir = RunDir(tmp_path)
    told = json.loads(run_dir.error(0).read_text())
    assert told["step"] == 8
    assert "rank 1 is late: " in told["message"] and "gloo:all_reduce of 3x5" in told["message"]
    assert "in oversleep" in told["traceback"]
    assert "all_reduce" in told["traceback"]
    assert [event["type"] for event in read_events(run_dir.events(1))] == ["stall", "hang"]
    assert "recent call first" in ranks[0].communicate()[1], "faulthandler's own words, in the log"
    ranks[1].communicate()


class Listening:
    """A journal that keeps what is written."""

    def __init__(self, run_dir=None):
        self.events, self._run_dir = [], run_dir

    def write(self, event):
        self.events.append(event)

    @property
    def hangs(self):
        return [event for event in self.events if isinstance(event, HangEvent)]

    def events_of(self, rank):
        return self._run_dir.events(rank)


@pytest.mark.usefixtures("one_process")
@pytest.mark.slow
def test_steps_in_time_and_what_lies_between_them_are_no_hang(tmp_path):
    journal = Listening()
    watching = StepWatch(RunDir(tmp_path), journal, floor_s=3.0, first_s=1800.0)
    watching.start()
    for step in range(1, 8):
        time.sleep(0.02)
        watching.beat(step)
    with watching.between_steps():
        time.sleep(3.5)
    watching.beat(8)
    time.sleep(0.3)
    watching.close()
    watching.join()
    assert journal.events == []


def report(waiting, collectives):
    about = {"step": 4, "waited_s": 10.0, "deadline_s": 5.0, "host": "h", "stack": "here"}
    return HangEvent(waiting=waiting, collectives=collectives, waits_in="gloo:x", **about)


def test_the_rank_behind_in_its_collectives_is_late():
    reports = {0: report(True, {"world": 7}), 1: report(True, {"world": 6}), 2: report(True, {"world": 7})}
    message, stacks = describe(reports, 3, step=4, waited_s=10.0, deadline_s=5.0)
    for fact in ("step 4 hung: ", " 10.0 s (limit: 5.0 s); rank 1 is late: ", " fewer "):
        assert fact in message
    assert stacks.count("was at") == 3


# With a clock that the test moves


class Clock:
    """Stands in for `time`, and for what wakes the thread: its ticks last as long as `ticks` says."""

    def __init__(self, now_s=1000.0):
        self.now_s, self.ticks, self.slept_s = now_s, [], 0.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self.slept_s += seconds

    def wait(self, tick_s):
        """Return True, which closes the watch, when no tick is left."""
        if not self.ticks:
            return True
        self.now_s += self.ticks.pop(0)
        return False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


@pytest.fixture
def make_watch(clock, tmp_path, monkeypatch):
    """make_watch(floor_s=2.0): -> a watch of two ranks with the test's clock, its journal and the exit codes of it."""
    monkeypatch.setattr(watch, "faulthandler", Dumps())

    def make(floor_s, rank=0, world_size=1, first_s=1800.0):
        ranks = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: world_size)
        monkeypatch.setattr(watch, "dist", ranks)
        journal, exits = Listening(RunDir(tmp_path)), []
        made = StepWatch(RunDir(tmp_path), journal, floor_s, first_s, end=exits.append)
        made._closed = clock
        return made, journal, exits

    return make


class Dumps:
    """Stands in for `faulthandler`: the time after which it is to write the stacks, None while it is off."""

    def __init__(self):
        self.after_s = None

    def dump_traceback_later(self, after_s):
        self.after_s = after_s

    def cancel_dump_traceback_later(self):
        self.after_s = None


def beat_every(clock, watching, *steps_s):
    for step, step_s in enumerate(steps_s, 1):
        clock.now_s += step_s
        watching.beat(step)


@pytest.mark.parametrize(
    ("floor_s", "steps_s", "limit_s"),
    [
        (2.0, [90.0, 1.0, 1.5, 1.0], 7.5),  # the first one compiles and is not learned from
        (20.0, [90.0, 1.0, 1.5, 1.0], 20.0),
        (2.0, [90.0, 1.0, 1.5], 1800.0),  # too few to learn from
        (2.0, [], 1800.0),
        (4000.0, [], 1800.0),
        (4000.0, [1.0], 4000.0),
        (None, [90.0, 1.0, 1.5, 1.0], None),
    ],
)
def test_a_step_may_take_five_times_the_slowest_of_those_before_it(clock, make_watch, floor_s, steps_s, limit_s):
    watching, journal, _ = make_watch(floor_s)
    beat_every(clock, watching, *steps_s)
    clock.ticks = [1.0] * 9000
    watching.run()
    assert len(journal.hangs) == (limit_s is not None)
    if limit_s is not None:
        (event,) = journal.hangs
        assert (event.step, event.deadline_s) == (len(steps_s) + 1, limit_s)
        assert limit_s < event.waited_s <= limit_s + 1.0
        assert event.host and "run" in event.stack


def test_the_slowest_of_the_last_hundred_steps_counts(clock, make_watch):
    watching, _, _ = make_watch(0.1)
    beat_every(clock, watching, 1.0, 7.0, *[2.0] * 99)
    assert watching._deadline_s == 35.0
    beat_every(clock, watching, 2.0)
    assert watching._deadline_s == 10.0
    assert watch.faulthandler.after_s == 10.25


@pytest.mark.parametrize(("pauses", "hung"), [([900.0] * 9, False), ([1.9] * 9, True), ([], False)])
def test_the_time_in_which_the_process_was_stopped_does_not_count(clock, make_watch, pauses, hung):
    """After SIGSTOP, or the sleep of the machine, a tick comes much later than it should."""
    watching, journal, _ = make_watch(2.0)
    beat_every(clock, watching, 1.0, 1.0, 1.0, 1.0, 1.0)
    clock.ticks = [1.0, 1.0, *pauses, 1.0, 1.0]
    watching.run()
    assert bool(journal.hangs) == hung


def test_a_step_that_hangs_after_the_process_was_stopped_is_found(clock, make_watch):
    watching, journal, _ = make_watch(2.0)
    beat_every(clock, watching, 1.0, 1.0, 1.0, 1.0, 1.0)
    clock.ticks = [1.0, 900.0, *[1.0] * 9]
    watching.run()
    (event,) = journal.hangs
    assert event.waited_s == 6.0


def test_what_lies_between_steps_has_the_first_steps_limit_and_teaches_nothing(clock, make_watch):
    watching, _, _ = make_watch(2.0)
    beat_every(clock, watching, *[1.0] * 5)
    with watching.between_steps():
        assert watch.faulthandler.after_s is None
        clock.now_s += 500.0
        assert (watching._deadline_s, watching._last_beat) == (1800.0, clock.now_s - 500.0)
    assert (watching._deadline_s, watching._last_beat) == (1800.0, clock.now_s)
    clock.now_s += 60.0
    watching.beat(6)
    assert watching._deadline_s == 5.0
    watching.beat(7)
    assert watch.faulthandler.after_s == 5.25


def leave_report(tmp_path, rank, time_s, monkeypatch, **changes):
    """Another rank's report of a hang, written at `time_s`."""
    monkeypatch.setattr("trainspec_cli.run.folder.events.time.time", lambda: time_s)
    writer = EventWriter(RunDir(tmp_path).events(rank), rank)
    writer.write(WarningEvent(step=1, message="before"))
    writer.write(replace(report(True, {"world": 7}), **changes))
    writer.close()
    monkeypatch.undo()


@pytest.mark.parametrize("rank", [1, 2])
def test_the_first_rank_that_reports_ends_the_run_with_everyones_stack(clock, tmp_path, monkeypatch, make_watch, rank):
    """Ranks 1 and 2 report; rank 0 has an old report alone, and rank 3 none."""
    found_at = clock.now_s + 3.5
    leave_report(tmp_path, 0, found_at - 11.0, monkeypatch)
    leave_report(tmp_path, 1, found_at + 4.0, monkeypatch, host="one", stack="in all_reduce")
    leave_report(tmp_path, 2, found_at - 4.0, monkeypatch, host="two", stack="in oversleep", waiting=False)
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "faulthandler", Dumps())
    watching, journal, exits = make_watch(2.0, rank=rank, world_size=4)
    beat_every(clock, watching, *[0.1] * 5)
    clock.ticks = [1.0] * 60
    watching.run()
    assert clock.slept_s == watch.OTHERS_S
    assert [event.step for event in journal.hangs] == [6]
    if rank == 2:
        assert exits == []
        assert not RunDir(tmp_path).error(2).exists()
        return
    assert exits == [5]
    told = read_error(RunDir(tmp_path).error(1), WorkerErrorRecord)
    assert (told.rank, told.step, told.code, told.exit_code, told.type) == (1, 6, "hang", 5, "Hang")
    assert "resilience.hang_floor_s" in told.hint
    for fact in ("step 6 hung: ", " 3.0 s (limit: 2.0 s); rank 0, 3 is late: ", " not respond"):
        assert fact in told.message
    assert told.message.endswith(" ranks wait in gloo:x")
    assert told.traceback == (
        "rank 0 reported nothing\nrank 3 reported nothing\n"
        "rank 1 (one) was at\nin all_reduce\nrank 2 (two) was at\nin oversleep"
    )


def test_a_hang_ends_the_run_even_where_nothing_can_be_written(clock, make_watch, monkeypatch, tmp_path):
    """A full disk keeps the event in memory and takes no file of the error; a newer start refuses the event."""
    watching, journal, exits = make_watch(2.0)
    beat_every(clock, watching, *[0.1] * 5)
    RunDir(tmp_path).errors_folder.touch()
    clock.ticks = [1.0] * 60
    with pytest.raises(FileExistsError):
        watching.run()
    assert (len(journal.hangs), exits) == (1, [5])
    monkeypatch.setattr(journal, "write", refuse)
    clock.ticks = [1.0] * 60
    with pytest.raises(WorkerError):
        watching.run()
    assert exits == [5, 5]


def refuse(event):
    raise WorkerError("start 2 owns the run now")


def recorded(group, number, created, **changes):
    """An entry of torch's flight recorder."""
    entry = {"is_p2p": False, "process_group": ["0", group], "collective_seq_id": number, "time_created_ns": created}
    return entry | {"profiling_name": "nccl:all_reduce", "input_sizes": [[3, 5], []], "state": "completed"} | changes


@pytest.mark.parametrize(
    ("entries", "waiting", "waits_in"),
    [
        ([recorded("dp", 4, 10), recorded("tp", 9, 20)], False, None),
        ([recorded("dp", 4, 10, state="started"), recorded("tp", 9, 20)], True, "nccl:all_reduce of 3x5, 1"),
        (
            [recorded("dp", 4, 10, state="started"), recorded("tp", 9, 5, state="started", profiling_name="nccl:send")],
            True,
            "nccl:all_reduce of 3x5, 1",
        ),
        (
            [recorded("dp", 3, 5), recorded("dp", 4, 10), recorded("tp", 9, 7), recorded("tp", 2, 9, is_p2p=True)],
            False,
            None,
        ),
        (
            [recorded("dp", 4, 10, state="started", profiling_name="gloo:all_reduce"), recorded("tp", 9, 20)],
            False,
            None,
        ),
    ],
)
def test_a_rank_waits_where_its_device_has_not_finished_a_collective(monkeypatch, entries, waiting, waits_in):
    monkeypatch.setattr(watch, "recorded_collectives", lambda line: read_recorder({"entries": entries}))
    found = watch.whereabouts(threading.get_ident())
    assert (found.waiting, found.waits_in) == (waiting, waits_in)
    assert found.collectives == {"0/dp": 4, "0/tp": 9}
    assert "whereabouts" in found.stack


def test_without_the_flight_recorder_no_collective_is_known(monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert list(watch.recorded_collectives()) == []


def deep(frames):
    return deeper(frames - 1) if frames else watch.whereabouts(threading.get_ident())


def deeper(frames):
    return deep(frames - 1)


def test_a_stack_holds_its_last_thirty_frames(monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    stack = deep(50).stack
    assert stack.count(", in ") == 30
    assert "in whereabouts" in stack


def test_a_step_that_may_come_to_hang_is_told_of_long_before(clock, make_watch):
    watching, journal, exits = make_watch(20.0)
    beat_every(clock, watching, *[2.0] * 5)
    clock.ticks = [1.0] * 7
    watching.run()
    (event,) = journal.events
    assert (type(event), event.step, event.waited_s, event.usual_s) == (StallEvent, 6, 6.0, 2.0)
    assert exits == []


def test_a_report_that_cannot_be_written_leaves_the_watch_at_work(clock, make_watch, monkeypatch):
    watching, journal, exits = make_watch(20.0)
    beat_every(clock, watching, *[2.0] * 5)
    clock.ticks = [1.0] * 30
    kept = journal.write

    def write(event):
        if isinstance(event, StallEvent):
            raise WorkerError("a newer start owns the run")
        kept(event)

    monkeypatch.setattr(journal, "write", write)
    watching.run()
    assert len(journal.hangs) == 1 and exits == [5]


def test_a_rank_waits_where_its_sums_go_on_in_another_thread():
    """It is no suspect of the hang: the thread waits for the others."""
    beside, gate = Background(torch.device("cpu"), lambda *_: None), threading.Event()
    beside.start(lambda: gate.wait(PATIENCE_S))
    waiting = threading.Thread(target=beside.wait)
    waiting.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := watch.whereabouts(waiting.ident)).waiting and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        gate.set()
        waiting.join()
    assert (found.waiting, found.waits_in) == (True, "sums of gradients")


# Before the first step


@pytest.mark.parametrize(("floor_s", "key"), [(2.0, "first_step_s"), (60.0, "first_step_s"), (4000.0, "first_step_s")])
def test_the_first_step_has_a_limit_of_its_own(clock, make_watch, tmp_path, floor_s, key):
    watching, journal, exits = make_watch(floor_s, first_s=30.0)
    clock.ticks = [1.0] * 60
    watching.run()
    assert ([event.deadline_s for event in journal.hangs], exits) == ([30.0], [5])
    told = read_error(RunDir(tmp_path).error(0), WorkerErrorRecord)
    assert (told.step, told.exit_code, told.hint.split()[1]) == (1, 5, f"resilience.{key}")


def test_without_a_limit_the_first_step_may_take_forever(clock, make_watch):
    watching, journal, exits = make_watch(2.0, first_s=None)
    clock.ticks = [1.0] * 9000
    watching.run()
    assert (journal.hangs, exits) == ([], [])


@pytest.mark.parametrize(("rank", "waiting", "notes"), [(0, False, 1), (0, True, 1), (3, False, 1), (3, True, 0)])
def test_a_slow_first_step_is_noted_once_with_what_it_waits_for(clock, make_watch, monkeypatch, rank, waiting, notes):
    place = watch.StackPosition(waiting, "gloo:all_reduce" if waiting else None, {}, "")
    monkeypatch.setattr(watch, "whereabouts", lambda thread: place)
    watching, journal, _ = make_watch(2.0, rank=rank, world_size=4)
    clock.ticks = [1.0] * 500
    watching.run()
    found = [event.message for event in journal.events if isinstance(event, WarningEvent)]
    assert len(found) == notes
    waits = "waits in gloo:all_reduce" if waiting else "is at no Python frame"
    assert all(fact in one for one in found for fact in ("step 1 has taken 121 s", f"rank {rank} {waits}; ", "1800 s"))


def test_a_quick_first_step_is_not_noted(clock, make_watch):
    watching, journal, _ = make_watch(500.0)
    clock.ticks = [1.0] * 100
    watching.run()
    beat_every(clock, watching, 30.0)
    clock.ticks = [1.0] * 300
    watching.run()
    assert journal.events == []


@pytest.mark.parametrize(("between", "steps_s"), [(False, []), (False, [50.0] * 5), (True, [0.1] * 5)])
def test_a_collective_that_does_not_end_is_reported_early(clock, make_watch, monkeypatch, between, steps_s):
    """In the first step, in a slow one and in an evaluation; once for each collective, and the run goes on."""
    standing = {("0/world", 7)}
    monkeypatch.setattr(watch, "unfinished_collectives", lambda: standing)
    watching, journal, exits = make_watch(100.0)
    beat_every(clock, watching, *steps_s)
    with watching.between_steps() if between else nullcontext():
        clock.ticks = [0.5] * 60
        watching.run()
        (event,) = journal.events
        assert (type(event), event.early) == (StallEvent, True)
        assert 6.0 < event.waited_s < 9.0
        standing = {("0/world", 8)}
        clock.ticks = [0.5] * 20
        watching.run()
    assert [one.early for one in journal.events] == [True, True] and exits == []


def test_collectives_that_end_in_time_are_not_reported(clock, make_watch, monkeypatch):
    numbers = iter(range(10**6))
    monkeypatch.setattr(watch, "unfinished_collectives", lambda: {("0/world", next(numbers) // 4)})
    watching, journal, _ = make_watch(None, first_s=None)
    clock.ticks = [0.5] * 200
    watching.run()
    assert journal.events == []


def stand_still(released, own):
    assert released.wait(PATIENCE_S)
    return []


def test_a_rank_whose_batch_is_not_read_waits_for_its_data():
    released = threading.Event()
    staging = SimpleNamespace(stage=lambda parts: parts, take=lambda slot: slot, give_back=lambda slot: None)
    reader = loader.BatchReader(partial(stand_still, released), staging)
    taking = threading.Thread(target=lambda: reader.take("own", []))
    taking.start()
    try:
        end = time.monotonic() + PATIENCE_S
        while "in stand_still" not in (found := watch.whereabouts(taking.ident)).stack and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        released.set()
        taking.join()
        reader.close()
    assert (found.waiting, found.waits_in) == (False, watch.DATA)
    assert "in stand_still" in found.stack
    at_data = replace(report(False, {}), waits_in=watch.DATA, stack=found.stack)
    message, _ = describe({0: at_data}, 1, step=1, waited_s=31.0, deadline_s=30.0)
    assert "rank 0 waits for its data; " in message
    message, _ = describe({0: at_data, 1: report(True, {"world": 1})}, 2, step=1, waited_s=31.0, deadline_s=30.0)
    assert "rank 0 is late: " in message and message.endswith(" ranks wait in gloo:x")
