"""What a node's kernel, GPUs and NICs say about a failure: kernel messages, and error counters that have increased.

A failed worker knows only that a call failed, and its peers only that a connection closed. The node knows why: the
driver reports an Xid, a memory error or a broken link; the kernel names the process that it killed. Every source may
be missing or unreadable: the kernel log often needs root, NVML a GPU. Then nothing is said about it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.results.doctor import FaultCause, NodeFault
from trainspec_cli.run.job.gpus import MOST_NVLINKS, opened_nvml

KMSG = Path("/dev/kmsg")
SYS = Path("/sys")
MOST_FAULTS = 8
"""Number of faults to report. A broken GPU can write thousands of lines."""
LINE_CHARS = 300
JOURNAL_S = 2.0
"""Time limit in seconds for journalctl."""

XIDS: Mapping[int, tuple[str, FaultCause]] = {
    13: ("a kernel of the program accessed an invalid address or failed", "program"),
    31: ("a kernel of the program accessed memory that is not mapped", "program"),
    32: ("the driver received an invalid command from the program", "program"),
    43: ("the program's channel was stopped", "program"),
    45: ("the program's work was stopped after an earlier error", "program"),
    48: ("uncorrectable memory error", "ecc"),
    61: ("the GPU's microcontroller has stopped", "xid"),
    62: ("the GPU's microcontroller has halted", "xid"),
    63: ("a row of memory will be remapped at the next reset", "row_remap"),
    64: ("a row of memory could not be remapped", "row_remap"),
    74: ("NVLink error", "nvlink"),
    79: ("the GPU has fallen off the bus", "xid"),
    92: ("many correctable memory errors", "ecc"),
    94: ("memory error, contained: only the program that hit it fails", "ecc"),
    95: ("memory error, not contained: the GPU needs a reset", "ecc"),
    109: ("a context switch did not end in time", "xid"),
    119: ("the GPU's system processor does not answer", "xid"),
    120: ("the GPU's system processor has failed", "xid"),
    140: ("unrecovered memory error", "ecc"),
    145: ("NVLink error", "nvlink"),
    149: ("NVLink error", "nvlink"),
}
"""Meanings of NVIDIA's Xid numbers (docs.nvidia.com/deploy/xid-errors), and the cause to report. Causes other than
`program` are faults of the machine."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
KERNEL_LINES: tuple[tuple[FaultCause, re.Pattern[str]], ...] = (
    ("out_of_memory", re.compile(r"out of memory: Killed process (?P<where>\d+ \([^)]*\))", re.IGNORECASE)),
    ("machine_check", re.compile(r"mce: \[Hardware Error\]: (?P<where>CPU \d+): Machine Check")),
    ("machine_check", re.compile(r"EDAC (?P<where>\w+): \d+ UE ")),
    ("thermal", re.compile(r"(?P<where>CPU\d+): (?:Core|Package) temperature.* above threshold")),
    ("link_down", re.compile(r"(?P<where>\w[\w.-]*): (?:NIC )?Link (?:is )?down", re.IGNORECASE)),
    ("storage", re.compile(r"I/O error, dev (?P<where>\w+)")),
    ("storage", re.compile(r"(?:EXT4-fs|XFS|BTRFS)[^(]*error[^(]*\((?:device )?(?P<where>[\w.-]+)\)", re.IGNORECASE)),
    ("storage", re.compile(r"nfs: server (?P<where>\S+) not responding")),
    ("xid", re.compile(r"amdgpu (?P<where>[0-9a-f:.]+): .*(?:GPU reset begin|ring \S+ timeout)")),
    ("ecc", re.compile(r"amdgpu (?P<where>[0-9a-f:.]+): .*uncorrectable hardware errors? detected")),
)
"""Messages of the Linux kernel and its drivers that explain failures."""


def read_kernel_faults(lines: Iterable[str]) -> Iterator[NodeFault]:
    """Yield what kernel messages say about failures."""
    for line in lines:
        if xid := _XID.search(line):
            meaning, cause = XIDS.get(int(xid[2]), ("see docs.nvidia.com/deploy/xid-errors", "xid"))
            yield NodeFault(cause, f"GPU {xid[1]}", f"Xid {xid[2]}, {meaning}: {_cut(line)}")
            continue
        for cause, pattern in KERNEL_LINES:
            if found := pattern.search(line):
                yield NodeFault(cause, found["where"], _cut(line))
                break


def _cut(line: str) -> str:
    return line.strip()[:LINE_CHARS]


def kernel_lines(since_s: float, kmsg: Path = KMSG) -> list[str]:
    """Return the kernel's messages since `since_s` on the monotonic clock; empty if they cannot be read."""
    with suppress(OSError):
        return list(_read_kmsg(since_s, kmsg))
    began = time.time() - (time.monotonic() - since_s)
    command = ("journalctl", "--dmesg", "--output=cat", "--no-pager", f"--since=@{began:.0f}")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=JOURNAL_S, stdin=subprocess.DEVNULL)
        return done.stdout.splitlines()
    return []


def _read_kmsg(since_s: float, kmsg: Path) -> Iterator[str]:
    """Yield messages from /dev/kmsg, which returns one `LEVEL,NUMBER,MICROSECONDS,FLAGS;TEXT` per read. Raises OSError
    if this user may not read it."""
    descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, 8192).decode(errors="replace")
            except BrokenPipeError:  # the kernel has overwritten messages that were not read yet
                continue
            except BlockingIOError:
                return
            if not record:
                return
            for line in record.splitlines():
                about, _, text = line.partition(";")
                at_us = about.split(",")[2:3]
                if text and at_us and at_us[0].isdigit() and int(at_us[0]) / 1e6 >= since_s:
                    yield text
    finally:
        os.close(descriptor)


# Counters


Counters = Mapping[tuple[FaultCause, str, str], int]
"""Values by cause, place and name of the counter."""
NVLINK_COUNTERS = {0: "replays", 1: "recoveries", 2: "flit CRC errors", 3: "data CRC errors"}
LOST = (15, 16)
"""NVML's errors for a GPU that has fallen off the bus, and for one that needs a reset."""
THROTTLED = {0x40: "hardware thermal slowdown", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that mean a fault of cooling or power supply."""
NIC_COUNTERS = (
    "counters/symbol_error",
    "counters/link_downed",
    "counters/link_error_recovery",
    "counters/local_link_integrity_errors",
    "counters/port_rcv_errors",
    "hw_counters/local_ack_timeout_err",
)
"""Counters of an RDMA port that stay constant on a healthy network (docs.kernel.org, infiniband/sysfs)."""
INTERFACE_COUNTERS = ("carrier_down_count", "statistics/rx_crc_errors")


def read_counters(sys: Path = SYS) -> dict[tuple[FaultCause, str, str], int]:
    """Return this node's error counters. A GPU that does not answer has the counter `is lost`."""
    found: dict[tuple[FaultCause, str, str], int] = {}
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        for name in NIC_COUNTERS:
            _count(found, "nic", f"{port.parents[1].name} port {port.name}", port / name)
    for interface in sorted((sys / "class/net").glob("*")):
        if (interface / "device").exists():  # not a virtual interface
            for name in INTERFACE_COUNTERS:
                _count(found, "nic", interface.name, interface / name)
    with suppress(MachineError), opened_nvml(sys) as nvml:
        for number in range(nvml.nvmlDeviceGetCount() if nvml else 0):
            gpu = f"GPU {number}"
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                found |= {(cause, gpu, name): value for cause, name, value in _gpu_counters(nvml, handle)}
                nvml.nvmlDeviceGetTemperature(handle, 0)
            except nvml.NVMLError as error:
                found["xid", gpu, "is lost"] = int(error.value in LOST)
    return found


def _count(found: dict[tuple[FaultCause, str, str], int], cause: FaultCause, where: str, path: Path) -> None:
    with suppress(OSError, ValueError):
        found[cause, where, path.name] = int(path.read_text())


def _gpu_counters(nvml: Any, handle: Any) -> Iterator[tuple[FaultCause, str, int]]:
    def ask(query: str, *arguments: int) -> Any:
        with suppress(AttributeError, nvml.NVMLError):
            return getattr(nvml, query)(handle, *arguments)
        return None

    # Arguments: uncorrected errors (1), since the driver was loaded (0).
    if (errors := ask("nvmlDeviceGetTotalEccErrors", 1, 0)) is not None:
        yield "ecc", "uncorrected memory errors", int(errors)
    if (rows := ask("nvmlDeviceGetRemappedRows")) is not None:
        _, uncorrectable, is_pending, has_failed = rows
        yield "row_remap", "rows remapped after uncorrectable errors", int(uncorrectable)
        yield "row_remap", "rows waiting for a reset", int(is_pending)
        yield "row_remap", "rows that could not be remapped", int(has_failed)
    for link in range(MOST_NVLINKS):
        if (state := ask("nvmlDeviceGetNvLinkState", link)) is None:
            break
        yield "nvlink", f"link {link} down", int(not state)
        for counter, name in NVLINK_COUNTERS.items():
            if (value := ask("nvmlDeviceGetNvLinkErrorCounter", link, counter)) is not None:
                yield "nvlink", f"link {link} {name}", int(value)
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    for bit, name in THROTTLED.items():
        yield "thermal", name, int(bool(reasons & bit))


def increased(before: Counters, after: Counters) -> Iterator[NodeFault]:
    """Yield the counters that have increased, and those that are new and not 0."""
    for (cause, where, name), value in after.items():
        more = value - before.get((cause, where, name), 0)
        if more > 0:
            yield NodeFault(cause, where, f"{where}: {name} increased by {more}")


class FaultWatch:
    """Remembers a node's counters at the start of a group's processes, and finds out later what has gone wrong."""

    def __init__(
        self,
        counters: Callable[[], Counters] = read_counters,
        lines: Callable[[float], Iterable[str]] = kernel_lines,
    ):
        self._began_s = time.monotonic()
        self._counters = counters
        self._lines = lines
        self._before = counters()

    def find(self) -> tuple[NodeFault, ...]:
        """Return the faults since the start, those of the machine first; at most one for each place and cause."""
        found: dict[tuple[str, str], NodeFault] = {}
        for fault in (*read_kernel_faults(self._lines(self._began_s)), *increased(self._before, self._counters())):
            found.setdefault((fault.cause, fault.where), fault)
        return tuple(sorted(found.values(), key=lambda fault: not fault.is_of_machine)[:MOST_FAULTS])
