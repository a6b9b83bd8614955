"""Event files: one JSON object per line, one file per rank.

A line reaches the kernel in a single `write`, so no complete line is lost when a process crashes. Only the last line
can be incomplete, and readers skip it. A resumed run appends to the file: if a step occurs twice, the later line wins.
Each writer's first line states the version of the training spec, which applies up to the next line that states one.
Lines before the first such line have version 0.1."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import (
    VERSION_KEY,
    check_version,
    open_regular,
    parse_json,
    unreadable,
    with_version,
)
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import FieldError, to_plain
from trainspec_cli.run.folder.event_types.events import Event, parse_event
from trainspec_cli.run.folder.paths import RunDir

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KEPT_BYTES = 2**20
"""Events that cannot be written because the disk is full are kept in memory, up to this many bytes, and written once
there is space again."""
TAIL_BYTES = 2**16
MAX_LINE_BYTES = 2**22
"""The maximum length of an event's line."""


class EventWriter:
    """Appends the events of one rank, from any thread. If a file ends with an incomplete line (after a crash), a
    newline is written first. A full disk does not stop the run."""

    def __init__(self, path: Path, rank: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rank, self._unwritten, self._lock = rank, b"", threading.Lock()
        self._has_stated_version = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, event: Event, at: float | None = None) -> None:
        """Append `event` with this writer's rank and the time: `at` if the event happened earlier, otherwise now."""
        stamped: JsonObject = {
            **to_plain(event),
            "time": time.time() if at is None else at,
            "rank": self._rank,
        }
        with self._lock:
            if not self._has_stated_version:
                stamped = with_version(stamped)
                self._has_stated_version = True
            self._unwritten += json_text(stamped, indent=None).encode() + b"\n"
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
    """Reads what has been appended to a file since the last call. A line is returned only once it is complete."""

    def __init__(self, path: Path, last_bytes: int | None = 0):
        """Start at the end of the file, or `last_bytes` before it (None: at its start). If a line is cut off there, it
        is skipped."""
        self._path = path
        size = path.stat().st_size if path.is_file() else 0
        self._offset = 0 if last_bytes is None else max(0, size - last_bytes)

    def read(self) -> list[Event]:
        """Return the new events, excluding damaged ones."""
        return list(self.new_events())

    def new_events(self) -> Iterator[Event]:
        """Yield the new events, excluding damaged ones, line by line, so that a long file is never entirely in
        memory."""
        yield from _sound(parse_lines(self._new_lines()))

    def _new_lines(self) -> Iterator[bytes]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while line := file.readline(MAX_LINE_BYTES):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < MAX_LINE_BYTES:
                    return
                self._offset += len(line)
                if is_whole:
                    yield line


def spoken_bytes(run: RunDir) -> int:
    """Return the total length of rank 0's event files: the run's, and those of its replica groups. If a start's
    workers have not appended to these files, it has not started training."""
    files = [run.events(0), *run.events_folder.glob("group*/rank00000.jsonl")]
    return sum(path.stat().st_size for path in files if path.is_file())


def read_events(path: Path) -> Iterator[JsonObject]:
    """Yield the JSON object in each complete line, unchecked. A line cut off by a crash is skipped."""
    yield from (plain for _, plain in _numbered(path))


def read_log(path: Path, last_bytes: int | None = None) -> Iterator[Event]:
    """Yield the events in a file from any writer; with `last_bytes`, only those at the end of a long file. Raises
    UnreadableFileError, which names the line of a damaged event or of one written by a newer trainspec."""
    for number, plain in _numbered(path, last_bytes):
        line = number if last_bytes is None else None
        if VERSION_KEY in plain:
            check_version(path, plain[VERSION_KEY], line)
        try:
            yield parse_event(plain)
        except FieldError as fault:
            hint = f"to read the run without it, delete the line from {path}"
            raise unreadable(path, f"holds an invalid event: {fault}", hint, line=line) from fault


def read_sound(path: Path) -> Iterator[Event]:
    """Yield the events in a file except for damaged ones. This is used to record the end of a run, which damaged files
    must not prevent; `report` shows the damage."""
    yield from _sound(read_events(path))


def tail_events(path: Path) -> Iterator[Event]:
    """Yield the newest intact events from the file's last `TAIL_BYTES`."""
    yield from _sound(plain for _, plain in _numbered(path, TAIL_BYTES))


def _sound(lines: Iterable[JsonObject]) -> Iterator[Event]:
    for plain in lines:
        try:
            event = parse_event(plain)
        except FieldError:
            continue
        yield event


def _numbered(path: Path, last_bytes: int | None = None) -> Iterator[tuple[int, JsonObject]]:
    """Yield (line number, JSON object)."""
    if not path.exists():
        return
    with open_regular(path) as file:
        if last_bytes is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
            yield from ((number, plain) for plain in parse_lines([line]))


def parse_lines(lines: Iterable[bytes]) -> Iterator[JsonObject]:
    """Yield the JSON objects in complete lines; other lines are skipped."""
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            plain = parse_json(line)
        except ValueError:
            continue
        if isinstance(plain, dict):
            yield plain
