"""Read the files that `hook/sitecustomize.py` writes in the user's processes: the steps of each process, with times."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"TSSTEPS1"
MAGIC_ATTACHED = b"TSSTEPS2"
HEADER = struct.Struct("<8sIiIIqdQ")
HEADER_BYTES = 64
SLOT = struct.Struct("<Qd")
SLOTS = 252
FILE_BYTES = HEADER_BYTES + SLOTS * SLOT.size


@dataclass(frozen=True)
class CountedProcess:
    """A process that has taken a step, according to its file."""

    pid: int
    rank: int | None
    """None if its environment does not specify a rank."""
    world_size: int
    """1 if its environment does not specify it."""
    answers: bool
    """True if SIGUSR2 makes it write its stacks to `stacks`."""
    updates_before: int | None
    """Its optimizer's update count before this process; None if the optimizer state does not count updates."""
    began: float
    """Unix time of the end of its first step."""
    main_thread: int
    stacks: Path
    attached: bool = False
    """True if the process writes the events of its steps itself (`trainspec_cli.attach`)."""


@dataclass(frozen=True)
class CountedStep:
    number: int
    """The number of the step in its process, starting at 1."""
    at: float
    """Unix time."""


class StepFile:
    """The file of one process; `read` returns the steps since the last call."""

    def __init__(self, path: Path):
        self._path = path
        self._newest = CountedStep(0, 0.0)

    def read(self) -> tuple[CountedProcess | None, list[CountedStep]]:
        """Return the process and its new steps, in order; None if the file is damaged. Steps whose times were
        overwritten before they were read get evenly spaced times."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return None, []
        if len(data) != FILE_BYTES or not data.startswith((MAGIC, MAGIC_ATTACHED)):
            return None, []
        found = sorted(SLOT.iter_unpack(data[HEADER_BYTES:]))
        new = [CountedStep(number, at) for number, at in found if number > self._newest.number]
        steps = new
        if new:
            count = new[0].number - self._newest.number
            since = self._newest.at or new[0].at
            each_s = (new[0].at - since) / count
            lost = [CountedStep(self._newest.number + place, since + place * each_s) for place in range(1, count)]
            steps = lost + new
            self._newest = new[-1]
        magic, pid, rank, world_size, answers, before, began, main_thread = HEADER.unpack_from(data)
        process = CountedProcess(
            pid=pid,
            rank=rank if rank >= 0 else None,
            world_size=max(1, world_size),
            answers=bool(answers),
            updates_before=before if before >= 0 else None,
            began=began,
            main_thread=main_thread,
            stacks=self._path.with_suffix(".stacks"),
            attached=magic == MAGIC_ATTACHED,
        )
        return process, steps


def step_files(folder: Path) -> list[Path]:
    """Return the files of a start's processes, oldest first."""
    return sorted(folder.glob("*.steps"), key=lambda path: int(path.stem.partition("-")[2] or 0))
