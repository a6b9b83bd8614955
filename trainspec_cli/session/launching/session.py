"""One start of a run, from a plan to an exit code: predict, check the nodes, select kernels, run.

`launch`, `resume` and a Slurm job each make a `Session`, on a run's only node or on the first of several, and start it
in this one order. The other nodes of a run join what the first has started (`nodes.join`).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainspec_cli.balance.advisor import LayoutAdvisor, Layouts, decides_layouts
from trainspec_cli.core.errors import EXIT_DONE, TrainspecError
from trainspec_cli.core.printable import format_count
from trainspec_cli.core.reading.files import read_text
from trainspec_cli.core.wings import Point, parts_of
from trainspec_cli.planner.workload.adapters import adapter_params
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.own_code import describe_code
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.wings import parts_for
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.backend.nodes.backend import Examination, NodesBackend, Reach, build_nodes_job
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import StartEvent
from trainspec_cli.run.folder.events import EventTail
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.known_runs import known_runs
from trainspec_cli.run.folder.memory import newest_copy
from trainspec_cli.run.folder.own_code import describe_changed_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan_of_all_nodes
from trainspec_cli.run.job.folder import RUNS, claim, find_owner, make_folder, storage, write_launch, write_resume
from trainspec_cli.run.job.job import Job, build_job
from trainspec_cli.run.memory_limits import LimitsWatch
from trainspec_cli.run.notify import NOBODY, Notify
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.session.console import RunConsole
from trainspec_cli.session.launching.changes import describe_changes, plan_on_fewer, trained_samples
from trainspec_cli.session.launching.run import describe_tracking, run
from trainspec_cli.session.launching.select_kernels import select_kernels
from trainspec_cli.session.planning.predict import predict, probe_after_run, with_known_limits
from trainspec_cli.session.recipe.data import prepare_data
from trainspec_cli.session.recipe.load import Loaded, check_start

CheckNodes = Callable[[Plan, Path, RunConsole, bool], Examination | None]
"""Takes the plan, the run's folder, the console, and whether the run starts whatever memory it takes (--force). Checks
this node, or returns the examination which each of several nodes goes through. Raises MachineError where unfit."""
CHECK_NODES: Point[CheckNodes] = Point("check_nodes")
RUN_SERVICES: Point[Callable[[RunDir, Plan], AbstractContextManager[None]]] = Point("run_services")
"""What serves a run next to its supervisor, over all starts of its workers, where the recipe uses the wing."""
MOST_KNOWN = 50
"""The newest runs, among which those that still train are looked for."""
MACHINE_BOUND = ("device", "world_size", "compute", "micro_batch_size", "grad_accum_steps")
"""Keys that a plan resolves from the machine, which may be another one now."""


@dataclass(frozen=True)
class Session:
    """One start of a run, prepared."""

    plan: Plan
    machine: Machine
    """This node; of several, the first."""
    begins: Loaded | RunDir
    """A recipe whose run is to be made, or a run that is written down already."""
    console: RunConsole
    reach: Reach | None = None
    """How the nodes are reached; None for a run that this process supervises on this node alone."""
    data_folder: Path | None = None
    """The folder of other data with which a run goes on; None: of its own."""
    force: bool = False
    """Train although the plan is predicted not to fit."""
    as_json: bool = False
    notify: Notify = NOBODY
    """The command and the address that hear of the run's end."""

    @property
    def folder(self) -> Path:
        """The run's folder, or that below which it will be made."""
        if isinstance(self.begins, RunDir):
            return self.begins.root.absolute()
        return RUNS if self.plan.spec.run.dir == AUTO else Path(self.plan.spec.run.dir).absolute()


def start(session: Session, requests: StopRequests | None = None) -> int:
    """Check, predict, examine the nodes, choose kernels, prepare data and write the run down (`_written_down`), then
    supervise it. Return the run's exit code. Raises TrainspecError where the run is refused, or fails."""
    machine = session.machine

    def layouts(home: Plan) -> Layouts:
        from trainspec_cli.balance.other_layout import OtherLayouts  # loads numpy: where a rank is slow alone

        return OtherLayouts.of_plan(home, machine)

    with _written_down(session) as (job, plan, examination):
        backend: OpenBackend = LocalBackend
        if session.reach:
            backend = partial(NodesBackend, reach=session.reach, examination=examination)
        limits = LimitsWatch(job.run, plan, machine)
        mail = WorkerMail()
        advisor = LayoutAdvisor(job.run, plan, layouts, mail) if decides_layouts(plan) else None
        with ExitStack() as services:
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
    # Now that nobody waits for the run any more, the machine is measured for the launches that follow; the probe would
    # slow another run that trains here, and be slowed by it.
    if code == EXIT_DONE and not any(_describe_other_runs(job.run)):
        probe_after_run(plan, machine, session.console)
    return code


def write_down(session: Session) -> RunDir:
    """Make the run's folder, for a resume to start. Raises TrainspecError where the run is refused."""
    with _written_down(session) as (job, _, _):
        return job.run


@contextmanager
def _written_down(session: Session) -> Iterator[tuple[Job, Plan, Examination | None]]:
    """Do all that comes before the workers; hold the run, as it is written, while the block runs."""
    console = session.console
    machine = session.machine
    begins = session.begins

    # Whatever can refuse the run comes before its folder is made: a run that is refused leaves nothing.
    check_start(session.plan.spec)
    plan = predict(_within_limits(session), machine, console, force=session.force)
    # After the prediction, whose memory the nodes must have free.
    examinations = [check(plan, session.folder, console, session.force) for check in parts_of(CHECK_NODES)]
    examination = next(filter(None, examinations), None)
    plan, kernels = select_kernels(plan, machine, console)

    if isinstance(begins, Loaded):
        data_folder = prepare_data(begins, console)
        with storage(plan.spec.run.dir):
            job = _build(session, plan, make_folder(session.plan.spec.run.dir, begins.composed.recipe))
            with claim(job.run, job.launch_id):
                console.report_each(_describe_adapters(plan), _describe_other_runs(job.run))
                write_launch(job, plan, begins.origin, data_folder, kernels)
                console.report_each(describe_code(plan.spec), describe_tracking(plan.spec, job.root))
                yield job, plan, examination
        return

    with storage(str(session.folder)):
        job = _build(session, plan, session.folder)
        # Two resumes may be typed at once: what the run holds is read only once it is claimed.
        with claim(job.run, job.launch_id), _restoring(job.run):
            console.report_each(_describe_adapters(plan), _describe_other_runs(job.run))
            changed_code = list(describe_changed_code(job.run))
            before = read_plan_of_all_nodes(job.run)
            # A run that Slurm or --detach begins was only written down before: it goes on from nothing.
            goes_on = generations.newest(job.run) > 0 or plan.spec != before.spec
            from_step = job.run.newest_step if goes_on else None
            write_resume(job, plan, sys.argv[1:], from_step, kernels, session.data_folder)
            if goes_on:
                console.report_each(_describe_start(job.run, before, plan), changed_code)
            console.report_each(describe_tracking(plan.spec, job.root))
            yield job, plan, examination


@contextmanager
def _restoring(run: RunDir) -> Iterator[None]:
    """Put back the files that a resume replaces, unless its workers have loaded the checkpoint and begun: a value that
    they refuse would else stay, and the next resume would be refused too."""
    files = (run.plan_json, run.plan_of_all_nodes, run.run_json, run.kernels_json, run.code_json, run.command_txt)
    before = {path: read_text(path) if path.is_file() else None for path in (*files, run.nccl_env, run.nccl_tuner_csv)}
    new_events = EventTail(run.events(0))
    try:
        yield
    except BaseException as error:
        # A run that another start has taken over is that one's: its files are not put back under it.
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
    """Return what `start` would start, refused as it would be; nothing is probed, measured or made for that."""
    console = session.console
    machine = session.machine
    check_start(session.plan.spec)
    plan = predict(_within_limits(session), machine, console, force=session.force)
    plan, _ = select_kernels(plan, machine, console, may_measure=False)
    root = session.folder
    if isinstance(session.begins, Loaded) and plan.spec.run.dir == AUTO:
        root = root / session.begins.composed.recipe / "TIME"
    return _build(session, plan, root), plan


def _within_limits(session: Session) -> Plan:
    """Return the plan; that of a run that begins now, with what others have learned of this machine's memory. A run
    that goes on follows its own plan and what it has learned itself, so that it computes the same bits."""
    begins = session.begins
    goes_on = isinstance(begins, RunDir) and generations.newest(begins) > 0
    return session.plan if goes_on else with_known_limits(session.plan, session.machine, session.console)


def _build(session: Session, plan: Plan, root: Path) -> Job:
    return build_nodes_job(plan, root, session.reach) if session.reach else build_job(plan, root, session.machine)


def _describe_adapters(plan: Plan) -> Iterator[str]:
    if trained := adapter_params(plan.spec.model, plan.spec.lora):
        of = f"{format_count(trained)} of {format_count(plan.params + trained)} parameters are trained"
        yield f"{of} ({trained / (plan.params + trained):.2%}): adapters of rank {plan.spec.lora.rank}"


def _describe_other_runs(run: RunDir) -> Iterator[str]:
    """Yield a line for each other run of this user that trains on this machine now, as far as runs are known."""
    for known in known_runs()[:MOST_KNOWN]:
        other = RunDir(known.path)
        owner = None if other.root == run.root.resolve() else find_owner(other)
        if owner and owner.host == socket.gethostname():
            yield f"the run in {other.root} trains on this machine too: on the same devices both are slower"


def _describe_start(run: RunDir, before: Plan, plan: Plan) -> Iterator[str]:
    step = run.newest_step
    if plan.spec.checkpoint.memory_interval_steps and newest_copy(run):
        yield f"goes on from the newest copy in memory that is whole, else from step {step}"
    else:
        yield f"goes on from step {step}" if step else "there is no checkpoint: it starts from the first step again"
    for name in MACHINE_BOUND:
        if getattr(before, name) != getattr(plan, name):
            yield f"{name} is {getattr(plan, name)} on this machine, and was {getattr(before, name)}"
    yield from describe_changes(before.spec, plan.spec, step, trained_samples(run, plan.spec, step))
