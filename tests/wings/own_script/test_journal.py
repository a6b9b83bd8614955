"""Counted steps of processes, as events of the run's ranks."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from trainspec_cli.run.folder.accounting import read_recoveries
from trainspec_cli.run.folder.event_types.events import RecoveryEvent, StartEvent, StepEvent
from trainspec_cli.run.folder.events import EventWriter, read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script import journal as progress
from trainspec_cli.wings.own_script.journal import StepJournal, count_steps, newest_step, restarts_left


def write_steps(folder: Path, name: str, steps: int, *, rank: int = -1, before: int = -1, pid: int = 2**22 + 1) -> None:
    """Write the file of a process that has made this many steps, one per second; no process has its id."""
    data = bytearray(progress.FILE_BYTES)
    began = 100.0 + float(name)
    progress.HEADER.pack_into(data, 0, progress.MAGIC, pid, rank, 2 if rank >= 0 else 0, 0, before, began, 7)
    for step in range(1, steps + 1):
        at = progress.HEADER_BYTES + step % progress.SLOTS * progress.SLOT.size
        progress.SLOT.pack_into(data, at, step, began + step - 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{pid}-{name}.steps").write_bytes(data)


def steps_of(run: RunDir, rank: int = 0) -> list[tuple[int, float]]:
    return [(event.step, event.step_time_s) for event in read_log(run.events(rank)) if isinstance(event, StepEvent)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_new_steps_are_written_once_and_with_their_times(run: RunDir) -> None:
    journal = StepJournal(run, run.progress(1), "a chip")
    for steps in (2, 2, 5):
        write_steps(run.progress(1), "1", steps, rank=1)
        journal.poll()
    journal.close()
    assert steps_of(run, 1) == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    begin, first, *_ = read_log(run.events(1))
    assert isinstance(begin, StartEvent) and (begin.step, begin.world_size, begin.unit) == (0, 2, "steps")
    assert (begin.time, first.time) == (101.0, 101.0)


def test_overwritten_steps_are_counted(run: RunDir) -> None:
    write_steps(run.progress(1), "1", 1000, rank=0)
    journal = StepJournal(run, run.progress(1), "")
    journal.poll()
    assert [step for step, _ in steps_of(run)] == list(range(1, 1001))


def test_a_restored_optimizer_sets_the_step_and_others_continue_the_count(run: RunDir) -> None:
    write_steps(run.progress(1), "1", 5, rank=0)
    StepJournal(run, run.progress(1), "").close()
    events = EventWriter(run.events(0), 0)
    events.write(RecoveryEvent(step=5, change="restart", group=None, stall_s=None, lost_steps=None))
    events.close()
    write_steps(run.progress(2), "2", 2, rank=0, before=3)
    StepJournal(run, run.progress(2), "").close()
    write_steps(run.progress(3), "3", 2, rank=0)
    StepJournal(run, run.progress(3), "").close()
    assert [step for step, _ in steps_of(run)] == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert count_steps(run) == 9
    (recovery,) = read_recoveries(read_log(run.events(0)))
    assert recovery.lost_steps == 2


def test_processes_without_a_rank_get_the_first_free_one(run: RunDir) -> None:
    write_steps(run.progress(1), "1", 3, pid=os.getpid())
    journal = StepJournal(run, run.progress(1), "")
    journal.poll()
    write_steps(run.progress(1), "2", 2)
    journal.poll()
    assert [rank.number for rank in journal.ranks] == [0, 1]
    assert journal.made == 3


@pytest.mark.parametrize("data", [b"", b"x" * progress.FILE_BYTES, struct.pack("<8s", progress.MAGIC)])
def test_a_damaged_file_is_skipped(run: RunDir, data: bytes) -> None:
    run.progress(1).mkdir(parents=True)
    (run.progress(1) / "5-1.steps").write_bytes(data)
    journal = StepJournal(run, run.progress(1), "")
    journal.poll()
    assert journal.ranks == []


def test_a_continued_run_has_the_remaining_restarts(run: RunDir) -> None:
    assert (restarts_left(run, 3), newest_step(run)) == (3, 0)
    write_steps(run.progress(1), "1", 5, rank=0)
    journal = StepJournal(run, run.progress(1), "")
    journal.poll()
    journal.close()
    events = EventWriter(run.events(0), rank=0)
    for _ in range(2):
        events.write(RecoveryEvent(step=5, change="restart", group=None, stall_s=None, lost_steps=None))
    events.close()
    assert newest_step(run) == 5
    assert [restarts_left(run, most) for most in (3, 2, 1)] == [1, 0, 0]
