"""Watch a run from another terminal, follow its log, and stop it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.recipe.records import Absent
from trainspec_cli.reporter.collect import collect
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.live import LiveView
from trainspec_cli.reporter.render import render_summary
from trainspec_cli.reporter.runs import QUEUED
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.folder.events import TAIL_BYTES
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import has_plan, read_plan
from trainspec_cli.run.job.folder import Owner, find_owner, is_running
from trainspec_cli.session.manager import manager_of
from trainspec_cli.session.runs.find import status_of_run

SECOND_REQUEST_S = 0.5
"""Delay between two signals, in seconds, so that the process handles both."""


def watch(run: RunDir, console: PrintableConsole) -> str:
    """Show a run as its own terminal does, from its newest events until it ends; return its status. Raises RecipeError
    if it is not running."""
    if not is_running(run):
        raise _not_running(run, f"see how it went: trainspec report {_quoted(run)}")
    plan = read_plan(run) if has_plan(run) else None
    with LiveView(run, plan, console, last_bytes=TAIL_BYTES) as view:
        while is_running(run):
            view.watch(stop_requested=False)
            time.sleep(POLL_S)
        view.watch(stop_requested=False)
    report = collect(run.root)
    if report.steps:
        console.print(render_summary(report))
    return report.status


def read_run_log(run: RunDir, *, follow: bool) -> Iterator[str]:
    """Yield the lines that the run's terminal has shown in all starts; with `follow`, also new lines until the run
    ends. Raises RecipeError if there is no log."""
    if not run.run_log.is_file():
        message = f"{run.run_log} does not exist: the run has printed nothing yet"
        raise RecipeError(Problem("no_log", message, hint="`trainspec runs` shows whether it has started"))
    with run.run_log.open(encoding="utf-8", errors="replace") as file:
        while True:
            goes_on = follow and is_running(run)  # checked before reading, so that the last lines are not lost
            while text := file.read(2**16):
                yield text
            if not goes_on:
                return
            time.sleep(POLL_S)


def stop(run: RunDir, *, at_once: bool, on_asked: Callable[[], None]) -> str:
    """Ask a run to stop, wait until it has ended, and return its status. `at_once`: stop without writing a checkpoint.

    Raises RecipeError if the run is not running, and MachineError if it runs on another node."""
    owner = find_owner(run)
    if owner is None:
        queued = status_of_run(run) == QUEUED
        raise _not_running(run, "remove it from Slurm's queue: scancel JOB" if queued else "")
    manager = manager_of(read_plan(run).spec) if has_plan(run) else None
    if manager is None and owner.host != socket.gethostname():
        job = None if isinstance(owner.slurm_job_id, Absent) else owner.slurm_job_id
        hint = f"run scancel {job}" if job else f"run it there: ssh {owner.host} trainspec stop {_quoted(run)}"
        message = f"the run in {run.root} is supervised on {owner.host}, and this is {socket.gethostname()}"
        raise MachineError(Problem("other_node", message, hint=hint, environment=True))
    ask = partial(manager.ask_to_stop, run) if manager else partial(_ask, owner)
    ask()
    on_asked()
    if at_once:
        time.sleep(SECOND_REQUEST_S)
        if find_owner(run) == owner:
            ask()
    # Wait only for the process that was asked to stop, not for one started later.
    while find_owner(run) == owner:
        time.sleep(POLL_S)
    return status_of_run(run)


def _ask(owner: Owner) -> None:
    with suppress(ProcessLookupError):  # the process has ended in the meantime
        os.kill(owner.pid, signal.SIGTERM)


def _not_running(run: RunDir, hint: str) -> RecipeError:
    return RecipeError(Problem("not_running", f"the run in {run.root} is {status_of_run(run)}, not running", hint=hint))


def _quoted(run: RunDir) -> str:
    return shlex.quote(str(Path(run.root)))
