"""`--detach`: a run goes on in a session of its own, without the terminal that it was started from."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainspec_cli.core.errors import ERRORS_OF_RUNS, Problem, RecipeError, TrainspecError, WorkerError
from trainspec_cli.core.trust import private_files
from trainspec_cli.recipe.compose.origins import show_path
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.launching.session import Session


def check_detachable(session: Session) -> None:
    """Raise RecipeError for a run on several nodes."""
    if session.reach:
        message = "a run on several nodes cannot be started with --detach"
        hint = "give the command on each node under nohup, or use trainspec sbatch"
        raise RecipeError(Problem("unsupported", message, "cluster.num_nodes", hint))


def resume_detached(run: RunDir, arguments: Sequence[str], *, force: bool) -> int:
    """Start the run's next start in a process of its own, which is led by no terminal; return its id once the run has
    begun. Raises TrainspecError where it has ended before."""
    before = generations.newest(run)
    length_bytes = run.run_log.stat().st_size if run.run_log.exists() else 0
    process = spawn_resume(run, arguments, force=force)
    try:
        while generations.newest(run) == before:
            if code := process.poll():
                raise refusal(code, run.run_log, length_bytes)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        process.terminate()
        raise
    return process.pid


def spawn_resume(
    run: RunDir, arguments: Sequence[str], *, force: bool, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process of its own session that resumes the run, and writes to the run's log. `environment`: variables
    that it has beside those of this process."""
    command = [sys.executable, "-m", "trainspec_cli", "resume", str(run.root.absolute()), *arguments]
    with private_files():
        run.logs.mkdir(parents=True, exist_ok=True)
        with run.run_log.open("ab") as log:
            return subprocess.Popen(
                [*command, *(["--force"] if force else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )


def describe_detached(run: RunDir, pid: int, *, as_json: bool) -> str:
    """Say how the run is followed and stopped."""
    if as_json:
        return json_text({"run": str(run.root), "pid": pid, "log": str(run.run_log)})
    root = shlex.quote(show_path(run.root, Path.cwd()))
    return "\n".join([
        f"run folder  {root}",
        f"follow      trainspec watch {root}",
        f"log         trainspec logs {root} -f",
        f"report      trainspec report {root}",
        f"stop        trainspec stop {root}  (it writes a checkpoint; trainspec resume {root} goes on)",
    ])  # fmt: skip


def refusal(code: int, log: Path, start_bytes: int) -> TrainspecError:
    """Return the error of a start that ended before the run began, with what it said."""
    said = log.read_bytes()[start_bytes:].decode(errors="replace").strip()
    return ERRORS_OF_RUNS.get(code, WorkerError)(Problem("not_started", f"the detached run did not begin:\n{said}"))
