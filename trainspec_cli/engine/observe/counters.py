"""This process's counters in the operating system and the interpreter, read every few steps, at the end of a step.

The main thread runs the step: the kernel counts its CPU time (`schedstat`), how long a quota throttled its control
group (`cpu.stat`), its major page faults, and packet losses on its connections (`TCP_INFO`). The interpreter reports
garbage collection. A counter that does not exist on this system is 0, or omitted if 0 could be a real value.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import struct
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from trainspec_cli.core.node import cpu_name
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.engine.accelerators import allocator_count, chip_name, device_memory, host_is_emulated, on_chip
from trainspec_cli.engine.comm.codec import Connection, borrow, open_connections, read_tcp_info
from trainspec_cli.engine.digest import Mark, MicroBatch, elapsed_s, mark, wait_for
from trainspec_cli.engine.observe.clock import ProcessorClock, QueuedTime
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.run.folder.event_types.events import ConnectionCounts, CountersEvent, StartEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.recovery.watch import WINDOW, slope_per_step, steps_until_full

WINDOW_S = 0.5
"""The shortest interval between readings. Reading and writing the counters takes a thousandth of that time."""
REMEMBERED_STEPS = 8
CGROUPS = Path("/sys/fs/cgroup")
PAGE_BYTES = resource.getpagesize()


class GarbageClock:
    """Sums the CPU time of garbage collection in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.runs = 0
        self._began_s = 0.0
        self._cut_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began_s
            self.runs += 1

    def cut(self) -> float:
        """Return the garbage collection time since the last call, in seconds."""
        since_s = self.seconds - self._cut_s
        self._cut_s = self.seconds
        return since_s

    def close(self) -> None:
        gc.callbacks.remove(self._note)


@dataclass(frozen=True)
class Counts:
    """The current values of counters that only increase."""

    cpu_s: float = 0.0
    throttled_s: float = 0.0
    steal_s: float = 0.0
    memory_stall_s: float = 0.0
    major_faults: int = 0
    gc_s: float = 0.0
    gc_runs: int = 0
    compiles: int = 0
    allocator_retries: int = 0

    def since(self, before: Counts) -> Counts:
        """Return the increase in each counter; 0 if the counter was reset, which can happen when a virtual machine
        migrates."""
        return Counts(**{name: max(0, now - getattr(before, name)) for name, now in vars(self).items()})


@dataclass
class Window:
    """The window of steps since the counters were last read."""

    before: Counts
    began_s: float
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    attended: int = 0
    agreed_s: float = math.inf
    """The shortest duration of the exchanges that ended the window's steps."""
    own_s: float = 0.0
    queued_s: float = 0.0
    starved_s: float | None = None


class StepCounters:
    """Reads the counters. Every rank calls `note_step` after each step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_emulated = host_is_emulated(device)
        """True if the host is emulated. The system's counters are then meaningless."""
        self.garbage = GarbageClock()
        self._connections = ConnectionCounter()
        self._recent_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._processor = ProcessorClock()
        self._window = Window(self._counts(), time.perf_counter())

    def note_step(
        self,
        step: int,
        parts_s: dict[str, float],
        queued: QueuedTime,
        micro_batches: Sequence[MicroBatch],
        agreement: tuple[float, float],
        starved_s: float | None = None,
        attended: int = 0,
    ) -> CountersEvent | None:
        """Record a step. Return the counts of the window that ends with this step; None if no window ends with it.

        `agreement`: the duration of the exchange that ends each step, in seconds, and the Unix time when this rank left
        it. `starved_s`: as in `Segments.starved_s`. `attended`: as in `Traffic.attended`.
        """
        agreed_s, left_at = agreement
        window = self._window
        self._recent_s.append(sum(parts_s.values()))
        window.steps += 1
        window.samples += sum(tokens.shape[0] for tokens, *_ in micro_batches)
        window.tokens += sum(tokens.numel() for tokens, *_ in micro_batches)
        window.attended += attended
        window.agreed_s = min(window.agreed_s, agreed_s)
        window.queued_s += queued.exposed_s
        if starved_s is not None:
            window.starved_s = (window.starved_s or 0.0) + starved_s
        window.own_s += sum(seconds for part, seconds in parts_s.items() if part != "exposed_comm")
        if step % window_steps(median(self._recent_s)):
            return None
        now = self._counts()
        self._window = Window(now, time.perf_counter())
        resident = _read("/proc/self/statm").split()
        swapped = _read("/proc/self/status").partition("VmSwap:")[2].split()
        available = available_bytes()
        return CountersEvent(
            step=step,
            steps=window.steps,
            wall_s=self._window.began_s - window.began_s,
            own_s=window.own_s,
            queued_s=window.queued_s,
            **vars(now.since(window.before)),
            rss_bytes=int(resident[1]) * PAGE_BYTES if resident else 0,
            swap_bytes=int(swapped[0]) * 1024 if swapped else 0,
            available_bytes=ABSENT if available is None else available,
            samples=window.samples,
            tokens=window.tokens,
            attended=window.attended,
            agreed_s=window.agreed_s,
            left_at=left_at,
            starved_s=ABSENT if window.starved_s is None else window.starved_s,
            connections=() if self._is_emulated else self._connections.cut(),
        )

    def _counts(self) -> Counts:
        retries = allocator_count(self._device, "num_alloc_retries")
        if self._is_emulated:
            return Counts(allocator_retries=retries)
        ticks = _read("/proc/stat").partition("\n")[0].split()
        stalls = _read("/proc/pressure/memory").partition("\n")[0]  # memory stalls of any process on the node
        dynamo = sys.modules.get(
            "torch._dynamo.utils"
        )  # do not import a module only for this, because that takes seconds
        return Counts(
            cpu_s=self._processor.read()[0],
            throttled_s=throttled_s(),
            steal_s=int(ticks[8]) / os.sysconf("SC_CLK_TCK") if len(ticks) > 8 else 0.0,
            memory_stall_s=int(stalls.rpartition("total=")[2]) / 1e6 if "total=" in stalls else 0.0,
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            gc_s=self.garbage.seconds,
            gc_runs=self.garbage.runs,
            compiles=int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0,
            allocator_retries=retries,
        )

    def close(self) -> None:
        self.garbage.close()
        self._processor.close()


def window_steps(step_s: float) -> int:
    """Return the number of steps between readings. It is a power of two, so that most windows end at the same step on
    all ranks, even if step times differ slightly."""
    steps = 1
    while 2 * steps * step_s <= WINDOW_S and steps < 1024:
        steps *= 2
    return steps


def throttled_s() -> float:
    """Return how long quotas have throttled this process's control group and its ancestors, in seconds."""
    total_s = 0.0
    for folder in _control_groups("cpu"):
        for line in _read(folder / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in THROTTLED:
                total_s += int(value) * THROTTLED[name]
    return total_s


THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
"""Maps the name in `cpu.stat` to its unit in seconds, for control groups v2 and v1."""
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_bytes() -> int | None:
    """Return the memory in bytes that this process may still allocate: the minimum over the node and the process's
    control groups."""
    free = _read("/proc/meminfo").partition("MemAvailable:")[2].split()
    left = [int(free[0]) * 1024] if free else []
    for folder in _control_groups("memory"):
        for limit, usage in LIMITS:
            texts = _read(folder / limit).strip(), _read(folder / usage).strip()
            if all(text.isdigit() for text in texts):
                left.append(max(0, int(texts[0]) - int(texts[1])))
    return min(left, default=None)


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group and its ancestors, except the root. A process may be moved to
    another group at any time."""
    for line in _read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and (CGROUPS / "cgroup.controllers").exists():
            root = CGROUPS
        elif controller in controllers.split(","):
            root = CGROUPS / controllers
        else:
            continue
        own = root / path.lstrip("/")
        return [folder for folder in (own, *own.parents) if folder != root and root in folder.parents]
    return []


def _read(path: Path | str) -> str:
    """Return the text of a small kernel file; empty if it does not exist on this system."""
    with suppress(OSError), open(path, encoding="ascii", errors="replace") as file:  # noqa: PTH123 - faster with a str
        return file.read()
    return ""


# The kernel's counters of this process's connections: bytes, retransmitted segments and round-trip times.
#
# Both ends identify a connection by the same two addresses, so the ranks at its ends can be found from all ranks'
# counts.


TIMEOUTS_OFFSET = 240
"""`tcpi_total_rto` in `struct tcp_info`, since Linux 6.7."""
NEEDLESS_OFFSET = 216
"""`tcpi_dsack_dups`, since Linux 4.19: segments retransmitted although they had arrived, because a process that is not
scheduled acknowledges them too late."""
FIELDS = struct.Struct("=68xI28xI52xI8xQ24xQQ")
"""From `struct tcp_info`: round-trip time in us, retransmitted segments, data segments, busy time in us, bytes sent,
bytes retransmitted."""
COUNTED = 2**32
"""The kernel's segment counters wrap around to 0 at this value."""
LISTED_EVERY = 16
"""Search for new connections after this number of windows; most connections are opened when a run starts."""
REPORTED = 6
"""Number of connections to report, starting with those that sent the most."""


@dataclass(frozen=True)
class ConnectionState:
    """A connection's counters since it was opened."""

    rtt_s: float
    resent: int
    segments: int
    sent_bytes: int
    busy_s: float
    timeouts: int


class ConnectionCounter:
    def __init__(self) -> None:
        self._cuts = 0
        self._ends: dict[Connection, tuple[str, str]] = {}
        self._before: dict[Connection, ConnectionState] = {}

    def cut(self) -> tuple[ConnectionCounts, ...]:
        """Return the counts since the last call, for the connections that sent the most."""
        if self._cuts % LISTED_EVERY == 0:
            self._find()
        self._cuts += 1
        counted = [counts for connection in list(self._ends) if (counts := self._count(connection)) is not None]
        return tuple(sorted(counted, key=lambda one: one.sent_bytes, reverse=True)[:REPORTED])

    def _find(self) -> None:
        connections = list(open_connections())
        self._ends = {one: self._ends.get(one) or ends_of(one[0]) for one in connections}
        self._before = {one: self._before[one] for one in connections if one in self._before}

    def _count(self, connection: Connection) -> ConnectionCounts | None:
        now = state_of(connection)
        before = self._before.get(connection)
        if now is None:
            return None
        self._before[connection] = now
        if before is None or now.sent_bytes <= before.sent_bytes:
            return None
        local, peer = self._ends[connection]
        return ConnectionCounts(
            local=local,
            peer=peer,
            sent_bytes=now.sent_bytes - before.sent_bytes,
            segments=(now.segments - before.segments) % COUNTED,
            resent=max(0, now.resent - before.resent),
            timeouts=max(0, now.timeouts - before.timeouts),
            busy_s=max(0.0, now.busy_s - before.busy_s),
            rtt_s=now.rtt_s,
        )


def ends_of(descriptor: int) -> tuple[str, str]:
    """Return the addresses of both ends; empty strings if the connection is closed."""
    with suppress(OSError), borrow(descriptor) as end:
        return _shown(end.getsockname()), _shown(end.getpeername())
    return "", ""


def _shown(address: tuple[object, ...]) -> str:
    """Return an address such as `10.0.0.1:29500`; IPv4 addresses within IPv6 are shown as IPv4."""
    return f"{str(address[0]).removeprefix('::ffff:')}:{address[1]}"


def state_of(connection: Connection) -> ConnectionState | None:
    """Return a connection's counters; None if it is closed."""
    info = read_tcp_info(connection)
    if info is None:
        return None
    rtt_us, resent, segments, busy_us, sent, again = FIELDS.unpack_from(info)
    (timeouts,) = struct.unpack_from("=H", info, TIMEOUTS_OFFSET) if len(info) >= TIMEOUTS_OFFSET + 2 else (0,)
    (needless,) = struct.unpack_from("=I", info, NEEDLESS_OFFSET) if len(info) >= NEEDLESS_OFFSET + 4 else (0,)
    return ConnectionState(rtt_us / 1e6, resent - needless, segments, sent - again, busy_us / 1e6, timeouts)


# This rank's device: its name, speed and memory use.


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PRODUCTS: tuple[Product, ...] = (lambda a, b: a @ b, lambda a, b: a @ b.T, lambda a, b: a.T @ b)
"""The operands that are transposed in a layer's matmuls, forward and backward. On CPUs the speeds of these variants
differ, by a factor of ten in a format without native support."""
MATMUL_SIZES = (1024, 2048)
CHIP_MATMUL_SIZES = (4096, 8192)
MATMUL_ROUNDS, MATMUL_ROUND_S = 10, 0.02
"""Number of rounds for each size, and minimum duration of a round in seconds. The fastest round counts."""
MATMUL_LIMIT_S = 1.0
"""No round begins after this many seconds, and larger sizes are skipped once a matmul takes longer: a CPU without
native bf16 achieves only about 1 GFLOP/s in that format."""


@dataclass(frozen=True)
class Peak:
    flops: float
    """FLOP/s of one device."""
    source: str
    """The source of the value, for display next to every MFU."""


def device_name(device: torch.device) -> str:
    return chip_name(device) if on_chip(device) else cpu_name()


def measure_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the best rate of a square matrix multiplication, measured on all ranks of the node at the same time."""
    best = 0.0
    products = PRODUCTS[:1] if on_chip(device) else PRODUCTS
    limits = MATMUL_ROUNDS, MATMUL_ROUND_S, MATMUL_LIMIT_S
    for size in CHIP_MATMUL_SIZES if on_chip(device) else MATMUL_SIZES:
        try:
            rates = [matmul_flops(device, dtype, size, *limits, product) for product in products]
        except torch.OutOfMemoryError:
            if not best:
                raise
            break  # the state leaves no room for larger matrices
        products = (products[rates.index(max(rates))],)
        best = max(best, *rates)
        if 8 * (2 * size**3) / max(rates) > MATMUL_LIMIT_S:  # the next size takes 8 times as long
            break
    return Peak(best, measured_source(dtype))


def measured_source(dtype: torch.dtype) -> str:
    return f"best {str(dtype).removeprefix('torch.')} matmul measured on this device"


def measured_before(run_dir: RunDir, device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return the peak that the run's first start measured, if it had such a device. Measuring takes one to three
    seconds, and a restart should not wait for it."""
    events = read_sound(run_dir.events(0))
    start = next((event for event in events if isinstance(event, StartEvent)), None)
    if start is None or (start.device_name, start.peak_source) != (device_name(device), measured_source(dtype)):
        return None
    return Peak(start.peak_flops, start.peak_source)


def matmul_flops(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    rounds: int,
    round_s: float,
    limit_s: float = math.inf,
    product: Product = PRODUCTS[0],
) -> float:
    """Return the FLOP/s of a square matrix multiplication in the fastest round."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / quickest_s(lambda: product(a, b), device, rounds, round_s, limit_s)


def quickest_s(
    call: Callable[[], Any], device: torch.device, rounds: int, round_s: float = 0.0, limit_s: float = math.inf
) -> float:
    """Return the time per call, in seconds, in the fastest round, after one warm-up call. A round repeats the call for
    `round_s` seconds, but at least once. Taking the fastest round limits the effect of load from other programs. After
    `limit_s`, no further round begins."""

    def reached() -> Mark:
        now = mark(on_gpu=on_chip(device))
        wait_for(now)
        return now

    call()
    quickest = math.inf
    began = started = reached()
    for _ in range(rounds):
        calls = 0
        ended = started
        while not calls or elapsed_s(started, ended) < round_s:
            call()
            ended = reached()
            calls += 1
        quickest = min(quickest, elapsed_s(started, ended) / calls)
        started = ended
        if elapsed_s(began, ended) > limit_s:
            break
    return quickest


def free_bytes(device: torch.device) -> float:
    """Return the memory in bytes that this process may still allocate: on a GPU, all free memory; on a host, this
    process's share of it."""
    if on_chip(device):
        return float(device_memory(device).available)
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device_allocations(device: torch.device) -> int:
    """Return how many times this process has allocated memory from the device's driver; 0 on a CPU."""
    return allocator_count(device, "num_device_alloc")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the allocator's peak in bytes on a GPU, or this process's peak resident memory on a CPU."""
    if on_chip(device):
        return torch.accelerator.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


# Watch this rank's memory from step to step, and report a leak once, without ending the run.


SETTLING_STEPS = 10
"""Number of initial steps, which allocate memory that later steps reuse."""


class MemoryWatch:
    """Reads the memory every few steps, so that a window spans the same fraction of the run, however long the run
    is."""

    def __init__(self, device: torch.device, first_step: int, last_step: int):
        self._device = device
        self._last_step = last_step
        self._first_step = first_step + SETTLING_STEPS
        self._every_steps = max(1, (last_step - first_step) // (4 * WINDOW))
        self._readings = defaultdict[str, deque[tuple[int, float]]](lambda: deque(maxlen=WINDOW))
        """Readings (step, bytes used), by kind of memory."""
        self._sizes = set[int]()
        self._process = psutil.Process()

    def check(self, step: int, micro_batch_size: int = 0) -> str | None:
        """Return a warning if one kind of memory is growing so fast that it will run out before the last step.

        A step whose largest micro-batch has a new size allocates memory again, like the first steps.
        """
        if micro_batch_size not in self._sizes:
            if self._sizes and self._first_step <= self._last_step:
                self._first_step = max(self._first_step, step + SETTLING_STEPS)
                self._readings.clear()
            self._sizes.add(micro_batch_size)
        if step < self._first_step or step % self._every_steps:
            return None
        for kind, (used_bytes, free_bytes) in self._usage().items():
            self._readings[kind].append((step, used_bytes))
            steps = [at for at, _ in self._readings[kind]]
            used = [taken_bytes for _, taken_bytes in self._readings[kind]]
            left = steps_until_full(steps, used, free_bytes)
            if left is not None and step + left < self._last_step:
                self._first_step = self._last_step + 1
                slope = slope_per_step(steps, used)
                return (
                    f"{kind} memory grows by {format_bytes(slope)} per step and will be full at about step "
                    f"{step + left:.0f}, before the last step ({self._last_step}): "
                    "memory that should be freed is being kept"
                )
        return None

    def _usage(self) -> dict[str, tuple[float, float]]:
        """Return (bytes used by this process, bytes left) for each kind of memory."""
        host = (float(self._process.memory_info().rss), float(psutil.virtual_memory().available))
        if not on_chip(self._device):
            return {"host": host}
        memory = device_memory(self._device)
        return {"host": host, "device": (float(memory.used), float(memory.available))}
