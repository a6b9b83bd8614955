"""`launch`, and a single start of a run, from plan to exit code: predict, check the nodes, select kernels, run.

`launch`, `resume` and a Slurm job each create a `Session` on the first or only node of a run, and `start` it in the
same order: `start` -> `run` (run.py, also used for users' own commands) -> `supervise` (run/supervise.py). The other
nodes of a run join what the first node has started (`nodes.join`)."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainspec_cli.balance.advisor import LayoutAdvisor, Layouts, decides_layouts
from trainspec_cli.core.environment_names import PROBE
from trainspec_cli.core.errors import ERRORS_OF_RUNS, EXIT_DONE, Problem, RecipeError, TrainspecError, WorkerError
from trainspec_cli.core.node import private_files
from trainspec_cli.core.printable import format_count
from trainspec_cli.core.reading.files import read_text
from trainspec_cli.core.wings import Point, parts_of
from trainspec_cli.planner.this_machine import is_predictable
from trainspec_cli.recipe.compose.folders import show_path
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KernelTable
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import parts_for
from trainspec_cli.recipe.user_code import describe_code
from trainspec_cli.reporter.console import PrintableConsole, RunConsole, make_console
from trainspec_cli.reporter.kernels_text import describe_choice
from trainspec_cli.reporter.live import LiveView
from trainspec_cli.reporter.text import describe_plan
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.backend.nodes.backend import Examination, NodesBackend, Reach, build_nodes_job
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.channel.folders import FolderServer, nodes_secret
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import StartEvent
from trainspec_cli.run.folder.events import EventTail
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.known_runs import known_runs
from trainspec_cli.run.folder.memory import newest_copy
from trainspec_cli.run.folder.own_code import describe_changed_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan, read_plan_of_all_nodes
from trainspec_cli.run.job.folder import (
    RUNS,
    check_free,
    claim,
    find_owner,
    make_folder,
    storage,
    write_launch,
    write_resume,
)
from trainspec_cli.run.job.job import Job, build_job, render_command
from trainspec_cli.run.job.machine import detect, listen, listening_address
from trainspec_cli.run.memory_limits import LimitsWatch
from trainspec_cli.run.notify import NOBODY, Notify
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.tools import known_probe, measure_kernels, read_table, table_path
from trainspec_cli.session.launching.changes import describe_changes, plan_on_fewer, trained_samples
from trainspec_cli.session.launching.nodes import Joined, NodeOptions, join, with_own_agent
from trainspec_cli.session.launching.run import describe_tracking, run
from trainspec_cli.session.manager import manager_of
from trainspec_cli.session.planning.predict import describe_load, predict, probe_after_run, with_known_limits
from trainspec_cli.session.recipe.data import prepare_data
from trainspec_cli.session.recipe.load import Loaded, check_start, load, plan_on, this_machine, with_profile
from trainspec_cli.session.runs.find import check_name_free

CheckNodes = Callable[[Plan, Path, RunConsole, bool], Examination | None]
"""Receives the plan, the run folder, the console, and whether --force is set. Checks this node, or returns the
examination to run on each of several nodes. Raises MachineError for an unfit node."""
CHECK_NODES: Point[CheckNodes] = Point("check_nodes")
RUN_SERVICES: Point[Callable[[RunDir, Plan], AbstractContextManager[None]]] = Point("run_services")
"""A plug-in's services. They run alongside the supervisor, and keep running when the workers are restarted."""
MOST_KNOWN = 50
"""Number of most recent runs to check for those still in progress."""
MACHINE_BOUND = ("device", "world_size", "compute", "micro_batch_size", "grad_accum_steps")
"""Plan fields that depend on the machine, and may therefore differ when a run is resumed."""


@dataclass(frozen=True)
class Session:
    """One prepared start of a run."""

    plan: Plan
    machine: Machine
    """This node, which is the first or only one."""
    begins: Loaded | RunDir
    """The recipe of a new run, or the folder of an existing run."""
    console: RunConsole
    reach: Reach | None = None
    """How to reach the nodes; None for a single-node run."""
    data_folder: Path | None = None
    """Folder of an existing run's changed data; None if the data is unchanged."""
    force: bool = False
    """Whether to train even if the plan is predicted not to fit."""
    as_json: bool = False
    notify: Notify = NOBODY
    """The command to run and the URL to notify when the run ends."""

    @property
    def folder(self) -> Path:
        """Return the run folder; for a folder that does not exist yet, its parent."""
        if isinstance(self.begins, RunDir):
            return self.begins.root.absolute()
        return RUNS if self.plan.spec.run.dir == AUTO else Path(self.plan.spec.run.dir).absolute()


def launch(
    arguments: Sequence[str],
    nodes: NodeOptions,
    notify: Notify = NOBODY,
    *,
    force: bool,
    as_json: bool,
    detach: bool = False,
) -> int:
    """Train a recipe, as the first node of the run or as a node that joins; return the run's exit code. With `detach`,
    return 0 as soon as a separate process has started the run."""
    loaded = load([*arguments, *nodes.as_arguments])
    wanted = loaded.spec.run.dir
    if manager := manager_of(loaded.spec):
        nodes.check_managed(loaded.spec)
        return manager.launch(loaded, notify, force=force, as_json=as_json, detach=detach)
    if nodes.reach(loaded.spec, wanted) and not nodes.is_first:
        wait_s = loaded.spec.run.join_timeout_s
        console = make_console(as_json=False)
        return join(wanted, nodes.node_rank, console, wait_s=wait_s, joined=JOINED, address=nodes.address)
    session = replace(_prepare(loaded, nodes, force=force, as_json=as_json), notify=notify)
    # This is checked again when the run is recorded. It is checked here first, before anything is measured or prepared.
    check_free(wanted)
    check_name_free(loaded.spec.run.name)
    if not detach:
        return start(session)
    check_detachable(session)
    run = write_down(session)
    pid = resume_detached(run, notify.options, force=force)
    print(describe_detached(run, pid, as_json=as_json))
    return EXIT_DONE


def take_over(run: RunDir, reach: Reach, console: RunConsole) -> int:
    """Supervise a run from this node, whose first node was lost. Return the run's exit code."""
    plan = read_plan_of_all_nodes(run)
    machine = detect(look_for_gpus=plan.device == "cuda")
    reach = with_own_agent(reach, reach.nodes[0])
    # The run has trained with this plan, so it starts even if the plan is predicted not to fit.
    return start(Session(plan, machine, run, console, reach, force=True))


JOINED = Joined(take_over=take_over)
"""How a node joins a run that trains a recipe."""


def launch_apart(arguments: Sequence[str], *, force: bool, console: RunConsole | None = None) -> RunDir:
    """Train a recipe on this node in a separate process, and wait for it to end. Return the run, with its result.
    Progress is shown on the `console`, if there is one. An interrupt is forwarded to the run, and this function then
    waits for the run's checkpoint. Raises TrainspecError if the run is rejected."""
    loaded = load(arguments)
    session = _prepare(loaded, NodeOptions(), force=force, as_json=False)
    if console:
        session = replace(session, console=console)
    check_free(loaded.spec.run.dir)
    check_name_free(loaded.spec.run.name)
    check_detachable(session)
    run = write_down(session)
    log_bytes = run.run_log.stat().st_size if run.run_log.exists() else 0
    process = spawn_resume(run, [], force=force, environment={PROBE: "off"})  # probed below, with visible output
    stop_requested = False
    # A progress bar takes over sys.stdout, so a console that shows nothing must not have one.
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
    # Without a generation the run has not started, and there is no result that states the reason.
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
    """Describe what `launch` would start, as text or as JSON. Raises the same errors as the launch."""
    loaded = load([*arguments, *nodes.as_arguments])
    job, plan = rehearse(_prepare(loaded, nodes, force=force, as_json=as_json))
    if not as_json:
        return f"{describe_plan(plan)}\n\n{render_command(job.command, job.environment, Path.cwd())}"
    shown = {"run": str(job.root), "command": list(job.command), "environment": dict(job.environment)}
    return json_text(shown | {"plan": to_plain(plan)})


def _prepare(loaded: Loaded, nodes: NodeOptions, *, force: bool, as_json: bool) -> Session:
    reach = nodes.reach(loaded.spec, loaded.spec.run.dir)
    console = make_console(as_json=as_json)
    return prepare_on(this_machine(loaded.spec), loaded, reach, console, force=force, as_json=as_json)


def prepare_on(
    machine: Machine, loaded: Loaded, reach: Reach | None, console: RunConsole, *, force: bool, as_json: bool
) -> Session:
    """Return the session of a new run on nodes like `machine`."""
    spec, profile = with_profile(loaded.spec, machine)
    loaded = replace(loaded, spec=spec)
    if profile:
        console.report(profile)
    return Session(plan_on(loaded, machine), machine, loaded, console, reach, force=force, as_json=as_json)


def start(session: Session, requests: StopRequests | None = None) -> int:
    """Prepare and record the run (`_written_down`), then supervise it; return the run's exit code. Raises
    TrainspecError if the run is rejected or fails."""
    machine = session.machine

    def layouts(home: Plan) -> Layouts:
        from trainspec_cli.balance.other_layout import OtherLayouts  # loads numpy; only needed once a rank is slow

        return OtherLayouts.of_plan(home, machine)

    with _written_down(session) as (job, plan, examination):
        backend: OpenBackend = LocalBackend
        limits = LimitsWatch(job.run, plan, machine)
        mail = WorkerMail()
        advisor = LayoutAdvisor(job.run, plan, layouts, mail) if decides_layouts(plan) else None
        with ExitStack() as services:
            if session.reach:
                reach = services.enter_context(_serving_folder(job.run, session.reach))
                backend = partial(NodesBackend, reach=reach, examination=examination)
            for serve in parts_for(RUN_SERVICES, plan.spec):
                services.enter_context(serve(job.run, plan))
            code = run(
                *(job, plan, backend, session.console, limits),
                advisor=advisor,
                mail=mail,
                as_json=session.as_json,
                requests=requests,
                replan=partial(plan_on_fewer, machine=machine),
                notifies=session.notify,
            )
    # The machine is measured after the run, for later launches, when no user is waiting. The probe and another run on
    # this machine would slow each other down.
    if code == EXIT_DONE and not any(_describe_other_runs(job.run)):
        probe_after_run(plan, machine, session.console)
    return code


@contextmanager
def _serving_folder(run: RunDir, reach: Reach) -> Iterator[Reach]:
    """Serve the run folder to nodes that do not share it, at the port that the user has named, if there is a secret by
    which they can prove who they are."""
    secret = nodes_secret()
    if secret is None:
        yield reach
        return
    server = FolderServer(run, secret, listen(listening_address(reach.head), reach.rendezvous_port or 0))
    try:
        yield replace(reach, folder=f"{reach.head}:{server.port}")
    finally:
        server.close()


def write_down(session: Session) -> RunDir:
    """Record the run in its folder, so that a resume can start it. Raises TrainspecError if the run is rejected."""
    with _written_down(session) as (job, _, _):
        return job.run


@contextmanager
def _written_down(session: Session) -> Iterator[tuple[Job, Plan, Examination | None]]:
    """Check, predict, examine the nodes, select kernels, prepare data and record the run. The run stays claimed during
    the block."""
    console = session.console
    machine = session.machine
    begins = session.begins

    # All checks that can reject the run come before its folder is created, so that a rejected run leaves nothing
    # behind.
    check_start(session.plan.spec)
    plan = predict(_within_limits(session), machine, console, force=session.force)
    # This follows the prediction, because the nodes must have the predicted memory free.
    examinations = [check(plan, session.folder, console, session.force) for check in parts_of(CHECK_NODES)]
    examination = next(filter(None, examinations), None)
    plan, kernels = select_kernels(plan, machine, console)

    is_new = isinstance(begins, Loaded)
    data_folder = prepare_data(begins, console) if isinstance(begins, Loaded) else session.data_folder
    with storage(plan.spec.run.dir if is_new else str(session.folder)):
        root = session.folder
        if isinstance(begins, Loaded):
            root = make_folder(session.plan.spec.run.dir, begins.composed.recipe)
        job = _build(session, plan, root)
        # Two resumes may run concurrently, so the run is read only once it is claimed.
        with claim(job.run, job.launch_id), nullcontext() if is_new else _restoring(job.run):
            adapters = []
            if trained := plan.adapter_params:
                of = f"{format_count(trained)} of {format_count(plan.params + trained)} parameters are trained"
                adapters.append(
                    f"{of} ({trained / (plan.params + trained):.2%}): adapters of rank {plan.spec.lora.rank}"
                )
            console.report_each(adapters, _describe_other_runs(job.run))
            if isinstance(begins, Loaded):
                write_launch(job, plan, begins.origin, data_folder, kernels)
                console.report_each(describe_code(plan.spec))
            else:
                changed_code = list(describe_changed_code(job.run))
                before = read_plan_of_all_nodes(job.run)
                # A run that Slurm or --detach starts for the first time has been recorded, but has no earlier start.
                goes_on = generations.newest(job.run) > 0 or plan.spec != before.spec
                from_step = job.run.newest_step if goes_on else None
                write_resume(job, plan, sys.argv[1:], from_step, kernels, data_folder)
                if goes_on:
                    starts = []
                    step = job.run.newest_step
                    # Another node may have a copy that this one, which has lost its memory, continues from.
                    may_have_copy = session.reach is not None or newest_copy(job.run)
                    if plan.spec.checkpoint.memory_interval_steps and may_have_copy:
                        starts.append(f"continues from the newest complete copy in memory, otherwise from step {step}")
                    else:
                        starts.append(
                            f"continues from step {step}" if step else "no checkpoint: starts from the first step again"
                        )
                    for name in MACHINE_BOUND:
                        if getattr(before, name) != getattr(plan, name):
                            starts.append(
                                f"{name} is {getattr(plan, name)} on this machine, and was {getattr(before, name)}"
                            )
                    starts += describe_changes(before.spec, plan.spec, step, trained_samples(job.run, plan.spec, step))
                    console.report_each(starts, changed_code)
            console.report_each(describe_tracking(plan.spec, job.root))
            yield job, plan, examination


@contextmanager
def _restoring(run: RunDir) -> Iterator[None]:
    """Restore the files that a resume replaces, unless its workers have loaded the checkpoint and started. Otherwise a
    value that the workers reject would persist, and the next resume would fail too."""
    files = (run.plan_json, run.plan_of_all_nodes, run.run_json, run.kernels_json, run.code_json, run.command_txt)
    before = {path: read_text(path) if path.is_file() else None for path in (*files, run.nccl_env, run.nccl_tuner_csv)}
    new_events = EventTail(run.events(0))
    try:
        yield
    except BaseException as error:
        # If another start has taken over the run, its files must not be replaced.
        is_fenced = isinstance(error, TrainspecError) and error.problems[0].code == generations.FENCED
        has_begun = any(isinstance(event, StartEvent) for event in new_events.new_events())
        if not has_begun and not is_fenced:
            for path, text in before.items():
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    write_text(path, text)
        raise


def rehearse(session: Session) -> tuple[Job, Plan]:
    """Return what `start` would start, without probing, measuring or creating anything. Raises the same errors."""
    console = session.console
    machine = session.machine
    check_start(session.plan.spec)
    plan = predict(_within_limits(session), machine, console, force=session.force)
    if is_predictable(plan.as_one_group):
        console.report_each(describe_load(known_probe(plan.as_one_group, machine)))
    plan, _ = select_kernels(plan, machine, console, may_measure=False)
    root = session.folder
    if isinstance(session.begins, Loaded) and plan.spec.run.dir == AUTO:
        root = root / session.begins.composed.recipe / "TIME"
    return _build(session, plan, root), plan


def _within_limits(session: Session) -> Plan:
    """Return the plan. For a new run, adapt it to the memory limits that earlier runs found on this machine. A resumed
    run keeps its own plan and limits, so that its results are bitwise identical."""
    begins = session.begins
    goes_on = isinstance(begins, RunDir) and generations.newest(begins) > 0
    return session.plan if goes_on else with_known_limits(session.plan, session.machine, session.console)


def _build(session: Session, plan: Plan, root: Path) -> Job:
    return build_nodes_job(plan, root, session.reach) if session.reach else build_job(plan, root, session.machine)


def _describe_other_runs(run: RunDir) -> Iterator[str]:
    """Yield a line for each other known run of this user that is training on this machine."""
    for known in known_runs()[:MOST_KNOWN]:
        other = RunDir(known.path)
        owner = None if other.root == run.root.resolve() else find_owner(other)
        if owner and owner.host == socket.gethostname():
            yield f"the run in {other.root} is also training on this machine; both are slower if they share devices"


# `--detach`: the run continues in a separate process session, without its terminal.


def check_detachable(session: Session) -> None:
    """Raise RecipeError for a run on several nodes."""
    if session.reach:
        message = "a run on several nodes cannot be started with --detach"
        hint = "run the command on each node under nohup, or use trainspec sbatch"
        raise RecipeError(Problem("unsupported", message, "cluster.num_nodes", hint))


def resume_detached(run: RunDir, arguments: Sequence[str], *, force: bool) -> int:
    """Resume the run in a separate process without a terminal; return the process id once the run has started. Raises
    TrainspecError if the process ends before that."""
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
    """Start a process in a new session that resumes the run and writes to the run's log. `environment`: additional
    variables."""
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


def describe_detached(run: RunDir, pid: int | None, *, as_json: bool) -> str:
    """Describe how to follow and stop the run. `pid`: the process that supervises it, if it is on this machine."""
    if as_json:
        process = {} if pid is None else {"pid": pid}
        return json_text({"run": str(run.root), **process, "log": str(run.run_log)})
    root = shlex.quote(show_path(run.root, Path.cwd()))
    return "\n".join([
        f"run folder  {root}",
        f"follow      trainspec watch {root}",
        f"log         trainspec logs {root} -f",
        f"report      trainspec report {root}",
        f"stop        trainspec stop {root}  (it writes a checkpoint; trainspec resume {root} continues)",
    ])  # fmt: skip


def refusal(code: int, log: Path, start_bytes: int) -> TrainspecError:
    """Return the error for a start that ended before the run started, including its output."""
    said = log.read_bytes()[start_bytes:].decode(errors="replace").strip()
    return ERRORS_OF_RUNS.get(code, WorkerError)(Problem("not_started", f"the detached run did not start:\n{said}"))


# Select the kernels that the recipe leaves to `auto`, based on measurements on this machine.


def select_kernels(
    plan: Plan, machine: Machine, console: PrintableConsole, *, may_measure: bool = True
) -> tuple[Plan, KernelTable | None]:
    """Return the plan with every `auto` kernel selected, and the table of measurements used to select them (None if no
    kernel was `auto`).

    On several nodes, the first one measures for all. Without `may_measure`, kernels that have never been measured stay
    `auto`, and the console reports this."""
    if not plan.kernels.open_ops:
        return plan, None
    table: KernelTable | None
    if may_measure:
        table = measure_kernels(plan, machine, partial(console.report, "measuring kernels on this machine, once"))
    else:
        table = read_table(table_path(plan, machine))
    if table is None:
        console.report("kernels: not measured yet; the first launch measures them, in about a minute")
        return plan, None
    selected = replace(plan, kernels=table.resolve(plan.kernels))
    console.report(f"kernels: {describe_choice(selected.kernels, table)}")
    return selected, table
