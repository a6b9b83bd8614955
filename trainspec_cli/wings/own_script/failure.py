"""Explain how a user's command ended, from its exit code and the exception in its output."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.printable import without_colours
from trainspec_cli.run.failure import (
    LOG_TAIL_LINES,
    PEER_LOST,
    Explanation,
    WorkerFailure,
    end_of,
    explain,
    explain_end,
    find_failures,
    tail,
    torchrun_logs,
)
from trainspec_cli.run.job.job import Job

_NO_DEVICE_MEMORY = re.compile(r"OutOfMemoryError|(CUDA|HIP) out of memory")
_NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate|\w*MemoryError\b|Cannot allocate memory|bad_alloc")
_PREFIX = re.compile(r"^(?:\[(?:rank|default)?\d+\]:\s?)+")
"""The prefix that torchrun and torch put before each line of a rank."""
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in ')
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?=:|$)")
_OF_LAUNCHERS = ("CalledProcessError", "ChildFailedError")
"""Exceptions that accelerate, torchrun and other launchers raise to report the failure of a process that they
started."""


def find_own_failures(job: Job) -> list[WorkerFailure]:
    return find_failures(job, explain_exit)


def explain_exit(code: int, log: Path | None, printed: Path) -> Explanation:
    """Explain how a rank ended, according to the launcher's list of failures. Without a log for the rank, use the
    command's output."""
    log = log or printed
    raised = find_exception(without_colours(end_of(log)))
    end = tail(log)
    return Explanation(
        _describe_exit(code, raised), raised.excerpt if raised else end, _hint_of(end), _cause_of(code, raised)
    )


def explain_own_end(job: Job, exit_code: int | None, failures: list[WorkerFailure]) -> Explanation:
    """Explain why a start failed: either a rank failed, or the command itself (`exit_code`)."""
    code = exit_code or 0
    if failures and (code >= 0 or not failures[0].consequence):
        return explain(failures)
    if code > 0 and job.nodes and not torchrun_logs(job) and job.torchrun_log.is_file():
        headline = f"the first node's agent ended with exit code {code} before any node had started the command"
        hint = "--rdzv-endpoint must be an address of the first node, with a port"
        return Explanation(headline, tail(job.torchrun_log), hint, exit_code=MachineError.exit_code)
    if not code:
        return explain_end(job, exit_code, failures)
    printed = torchrun_logs(job)
    end = "\n\n".join(map(tail, printed))
    raised = next((found for log in printed if (found := find_exception(without_colours(end_of(log))))), None)
    headline = f"{job.program} {_describe_exit(code, raised)}"
    return Explanation(headline, raised.excerpt if raised else end, _hint_of(end), _cause_of(code, raised))


def _cause_of(code: int, raised: RaisedException | None) -> str:
    """Return the cause of an exit that is likely to recur; empty after a lost connection or a signal."""
    return raised.cause if raised and code > 0 and not PEER_LOST.search(raised.message) else ""


def _describe_exit(code: int, raised: RaisedException | None = None) -> str:
    """Describe how a process of the user's command ended. Such a process does not report a reason."""
    if code >= 0:
        return f"ended with exit code {code}" + (f": {raised.summary}" if raised and code else "")
    name = signal.Signals(-code).name
    return f"was killed by {name}" if -code == signal.SIGKILL else f"was ended by {name}"


def _hint_of(log_end: str) -> str:
    """Return advice on a failure that appears in a log."""
    if _NO_DEVICE_MEMORY.search(log_end):
        return "the device ran out of memory: use smaller batches or activation checkpointing"
    if _NO_HOST_MEMORY.search(log_end):
        return "the host ran out of memory: use fewer data loader workers, or read the data in parts"
    return ""


@dataclass(frozen=True)
class RaisedException:
    """The exception that ended a program, from the traceback in a log."""

    type: str
    message: str
    """The first line of the exception, such as `ValueError: boo`."""
    file: str
    line: int
    """The innermost frame outside installed packages."""
    excerpt: str
    """The log lines from the innermost frame to the exception."""

    @property
    def cause(self) -> str:
        """A value that is the same for the same error on the same line. It does not include the message, because many
        messages contain changing numbers, such as the step."""
        return f"{self.type} at {self.file}:{self.line}"

    @property
    def summary(self) -> str:
        return f"{self.message} ({Path(self.file).name}:{self.line})"


def find_exception(log_end: str) -> RaisedException | None:
    """Return the last exception with a complete traceback in a log, or None. If several ranks write to
    the log, the lines of one rank are used."""
    prefixed = [(match[0] if (match := _PREFIX.match(line)) else "", line) for line in log_end.splitlines()]
    begins = [
        place
        for place, (_, line) in enumerate(prefixed)  # a progress bar may precede the prefix on the same line
        if line.endswith(_TRACEBACK) and not line.endswith(f"Original {_TRACEBACK}")
    ]
    for begin in reversed(begins):
        prefix = prefixed[begin][0]
        lines = [line[len(prefix) :] for other, line in prefixed[begin + 1 :] if other == prefix]
        end = next((place for place, line in enumerate(lines) if line and not line.startswith(" ")), None)
        raised = _RAISED.match(lines[end]) if end is not None else None
        frames = [(place, found) for place, line in enumerate(lines[:end]) if (found := _FRAME.match(line))]
        if end is None or raised is None or not frames or raised[0].rpartition(".")[2] in _OF_LAUNCHERS:
            continue
        own = [frame for frame in frames if not re.search(r"/(site|dist)-packages/|^<|/lib/python3", frame[1][1])]
        place, frame = (own or frames)[-1]
        excerpt = "\n".join(lines[place : end + 1][-LOG_TAIL_LINES:])
        return RaisedException(raised[0], lines[end], frame[1], int(frame[2]), excerpt)
    return None
