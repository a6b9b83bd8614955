"""Events: what happened, one JSON object a line, one file a rank.

A line reaches the kernel in one `write`, so a crash of the process loses no whole line; a half line can only be
the last, and a reader passes over it. A resumed run appends: where a step occurs twice the later line is true.

    start       world_size step device_name peak_flops peak_source params flops_per_token unit pid host
    step        step loss grad_norm lr tokens samples step_time_s time_s{PARTS} skipped
    eval        step heldout_loss heldout_bits_per_byte xz_bits_per_byte seconds
                (of images: step heldout_loss heldout_accuracy seconds; of volumes heldout_dice; and no `tokens` above)
    checkpoint  step path bytes seconds
    sample      step prompt text
    warning     step message
    recovery    step change{left,joined,retried,restart} group stall_s lost_steps
    end         step status weights_sha256

Of replica groups rank 0's file is the run's story, written by the group that leads; each process has a file of its own
below `groupNNNNN/`. Their `step` events add: group, groups (those that took part), took [first sample, samples].
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = ("data_wait", "forward", "backward", "exposed_comm", "optimizer", "checkpoint", "other")
"""What a step's time is divided into; the parts sum to `step_time_s`."""


class EventWriter:
    """Appends events of one rank. A file that ends in half a line (a crash) is closed with a newline first."""

    def __init__(self, path: Path, rank: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "time": time.time(), "rank": self._rank, **fields}
        os.write(self._descriptor, json.dumps(event, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
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


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only; a line cut by a crash is passed over."""
    if path.is_file():
        with path.open("rb") as file:
            yield from parse_lines(file)


def parse_lines(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
