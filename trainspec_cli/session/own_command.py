"""`run`: a command of the user's own, unchanged, with what a recipe gets: a folder, restarts, hangs named, a report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from trainspec_cli.launcher.job.claim import claim
from trainspec_cli.launcher.job.folder import RUNS, check_free, make_folder, storage, write_own_launch
from trainspec_cli.launcher.job.job import render_command
from trainspec_cli.launcher.job.machine import detect
from trainspec_cli.launcher.notify import NOBODY, Notify
from trainspec_cli.launcher.own_command.backend import OwnCommandBackend
from trainspec_cli.launcher.own_command.job import (
    Wanted,
    build_own_job,
    check_command,
    script_name,
    start_environment,
    what_it_opens,
    why_uncounted,
)
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.session.console import make_console
from trainspec_cli.session.run import run
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.recipe.cluster import Machine

SHOWN_BYTES = 2**16
"""Of what a command prints at once, no more is shown here; its log holds all of it."""


def run_command(
    command: Sequence[str], folder: str | None, wanted: Wanted, notify: Notify = NOBODY, *, as_json: bool
) -> int:
    """Run the command to its end; return this command's exit code. Raises TrainspecError where it is refused, or
    fails."""
    run_dir = folder or AUTO
    check_command(command)
    check_free(run_dir)
    machine, console = detect(), make_console(as_json=as_json)
    with storage(run_dir):
        job = build_own_job(command, make_folder(run_dir, script_name(command)), machine, wanted)
        with claim(job.run, job.launch_id):
            write_own_launch(job, script_name(command), sys.argv[1:])
            console.report(*_notes(command))
            backend = partial(OwnCommandBackend, device_name=_device_name(machine))
            return run(*(job, None, backend, console), as_json=as_json, notifies=notify, output=Output(job.run))


def show_command(command: Sequence[str], folder: str | None, wanted: Wanted, *, as_json: bool) -> str:
    """Return what `run_command` would start, and where, as text or as JSON."""
    check_command(command)
    check_free(folder or AUTO)
    root = Path(folder) if folder else RUNS / script_name(command) / "TIME"
    job = build_own_job(command, root, detect(), wanted)
    environment = {**job.environment, **start_environment(job, 1)}
    if as_json:
        return json_text({"run": str(job.root), "command": list(job.command), "environment": environment})
    return "\n".join([*_notes(command), render_command(job.command, environment, Path.cwd())])


def _notes(command: Sequence[str]) -> list[str]:
    uncounted = why_uncounted(command)
    notes = [f"steps cannot be counted: {uncounted}"] if uncounted else []
    return [*notes, *(f"note: {opens}" for opens in [what_it_opens(command)] if opens)]


def _device_name(machine: Machine) -> str:
    return machine.gpu_names[0] if machine.gpu_names else f"process ({machine.cpu_cores} cores)"


class Output:
    """Shows what the command prints, as it comes; lines that a progress bar writes over are left out."""

    def __init__(self, run_dir: RunDir):
        self._run = run_dir
        self._log: Path | None = None
        self._offset = 0

    def look(self, report: Callable[[str], None]) -> None:
        for log in sorted(self._run.logs.glob("launch_*/output.log")):
            if self._log is None or log > self._log:
                self._log, self._offset = log, 0
        if self._log is None:
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        if len(whole) > SHOWN_BYTES:
            report(f"... ({len(whole) - SHOWN_BYTES:,} bytes more in {self._log})")
        for line in whole[-SHOWN_BYTES:].decode(errors="replace").splitlines():
            report(line)
