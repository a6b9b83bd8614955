"""Determine why a worker failed, from the worker's report, torchrun's list of exit codes, and the worker's log."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainspec_cli.core.errors import MachineError, WorkerError
from trainspec_cli.core.printable import without_colours
from trainspec_cli.core.reading.files import open_regular
from trainspec_cli.recipe.results.tables import Shortage
from trainspec_cli.run.folder.event_types.events import EndEvent
from trainspec_cli.run.folder.events import tail_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import NodeErrorRecord, WorkerErrorRecord, read_error
from trainspec_cli.run.job.job import LOOPBACK, Job
from trainspec_cli.run.recovery.run_state import HostFault

LOG_TAIL_LINES = 30
SHOWN_FAULTS = 2
MAX_LOG_BYTES = 2**20
"""Number of bytes read from the end of a log."""

_EXIT = re.compile(r"host\s*: (\S+)\s*rank\s*: (\d+) \(local_rank: (\d+)\)\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_FORCED = re.compile(r"Unable to shutdown process (\d+)")
PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited"
    r"|ncclremoteerror|communicator was aborted|connectionreseterror",
    re.IGNORECASE,
)
_MISMATCH = re.compile(
    r"\d+ vs \d+\. Received data size doesn't match expected size|Detected mismatch between collectives on ranks.*"
)
"""gloo's and torch's messages on a rank that called another collective than its peers. gloo ends the process with
SIGABRT."""
MISMATCH_HINT = "compare the lines at which the ranks stopped; TORCH_DISTRIBUTED_DEBUG=DETAIL names every rank's call"
_ENDED_BY_OTHERS = (signal.SIGTERM, signal.SIGABRT)
"""torchrun ends the peers of a failed worker with SIGTERM. NCCL's watchdog uses SIGABRT to end a worker that is waiting
for a lost peer."""


@dataclass(frozen=True)
class WorkerFailure:
    rank: int
    """The worker's rank or, if an entire node has failed, the node's number."""
    host: str
    summary: str
    """One line, such as `ValueError: boo` or `killed by SIGKILL`."""
    detail: str = ""
    """The worker's own traceback, or the end of its log; empty for an anticipated error."""
    hint: str = ""
    step: int | None = None
    time: float = math.inf
    """Unix time of the failure, if known."""
    self_reported: bool = False
    """True if the worker itself reported the failure."""
    was_killed: bool = False
    """True if the worker was killed by SIGKILL."""
    consequence: bool = False
    """True if the worker exited only because another worker had exited."""
    foreseen: bool = False
    """True if the failure would recur if the run were restarted unchanged, such as an invalid input or a missing
    node."""
    exit_code: int = WorkerError.exit_code
    """The run's exit code for this failure."""
    shortage: Shortage | None = None
    """The out-of-memory failure, if there was one."""
    whole_node: bool = False
    """True if an entire node, rather than a single worker, has failed because it was lost or is unfit."""
    cause: str = ""
    """For a user-defined command: the exception and where it was raised; empty if its log shows none."""

    @property
    def who(self) -> str:
        return f"{'node' if self.whole_node else 'rank'} {self.rank}"

    @property
    def never_came(self) -> bool:
        """Return whether this is a node that never joined, and whose hostname is therefore unknown."""
        return self.whole_node and not self.self_reported and not self.host


@dataclass(frozen=True)
class Explanation:
    """A description of a failure for users."""

    headline: str
    detail: str = ""
    hint: str = ""
    cause: str = ""
    """Same as in WorkerFailure."""
    exit_code: int = WorkerError.exit_code
    """Same as in WorkerFailure."""
    node: WorkerFailure | None = None
    """The node where the failure started, for advice that depends on how the nodes were started."""


DescribeExit = Callable[[int, Path | None, Path], Explanation]
"""Explains the exit code of a worker that left no report, from the worker's log (if any) and the log of the program
that started it."""


def describe_worker_exit(code: int, log: Path | None, launchers_log: Path) -> Explanation:
    return Explanation(describe_exit(code), tail(log) if log else "")


def find_failures(job: Job, describe: DescribeExit = describe_worker_exit) -> list[WorkerFailure]:
    """Return all failed workers, with the root cause first and those that only lost their peers last."""
    reported = {failure.rank: failure for failure in _reported(job)}
    silent = [failure for failure in find_listed(job, describe) if failure.rank not in reported]
    return first_causes([*find_failed_nodes(job.run), *reported.values(), *silent])


def find_listed(job: Job, describe: DescribeExit = describe_worker_exit) -> list[WorkerFailure]:
    """Return the workers that torchrun lists with exit codes, in the same order as `find_failures`."""
    return first_causes(failure for log in torchrun_logs(job) for failure in _silent(job, log, describe))


def first_causes(failures: Iterable[WorkerFailure]) -> list[WorkerFailure]:
    """Sort the failures, with the root cause first and those that only lost their peers last."""
    return sorted(failures, key=lambda failure: (failure.consequence, failure.time, failure.rank))


def _reported(job: Job) -> Iterator[WorkerFailure]:
    """Yield the workers that have written a report."""
    for path in sorted(job.run.errors_folder.glob("rank*.json")):
        error = read_error(path, WorkerErrorRecord)
        if job.ranks is not None and error.rank not in job.ranks:
            continue
        hung = error.code == "hang"
        foreseen = bool(error.code)
        summary = error.message if foreseen else f"{error.type}: {error.message}".strip().rstrip(":")
        yield WorkerFailure(
            rank=error.rank,
            host=error.host,
            summary=summary,
            detail="" if foreseen and not hung else error.traceback.rstrip(),
            hint=error.hint or "",
            step=error.step,
            # Every failure after the detection of a hang is a consequence of it.
            time=-math.inf if hung else path.stat().st_mtime if error.time is None else error.time,
            self_reported=True,
            foreseen=foreseen and not hung,
            consequence=not foreseen and bool(PEER_LOST.search(summary)),
            exit_code=error.exit_code or WorkerError.exit_code,
            shortage=error.shortage,
        )


def find_failed_nodes(run: RunDir) -> list[WorkerFailure]:
    """Return the nodes that were lost, did not join or could not start, and thereby made their workers fail."""
    failures = []
    for path in sorted(run.errors_folder.glob("node*.json")):
        error = read_error(path, NodeErrorRecord)
        failure = WorkerFailure(
            rank=error.node,
            host=error.host,
            summary=error.message,
            hint=error.hint,
            time=0.0,
            self_reported=not error.lost,
            foreseen=True,
            whole_node=True,
        )
        # No worker failed on this node, because the node was not connected or is unfit.
        if failure.never_came or failure.self_reported:
            failure = replace(failure, exit_code=MachineError.exit_code)
        failures.append(failure)
    return failures


def torchrun_logs(job: Job) -> list[Path]:
    """Return the logs of the programs that the job starts, one per node."""
    return sorted([*job.logs.glob(job.log), *job.logs.glob(f"node*/{job.log}")])


def _silent(job: Job, torchrun_log: Path, describe: DescribeExit) -> Iterator[WorkerFailure]:
    """Yield the workers that left no report (because of a signal, or an error before their own code), from torchrun's
    summary."""
    text = end_of(torchrun_log)
    forced = set(_FORCED.findall(text))
    for host, rank, local_rank, code, pid in _EXIT.findall(text):
        logs = [
            log
            for start in ("workers_*", "ranks/*")
            for log in torchrun_log.parent.glob(f"{start}/attempt_*/{local_rank}/stderr.log")
        ]
        # The newest start's log is last in sorted order.
        newest = max(logs, default=None)
        why = describe(int(code), newest, torchrun_log)
        mismatch = _find_mismatch(end_of(newest)) if newest else ""
        global_rank = int(rank)
        if job.ranks:
            # torchrun counts a group's ranks; if the group spans several nodes, each node's part has only its own
            # ranks.
            global_rank = job.ranks[global_rank if global_rank < len(job.ranks) else int(local_rank)]
        yield WorkerFailure(
            rank=global_rank,
            host=socket.gethostname() if host == LOOPBACK else host,
            summary=f"{why.headline}{mismatch}",
            detail=why.detail,
            hint=why.hint or (MISMATCH_HINT if mismatch else ""),
            # SIGKILL comes from outside, so a worker killed by it is the root cause.
            time=0.0 if int(code) == -signal.SIGKILL else math.inf,
            was_killed=int(code) == -signal.SIGKILL,
            consequence=not mismatch and (pid in forced or -int(code) in _ENDED_BY_OTHERS),
            cause=why.cause,
        )


def _find_mismatch(log_end: str) -> str:
    """Return what a rank's log says about collectives that do not match, and where the rank was; empty if nothing."""
    found = _MISMATCH.search(log_end)
    if found is None:
        return ""
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', log_end, re.MULTILINE)  # by faulthandler
    own = next((frame for frame in frames if "/torch/" not in frame[0]), None)
    at = f"; this rank was at {Path(own[0]).name}:{own[1]} in {own[2]}" if own else ""
    return f": the ranks called different collectives ({found[0]}){at}"


def describe_exit(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code} without a report"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        advice = "perhaps by the kernel because memory ran out: try a smaller batching.micro_batch_size"
        return f"was killed by {name}; {advice}"
    if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return f"crashed in native code ({name})"
    return f"was ended by {name}"


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the end of a log, without colour codes."""
    return "\n".join(without_colours(end_of(log)).splitlines()[-lines:])


def end_of(log: Path) -> str:
    with open_regular(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
        return file.read(MAX_LOG_BYTES).decode(errors="replace")


def explain(failures: list[WorkerFailure]) -> Explanation:
    """Describe the first failure with its report, and all others on one line."""
    first, *others = failures
    at = f", step {first.step}" if first.step is not None else ""
    who = f"{first.who} ({first.host or 'hostname unknown'}{at})"
    ends = []
    alike = [other for other in others if (other.summary, other.whole_node) == (first.summary, first.whole_node)]
    lost = [other for other in others if other.consequence and other not in alike]
    if alike:
        ends.append(f"{_names(alike)} {'did not join either' if first.never_came else 'ended in the same way'}.")
    if lost:
        ends.append(f"{_names(lost)} lost the connection to {first.who}, or ended with it.")
    for other in others:
        if other not in alike and other not in lost:
            ends.append(_sentence(f"also {other.who}", other))
    detail = [first.detail, *ends]
    return Explanation(
        _sentence(who, first),
        "\n\n".join(filter(None, detail)),
        first.hint,
        first.cause,
        first.exit_code,
        first if first.whole_node else None,
    )


def explain_end(job: Job, exit_code: int | None, failures: list[WorkerFailure]) -> Explanation:
    """Explain why a single-group run failed: a worker or torchrun (`exit_code`) failed, or all of them simply
    exited."""
    code = exit_code or 0
    if failures and (code >= 0 or not failures[0].consequence):
        return explain(failures)
    if code < 0:
        return Explanation(f"torchrun was ended by {signal.Signals(-code).name}, and its workers with it")
    if code:
        logs = "\n\n".join(tail(log) for log in torchrun_logs(job))
        # Without an agent's log, the output is that of the command that started the agents.
        if job.nodes and not any(job.logs.glob("node*/torchrun.log")):
            headline = f"{Path(job.command[0]).name} ended with exit code {code} before any node had started a worker"
            hint = "read its messages above; if it uses a container, the image must be on every node"
            return Explanation(headline, logs, hint, exit_code=MachineError.exit_code)
        return Explanation(f"torchrun ended with exit code {code}", logs)
    if any(isinstance(event, EndEvent) for event in list(tail_events(job.run.events(0)))[-1:]):
        return Explanation("the workers were ended by a signal, but no stop of the run was requested")
    return Explanation("the workers ended without writing a result")


def with_faults(headline: str, faults: Sequence[HostFault]) -> str:
    """Add to a headline what the nodes say about the failure. Their own faults explain it better than messages about
    the program, which are only shown if there are no others."""
    of_machines = [one for one in faults if one.fault.is_of_machine] or faults
    said = "; ".join(f"{one.hostname} reports: {one.fault.text}" for one in of_machines[:SHOWN_FAULTS])
    return f"{headline}; {said}" if said else headline


def _sentence(who: str, failure: WorkerFailure) -> str:
    return f"{who}: {failure.summary}" if failure.self_reported else f"{who} {failure.summary}"


def _names(failures: list[WorkerFailure]) -> str:
    """Return `node 1` or `ranks 0, 2`; either all failures are nodes, or all are ranks."""
    numbers = ", ".join(str(failure.rank) for failure in failures[:8])
    more = f" and {len(failures) - 8} more" if len(failures) > 8 else ""
    kind = "node" if failures[0].whole_node else "rank"
    return f"{kind}{'s' if len(failures) > 1 else ''} {numbers}{more}"
