"""Why a worker failed, found in what it left: its own report, torchrun's list of exit codes, its log."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.core.printable import without_colours
from trainspec_cli.core.reading.files import open_regular
from trainspec_cli.recipe.results.memory import Shortage
from trainspec_cli.run.folder.event_types.training import EndEvent
from trainspec_cli.run.folder.events import tail_events
from trainspec_cli.run.folder.record import NodeErrorRecord, WorkerErrorRecord, read_error
from trainspec_cli.run.job.job import LOOPBACK, Job

LOG_TAIL_LINES = 30
MAX_LOG_BYTES = 2**20
"""The end of a log that is read."""

_EXIT = re.compile(r"host\s*: (\S+)\s*rank\s*: (\d+) \(local_rank: (\d+)\)\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_FORCED = re.compile(r"Unable to shutdown process (\d+)")
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited"
    r"|ncclremoteerror|communicator was aborted|connectionreseterror",
    re.IGNORECASE,
)
_NO_DEVICE_MEMORY = re.compile(r"OutOfMemoryError|(CUDA|HIP) out of memory")
_NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate|\w*MemoryError\b|Cannot allocate memory|bad_alloc")
_PREFIX = re.compile(r"^(?:\[(?:rank|default)?\d+\]:\s?)+")
"""What torchrun and torch put before the lines of a rank."""
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in ')
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?=:|$)")
_OF_LAUNCHERS = ("CalledProcessError", "ChildFailedError")
"""Exceptions by which accelerate, torchrun and others report that a process which they had started has failed."""
_ENDED_BY_OTHERS = (signal.SIGTERM, signal.SIGABRT)
"""torchrun ends the peers of a failed worker by SIGTERM; NCCL's watchdog ends a worker that waits for a lost peer
by SIGABRT."""


@dataclass(frozen=True)
class WorkerFailure:
    rank: int
    """The rank; the node's number where a whole node has failed."""
    host: str
    summary: str
    """One line: `ValueError: boo`, `killed by SIGKILL`."""
    detail: str = ""
    """The worker's own traceback, or the end of its log; empty for an error that was foreseen."""
    hint: str = ""
    step: int | None = None
    time: float = math.inf
    """Unix seconds, where it is known."""
    self_reported: bool = False
    """Reported by the worker itself."""
    was_killed: bool = False
    """It ended by SIGKILL."""
    consequence: bool = False
    """It ended because another one had."""
    foreseen: bool = False
    """It would come again if the run was started again as it is: an error for people, a node that is gone."""
    exit_code: int = WorkerError.exit_code
    """The exit code that the run ends with because of it."""
    shortage: Shortage | None = None
    """Its memory ran out."""
    whole_node: bool = False
    """Not one worker, but one node of several: it was lost, or lacks something."""
    cause: str = ""
    """The exception and the place where it was raised, of a user's own command; empty where its log shows none."""

    @property
    def who(self) -> str:
        return f"{'node' if self.whole_node else 'rank'} {self.rank}"


def find_failures(job: Job) -> list[WorkerFailure]:
    """Return all workers that failed, the one that began it first; those that only lost their peers last."""
    reported = {failure.rank: failure for failure in _reported(job)}
    silent = [failure for failure in find_listed(job) if failure.rank not in reported]
    return first_causes([*_nodes(job), *reported.values(), *silent])


def find_listed(job: Job) -> list[WorkerFailure]:
    """Return the workers that torchrun lists with their exit codes, ordered likewise."""
    return first_causes(failure for log in torchrun_logs(job) for failure in _silent(job, log))


def first_causes(failures: Iterable[WorkerFailure]) -> list[WorkerFailure]:
    """Sort the failures: the one that began it first, those that only lost their peers last."""
    return sorted(failures, key=lambda failure: (failure.consequence, failure.time, failure.rank))


def _reported(job: Job) -> Iterator[WorkerFailure]:
    """Yield the workers that wrote down what happened to them."""
    for path in sorted(job.run.errors_folder.glob("rank*.json")):
        error = read_error(path, WorkerErrorRecord)
        if job.ranks is not None and error.rank not in job.ranks:
            continue
        hung, foreseen = error.code == "hang", bool(error.code)
        summary = error.message if foreseen else f"{error.type}: {error.message}".strip().rstrip(":")
        yield WorkerFailure(
            rank=error.rank,
            host=error.host,
            summary=summary,
            detail="" if foreseen and not hung else error.traceback.rstrip(),
            hint=error.hint or "",
            step=error.step,
            # Whatever ended after a hang was found, and however, ended because of it.
            time=-math.inf if hung else path.stat().st_mtime if error.time is None else error.time,
            self_reported=True,
            foreseen=foreseen and not hung,
            consequence=not foreseen and bool(_PEER_LOST.search(summary)),
            exit_code=error.exit_code or WorkerError.exit_code,
            shortage=error.shortage,
        )


def _nodes(job: Job) -> Iterator[WorkerFailure]:
    """Yield the nodes that were lost or could not start: a failure of their workers began with them."""
    for path in sorted(job.run.errors_folder.glob("node*.json")):
        error = read_error(path, NodeErrorRecord)
        yield WorkerFailure(
            rank=error.node,
            host=error.host,
            summary=error.message,
            time=0.0,
            self_reported=not error.lost,
            foreseen=True,
            whole_node=True,
        )


def torchrun_logs(job: Job) -> list[Path]:
    """Return the logs of torchrun, one per node; of a command of the user's own those of all it prints."""
    if job.own:
        return sorted([*job.logs.glob("output.log"), *job.logs.glob("node*/output.log")])
    return sorted([*job.logs.glob("torchrun.log"), *job.logs.glob("node*/torchrun.log")])


def _silent(job: Job, torchrun_log: Path) -> Iterator[WorkerFailure]:
    """Yield the workers that left no report (a signal, an error before their own code), from torchrun's summary."""
    text = _end_of(torchrun_log)
    forced = set(_FORCED.findall(text))
    for host, rank, local_rank, code, pid in _EXIT.findall(text):
        log = worker_log(torchrun_log.parent, int(local_rank)) or (torchrun_log if job.own else None)
        raised = find_exception(without_colours(_end_of(log))) if log and job.own else None
        yield WorkerFailure(
            rank=_rank_in_run(job, int(rank), int(local_rank)),
            host=socket.gethostname() if host == LOOPBACK else host,
            summary=_describe_own_exit(int(code), raised) if job.own else describe_exit(int(code)),
            detail=raised.excerpt if raised else tail(log) if log else "",
            hint=_hint_of(tail(log)) if log and job.own else "",
            # SIGKILL comes from outside, so it is where a failure begins.
            time=0.0 if int(code) == -signal.SIGKILL else math.inf,
            was_killed=int(code) == -signal.SIGKILL,
            consequence=pid in forced or -int(code) in _ENDED_BY_OTHERS,
            cause=_cause_of(int(code), raised),
        )


def _rank_in_run(job: Job, rank: int, local_rank: int) -> int:
    """Return a worker's rank among all of the run's. `rank` is torchrun's; a node's part of a replica group that has
    several nodes holds the ranks of that node."""
    if not job.ranks:
        return rank
    return job.ranks[rank if rank < len(job.ranks) else local_rank]


def describe_exit(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code} before it could say why"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"was killed by {name}; if memory ran out, the kernel did it: try a smaller batching.micro_batch_size"
    if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return f"crashed in native code ({name})"
    return f"was ended by {name}"


def _cause_of(code: int, raised: RaisedException | None) -> str:
    """Return the cause of an exit that would most likely come again. A lost connection need not, nor a signal."""
    return raised.cause if raised and code > 0 and not _PEER_LOST.search(raised.message) else ""


def _describe_own_exit(code: int, raised: RaisedException | None = None) -> str:
    """Describe how a process of the user's own command has ended: it is not asked to say why."""
    if code >= 0:
        return f"ended with exit code {code}" + (f": {raised.summary}" if raised and code else "")
    name = signal.Signals(-code).name
    return f"was killed by {name}" if -code == signal.SIGKILL else f"was ended by {name}"


def _hint_of(log_end: str) -> str:
    """Return what to do about a failure that a log names."""
    if _NO_DEVICE_MEMORY.search(log_end):
        return "the device's memory ran out: smaller batches, or activation checkpointing, take less"
    if _NO_HOST_MEMORY.search(log_end):
        return "the host's memory ran out: fewer workers of the data loader, and data read in parts, take less"
    return ""


@dataclass(frozen=True)
class RaisedException:
    """The exception that ended a program, as its traceback in a log shows it."""

    type: str
    message: str
    """Its first line: `ValueError: boo`."""
    file: str
    line: int
    """Innermost frame outside installed packages."""
    excerpt: str
    """The lines from that frame to the exception."""

    @property
    def cause(self) -> str:
        """Equal for the same error at the same place. Messages differ: many hold numbers, such as the step."""
        return f"{self.type} at {self.file}:{self.line}"

    @property
    def summary(self) -> str:
        return f"{self.message} ({Path(self.file).name}:{self.line})"


def find_exception(log_end: str) -> RaisedException | None:
    """Return the last exception of a log whose traceback is whole; None where it has none. Of several ranks that
    write to one log, the lines of one are read."""
    prefixed = [(match[0] if (match := _PREFIX.match(line)) else "", line) for line in log_end.splitlines()]
    begins = [
        place
        for place, (_, line) in enumerate(prefixed)  # a progress bar may stand before it on its line
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


def worker_log(logs_of_host: Path, local_rank: int) -> Path | None:
    """Return the newest standard error of a worker."""
    logs = sorted(
        log
        for start in ("workers_*", "ranks/*")
        for log in logs_of_host.glob(f"{start}/attempt_*/{local_rank}/stderr.log")
    )
    return logs[-1] if logs else None


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the end of a log, without its colours."""
    return "\n".join(without_colours(_end_of(log)).splitlines()[-lines:])


def _end_of(log: Path) -> str:
    with open_regular(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
        return file.read(MAX_LOG_BYTES).decode(errors="replace")


@dataclass(frozen=True)
class Explanation:
    """A failure as people read it."""

    headline: str
    detail: str = ""
    hint: str = ""
    cause: str = ""
    """As of a WorkerFailure."""


def explain(failures: list[WorkerFailure]) -> Explanation:
    """Describe the first failure as it was reported, and the others in a line."""
    first, *others = failures
    at = f", step {first.step}" if first.step is not None else ""
    who = f"{first.who} ({first.host or 'hostname unknown'}{at})"
    detail = [first.detail, *_explain_others(first, others)]
    return Explanation(_sentence(who, first), "\n\n".join(filter(None, detail)), first.hint, first.cause)


def explain_end(job: Job, exit_code: int | None, failures: list[WorkerFailure]) -> Explanation:
    """Explain why a run of one group failed: a worker did, or torchrun (`exit_code`), or all of them just ended."""
    code = exit_code or 0
    if failures and (code >= 0 or not failures[0].consequence):
        return explain(failures)
    if job.own and code > 0 and job.nodes and not torchrun_logs(job) and job.torchrun_log.is_file():
        headline = f"the agent of the first node ended with exit code {code} before any node had started the command"
        return Explanation(
            headline, tail(job.torchrun_log), "--rdzv-endpoint is the first node's own address, and a port"
        )
    if job.own and code:
        printed = torchrun_logs(job)
        end = "\n\n".join(map(tail, printed))
        raised = next((found for log in printed if (found := find_exception(without_colours(_end_of(log))))), None)
        headline = f"{job.program} {_describe_own_exit(code, raised)}"
        return Explanation(headline, raised.excerpt if raised else end, _hint_of(end), _cause_of(code, raised))
    if code < 0:
        return Explanation(f"torchrun was ended by {signal.Signals(-code).name}, and its workers with it")
    if code:
        logs = "\n\n".join(tail(log) for log in torchrun_logs(job))
        if job.nodes and not any(job.logs.glob("node*/torchrun.log")):  # what is there is the starter's own output
            headline = f"{Path(job.command[0]).name} ended with exit code {code} before any node had started a worker"
            return Explanation(headline, logs, "look at its own messages; a container's image must be on every node")
        return Explanation(f"torchrun ended with exit code {code}", logs)
    if any(isinstance(event, EndEvent) for event in list(tail_events(job.run.events(0)))[-1:]):
        return Explanation("the workers got a signal to end, but nobody had asked the run to stop")
    return Explanation("the workers ended without leaving a result")


def _explain_others(first: WorkerFailure, others: list[WorkerFailure]) -> Iterator[str]:
    alike = [other for other in others if other.summary == first.summary]
    lost = [other for other in others if other.consequence and other not in alike]
    if alike:
        yield f"{_ranks(alike)} ended in the same way."
    if lost:
        yield f"{_ranks(lost)} lost the connection to {first.who}, or ended with it."
    for other in others:
        if other not in alike and other not in lost:
            yield _sentence(f"also {other.who}", other)


def _sentence(who: str, failure: WorkerFailure) -> str:
    return f"{who}: {failure.summary}" if failure.self_reported else f"{who} {failure.summary}"


def _ranks(failures: list[WorkerFailure]) -> str:
    numbers = ", ".join(str(failure.rank) for failure in failures[:8])
    more = f" and {len(failures) - 8} more" if len(failures) > 8 else ""
    return f"rank{'s' if len(failures) > 1 else ''} {numbers}{more}"
