"""Observe the user's processes from outside: resource usage, signs of work, and the stacks of ranks in a hung run.

A run with counted steps may be hung if no rank takes a step for a long time. In that case, each rank's stack (SIGUSR2,
see `hook/sitecustomize.py`), CPU time and I/O are sampled occasionally. Without counted steps, each process's CPU time
and I/O and the log are sampled. A process that spins while waiting appears to be working, but a hung run has other
processes that are stopped or asleep. In both cases, the time since the last sign of work counts, not the time since the
last step."""

from __future__ import annotations

import math
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
from trainspec_cli.core.reading.files import read_object
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.recipe.results.verdict import Collective
from trainspec_cli.run.channel.messages import ProcessSilent, RankStands
from trainspec_cli.run.folder.event_types.events import UsageEvent
from trainspec_cli.run.job.gpus import opened_nvml
from trainspec_cli.run.recovery.collectives import find_mismatch, read_recorder, with_line
from trainspec_cli.run.recovery.watch import Whereabouts, find_late, stall_after_s, step_deadline_s
from trainspec_cli.wings.own_script.journal import CountedProcess, CountedRank

FIRST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 10.0
"""Bounds of the interval between usage samples: 1/100 of the elapsed time, or 1/20 without counted steps."""
QUIET_PART = 0.25
"""Sampling of ranks starts once this fraction of the hang timeout has passed without a step."""
SAMPLES = 20
"""Approximate number of samples taken before a run is treated as hung."""
ANSWER_S = 1.0
"""Time limit in seconds for a process to write its stack."""
RECORDED_S = 3.0
"""Time limit in seconds for a process to write its newest collectives."""
LONGEST_STACK_BYTES = 2**16
LONGEST_COMMAND = 60
NAMED = 8
"""Maximum number of processes named in a message."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WRAPPERS = ("wrapper", "inner", "_fn", "_wrapped_call_impl", "_call_impl")
"""Names of functions that only wrap another function."""
_LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "lightning", "jax", "jaxlib", "tensorflow", "keras")
"""Training packages. A rank inside one of them is most likely waiting there."""
_LIBRARY = re.compile(rf"^.*?[/\\](?:{'|'.join(_LIBRARIES)})(?=[/\\])")
_JAX = re.compile(r'^  File ".*[/\\]jax[/\\]_src[/\\]', re.MULTILINE)
"""Matches JAX's frames: compiled JAX functions wait without a separate Python frame."""
_PYTHONS = re.compile(r"^<|[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)")


# Usage


@dataclass(frozen=True)
class GpuUse:
    busy: float
    """Fraction of roughly the last second during which the GPU ran a kernel."""
    bytes: int
    """Device memory that the process holds."""


class UsageLog:
    """Writes usage events for the ranks of one start. Call `poll` repeatedly."""

    def __init__(self) -> None:
        self._began_s = self._sampled_s = time.monotonic()
        self._processor_s: dict[int, float] = {}

    def poll(self, ranks: Iterable[CountedRank]) -> None:
        now_s = time.monotonic()
        passed_s = now_s - self._sampled_s
        if passed_s < min(LONGEST_INTERVAL_S, max(FIRST_INTERVAL_S, (now_s - self._began_s) / 100)):
            return
        self._sampled_s = now_s
        gpus = gpu_uses()
        for rank in ranks:
            if rank.trainer and (event := self._read(rank, passed_s)):
                use = gpus.get(rank.trainer.pid)
                rank.writer.write(replace(event, gpu_busy=use.busy, gpu_bytes=use.bytes) if use else event)

    def _read(self, rank: CountedRank, passed_s: float) -> UsageEvent | None:
        assert rank.trainer is not None, "the rank has taken a step"
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
        with suppress(OSError, ValueError, IndexError):  # not every system has this file
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
    """Return the total processor time of the live processes."""
    spent_s = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            spent_s += times.user + times.system
    return spent_s


def wanted_s(process: psutil.Process) -> float:
    """Return the time that a process's threads spent computing or waiting for a processor. Waiting is included because
    on a busy machine, a working process may compute little. If the system does not count waiting, return only the
    computing time."""
    wanted_ns = 0
    try:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(FileNotFoundError):  # the thread has ended
                ran_ns, waited_ns, _ = (thread / "schedstat").read_text().split()
                wanted_ns += int(ran_ns) + int(waited_ns)
    except (OSError, ValueError):
        return processor_s([process])
    return wanted_ns / 1e9 if wanted_ns else processor_s([process])


def moved_bytes(process: psutil.Process) -> int:
    """Return the number of bytes that a process has read and written; 0 if the system does not count them."""
    with suppress(psutil.Error, AttributeError, NotImplementedError):  # macOS has no such counters
        counters = process.io_counters()
        return int(counters.read_chars + counters.write_chars)
    return 0


def gpu_uses() -> dict[int, GpuUse]:
    """Return the GPU use by process id, for this node's NVIDIA GPUs. Empty if there is no driver."""
    if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - called often, and `Path` is slow
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
    """Records when a sign of work was last seen, such as output in the log."""

    def __init__(self, log: Path):
        self._log = log
        self._log_bytes = 0
        self.newest_s = time.monotonic()

    @property
    def quiet_s(self) -> float:
        return time.monotonic() - self.newest_s

    def log_has_grown(self) -> bool:
        """Return whether the log has grown since the last call."""
        size = self._log.stat().st_size if self._log.is_file() else 0
        grown = size > self._log_bytes
        self._log_bytes = size
        return grown


# While a process takes no steps, determine from outside whether it is working or hung. Between steps, a program
# evaluates, compiles and saves without reporting it. Work is visible: the stack changes, data is read or written, or
# child processes compute. A process with a constant stack may still be computing in native code. But if it uses a GPU
# and another process is idle, it is spinning while it waits for the idle process.


MOVED_BYTES = 2**16
"""A process that moves fewer bytes than this between two samples does not count as working, because keep-alive traffic
also moves some."""
BUSY_CORES = 0.2
"""A process is treated as asleep if it computes or waits for a processor for less than this fraction of the time."""


@dataclass(frozen=True)
class Reading:
    """Observations of a process since the previous sample."""

    stopped: bool = False
    """True if a signal has stopped the process. In that case, its stack cannot be read."""
    stack_changed: bool = False
    has_stack: bool = True
    """False if the process does not react to the signal that requests its stack."""
    in_library: bool = False
    """True if the innermost Python frame is in torch or another training library."""
    busy_cores: float = 0.0
    """Average number of the process's threads that are computing or waiting for a processor."""
    child_cores: float = 0.0
    """Average number of such threads in child processes that are not ranks."""
    moved_bytes: int = 0
    """Number of bytes that the process has read and written."""
    on_gpu: bool = False


def working(readings: Mapping[int, Reading]) -> tuple[int, ...]:
    """Return the ranks that show a sign of work."""
    asleep = [rank for rank, reading in readings.items() if _is_idle(reading)]
    return tuple(rank for rank, reading in readings.items() if _works(reading, waits_for=bool(set(asleep) - {rank})))


def _is_idle(reading: Reading) -> bool:
    if reading.stopped:
        return True
    moves = reading.stack_changed or reading.moved_bytes > MOVED_BYTES
    return not moves and max(reading.busy_cores, reading.child_cores) < BUSY_CORES


def _works(reading: Reading, *, waits_for: bool) -> bool:
    """Return whether a process is working. `waits_for`: whether there is an idle rank that this process may be waiting
    for."""
    if _is_idle(reading):
        return False
    if reading.stack_changed or reading.moved_bytes > MOVED_BYTES or reading.child_cores >= BUSY_CORES:
        return True
    spins = reading.has_stack and waits_for and (reading.in_library or reading.on_gpu)
    return not spins


# Runs with counted steps

SUSPECTED_S = 4.0
"""The shortest time without a sign of work after which a run may be hung."""
Hang = tuple[float, float, tuple[RankStands, ...], bool]
"""Time without progress and its limit, both in seconds, the state of each rank, and whether the limit is over."""


@dataclass
class _Sample:
    """A process at the time of one sample."""

    stack: str = ""
    processor_s: float = 0.0
    children_s: float = 0.0
    moved_bytes: int = 0


class HangWatch:
    """Watches one start. Call `poll` repeatedly. `floor_s`: no run is treated as hung before this time; None: a run is
    never treated as hung. Long before, ranks that show no sign of work are reported once."""

    def __init__(self, floor_s: float | None, log: Path):
        self._floor_s = floor_s
        self.signs = SignsOfWork(log)
        self._samples: dict[int, _Sample] = {}
        self._sampled_s = self.signs.newest_s
        self._steps: dict[int, int] = {}
        self._is_suspected = False

    def poll(self, ranks: Sequence[CountedRank]) -> Hang | None:
        """Return the state of the ranks if no rank has shown a sign of work within the allowed time, or for much longer
        than a step takes; otherwise None."""
        now_s = time.monotonic()
        steps = {rank.number: rank.step for rank in ranks if rank.trainer}
        if self._floor_s is None or not steps or steps != self._steps:
            self._steps = steps
            self.signs.newest_s = now_s
            self._samples = {}
            self._is_suspected = False
            return None
        deadline_s = max(step_deadline_s(rank.recent_s, self._floor_s) for rank in ranks)
        quiet_s = now_s - self.signs.newest_s
        late_s = [stall_after_s(rank.recent_s, deadline_s) for rank in ranks]
        suspected_s = math.inf if self._is_suspected else max(SUSPECTED_S, *late_s)
        is_early = quiet_s >= suspected_s
        interval_s = ANSWER_S if is_early else max(ANSWER_S, deadline_s * (1 - QUIET_PART) / SAMPLES)
        if quiet_s < min(suspected_s, deadline_s * QUIET_PART) or now_s - self._sampled_s < interval_s:
            return None
        passed_s = now_s - self._sampled_s
        self._sampled_s = now_s
        was_seen = bool(self._samples)
        readings = self._read(ranks, passed_s)
        if (was_seen and working(readings)) or self.signs.log_has_grown() or not readings:
            self.signs.newest_s = now_s
            self._is_suspected = False
        elif quiet_s > deadline_s and was_seen:
            return quiet_s, deadline_s, self._describe(ranks, readings), True
        elif is_early and was_seen:
            self._is_suspected = True
            return quiet_s, deadline_s, self._describe(ranks, readings), False
        return None

    def _read(self, ranks: Sequence[CountedRank], passed_s: float) -> dict[int, Reading]:
        trainers = {rank.number: rank.trainer for rank in ranks if rank.trainer}
        stacks = read_stacks(list(trainers.values()))
        gpus = gpu_uses()
        readings = {}
        for number, trainer in trainers.items():
            before = self._samples.get(number)
            stack = stacks.get(trainer.pid, "")
            try:
                process = psutil.Process(trainer.pid)
                state = process.status()
                others = {one.pid for one in trainers.values()}
                children = [child for child in process.children(recursive=True) if child.pid not in others]
                children_s = sum(map(wanted_s, children))
                sample = _Sample(stack, wanted_s(process), children_s, moved_bytes(process))
            except (psutil.Error, OSError):
                continue
            self._samples[number] = sample
            was = before or sample
            readings[number] = Reading(
                stopped=state == psutil.STATUS_STOPPED,
                stack_changed=bool(stack) and main_stack(stack, trainer) != main_stack(was.stack, trainer),
                has_stack=bool(stack),
                in_library=in_library(main_stack(stack, trainer)),
                busy_cores=max(0.0, sample.processor_s - was.processor_s) / passed_s,
                child_cores=max(0.0, sample.children_s - was.children_s) / passed_s,
                moved_bytes=sample.moved_bytes - was.moved_bytes,
                on_gpu=trainer.pid in gpus,
            )
        return readings

    def _describe(self, ranks: Sequence[CountedRank], readings: dict[int, Reading]) -> tuple[RankStands, ...]:
        """Return the state of the ranks. The stack of a stopped rank is read later, once the hang is confirmed."""
        stands = []
        recorded = read_collectives([rank.trainer for rank in ranks if rank.trainer])
        for rank in ranks:
            if rank.trainer is None:
                continue
            reading = readings.get(rank.number)
            stopped = reading is not None and reading.stopped
            stack = self._samples[rank.number].stack if reading and not stopped else ""
            main = main_stack(stack, rank.trainer)
            stands.append(
                RankStands(
                    rank=rank.number,
                    host=socket.gethostname(),
                    step=rank.step,
                    stack=main or ("it is stopped" if stopped else "the stack cannot be read"),
                    place=locate(main),
                    waiting=in_library(main),
                    stopped=stopped,
                    ended=reading is None,
                    collectives=tuple(with_line(recorded.get(rank.trainer.pid, ()), own_line(main))),
                )
            )
        return tuple(stands)


def read_stacks(trainers: Sequence[CountedProcess], *, resume: bool = False) -> dict[int, str]:
    """Ask processes for their stacks, and return the stacks by process id. A stopped process does not react unless
    `resume` lets it run until it has written its stack."""
    sizes = {}
    for trainer in trainers:
        with suppress(OSError, psutil.Error):
            # SIGUSR2 kills a process without a handler for it. Lightning removes the handler at the end of `fit`.
            catches = True
            if Path("/proc/self").exists():
                status = Path(f"/proc/{trainer.pid}/status").read_text().splitlines()
                caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
                catches = bool(int(caught, 16) >> (signal.SIGUSR2 - 1) & 1)
            runs = resume or psutil.Process(trainer.pid).status() != psutil.STATUS_STOPPED
            if trainer.answers and catches and runs:
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


def read_collectives(trainers: Sequence[CountedProcess]) -> dict[int, list[Collective]]:
    """Ask processes for their newest collectives, and return these by process id. A stopped process does not answer."""
    asked = {}
    for trainer in trainers:
        answer = trainer.stacks.parent / f"{trainer.pid}.collectives"
        answer.unlink(missing_ok=True)
        with suppress(OSError):  # the process has no process group, or is still answering
            os.close(os.open(answer.with_suffix(".ask"), os.O_WRONLY | os.O_NONBLOCK))
            asked[trainer.pid] = answer
    deadline_s = time.monotonic() + RECORDED_S
    found: dict[int, list[Collective]] = {}
    while len(found) < len(asked) and time.monotonic() < deadline_s:
        time.sleep(ANSWER_S / 50)
        for pid in asked.keys() - found.keys():
            if asked[pid].is_file():
                found[pid] = read_recorder(read_object(asked[pid]), _is_installed)
    return found


def own_line(stack: str) -> str:
    """Return the innermost line of the user's code, as `FILE:LINE in FUNCTION`; empty if the stack has none."""
    own = next((frame for frame in _FRAME.findall(stack) if not _is_installed(frame[0])), None)
    return f"{Path(own[0]).name}:{own[1]} in {own[2]}" if own else ""


def _is_installed(file: str) -> bool:
    return bool(_PYTHONS.search(file)) or _is_librarys(file)


def main_stack(text: str, trainer: CountedProcess) -> str:
    """Return the frames of the main thread, innermost first. If the main thread's id is missing, return those of the
    first thread."""
    parts = _THREAD.split(text)
    threads = {int(number, 16): frames.strip("\n") for number, frames in zip(parts[1::2], parts[2::2], strict=True)}
    return threads.get(trainer.main_thread, next(iter(threads.values()), ""))


def in_library(stack: str) -> bool:
    """Return whether the innermost frame outside the Python standard library is in a training library."""
    files = (file for file, _, _ in _FRAME.findall(stack))
    return _is_librarys(next((file for file in files if not _PYTHONS.search(file)), ""))


@lru_cache(maxsize=4096)
def _is_librarys(file: str) -> bool:
    """Return whether a file belongs to a package in `_LIBRARIES`. A user's folder of the same name does not count."""
    found = _LIBRARY.match(file)
    return found is not None and (Path(found[0]) / "__init__.py").is_file()


def locate(stack: str) -> str:
    """Return a stack's position in the user's code, and the library function called there, such as `all_reduce, called
    at train.py:31`."""
    frames = [frame for frame in _FRAME.findall(stack) if not _PYTHONS.search(frame[0])]
    own = next((frame for frame in frames if not _is_librarys(frame[0])), None)
    if own is None:
        return ""
    where = f"{Path(own[0]).name}:{own[1]}"
    called = [name for _, _, name in frames[: frames.index(own)] if name not in _WRAPPERS]
    return f"{called[-1]}, called at {where}" if called else f"{own[2]}, {where}"


def name_late(ranks: Sequence[RankStands]) -> tuple[list[int], str]:
    """Return the ranks on all nodes that the other ranks are waiting for, and why; all ranks if none differs. If all
    ranks wait in a library, those that wait in a different place from the majority have skipped an exchange or made an
    extra one."""
    numbers = sorted(rank.rank for rank in ranks)
    if ended := sorted(rank.rank for rank in ranks if rank.ended):
        return ended, "it has ended"
    standing = {rank.rank: rank for rank in ranks}
    if mismatch := find_mismatch({rank.rank: rank.collectives for rank in ranks}):
        return list(mismatch.ranks) or numbers, mismatch.why
    unseen = any(_JAX.search(rank.stack) for rank in ranks)
    states = {
        place: Whereabouts(
            waiting=unseen or standing[number].waiting,
            collectives={one.group: one.number for one in standing[number].collectives},
            entered=standing[number].collectives,
            line=own_line(standing[number].stack),
        )
        for place, number in enumerate(numbers)
        if not standing[number].stopped
    }
    found, why = find_late(states, len(numbers))
    late = [numbers[place] for place in found]
    if len(numbers) == 1 and not late:
        return numbers, f"it is in {standing[numbers[0]].place or 'code that has no Python stack'}"
    if late or not all(state.waiting for state in states.values()):
        return late or numbers, why
    where = {number: standing[number].place for number in numbers}
    names = sorted(set(where.values()), key=list(where.values()).count)
    if len(names) == 1:
        return numbers, f"all ranks wait in {names[0]}"
    waits = "; ".join(f"rank {number} waits in {place}" for number, place in sorted(where.items())[:8])
    fewest = [number for number, place in where.items() if place == names[0]]
    is_minority = len(fewest) * 2 < len(numbers)
    return sorted(fewest if is_minority else numbers), f"the ranks make different exchanges: {waits}"


# Runs without counted steps

Silence = tuple[float, tuple[ProcessSilent, ...]]
"""Time in seconds without a sign of work from any process, and the processes to name."""


class SilenceWatch:
    """Watches one start. Call `poll` repeatedly. `limit_s`: maximum time without a sign of work; None: no limit."""

    def __init__(self, limit_s: float | None, log: Path):
        self._limit_s = limit_s
        self.signs = SignsOfWork(log)
        self._began_s = self.signs.newest_s
        self._sampled_s = self.signs.newest_s
        self._seen: dict[int, tuple[float, int]] = {}
        """`wanted_s` and `moved_bytes` of each process at the last sample."""
        self.worked_s = 0.0
        """Total time in seconds during which the command showed signs of work."""

    def poll(self, members: Callable[[], Sequence[psutil.Process]]) -> Silence | None:
        """Return the silent processes if no process has shown a sign of work within the allowed time; otherwise None.
        `members` returns the command's running processes."""
        now_s = time.monotonic()
        passed_s = now_s - self._sampled_s
        if passed_s < min(LONGEST_INTERVAL_S, max(FIRST_INTERVAL_S, (now_s - self._began_s) / 20)):
            return None
        self._sampled_s = now_s
        found = members()
        readings = self._read(found, passed_s)
        if self.signs.log_has_grown() or working(readings):
            self.worked_s += passed_s
            self.signs.newest_s = now_s
        elif not readings:  # the node waits for other nodes before it starts, or every process has ended
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
                spent = wanted_s(process), moved_bytes(process)
            except (psutil.Error, OSError):
                continue
            was = self._seen.get(process.pid, (0.0, 0))
            seen[process.pid] = spent
            readings[process.pid] = Reading(
                stopped=state == psutil.STATUS_STOPPED,
                has_stack=False,
                busy_cores=max(0.0, spent[0] - was[0]) / passed_s,
                moved_bytes=spent[1] - was[1],
            )
        self._seen = seen
        if any(reading.stopped for reading in readings.values()):
            # Other processes may spin while they wait for the stopped one, so computing is not a sign of work here.
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
    """Return which processes on all nodes to name, and why: the stopped processes, or all processes if none is
    stopped."""
    if stopped := [process for process in processes if process.stopped]:
        return stopped[:NAMED], "is stopped" if len(stopped) == 1 else "are stopped"
    if len(processes) == 1:
        return list(processes), "sleeps"
    return list(processes[:NAMED]), "sleep; without counted steps, late and waiting processes look the same"
