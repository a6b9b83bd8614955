"""What the user's processes use, read from outside: processors, memory, and GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.run.folder.event_types.events import UsageEvent
from trainspec_cli.run.job.gpus import opened_nvml
from trainspec_cli.wings.own_script.journal import CountedRank

FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 1.0, 10.0
"""Readings come as often as a hundredth of the time that has passed, within these bounds."""


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
                rank.write(replace(event, gpu_busy=use.busy, gpu_bytes=use.bytes) if use else event)

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
        return UsageEvent(
            step=rank.step,
            cores=max(0.0, spent_s - before_s) / passed_s,
            rss_bytes=rss_bytes,
            swap_bytes=_swap_bytes(process.pid),
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


def _swap_bytes(pid: int) -> int:
    """Return 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSwap")), 0)
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
