import errno
import json
import math
import os
import subprocess
import sys

import pytest
from lab.problems import raises

from trainspec_cli.core.reading.files import NEWER_VERSION, UnreadableFileError
from trainspec_cli.run.folder import events
from trainspec_cli.run.folder.event_types.events import (
    EvalEvent,
    RetryEvent,
    SetFigures,
    StepEvent,
    UnknownEvent,
    WarningEvent,
)
from trainspec_cli.run.folder.events import (
    EventTail,
    EventWriter,
    read_events,
    read_log,
    read_sound,
    spoken_bytes,
    tail_events,
)
from trainspec_cli.run.folder.paths import RunDir

STEP = {"grad_norm": 1.0, "tokens": 8, "step_time_s": 1.0, "time_s": {}, "skipped": False}


def write(path, *written, rank=0):
    writer = EventWriter(path, rank)
    for event in written:
        writer.write(event)
    writer.close()


@pytest.mark.clause("RUN-4")
def test_events_are_read_back_in_order(tmp_path):
    path = tmp_path / "events" / "rank00003.jsonl"
    write(path, StepEvent(step=1, loss=2.5, **STEP), WarningEvent(step=1, message="naïve — ünïcode"), rank=3)
    step, warning = read_log(path)
    assert isinstance(step, StepEvent) and (step.rank, step.loss) == (3, 2.5)
    assert isinstance(warning, WarningEvent) and (warning.rank, warning.message) == (3, "naïve — ünïcode")
    assert warning.time >= step.time > 1.7e9


@pytest.mark.clause("RUN-4")
def test_a_killed_writer_loses_no_whole_line(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    script = f"""
import os, pathlib
from trainspec_cli.run.folder.event_types.events import RetryEvent
from trainspec_cli.run.folder.events import EventWriter
writer = EventWriter(pathlib.Path({str(path)!r}), 0)
for step in range(100):
    writer.write(RetryEvent(step=step))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert [event["step"] for event in read_events(path)] == list(range(100))


@pytest.mark.clause("RUN-4")
def test_half_a_line_is_passed_over_and_closed_by_the_next_writer(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    path.write_bytes(json.dumps({"type": "retry", "time": 1, "step": 1}).encode() + b'\n{"type": "st')
    assert [event.step for event in read_log(path)] == [1]
    write(path, RetryEvent(step=2))
    assert [event.step for event in read_log(path)] == [1, 2]


@pytest.mark.clause("RUN-5")
def test_a_number_that_is_not_finite_is_null_in_an_event_and_read_back(tmp_path):
    path = tmp_path / "e.jsonl"
    sets = {"a": SetFigures(loss=math.inf, bits_per_byte=None)}
    write(path, StepEvent(step=1, loss=math.nan, **STEP))
    write(path, EvalEvent(step=1, heldout_loss=math.nan, heldout_bits_per_byte=math.nan, sets=sets))
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert (first["loss"], second["heldout_loss"]) == (None, None)
    assert second["sets"] == {"a": {"loss": None, "bits_per_byte": None}}
    step, evaluation = read_log(path)
    assert (step.loss, evaluation.heldout_loss, evaluation.heldout_bits_per_byte) == (None, None, None)


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path):
    victim = tmp_path / "thesis"
    victim.write_text("words")
    (tmp_path / "rank00000.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        EventWriter(tmp_path / "rank00000.jsonl", 0)
    assert victim.read_text() == "words"


@pytest.fixture
def damaged(tmp_path):
    """The second of three events is damaged, and a fourth is of a type that is not known."""
    path = tmp_path / "rank00000.jsonl"
    write(path, RetryEvent(step=1))
    with path.open("a") as file:
        file.write('{"type": "retry", "time": 1.0, "rank": 0, "step": "two"}\nno JSON\n')
    write(path, RetryEvent(step=3))
    with path.open("a") as file:
        file.write('{"type": "eclipse", "time": 1.0, "rank": 0, "shade": [1]}\n')
    return path


@pytest.mark.clause("RUN-6")
def test_a_report_names_the_line_of_a_damaged_event(damaged):
    with raises(UnreadableFileError, "unreadable_file", "`step` is 'two'") as caught:
        list(read_log(damaged))
    assert caught.value.problems[0].line == 2


def test_other_readers_go_on_without_a_damaged_event(damaged):
    first, third, unknown = read_sound(damaged)
    assert (first.step, third.step) == (1, 3)
    assert isinstance(unknown, UnknownEvent) and unknown.type == "eclipse"
    assert list(tail_events(damaged)) == [first, third, unknown]


def test_a_tail_waits_for_the_rest_of_a_line(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    tail = EventTail(path)
    line = json.dumps({"type": "retry", "time": 1, "rank": 0, "step": 7}) + "\n"
    path.write_text(line[:20])
    assert tail.read() == []
    with path.open("a") as file:
        file.write(line[20:])
    assert [event.step for event in tail.read()] == [7]
    assert tail.read() == []


def test_a_tail_begins_at_the_end_and_passes_over_damage(damaged):
    tail = EventTail(damaged)
    with damaged.open("a") as file:
        file.write('{"type": "retry", "time": 1.0, "rank": 0, "step": null}\n')
    write(damaged, RetryEvent(step=9))
    assert [event.step for event in tail.read()] == [9]


class FullDisk:
    """Stands in for `os` in the writer: writes take no more than `room` bytes, then fail with `error`."""

    def __init__(self, room, error=errno.ENOSPC):
        self.room, self.error = room, error

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, content):
        if self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        taken = os.write(descriptor, content[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_events_that_a_full_disk_does_not_take_are_written_when_there_is_room_again(tmp_path, monkeypatch, error):
    path, disk = tmp_path / "e.jsonl", FullDisk(30, error)
    writer = EventWriter(path, 0)
    monkeypatch.setattr(events, "os", disk)
    for step in range(3):
        writer.write(RetryEvent(step=step))
    assert path.stat().st_size == 30
    assert list(read_log(path)) == []
    disk.room = 10**6
    writer.close()
    assert [event.step for event in read_log(path)] == [0, 1, 2]


def test_a_disk_that_stays_full_ends_the_run_when_too_much_waits(tmp_path, monkeypatch):
    writer = EventWriter(tmp_path / "e.jsonl", 0)
    monkeypatch.setattr(events, "os", FullDisk(0))
    half = WarningEvent(step=1, message="x" * (events.KEPT_BYTES // 2))
    writer.write(half)
    with pytest.raises(OSError, match="No space left"):
        writer.write(half)


def test_another_error_of_the_disk_is_raised_at_once(tmp_path, monkeypatch):
    writer = EventWriter(tmp_path / "e.jsonl", 0)
    monkeypatch.setattr(events, "os", FullDisk(0, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        writer.write(RetryEvent(step=1))


def test_a_file_that_ends_in_a_whole_line_gets_no_empty_one(tmp_path):
    path = tmp_path / "e.jsonl"
    write(path, RetryEvent(step=1))
    write(path, RetryEvent(step=2))
    assert path.read_bytes().count(b"\n") == 2
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_tail_of_a_file_that_does_not_exist_yet(tmp_path):
    tail = EventTail(tmp_path / "e.jsonl")
    assert tail.read() == []
    write(tmp_path / "e.jsonl", RetryEvent(step=1))
    assert [event.step for event in tail.read()] == [1]


def test_the_first_workers_of_all_replica_groups_have_spoken(tmp_path):
    run = RunDir(tmp_path)
    assert spoken_bytes(run) == 0
    for path, size in [
        (run.events(0), 10),
        (run.events(1), 1000),
        (run.group_events(0, 0), 200),
        (run.group_events(1, 0), 3),
        (run.group_events(1, 1), 1000),
        (run.supervisor_events, 1000),
    ]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    assert spoken_bytes(run) == 213


def test_the_end_of_a_long_file_is_read_without_its_cut_line(tmp_path):
    path = tmp_path / "e.jsonl"
    write(path, *(RetryEvent(step=step) for step in range(5)))
    line_bytes = len(path.read_bytes().splitlines(keepends=True)[-1])
    assert [event.step for event in read_log(path, last_bytes=2 * line_bytes + line_bytes // 2)] == [3, 4]
    assert list(read_log(tmp_path / "none.jsonl")) == []
    write(path, WarningEvent(step=9, message="x" * events.TAIL_BYTES), RetryEvent(step=10))
    assert [event.step for event in tail_events(path)] == [10]
    with path.open("a") as file:
        file.write('{"type": "retry", "time": 1.0, "rank": 0, "step": "two"}\n[1]\n')
    with pytest.raises(UnreadableFileError) as caught:
        list(read_log(path, last_bytes=200))
    assert caught.value.problems[0].line is None


def test_an_event_has_its_writers_time_and_rank_whatever_it_held_before(tmp_path):
    write(tmp_path / "e.jsonl", RetryEvent(step=1, time=5.0, rank=7), rank=2)
    (event,) = read_log(tmp_path / "e.jsonl")
    assert event.rank == 2
    assert event.time > 5.0


@pytest.mark.clause("VER-1")
def test_the_first_line_of_each_writer_states_the_version(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    path.write_text('{"type": "retry", "time": 1.0, "step": 1}\n')  # as version 0.1 wrote it
    for first in (2, 4):
        write(path, RetryEvent(step=first), RetryEvent(step=first + 1))
    assert [event.get("spec_version") for event in read_events(path)] == [None, "1.0", None, "1.0", None]
    assert [event.step for event in read_log(path)] == [1, 2, 3, 4, 5]


@pytest.mark.clause("VER-4")
def test_events_of_a_newer_version_are_refused_with_their_line(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    write(path, RetryEvent(step=1))
    with path.open("a") as file:
        file.write('{"spec_version": "4.0", "type": "retry", "time": 1.0, "step": 2}\n')
    with raises(UnreadableFileError, NEWER_VERSION, " version 4.0 ") as caught:
        list(read_log(path))
    assert caught.value.problems[0].line == 2
    assert [event.step for event in read_sound(path)] == [1, 2], "the end of the run is still recorded"
