"""Events: what happened, one JSON object a line, one file a rank.

A line reaches the kernel in one `write`, so a crash of the process loses no whole line; a half line can only be
the last, and a reader passes over it. A resumed run appends: where a step occurs twice the later line is true.

    start       world_size step device_name peak_flops peak_source params flops_per_token unit restored_from pid host
    step        step loss grad_norm lr tokens samples step_time_s time_s{PARTS} skipped h2d_copies h2d_bytes allocations
                (`h2d_*`: batches copied to the device, 0 where it is the host itself; `allocations`: buffers made for
                batches, and calls to a GPU's driver for memory; what malloc does on a CPU is not counted)
    eval        step heldout_loss heldout_bits_per_byte xz_bits_per_byte seconds
                (of images: step heldout_loss heldout_accuracy seconds; of volumes heldout_dice; and no `tokens` above)
    checkpoint  step path bytes seconds written_s
                (`seconds` training waited; `written_s` until it was whole on disk, beside later steps; `waited_s`
                of the last one, which the run's end waited for outside any step)
    cadence     step interval_steps blocked_s drag_s written_s step_time_s mtbf_s
                (the interval that `checkpoint.interval_steps: auto` has chosen, and its grounds)
    hang        step waited_s deadline_s host waiting waits_in collectives stack
    sample      step prompt text
    warning     step message
    retry       step (of replica groups: an exchange failed, and the step is made again)
    recovery    step change{left,joined,retried,restart} group stall_s lost_steps
    end         step status weights_sha256

Of replica groups rank 0's file is the run's story, written by the group that leads; each process has a file of its own
below `groupNNNNN/`. Their `step` events add: group, groups (those that took part), took [first sample, samples].

The supervisor's marks, in a file of their own:

    launch                    failure  (when it knew of one)                    ended  exit_code
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainspec_cli.reading.files import open_regular, unreadable
from trainspec_cli.reading.json_file import parse_json
from trainspec_cli.rundir.event_fields import find_fault
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.json_text import json_text

PARTS = ("data_wait", "forward", "backward", "exposed_comm", "optimizer", "checkpoint", "other")
"""What a step's time is divided into; the parts sum to `step_time_s`."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KEPT_BYTES = 2**20
"""What a full disk does not take is kept up to this size, and written when there is room again."""
TAIL_BYTES = 2**16
MAX_LINE_BYTES = 2**22
"""No event is longer."""


class EventWriter:
    """Appends events of one rank, from any thread. A file that ends in half a line (a crash) is closed with a newline
    first; a full disk does not stop the run."""

    def __init__(self, path: Path, rank: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rank, self._unwritten, self._lock = rank, b"", threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "time": time.time(), "rank": self._rank, **fields}
        with self._lock:
            self._unwritten += json_text(event, indent=None).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        except OSError as error:
            if error.errno not in FULL or len(self._unwritten) > KEPT_BYTES:
                raise

    def close(self) -> None:
        with self._lock:
            self._flush()
        os.close(self._descriptor)


class EventTail:
    """Reads what was appended to a file since the last look; half a line waits for its other half."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(parse_lines(whole.splitlines(keepends=True)))


def spoken_bytes(run: RunDir) -> int:
    """The length of what the first workers have said, those of the replica groups included. A start whose workers have
    added nothing to it has not begun to train."""
    files = [run.events(0), *run.events_folder.glob("group*/rank00000.jsonl")]
    return sum(path.stat().st_size for path in files if path.is_file())


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only; a line cut by a crash is passed over."""
    yield from (event for _, event in _numbered(path))


def read_story(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """As `read_events`, of a folder that anybody may have written. Raises UnreadableFileError that names the line of an
    event whose fields are not of their kinds. `last_bytes`: of the end of a long file alone."""
    for number, event in _numbered(path, last_bytes):
        if fault := find_fault(event):
            hint = f"to look at the run without it, take the line out of {path}"
            line = number if last_bytes is None else None
            raise unreadable(path, f"holds an event that no worker writes: {fault}", hint, line=line)
        yield event


def read_sound(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_story`, without the events that it would refuse: how a run ended is written down whatever its folder
    holds, and `report` names the damage."""
    yield from (event for _, event in _numbered(path) if not find_fault(event))


def tail_events(path: Path) -> Iterator[dict[str, Any]]:
    """The newest whole lines, as far as the file's last `TAIL_BYTES` reach."""
    yield from (event for _, event in _numbered(path, TAIL_BYTES))


def _numbered(path: Path, last_bytes: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, event)"""
    if not path.exists():
        return
    with open_regular(path) as file:
        if last_bytes is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
            yield from ((number, event) for event in parse_lines([line]))


def parse_lines(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
