"""Write the steps counted in the user's processes as events of the run's ranks."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trainspec_cli.run.folder.event_types.events import RecoveryEvent, StartEvent, StepEvent
from trainspec_cli.run.folder.events import EventWriter, read_sound
from trainspec_cli.run.folder.paths import RunDir

# Read the files that `hook/sitecustomize.py` writes in the user's processes. They contain each process's steps with
# their times.

MAGIC = b"TSSTEPS1"
MAGIC_ATTACHED = b"TSSTEPS2"
HEADER = struct.Struct("<8sIiIIqdQ")
HEADER_BYTES = 64
SLOT = struct.Struct("<Qd")
SLOTS = 252
FILE_BYTES = HEADER_BYTES + SLOTS * SLOT.size


@dataclass(frozen=True)
class CountedProcess:
    """A process that has taken a step, as described by its file."""

    pid: int
    rank: int | None
    """None if the environment of the process does not specify a rank."""
    world_size: int
    """1 if the environment of the process does not specify a world size."""
    answers: bool
    """True if SIGUSR2 makes the process write its stacks to `stacks`."""
    updates_before: int | None
    """The optimizer's update count before this process; None if the optimizer state does not count updates."""
    began: float
    """Unix time when the process finished its first step."""
    main_thread: int
    stacks: Path
    attached: bool = False
    """True if the process writes the events of its steps itself (`trainspec_cli.attach`)."""


@dataclass(frozen=True)
class CountedStep:
    number: int
    """The number of the step within its process, starting at 1."""
    at: float
    """Unix time when the step ended."""


class StepFile:
    """The file of one process. `read` returns the steps since the last call."""

    def __init__(self, path: Path):
        self._path = path
        self._newest = CountedStep(0, 0.0)

    def read(self) -> tuple[CountedProcess | None, list[CountedStep]]:
        """Return the process and its new steps, in order; None if the file is damaged. If the times of steps were
        overwritten before they were read, these steps get evenly spaced times."""
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


UNIT = "steps"
"""The unit of the reported throughput."""
REMEMBERED_STEPS = 100


@dataclass
class CountedRank:
    """A rank and its current process."""

    number: int
    writer: EventWriter
    step: int
    """The newest step of the rank, across all starts."""
    trainer: CountedProcess | None = None
    path: Path | None = None
    before: int = 0
    """The run's newest step when the current process started."""
    stepped_at: float = 0.0
    """Unix time of the current process's newest step."""
    made: int = 0
    """Number of steps taken by the rank's processes in this start."""
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))


class StepJournal:
    """The journal of one start. Call `poll` about ten times per second."""

    def __init__(self, run: RunDir, folder: Path, device_name: str):
        self._run = run
        self._folder = folder
        self._device_name = device_name
        self._files: dict[Path, StepFile] = {}
        self._ranks: dict[int, CountedRank] = {}
        self._places: dict[Path, int] = {}

    @property
    def ranks(self) -> list[CountedRank]:
        """The ranks that have taken a step in this start."""
        return [self._ranks[number] for number in sorted(self._ranks)]

    @property
    def trainers(self) -> list[CountedProcess]:
        return [rank.trainer for rank in self.ranks if rank.trainer]

    @property
    def made(self) -> int:
        """Number of steps in this start, including repeated ones."""
        return max((rank.made for rank in self._ranks.values()), default=0)

    def poll(self) -> None:
        for path in step_files(self._folder):
            file = self._files.setdefault(path, StepFile(path))
            trainer, made = file.read()
            if trainer and made:
                self._record(path, trainer, made)

    def close(self) -> None:
        self.poll()
        for rank in self._ranks.values():
            rank.writer.close()

    def _record(self, path: Path, trainer: CountedProcess, made: list[CountedStep]) -> None:
        # A process whose environment does not specify a rank gets the first rank that no running process holds.
        if trainer.rank is None and path not in self._places:
            held = {rank.number for rank in self.ranks if rank.trainer and psutil.pid_exists(rank.trainer.pid)}
            self._places[path] = next(place for place in itertools.count() if place not in held)
        number = self._places[path] if trainer.rank is None else trainer.rank
        if number not in self._ranks:
            events = self._run.events(number)
            newest = max((event.step for event in read_sound(events) if isinstance(event, StepEvent)), default=0)
            self._ranks[number] = CountedRank(number, EventWriter(events, number), newest)
        rank = self._ranks[number]
        if rank.path == path:
            rank.trainer = trainer
        elif rank.trainer is None or trainer.began >= rank.trainer.began:
            self._begin(rank, path, trainer)
        else:  # a different process has taken over this rank
            return
        for one in made:
            step_s = max(0.0, one.at - rank.stepped_at) if rank.stepped_at else 0.0
            rank.step = rank.before + one.number
            rank.made = rank.made + 1
            if not trainer.attached:
                # Without `attach`, only a step's number and time are known.
                event = StepEvent(
                    step=rank.step,
                    loss=None,
                    grad_norm=None,
                    steps=1,
                    step_time_s=step_s,
                    time_s={"other": step_s},
                    skipped=False,
                )
                rank.writer.write(event, one.at)
            if rank.stepped_at:
                rank.recent_s.append(step_s)
            rank.stepped_at = one.at

    def _begin(self, rank: CountedRank, path: Path, trainer: CountedProcess) -> None:
        rank.trainer = trainer
        rank.path = path
        rank.stepped_at = 0.0
        rank.before = rank.step if trainer.updates_before is None else trainer.updates_before
        rank.recent_s.clear()
        if trainer.attached:
            return
        rank.writer.write(
            StartEvent(
                step=rank.before,
                world_size=trainer.world_size,
                device_name=self._device_name,
                params=0,
                peak_flops=0.0,
                peak_source="",
                flops_per_token=0.0,
                unit=UNIT,
                pid=trainer.pid,
            ),
            trainer.began,
        )


def count_steps(run: RunDir) -> int:
    """Return the number of steps across all starts of a run, including repeated ones."""
    return sum(isinstance(event, StepEvent) for event in read_sound(run.events(0)))


def restarts_left(run: RunDir, max_restarts: int) -> int:
    """Return how many of a run's `max_restarts` restarts remain."""
    made = sum(isinstance(event, RecoveryEvent) for event in read_sound(run.events(0)))
    return max(0, max_restarts - made)


def newest_step(run: RunDir) -> int:
    """Return the newest step of any start; 0 if no steps are counted."""
    return max((event.step for event in read_sound(run.events(0)) if isinstance(event, StepEvent)), default=0)
