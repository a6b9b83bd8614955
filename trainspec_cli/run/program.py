"""Run a program other than the engine to completion. It is supervised like a run, so that no process is left behind."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import Interrupted, MachineError, Problem
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.failure import tail
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.job import Job, next_log_folder
from trainspec_cli.run.supervise import supervise


@dataclass(frozen=True)
class Program:
    command: tuple[str, ...]
    folder: Path
    """The folder for its log and the supervisor's records."""
    what: str
    """The program's name in messages."""
    timeout_s: float


@dataclass(frozen=True)
class ProgramEnd:
    exit_code: int | None
    """The exit code; None if the program exceeded its time limit and was killed."""
    output: str
    """The last lines that it printed."""


class _OutOfTime(Exception):  # noqa: N818 - it ends a wait
    pass


def run_program(
    program: Program, environment: Mapping[str, str], on_tick: Callable[[], None] = lambda: None
) -> ProgramEnd:
    """Run a program, with `environment` added to this process's environment. `on_tick` is called about ten times per
    second. Raises MachineError if the program cannot be started, and Interrupted if a stop was requested."""
    root = program.folder.absolute()
    own = {LAUNCH_ID: secrets.token_hex(8), **environment}
    job = Job(root, program.command, own, world_size=1, stop_grace_s=0.0, logs=next_log_folder(RunDir(root).logs))
    deadline = time.monotonic() + program.timeout_s

    def watch(_: bool) -> None:
        on_tick()
        if time.monotonic() > deadline:
            raise _OutOfTime

    try:
        ending = supervise(job, None, LocalBackend, watch)
    except _OutOfTime:
        return ProgramEnd(None, _output(job))
    except OSError as error:
        message = f"{program.what} cannot be started: {error}"
        raise MachineError(Problem("run_failed", message, hint="check its name and path", environment=True)) from error
    if ending.stop_requested:
        raise Interrupted(f"{program.what} was interrupted", code="interrupted")
    return ProgramEnd(ending.exit_code, _output(job))


def _output(job: Job) -> str:
    return tail(job.torchrun_log) if job.torchrun_log.is_file() else ""
