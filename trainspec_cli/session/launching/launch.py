"""`launch`: a session for a recipe, whose run is made; started, or shown without starting anything."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from trainspec_cli.core.environment_names import PROBE
from trainspec_cli.core.errors import ERRORS_OF_RUNS, EXIT_DONE, Problem, RecipeError, TrainspecError, WorkerError
from trainspec_cli.core.trust import private_files
from trainspec_cli.recipe.compose.folders import show_path
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.live import LiveView
from trainspec_cli.reporter.text import describe_plan
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.run.job.folder import check_free
from trainspec_cli.run.job.job import render_command
from trainspec_cli.run.notify import NOBODY, Notify
from trainspec_cli.session.console import RunConsole, make_console
from trainspec_cli.session.launching.nodes import NodeOptions, join
from trainspec_cli.session.launching.session import Session, rehearse, start, write_down
from trainspec_cli.session.planning.predict import probe_after_run
from trainspec_cli.session.planning.profile import with_profile
from trainspec_cli.session.recipe.load import Loaded, load, plan_on, this_machine
from trainspec_cli.session.runs.find import check_name_free

# `--detach`: a run goes on in a session of its own, without the terminal that it was started from.


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


def launch(
    arguments: Sequence[str],
    nodes: NodeOptions,
    notify: Notify = NOBODY,
    *,
    force: bool,
    as_json: bool,
    detach: bool = False,
) -> int:
    """Train a recipe, as the first node of the run or as another that joins it; return the run's exit code. With
    `detach`, 0 as soon as the run has begun in a process of its own."""
    loaded = load([*arguments, *nodes.as_arguments])
    wanted = loaded.spec.run.dir
    if nodes.reach(loaded.spec, wanted) and not nodes.is_first:
        wait_s = loaded.spec.run.join_timeout_s
        return join(wanted, nodes.node_rank, make_console(as_json=False), wait_s=wait_s)
    session = replace(_prepare(loaded, nodes, force=force, as_json=as_json), notify=notify)
    # Asked again where the run is written down; here it is known before anything is measured or prepared.
    check_free(wanted)
    check_name_free(loaded.spec.run.name)
    if not detach:
        return start(session)
    check_detachable(session)
    run = write_down(session)
    pid = resume_detached(run, notify.options, force=force)
    print(describe_detached(run, pid, as_json=as_json))
    return EXIT_DONE


def launch_apart(arguments: Sequence[str], *, force: bool, console: RunConsole | None = None) -> RunDir:
    """Train a recipe on this node in a process of its own, and wait for its end; return the run, whose result says how
    it ended. With a `console`, progress is shown on it. An interrupt is passed on, and the run's checkpoint waited for.
    Raises TrainspecError where it is refused before."""
    loaded = load(arguments)
    session = _prepare(loaded, NodeOptions(), force=force, as_json=False)
    if console:
        session = replace(session, console=console)
    check_free(loaded.spec.run.dir)
    check_name_free(loaded.spec.run.name)
    check_detachable(session)
    run = write_down(session)
    log_bytes = run.run_log.stat().st_size if run.run_log.exists() else 0
    process = spawn_resume(run, [], force=force, environment={PROBE: "off"})  # it is done below, where it is seen
    stop_requested = False
    # A bar takes over sys.stdout, so a console that shows nothing must not have one.
    shows = console is not None and not console.quiet
    with LiveView(run, read_plan(run), console) if console and shows else nullcontext() as view:
        while process.poll() is None:
            try:
                if view:
                    view.watch(stop_requested)
                process.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:
                stop_requested = True
                process.terminate()
        if view:
            view.watch(stop_requested)
    # Without a generation nothing has begun, and there is no result that could tell the reason.
    if process.returncode and not generations.newest(run):
        raise refusal(process.returncode, run.run_log, log_bytes)
    if process.returncode == EXIT_DONE and not stop_requested:
        probe_after_run(session.plan, session.machine, session.console)
    return run


def show_launch(
    arguments: Sequence[str],
    nodes: NodeOptions,
    *,
    force: bool,
    as_json: bool,
) -> str:
    """Return what `launch` would start, and where, as text or as JSON; refused as the launch would be."""
    loaded = load([*arguments, *nodes.as_arguments])
    job, plan = rehearse(_prepare(loaded, nodes, force=force, as_json=as_json))
    if not as_json:
        return f"{describe_plan(plan)}\n\n{render_command(job.command, job.environment, Path.cwd())}"
    shown = {"run": str(job.root), "command": list(job.command), "environment": dict(job.environment)}
    return json_text(shown | {"plan": to_plain(plan)})


def _prepare(loaded: Loaded, nodes: NodeOptions, *, force: bool, as_json: bool) -> Session:
    reach = nodes.reach(loaded.spec, loaded.spec.run.dir)
    machine = this_machine(loaded.spec)
    console = make_console(as_json=as_json)
    spec, profile = with_profile(loaded.spec, machine)
    loaded = replace(loaded, spec=spec)
    if profile:
        console.report(profile)
    return Session(plan_on(loaded, machine), machine, loaded, console, reach, force=force, as_json=as_json)
