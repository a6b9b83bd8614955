"""What the checks have found, in a file that is whole at any moment: OUT/results.json.

A check consists of items. While one runs, its process writes each item as it is found to OUT/running.json; a call
that is killed leaves that file, and the next call takes it up and goes on with the items that are missing.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINES_OF_ERRORS = 12
Found = dict[str, Any]
"""Item -> plain values; an item that failed is {"error": its traceback's end}."""


class OutOfTime(Exception):  # noqa: N818 - no error: the next call goes on
    """The next item would not end before this call has to."""


class ItemFailed(Exception):  # noqa: N818 - it is recorded, and the check goes on in a new process
    """An item failed; on a device that may leave the process unfit for others."""


def write_json(file: Path, value: Any) -> None:
    """Under another name, flushed and renamed: whoever reads it reads all of it."""
    aside = file.with_name(file.name + ".part")
    with aside.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@dataclass
class Items:
    """The items of one check in its own process."""

    file: Path
    """OUT/running.json"""
    check: str
    ends_at_s: float
    """On `time.monotonic`."""
    found: Found = field(default_factory=dict)
    folder: Path = Path()
    """OUT, for data beside the results."""

    def take(self, item: str, find: Callable[[], Any], least_s: float = 0.0) -> None:
        """Find an item, unless an earlier call has. Raises OutOfTime where less than `least_s` are left for it."""
        if item in self.found:
            return
        if time.monotonic() + least_s > self.ends_at_s:
            raise OutOfTime(item)
        self._write(item)
        started = time.monotonic()
        try:
            self.found[item] = find()
        except Exception:
            self.found[item] = {"error": last_lines(traceback.format_exc())}
            self._write()
            raise ItemFailed(item) from None
        if isinstance(self.found[item], dict):
            self.found[item]["took_s"] = round(time.monotonic() - started, 1)
        self._write()

    def _write(self, item: str | None = None) -> None:
        write_json(self.file, {"check": self.check, "item": item, "found": self.found})


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LINES_OF_ERRORS:])[-2000:]
