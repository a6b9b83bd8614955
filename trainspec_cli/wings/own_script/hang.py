"""Finds a run of the user's own command that hangs, and where each of its ranks stands.

While no rank has stepped for long, each is looked at now and then: its stack (SIGUSR2, see `hook/sitecustomize.py`),
its processor time and its input and output. The time since the last sign of work counts, not that since the last step.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import psutil

from trainspec_cli.run.channel.messages import NodeStands, RankStands
from trainspec_cli.run.folder.event_types.events import HangEvent
from trainspec_cli.run.recovery.watch import Reading, Whereabouts, find_late, step_deadline_s, working
from trainspec_cli.wings.own_script.journal import CountedRank
from trainspec_cli.wings.own_script.progress import CountedProcess
from trainspec_cli.wings.own_script.usage import gpu_uses, moved_bytes, wanted_s

QUIET_PART = 0.25
"""Ranks are looked at once no step has come for this part of the time after which the run counts as hung."""
LOOKS = 20
"""Looks at a hung run before it counts as one, about."""
ANSWER_S = 1.0
"""A stack is written within this time by a process that can."""
LONGEST_STACK_BYTES = 2**16

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WRAPPERS = ("wrapper", "inner", "_fn", "_wrapped_call_impl", "_call_impl")
"""Functions that stand between a call and what is called."""
_LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "lightning", "jax", "jaxlib", "tensorflow", "keras")
"""Packages of what trains; a rank that stands in one of them waits there, most likely."""
_LIBRARY = re.compile(rf"^.*?[/\\](?:{'|'.join(_LIBRARIES)})(?=[/\\])")
_JAX = re.compile(r'^  File ".*[/\\]jax[/\\]_src[/\\]', re.MULTILINE)
"""Functions that JAX has compiled wait without a Python frame of their own."""
_PYTHONS = re.compile(r"^<|[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)")


Hang = tuple[float, float, tuple[RankStands, ...]]
"""How long no rank has worked, how long that may be, and where each stands."""


@dataclass
class _Sighting:
    """What was seen of a process at a look."""

    stack: str = ""
    processor_s: float = 0.0
    children_s: float = 0.0
    moved_bytes: int = 0


class HangWatch:
    """Watches one start; `look` is to be called again and again. `floor_s`: no run counts as hung before this time;
    None for never."""

    def __init__(self, floor_s: float | None, log: Path):
        self._floor_s = floor_s
        self._log = log
        self._looks: dict[int, _Sighting] = {}
        self._log_bytes = 0
        self._worked_s = self._looked_s = time.monotonic()
        self._steps: dict[int, int] = {}

    @property
    def quiet_s(self) -> float:
        """The time since the last sign of work."""
        return time.monotonic() - self._worked_s

    def look(self, ranks: Sequence[CountedRank]) -> Hang | None:
        """Return where the ranks stand, where none of them has worked for longer than they may."""
        now_s = time.monotonic()
        steps = {rank.number: rank.step for rank in ranks if rank.trainer}
        if self._floor_s is None or not steps or steps != self._steps:
            self._steps = steps
            self._worked_s = now_s
            self._looks = {}
            return None
        deadline_s = max(step_deadline_s(rank.recent_s, self._floor_s) for rank in ranks)
        quiet_s = now_s - self._worked_s
        interval_s = max(ANSWER_S, deadline_s * (1 - QUIET_PART) / LOOKS)
        if quiet_s < deadline_s * QUIET_PART or now_s - self._looked_s < interval_s:
            return None
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        was_seen = bool(self._looks)
        readings = self._read(ranks, passed_s)
        if (was_seen and working(readings)) or self._log_has_grown() or not readings:
            self._worked_s = now_s
        elif quiet_s > deadline_s and was_seen:
            return quiet_s, deadline_s, self._describe(ranks, readings)
        return None

    def _log_has_grown(self) -> bool:
        size = self._log.stat().st_size if self._log.is_file() else 0
        grown = size > self._log_bytes
        self._log_bytes = size
        return grown

    def _read(self, ranks: Sequence[CountedRank], passed_s: float) -> dict[int, Reading]:
        trainers = {rank.number: rank.trainer for rank in ranks if rank.trainer}
        stacks = read_stacks(list(trainers.values()))
        gpus = gpu_uses()
        readings = {}
        for number, trainer in trainers.items():
            before = self._looks.get(number)
            stack = stacks.get(trainer.pid, "")
            try:
                process = psutil.Process(trainer.pid)
                state = process.status()
                look = _look(process, stack, {one.pid for one in trainers.values()})
            except (psutil.Error, OSError):
                continue
            self._looks[number] = look
            was = before or look
            readings[number] = Reading(
                stopped=state == psutil.STATUS_STOPPED,
                stack_changed=bool(stack) and main_stack(stack, trainer) != main_stack(was.stack, trainer),
                has_stack=bool(stack),
                in_library=in_library(main_stack(stack, trainer)),
                busy_cores=max(0.0, look.processor_s - was.processor_s) / passed_s,
                child_cores=max(0.0, look.children_s - was.children_s) / passed_s,
                moved_bytes=look.moved_bytes - was.moved_bytes,
                on_gpu=trainer.pid in gpus,
            )
        return readings

    def _describe(self, ranks: Sequence[CountedRank], readings: dict[int, Reading]) -> tuple[RankStands, ...]:
        """Say where the ranks stand; of a stopped one `read_stopped` reads the stack once the run counts as hung."""
        stands = []
        for rank in ranks:
            if rank.trainer is None:
                continue
            reading = readings.get(rank.number)
            stopped = reading is not None and reading.stopped
            stack = self._looks[rank.number].stack if reading and not stopped else ""
            main = main_stack(stack, rank.trainer)
            stands.append(
                RankStands(
                    rank=rank.number,
                    host=socket.gethostname(),
                    step=rank.step,
                    stack=main or ("it is stopped" if stopped else "its stack cannot be read"),
                    place=place_of(main),
                    waiting=in_library(main),
                    stopped=stopped,
                    ended=reading is None,
                )
            )
        return tuple(stands)


def read_stopped(stands: RankStands, trainer: CountedProcess) -> RankStands:
    """Return where a stopped rank stands, with its stack. The process has to run for it, and may make a step in that
    time, which counts as work on all nodes: so it is read only when the hang is found on all of them."""
    main = main_stack(read_stacks([trainer], resume=True).get(trainer.pid, ""), trainer)
    return replace(stands, stack=main, place=place_of(main)) if main else stands


def hang_event(stands: RankStands, node: NodeStands, late: Sequence[int]) -> HangEvent:
    return HangEvent(
        step=max(rank.step for rank in node.ranks) + 1,
        waited_s=node.waited_s,
        host=stands.host,
        waiting=stands.rank not in late,
        waits_in=stands.place or None,
        collectives={},
        stack=stands.stack,
        deadline_s=node.deadline_s,
    )


def _look(process: psutil.Process, stack: str, trainers: set[int]) -> _Sighting:
    children = [child for child in process.children(recursive=True) if child.pid not in trainers]
    return _Sighting(stack, wanted_s(process), sum(map(wanted_s, children)), moved_bytes(process))


def read_stacks(trainers: Sequence[CountedProcess], *, resume: bool = False) -> dict[int, str]:
    """Return the stacks that the processes write when they are asked to, by process id. One that is stopped does not
    answer, unless `resume` lets it go on until it has."""
    sizes = {}
    for trainer in trainers:
        with suppress(OSError, psutil.Error):
            if (
                trainer.answers
                and _catches(trainer.pid)
                and (resume or psutil.Process(trainer.pid).status() != psutil.STATUS_STOPPED)
            ):
                sizes[trainer] = trainer.stacks.stat().st_size
                os.kill(trainer.pid, signal.SIGUSR2)
                if resume:
                    os.kill(trainer.pid, signal.SIGCONT)
    found: dict[int, str] = {}
    deadline_s = time.monotonic() + ANSWER_S
    while len(found) < len(sizes) and time.monotonic() < deadline_s:
        time.sleep(ANSWER_S / 50)
        for trainer, size in sizes.items():
            text = _text_after(trainer.stacks, size)
            if trainer.pid not in found and text.endswith("\n") and main_stack(text, trainer):
                found[trainer.pid] = text
    for trainer in sizes if resume else ():
        with suppress(OSError):
            os.kill(trainer.pid, signal.SIGSTOP)
    return found


def _catches(pid: int) -> bool:
    """Return whether SIGUSR2 would not end a process: Lightning takes its handler away at the end of `fit`. True where
    the system does not say."""
    status = Path(f"/proc/{pid}/status")
    if not status.parent.parent.joinpath("self").exists():
        return True
    caught = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGUSR2 - 1) & 1)


def _text_after(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(LONGEST_STACK_BYTES).decode(errors="replace")


def main_stack(text: str, trainer: CountedProcess) -> str:
    """Return the frames of the main thread, innermost first; all of them where it is not found by its number."""
    parts = _THREAD.split(text)
    threads = {int(number, 16): frames.strip("\n") for number, frames in zip(parts[1::2], parts[2::2], strict=True)}
    return threads.get(trainer.main_thread, next(iter(threads.values()), ""))


def in_library(stack: str) -> bool:
    """Return whether the innermost frame, those of Python's own modules apart, is one of a library that trains."""
    files = (file for file, _, _ in _FRAME.findall(stack))
    return _is_librarys(next((file for file in files if not _PYTHONS.search(file)), ""))


@lru_cache(maxsize=4096)
def _is_librarys(file: str) -> bool:
    """Return whether a file is one of such a package; a folder that only has its name is the user's own."""
    found = _LIBRARY.match(file)
    return found is not None and (Path(found[0]) / "__init__.py").is_file()


def place_of(stack: str) -> str:
    """Return where a stack stands in the user's own code, and what it has called of torch or another library:
    `all_reduce, called at train.py:31`."""
    frames = [frame for frame in _FRAME.findall(stack) if not _PYTHONS.search(frame[0])]
    own = next((frame for frame in frames if not _is_librarys(frame[0])), None)
    if own is None:
        return ""
    where = f"{Path(own[0]).name}:{own[1]}"
    called = [name for _, _, name in frames[: frames.index(own)] if name not in _WRAPPERS]
    return f"{called[-1]}, called at {where}" if called else f"{own[2]}, {where}"


def name_late(ranks: Sequence[RankStands]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, of all nodes, and why; all of them where none stands out. Where all
    wait in a library, those that wait elsewhere than most do have left out an exchange, or make one more."""
    numbers = sorted(rank.rank for rank in ranks)
    if ended := sorted(rank.rank for rank in ranks if rank.ended):
        return ended, "it has ended"
    standing = {rank.rank: rank for rank in ranks}
    unseen = any(_JAX.search(rank.stack) for rank in ranks)
    places = {
        place: Whereabouts(waiting=unseen or standing[number].waiting)
        for place, number in enumerate(numbers)
        if not standing[number].stopped
    }
    found, why = find_late(places, len(numbers))
    late = [numbers[place] for place in found]
    if len(numbers) == 1 and not late:
        return numbers, f"it stands in {standing[numbers[0]].place or 'code that has no Python stack'}"
    if late or not all(place.waiting for place in places.values()):
        return late or numbers, why
    where = {number: standing[number].place for number in numbers}
    names = sorted(set(where.values()), key=list(where.values()).count)
    if len(names) == 1:
        return numbers, f"all ranks wait in {names[0]}"
    told = "; ".join(f"rank {number} waits in {place}" for number, place in sorted(where.items())[:8])
    fewest = [number for number, place in where.items() if place == names[0]]
    alone = len(fewest) * 2 < len(numbers)
    return sorted(fewest if alone else numbers), f"the ranks make different exchanges: {told}"
