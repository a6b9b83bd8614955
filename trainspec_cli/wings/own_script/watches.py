"""What is seen of the user's processes from outside: what they use, whether they work, and where each rank of a run
that hangs stands.

A command whose steps are counted hangs where no rank has stepped for long: each is looked at now and then, its stack
(SIGUSR2, see `hook/sitecustomize.py`), its processor time and its input and output. Of a command without counted steps
the processor time of each process, what it reads and writes, and the log are seen. A process that spins while it waits
looks as if it worked, so that such a run is found to hang by its stopped or sleeping processes. Either way the time
since the last sign of work counts, not that since the last step.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import psutil

from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.run.channel.messages import ProcessSilent, RankStands
from trainspec_cli.run.folder.event_types.events import UsageEvent
from trainspec_cli.run.job.gpus import opened_nvml
from trainspec_cli.run.recovery.watch import Whereabouts, find_late, step_deadline_s
from trainspec_cli.wings.own_script.journal import CountedRank
from trainspec_cli.wings.own_script.progress import CountedProcess

FIRST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 10.0
"""Readings come as often as a hundredth of the time that has passed, looks at a silent command as a twentieth of it,
within these bounds."""
QUIET_PART = 0.25
"""Ranks are looked at once no step has come for this part of the time after which the run counts as hung."""
LOOKS = 20
"""Looks at a hung run before it counts as one, about."""
ANSWER_S = 1.0
"""A stack is written within this time by a process that can."""
LONGEST_STACK_BYTES = 2**16
LONGEST_COMMAND = 60
NAMED = 8
"""No more processes are named."""

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


# Use


@dataclass(frozen=True)
class GpuUse:
    busy: float
    """Part of the last second or so in which a kernel ran."""
    bytes: int
    """Memory that the process holds."""


class UsageLog:
    """Writes usage events of the ranks of one start; `look` is to be called again and again."""

    def __init__(self) -> None:
        self._began_s = self._looked_s = time.monotonic()
        self._processor_s: dict[int, float] = {}

    def look(self, ranks: Iterable[CountedRank]) -> None:
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        if passed_s < min(LONGEST_INTERVAL_S, max(FIRST_INTERVAL_S, (now_s - self._began_s) / 100)):
            return
        self._looked_s = now_s
        gpus = gpu_uses()
        for rank in ranks:
            if rank.trainer and (event := self._read(rank, passed_s)):
                use = gpus.get(rank.trainer.pid)
                rank.writer.write(replace(event, gpu_busy=use.busy, gpu_bytes=use.bytes) if use else event)

    def _read(self, rank: CountedRank, passed_s: float) -> UsageEvent | None:
        assert rank.trainer is not None, "it has stepped"
        try:
            process = psutil.Process(rank.trainer.pid)
            spent_s = processor_s([process, *process.children(recursive=True)])
            rss_bytes = process.memory_info().rss
        except (psutil.Error, OSError):
            return None
        before_s = self._processor_s.get(process.pid)
        self._processor_s[process.pid] = spent_s
        if before_s is None:
            return None
        swap_bytes = 0
        with suppress(OSError, ValueError, IndexError):  # not every system says it
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            swap_bytes = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSwap")), 0)
        return UsageEvent(
            step=rank.step,
            cores=max(0.0, spent_s - before_s) / passed_s,
            rss_bytes=rss_bytes,
            swap_bytes=swap_bytes,
            available_bytes=int(psutil.virtual_memory().available),
            gpu_busy=ABSENT,
            gpu_bytes=ABSENT,
        )


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time that living processes have taken."""
    spent_s = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            spent_s += times.user + times.system
    return spent_s


def wanted_s(process: psutil.Process) -> float:
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


def moved_bytes(process: psutil.Process) -> int:
    """Return what a process has read and written; 0 where the system does not say."""
    with suppress(psutil.Error, AttributeError, NotImplementedError):  # macOS has no such counters
        counters = process.io_counters()
        return int(counters.read_chars + counters.write_chars)
    return 0


def gpu_uses() -> dict[int, GpuUse]:
    """Return what processes hold of this node's NVIDIA GPUs, by process id; empty without a driver."""
    if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - asked often, and `Path` is slow to make
        return {}
    uses: dict[int, GpuUse] = {}
    with suppress(MachineError), opened_nvml() as nvml:
        for index in range(nvml.nvmlDeviceGetCount() if nvml else 0):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    before = uses.get(process.pid, GpuUse(0.0, 0))
                    held = before.bytes + int(process.usedGpuMemory or 0)
                    uses[process.pid] = GpuUse(max(before.busy, busy), held)
    return uses


# Signs of work


class SignsOfWork:
    """When something was last seen to work; its log may show it."""

    def __init__(self, log: Path):
        self._log = log
        self._log_bytes = 0
        self.newest_s = time.monotonic()

    @property
    def quiet_s(self) -> float:
        return time.monotonic() - self.newest_s

    def log_has_grown(self) -> bool:
        """Return whether it has since the last call."""
        size = self._log.stat().st_size if self._log.is_file() else 0
        grown = size > self._log_bytes
        self._log_bytes = size
        return grown


# Tell a process that works from one that hangs, by what is seen of it from outside while it makes no step.
#
# A program evaluates, compiles and saves between steps, and says nothing of it. What works shows that: its stack
# changes, it reads or writes, its children compute. A process whose stack stays the same may still compute in native
# code; where another one stands still meanwhile, and it has a GPU, it spins: it waits for that one.


MOVED_BYTES = 2**16
"""A process that reads and writes less between two looks does not work: connections are kept alive by less."""
BUSY_CORES = 0.2
"""A process that computes, or waits for a processor, for a smaller part of the time is asleep."""


@dataclass(frozen=True)
class Reading:
    """What was seen of a process since the look before."""

    stopped: bool = False
    """It was stopped by a signal, and its stack cannot be read."""
    stack_changed: bool = False
    has_stack: bool = True
    """False for a process that does not answer the signal that asks for its stack."""
    in_library: bool = False
    """Its innermost Python frame is one of torch or of another library that trains."""
    busy_cores: float = 0.0
    """Threads that computed, or waited for a processor, on average."""
    child_cores: float = 0.0
    """Likewise, of what it has started and is no rank itself."""
    moved_bytes: int = 0
    """Bytes read and written."""
    on_gpu: bool = False


def working(readings: Mapping[int, Reading]) -> tuple[int, ...]:
    """Return the ranks that show a sign of work."""
    asleep = [rank for rank, reading in readings.items() if _stands_still(reading)]
    return tuple(rank for rank, reading in readings.items() if _works(reading, waits_for=bool(set(asleep) - {rank})))


def _stands_still(reading: Reading) -> bool:
    if reading.stopped:
        return True
    moves = reading.stack_changed or reading.moved_bytes > MOVED_BYTES
    return not moves and max(reading.busy_cores, reading.child_cores) < BUSY_CORES


def _works(reading: Reading, *, waits_for: bool) -> bool:
    """`waits_for`: another rank stands still, for which this one may wait."""
    if _stands_still(reading):
        return False
    if reading.stack_changed or reading.moved_bytes > MOVED_BYTES or reading.child_cores >= BUSY_CORES:
        return True
    spins = reading.has_stack and waits_for and (reading.in_library or reading.on_gpu)
    return not spins


# Where steps are counted

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
        self.signs = SignsOfWork(log)
        self._looks: dict[int, _Sighting] = {}
        self._looked_s = self.signs.newest_s
        self._steps: dict[int, int] = {}

    def look(self, ranks: Sequence[CountedRank]) -> Hang | None:
        """Return where the ranks stand, where none of them has worked for longer than they may."""
        now_s = time.monotonic()
        steps = {rank.number: rank.step for rank in ranks if rank.trainer}
        if self._floor_s is None or not steps or steps != self._steps:
            self._steps = steps
            self.signs.newest_s = now_s
            self._looks = {}
            return None
        deadline_s = max(step_deadline_s(rank.recent_s, self._floor_s) for rank in ranks)
        quiet_s = now_s - self.signs.newest_s
        interval_s = max(ANSWER_S, deadline_s * (1 - QUIET_PART) / LOOKS)
        if quiet_s < deadline_s * QUIET_PART or now_s - self._looked_s < interval_s:
            return None
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        was_seen = bool(self._looks)
        readings = self._read(ranks, passed_s)
        if (was_seen and working(readings)) or self.signs.log_has_grown() or not readings:
            self.signs.newest_s = now_s
        elif quiet_s > deadline_s and was_seen:
            return quiet_s, deadline_s, self._describe(ranks, readings)
        return None

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
                others = {one.pid for one in trainers.values()}
                children = [child for child in process.children(recursive=True) if child.pid not in others]
                children_s = sum(map(wanted_s, children))
                look = _Sighting(stack, wanted_s(process), children_s, moved_bytes(process))
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
        """Say where the ranks stand; of a stopped one the stack is read once the run counts as hung."""
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
            with trainer.stacks.open("rb") as file:
                file.seek(size)
                text = file.read(LONGEST_STACK_BYTES).decode(errors="replace")
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


# Where no step is counted, or none yet

Silence = tuple[float, tuple[ProcessSilent, ...]]
"""How long no process has worked, and those to be named."""


@dataclass
class _Spent:
    wanted_s: float
    moved_bytes: int


class SilenceWatch:
    """Watches one start; `look` is to be called again and again. `limit_s`: how long it may show no sign of work; None
    for ever."""

    def __init__(self, limit_s: float | None, log: Path):
        self._limit_s = limit_s
        self.signs = SignsOfWork(log)
        self._began_s = self.signs.newest_s
        self._looked_s = self.signs.newest_s
        self._seen: dict[int, _Spent] = {}
        self.worked_s = 0.0
        """The time in which it showed that it works."""

    def look(self, members: Callable[[], Sequence[psutil.Process]]) -> Silence | None:
        """Return what is silent, where no process has worked for longer than they may. `members` are the command's
        processes that live."""
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        if passed_s < min(LONGEST_INTERVAL_S, max(FIRST_INTERVAL_S, (now_s - self._began_s) / 20)):
            return None
        self._looked_s = now_s
        found = members()
        readings = self._read(found, passed_s)
        if self.signs.log_has_grown() or working(readings):
            self.worked_s += passed_s
            self.signs.newest_s = now_s
        elif not readings:  # the node waits for others before it starts, or all has ended
            self.signs.newest_s = now_s
        quiet_s = now_s - self.signs.newest_s
        if self._limit_s is None or quiet_s < self._limit_s or not readings:
            return None
        return quiet_s, _describe(found, readings)

    def _read(self, members: Sequence[psutil.Process], passed_s: float) -> dict[int, Reading]:
        readings = {}
        seen = {}
        for process in members:
            try:
                state = process.status()
                sighting = _Spent(wanted_s(process), moved_bytes(process))
            except (psutil.Error, OSError):
                continue
            was = self._seen.get(process.pid, _Spent(0.0, 0))
            seen[process.pid] = sighting
            readings[process.pid] = Reading(
                stopped=state == psutil.STATUS_STOPPED,
                has_stack=False,
                busy_cores=max(0.0, sighting.wanted_s - was.wanted_s) / passed_s,
                moved_bytes=sighting.moved_bytes - was.moved_bytes,
            )
        self._seen = seen
        if any(reading.stopped for reading in readings.values()):
            # Others may spin while they wait for it: that they compute is no sign of work.
            readings = {pid: replace(reading, busy_cores=0.0) for pid, reading in readings.items()}
        return readings


def _describe(members: Sequence[psutil.Process], readings: dict[int, Reading]) -> tuple[ProcessSilent, ...]:
    stopped = [process for process in members if readings.get(process.pid, Reading()).stopped]
    host = socket.gethostname()
    found = []
    for process in (stopped or members)[:NAMED]:
        rank = ""
        command = "ended"
        with suppress(psutil.Error, OSError):
            command = shlex.join(process.cmdline())
            command = f"...{command[-LONGEST_COMMAND:]}" if len(command) > LONGEST_COMMAND else command
            rank = process.environ().get("RANK", "")
        number = int(rank) if rank.isdigit() else None
        found.append(ProcessSilent(number, host, process.pid, command, stopped=bool(stopped)))
    return tuple(found)


def name_silent(processes: Sequence[ProcessSilent]) -> tuple[list[ProcessSilent], str]:
    """Return the processes of all nodes that are to be named, and why: the stopped ones, or all where none is."""
    if stopped := [process for process in processes if process.stopped]:
        return stopped[:NAMED], "is stopped" if len(stopped) == 1 else "are stopped"
    if len(processes) == 1:
        return list(processes), "sleeps"
    return list(processes[:NAMED]), "sleep; without counted steps nobody can say who waits for whom"
