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
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainspec_cli.launcher.own_command.journal import CountedRank
from trainspec_cli.launcher.own_command.progress import CountedProcess
from trainspec_cli.launcher.own_command.usage import gpu_uses, processor_s
from trainspec_cli.policy.recovery.hang import Whereabouts, find_late, step_deadline_s
from trainspec_cli.policy.recovery.silence import Reading, working
from trainspec_cli.rundir.event_types.observed import HangEvent

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
"""Functions of torch that stand between a call and what is called."""
_TORCH = f"{os.sep}torch{os.sep}"


@dataclass(frozen=True)
class Hang:
    late: tuple[int, ...]
    """The ranks that the others wait for; all of them where none stands out."""
    why: str
    waited_s: float
    events: dict[int, HangEvent]
    """By rank."""


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
        self._floor_s, self._log = floor_s, log
        self._looks: dict[int, _Sighting] = {}
        self._log_bytes = 0
        self._worked_s = self._looked_s = time.monotonic()
        self._steps: dict[int, int] = {}

    def look(self, ranks: Sequence[CountedRank]) -> Hang | None:
        """Return the hang, where the run is hung by now."""
        now_s = time.monotonic()
        steps = {rank.number: rank.step for rank in ranks if rank.trainer}
        if self._floor_s is None or not steps or steps != self._steps:
            self._steps, self._worked_s, self._looks = steps, now_s, {}
            return None
        deadline_s = max(step_deadline_s(rank.recent_s, self._floor_s) for rank in ranks)
        quiet_s, interval_s = now_s - self._worked_s, max(ANSWER_S, deadline_s * (1 - QUIET_PART) / LOOKS)
        if quiet_s < deadline_s * QUIET_PART or now_s - self._looked_s < interval_s:
            return None
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        was_seen = bool(self._looks)
        readings = self._read(ranks, passed_s)
        if (was_seen and working(readings)) or self._log_has_grown() or not readings:
            self._worked_s = now_s
        elif quiet_s > deadline_s and was_seen:
            return self._describe(ranks, readings, quiet_s, deadline_s)
        return None

    def _log_has_grown(self) -> bool:
        size = self._log.stat().st_size if self._log.is_file() else 0
        grown, self._log_bytes = size > self._log_bytes, size
        return grown

    def _read(self, ranks: Sequence[CountedRank], passed_s: float) -> dict[int, Reading]:
        trainers = {rank.number: rank.trainer for rank in ranks if rank.trainer}
        stacks = read_stacks(list(trainers.values()))
        gpus = gpu_uses()
        readings = {}
        for number, trainer in trainers.items():
            before, stack = self._looks.get(number), stacks.get(trainer.pid, "")
            try:
                process = psutil.Process(trainer.pid)
                state, look = process.status(), _look(process, stack, {one.pid for one in trainers.values()})
            except (psutil.Error, OSError):
                continue
            self._looks[number] = look
            was = before or look
            readings[number] = Reading(
                stopped=state == psutil.STATUS_STOPPED,
                stack_changed=bool(stack) and main_stack(stack, trainer) != main_stack(was.stack, trainer),
                has_stack=bool(stack),
                in_torch=_in_torch(main_stack(stack, trainer)),
                busy_cores=max(0.0, look.processor_s - was.processor_s) / passed_s,
                child_cores=max(0.0, look.children_s - was.children_s) / passed_s,
                moved_bytes=look.moved_bytes - was.moved_bytes,
                on_gpu=trainer.pid in gpus,
            )
        return readings

    def _describe(
        self, ranks: Sequence[CountedRank], readings: dict[int, Reading], waited_s: float, deadline_s: float
    ) -> Hang:
        """Name the ranks that the others wait for. Those that were stopped go on for as long as it takes them to write
        their stacks."""
        trainers = {rank.number: rank.trainer for rank in ranks if rank.trainer}
        stopped = [number for number, reading in readings.items() if reading.stopped]
        found = {number: self._looks[number].stack for number in readings}
        resumed = read_stacks([trainers[number] for number in stopped], resume=True)
        found |= {number: resumed.get(trainers[number].pid, "") for number in stopped}
        mains = {number: main_stack(stack, trainers[number]) for number, stack in found.items()}
        ended = sorted(trainers.keys() - readings.keys())
        late, why = (ended, "it has ended") if ended else _find_late(mains, readings)
        step = max(rank.step for rank in ranks) + 1
        events = {
            number: HangEvent(
                step=step,
                waited_s=waited_s,
                host=socket.gethostname(),
                waiting=number not in late,
                waits_in=place_of(stack) or None,
                collectives={},
                stack=stack or "its stack cannot be read",
                deadline_s=deadline_s,
            )
            for number, stack in mains.items()
        }
        return Hang(tuple(late), why, waited_s, events)


def _look(process: psutil.Process, stack: str, trainers: set[int]) -> _Sighting:
    children = [child for child in process.children(recursive=True) if child.pid not in trainers]
    moved_bytes = 0
    with suppress(psutil.Error, AttributeError, NotImplementedError):  # macOS has no such counters
        counters = process.io_counters()
        moved_bytes = counters.read_chars + counters.write_chars
    return _Sighting(stack, _wanted_s(process), sum(map(_wanted_s, children)), moved_bytes)


def _wanted_s(process: psutil.Process) -> float:
    """Return the time for which a process' threads have computed, or waited for a processor: on a machine that others
    use too, what works may compute little. Where the system does not count waiting, the time that they computed."""
    wanted_ns = 0
    try:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(FileNotFoundError):  # it has ended meanwhile
                ran_ns, waited_ns, _ = (thread / "schedstat").read_text().split()
                wanted_ns += int(ran_ns) + int(waited_ns)
    except (OSError, ValueError):
        return processor_s([process])
    return wanted_ns / 1e9 if wanted_ns else processor_s([process])


def read_stacks(trainers: Sequence[CountedProcess], *, resume: bool = False) -> dict[int, str]:
    """Return the stacks that the processes write when they are asked to, by process id. One that is stopped does not
    answer, unless `resume` lets it go on until it has."""
    sizes = {}
    for trainer in trainers:
        with suppress(OSError, psutil.Error):
            if trainer.answers and (resume or psutil.Process(trainer.pid).status() != psutil.STATUS_STOPPED):
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


def _text_after(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(LONGEST_STACK_BYTES).decode(errors="replace")


def main_stack(text: str, trainer: CountedProcess) -> str:
    """Return the frames of the main thread, innermost first; all of them where it is not found by its number."""
    parts = _THREAD.split(text)
    threads = {int(number, 16): frames.strip("\n") for number, frames in zip(parts[1::2], parts[2::2], strict=True)}
    return threads.get(trainer.main_thread, next(iter(threads.values()), ""))


def _in_torch(stack: str) -> bool:
    first = _FRAME.search(stack)
    return first is not None and _TORCH in first[1]


def place_of(stack: str) -> str:
    """Return where a stack stands in the user's own code, and what it has called of torch: `all_reduce, called at
    train.py:31`."""
    frames = _FRAME.findall(stack)
    own = next((frame for frame in frames if _TORCH not in frame[0]), None)
    if own is None:
        return ""
    where = f"{Path(own[0]).name}:{own[1]}"
    called = [name for _, _, name in frames[: frames.index(own)] if name not in _WRAPPERS]
    return f"{called[-1]}, called at {where}" if called else f"{own[2]}, {where}"


def _find_late(mains: dict[int, str], readings: dict[int, Reading]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and why. Where all wait in torch, those that wait elsewhere than most
    do have left out an exchange, or make one more."""
    numbers = sorted(mains)  # those of this node: another one's ranks are not looked at
    places = {
        place: Whereabouts(waiting=_in_torch(mains[number]))
        for place, number in enumerate(numbers)
        if not readings[number].stopped
    }
    found, why = find_late(places, len(numbers))
    late = [numbers[place] for place in found]
    if len(mains) == 1 and not late:
        return [*mains], f"it stands in {place_of(*mains.values()) or 'code that has no Python stack'}"
    if late or not all(place.waiting for place in places.values()):
        return late or sorted(mains), why
    where = {number: place_of(stack) for number, stack in mains.items()}
    names = sorted(set(where.values()), key=list(where.values()).count)
    if len(names) == 1:
        return sorted(mains), f"all ranks wait in {names[0]}"
    told = "; ".join(f"rank {number} waits in {place}" for number, place in sorted(where.items())[:8])
    fewest = [number for number, place in where.items() if place == names[0]]
    alone = len(fewest) * 2 < len(mains)
    return sorted(fewest if alone else mains), f"the ranks make different exchanges: {told}"
