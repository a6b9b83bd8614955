"""Write files so that no reader ever sees a half-written file; `read_json` and `read_object` read them."""

from __future__ import annotations

import filecmp
import math
import os
import secrets
import shutil
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import TypeVar, overload

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import (
    CURRENT_VERSION,
    UNSTATED_VERSION,
    VERSION_KEY,
    check_version,
    read_json,
    read_object,
    unreadable,
    without_version,
)
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import FieldError, read_record

__all__ = ["read_json", "read_object", "replace_head", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write to a file next to `path`, under a name that no other process uses, flush it to disk, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_head(path: Path, old: bytes, new: bytes, backup: Path) -> None:
    """Replace `old` at the start of a file with `new`. The rest of the file and its mode stay unchanged.

    A copy of the original file is made first, under a name that must be unused or belong to a file with the same
    content. Raises FileExistsError if the copy's name is taken, and ValueError if the file does not start with
    `old`."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with path.open("rb") as source, partial.open("xb") as target:
            if source.read(len(old)) != old:
                raise ValueError(f"{path} has changed in the meantime")
            target.write(new)
            shutil.copyfileobj(source, target)
            target.flush()
            os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
            os.fsync(target.fileno())
        # If an interrupted call has left a copy, it is used.
        if not (backup.is_file() and filecmp.cmp(path, backup, shallow=False)):
            with path.open("rb") as source, backup.open("xb") as target:
                os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    write_text(path, json_text(content) + "\n")


# Files that state their version of the training spec.


Record = TypeVar("Record")


def write_versioned(path: Path, content: Mapping[str, object]) -> None:
    """Write a file in the current version. Raises the same errors as `write_json`."""
    write_json(path, {VERSION_KEY: CURRENT_VERSION, **content})


def read_versioned(path: Path) -> JsonObject:
    """Return the object in a file of any version that this trainspec reads, without the version key. Raises the same
    errors as `read_object`, and UnreadableFileError if the file was written by a newer trainspec."""
    content = read_object(path)
    check_version(path, content.get(VERSION_KEY, UNSTATED_VERSION))
    return without_version(content)


def read_versioned_record(path: Path, record_type: type[Record], name: str) -> Record:
    """Read the record; `name` is what messages call it. Raises the same errors as `read_versioned`, and
    UnreadableFileError if the record is damaged."""
    try:
        return read_record(record_type, read_versioned(path))
    except FieldError as fault:
        raise unreadable(path, f"is not a valid {name}: {fault}") from fault


# Values of many steps as columns of plain numbers. A number takes eight bytes, whereas an event takes a kilobyte.


class StepColumns:
    """Columns of doubles by name, together with a column of steps."""

    def __init__(self, *names: str):
        self.steps = array("q")
        self._values = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> array[float]:
        return self._values[name]

    def add(self, step: int, *values: float) -> None:
        """Append a row, with values in the order of the column names."""
        self.steps.append(step)
        for column, value in zip(self._values.values(), values, strict=True):
            column.append(value)

    def put(self, step: int, *values: float) -> None:
        """Append a row, or replace the row for the same step."""
        if self.steps and step <= self.steps[-1]:
            self._keep([row for row, made in enumerate(self.steps) if made != step])
        self.add(step, *values)

    def forget_beyond(self, step: int) -> None:
        """Drop the rows of later steps."""
        self._keep([row for row, made in enumerate(self.steps) if made <= step])

    def forget_before(self, step: int) -> None:
        """Drop the rows of earlier steps."""
        self._keep([row for row, made in enumerate(self.steps) if made >= step])

    def _keep(self, rows: Sequence[int]) -> None:
        if len(rows) < len(self.steps):
            self.steps = array("q", (self.steps[row] for row in rows))
            for name, column in self._values.items():
                self._values[name] = array("d", (column[row] for row in rows))


class StepCurve(Sequence[tuple[int, float | None]]):
    """A metric over the steps, as a sequence of (step, value); None if the value was not finite."""

    def __init__(self, steps: array[int], values: array[float]):
        self._steps = steps
        self._values = values

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float | None]: ...
    @overload
    def __getitem__(self, place: slice) -> StepCurve: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float | None] | StepCurve:
        if isinstance(place, slice):
            return StepCurve(self._steps[place], self._values[place])
        value = self._values[place]
        return self._steps[place], value if math.isfinite(value) else None

    def __iter__(self) -> Iterator[tuple[int, float | None]]:
        for step, value in zip(self._steps, self._values, strict=True):
            yield step, value if math.isfinite(value) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]
