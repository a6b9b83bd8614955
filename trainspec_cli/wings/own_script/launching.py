"""`run`: start a user's command with a run folder, restarts, hang detection and a report. This module also resumes such
runs, and runs them in Slurm jobs.

In a Slurm job that uses the user's own batch script, srun starts `trainspec run` once on each node. If Slurm requeues
the job, the run continues in its folder."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from trainspec_cli import __version__
from trainspec_cli.core.errors import (
    EXIT_DONE,
    Interrupted,
    Problem,
    RecipeError,
    Stopped,
    TrainspecError,
    WorkerError,
)
from trainspec_cli.core.printable import without_colours
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine, SlurmSpec
from trainspec_cli.recipe.records import Absent
from trainspec_cli.reporter.console import PrintableConsole, RunConsole, make_console
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.nodes.backend import NodesBackend, Reach, agent_command
from trainspec_cli.run.failure import end_of, find_failed_nodes
from trainspec_cli.run.folder.files import write_json, write_text
from trainspec_cli.run.folder.generations import FENCED, GenerationRecord
from trainspec_cli.run.folder.known_runs import remember_run
from trainspec_cli.run.folder.paths import COMMAND, RunDir
from trainspec_cli.run.folder.record import Resume, RunRecord, RunResult, read_result, read_run_record, write_run_record
from trainspec_cli.run.job.folder import RUNS, check_free, check_no_run, claim, clear_end, make_folder, storage
from trainspec_cli.run.job.job import Job, git_state, render_command, versions
from trainspec_cli.run.job.machine import NodePlace, detect
from trainspec_cli.run.notify import NOBODY, Notify
from trainspec_cli.run.outcome import RunOutcome, result_from_events
from trainspec_cli.run.signals import PatientRequests, StopRequests
from trainspec_cli.run.slurm.commands import own_address
from trainspec_cli.run.slurm.queue import job_of, note_job, own_job
from trainspec_cli.run.supervise import Ending
from trainspec_cli.session.launching.in_slurm import Limits, TimeWarning, requeue_if_of_use, restarts
from trainspec_cli.session.launching.kinds import RunKind, about_node, command_to_resume, quoted, shown
from trainspec_cli.session.launching.nodes import Joined, NodeOptions, join
from trainspec_cli.session.launching.run import run
from trainspec_cli.wings.own_script.failure import explain_own_end, find_own_failures
from trainspec_cli.wings.own_script.job import (
    CommandSettings,
    OwnJob,
    build_own_job,
    build_own_node_job,
    build_own_nodes_job,
    check_command,
    check_for_nodes,
    describe_own_command,
    device_name,
    notes_on,
    read_own_command,
    read_own_job,
    script_name,
    start_environment,
    write_own_job,
)
from trainspec_cli.wings.own_script.journal import newest_step, restarts_left
from trainspec_cli.wings.own_script.start import JOBS, JOIN_OPTION, OwnCommandBackend
from trainspec_cli.wings.own_script.terminal import PassedOutput

THIS_NODE = NodeOptions()
FOLDER = "--dir"
"""The option that specifies the run folder."""
JOB = "SLURM_JOB_ID"
_EMPTY_OF_RANK = re.compile(r"\[[a-z]+\d+\]:\s*")
SHOWN_BYTES = 2**16
"""Maximum number of output bytes to show at once. The log contains the full output."""


def run_command(
    command: Sequence[str],
    folder: str | None,
    wanted: CommandSettings,
    nodes: NodeOptions = THIS_NODE,
    notify: Notify = NOBODY,
    *,
    as_json: bool,
) -> int:
    """Run the command to completion, as the first node of its run or as a node that joins. Return the exit code. Raises
    TrainspecError if the command is rejected or fails."""
    check_command(command)
    console = make_console(as_json=as_json)
    nodes, run_dir = find_nodes_and_folder(command, folder, nodes)
    reach = reach_nodes(command, run_dir, nodes, wanted)
    if note := describe_slurm_nodes(nodes, reach):
        console.report(note)
    again = None if run_dir == AUTO else earlier_start(RunDir(run_dir), command)
    if again == "done":
        console.report(f"the run in {run_dir} was already finished by an earlier start of this Slurm job")
        return EXIT_DONE
    if reach and not nodes.is_first:
        # Slurm warns every process in a job step. The first node reacts on behalf of all nodes.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        joined = Joined(
            check=partial(_check_same, command),
            exit_code=exit_code_of,
            folder=FOLDER,
            join_key=JOIN_OPTION,
            of_slurm=nodes.of_slurm,
        )
        return join(run_dir, nodes.node_rank, console, wait_s=wanted.join_timeout_s, joined=joined)
    if not again:
        check_free(run_dir, FOLDER)
    with storage(run_dir, FOLDER):
        root = Path(run_dir) if again else make_folder(run_dir, script_name(command), FOLDER)
        # `resume` uses the same options.
        write_own_job(RunDir(root), OwnJob(nodes.nnodes or 1, wanted, SlurmSpec.max_requeues, None))
        left = _left(root, wanted)
        job = _build(command, root, detect(), left, reach, nodes)
        start = partial(_run, job, command, left, reach, console, notify=notify, as_json=as_json)
        return requeueing(RunDir(root), nodes, console, start)


def _check_same(command: Sequence[str], run: RunDir, record: GenerationRecord) -> None:
    """Raise RecipeError if the first node runs a different command."""
    known = f"{run.root} contains the run of a recipe"
    if record.kind == COMMAND:
        firsts = read_own_command(record).command
        if tuple(command) == firsts:
            return
        known = f"the first node runs {shlex.join(firsts)}"
    message = f"{known}, but this node runs {shlex.join(command)}"
    raise RecipeError(Problem("usage", message, "COMMAND", "use the same command on each node"))


def exit_code_of(run: RunDir, result: RunResult | None) -> int:
    """Return trainspec's exit code on a node that has joined. It is the same as on the first node."""
    codes = {"done": EXIT_DONE, "stopped": Stopped.exit_code}
    if result and result.status in codes:
        return codes[result.status]
    failed = find_failed_nodes(run) if result else []
    return failed[0].exit_code if failed else WorkerError.exit_code


def _run(
    job: Job,
    command: Sequence[str],
    wanted: CommandSettings,
    reach: Reach | None,
    console: RunConsole,
    requests: StopRequests,
    *,
    notify: Notify = NOBODY,
    as_json: bool = False,
) -> int:
    """Record that the run starts or continues, and supervise it until it ends. `wanted`: settings with the remaining
    restarts. `reach`: None if this node is the only one."""
    with claim(job.run, job.launch_id):
        if job.run.run_json.exists():
            clear_end(job.run)
            write_text(job.run.command_txt, render_command(job.command, job.environment, Path.cwd()))
            record = read_run_record(job.run)
            resume = Resume(tuple(sys.argv[1:]), __version__, time.time(), newest_step(job.run))
            write_run_record(job.run, replace(record, resumes=(*record.resumes, resume)))
        else:
            write_own_launch(job, command)
        if notes := notes_on(command):
            console.report(*notes)
        passed = PassedOutput(console.file.fileno()) if console.is_terminal and not reach else None
        describe = partial(describe_own_command, command, wanted)
        of_nodes = partial(NodesBackend, worker=(), kind=JOBS, describe_work=describe)
        alone = partial(OwnCommandBackend, wanted=wanted, device_name=device_name(detect()), passed=passed)
        backend: OpenBackend = partial(of_nodes, reach=reach) if reach else alone
        return run(
            *(job, None, backend, console),
            as_json=as_json,
            requests=requests,
            notifies=notify,
            output=Output(job),
            passed=passed,
            run_kind=RUNS_OF_COMMANDS,
        )


def write_own_launch(job: Job, command: Sequence[str]) -> None:
    """Record how the command is started. run.json is written last, because its presence means that the run exists."""
    run = job.run
    check_no_run(run.root, FOLDER)
    write_json(run.versions_json, versions())
    write_text(run.command_txt, render_command(job.command, job.environment, Path.cwd()))
    record = RunRecord(
        recipe=job.program,
        argv=tuple(sys.argv[1:]),
        trainspec=__version__,
        created_at=time.time(),
        data_dir=None,
        git=git_state(Path.cwd()),
        command=tuple(command),
    )
    write_run_record(run, record)
    remember_run(run)


def _left(root: Path, wanted: CommandSettings) -> CommandSettings:
    """Return the settings with the number of restarts that remain in the run's budget."""
    return replace(wanted, max_restarts=restarts_left(RunDir(root), wanted.max_restarts))


def reach_nodes(command: Sequence[str], run_dir: str, nodes: NodeOptions, wanted: CommandSettings) -> Reach | None:
    """Return how the nodes of a command reach each other; None if this node is the only one. Raises RecipeError if the
    command line is incomplete or contradicts the command."""
    example = "--nnodes 2 --node-rank I --rdzv-endpoint HOST:PORT --dir <a shared folder> -- COMMAND"
    hint = f"on each node: trainspec run {example}"
    count = nodes.nnodes
    if nodes.of_slurm:
        reach = Reach(own_address() if nodes.is_first else "", agent_command(0), None, wanted.join_timeout_s)
    elif count is None or count == 1:
        if nodes.endpoint is not None or nodes.node_rank:
            option = "--node-rank" if nodes.node_rank else "--rdzv-endpoint"
            message = f"{option} needs --nnodes" + (f", which is {count}" if count else "")
            raise RecipeError(Problem("usage", message, option, hint))
        return None
    elif count < 1:
        raise RecipeError(Problem("usage", f"--nnodes is {count}; it must be 1 or more", "--nnodes", hint))
    elif nodes.endpoint is None:
        message = f"--nnodes is {count}, so --rdzv-endpoint, the address of the first node, is required"
        raise RecipeError(Problem("several_hosts", message, "--rdzv-endpoint", hint))
    else:
        reach = nodes.reach_at(nodes.endpoint, count, 0, hint, wanted.join_timeout_s)
        if run_dir == AUTO:
            message = "--dir is missing: without it, each node would create a separate folder"
            raise RecipeError(Problem("missing_value", message, "--dir", "pass --dir <a folder that all nodes share>"))
    if count:
        check_for_nodes(command, count)
    return reach


def _build(
    command: Sequence[str],
    root: Path,
    machine: Machine,
    wanted: CommandSettings,
    reach: Reach | None,
    nodes: NodeOptions,
) -> Job:
    if reach and nodes.nnodes:
        return build_own_nodes_job(command, root, reach.start, nodes.nnodes, wanted)
    return build_own_job(command, root, machine, wanted)


def show_command(
    command: Sequence[str],
    folder: str | None,
    wanted: CommandSettings,
    nodes: NodeOptions = THIS_NODE,
    *,
    as_json: bool,
) -> str:
    """Return the command that `run_command` would start, and its environment, as text or as JSON."""
    check_command(command)
    nodes, run_dir = find_nodes_and_folder(command, folder, nodes)
    reach = reach_nodes(command, run_dir, nodes, wanted)
    check_free(run_dir, FOLDER)
    root = RUNS / script_name(command) / "TIME" if run_dir == AUTO else Path(run_dir)
    job = _build(command, root, detect(), wanted, reach, nodes)
    if reach:
        # Show what this node would run on the first start.
        record = GenerationRecord(
            generation=1,
            at=0.0,
            host="",
            head=reach.head,
            hub_port=0,
            rendezvous={},
            num_nodes=len(job.nodes),
            launch_id=job.launch_id,
            logs=str(job.logs),
            worker=(),
            examine=(),
            nodes=job.nodes,
            own=describe_own_command(command, wanted, reach.rendezvous_port or 0),
        )
        job = build_own_node_job(job.root, detect(), NodePlace(nodes.node_rank, len(job.nodes), reach.head), record)
    environment = dict(job.environment) if reach else {**job.environment, **start_environment(job, 1)}
    if as_json:
        return json_text({"run": str(job.root), "command": list(job.command), "environment": environment})
    return "\n".join([*notes_on(command), render_command(job.command, environment, Path.cwd())])


# Slurm jobs with the user's own batch script


FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From this number on, Slurm's step numbers have special meanings, such as the shell of `salloc`. srun counts its steps
from 0."""


def find_nodes_and_folder(command: Sequence[str], folder: str | None, nodes: NodeOptions) -> tuple[NodeOptions, str]:
    """Return the run's nodes and folder, as specified by the user or, by default, as derived from srun's step. The
    default folder is below ./runs and named after the step, so all nodes and later starts find it. Raises RecipeError
    if srun has started several tasks on a node."""
    number = os.environ.get("SLURM_STEP_ID", "")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    is_step = number.isdigit() and int(number) < FIRST_SPECIAL_STEP and tasks.isdigit() and "SLURM_PROCID" in os.environ
    if nodes != NodeOptions() or not is_step:
        return nodes, folder or AUTO
    count = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    if int(tasks) != count:
        message = f"srun has started this command {tasks} times on {count} {'node' if count == 1 else 'nodes'}"
        hint = (
            "start it once on each node: srun --ntasks-per-node=1 trainspec run -- torchrun --nproc-per-node N train.py"
        )
        raise RecipeError(Problem("usage", message, "--ntasks-per-node", hint))
    usual = RUNS / script_name(command) / f"slurm-{os.environ[JOB]}.{number}"
    several = NodeOptions(count, int(os.environ["SLURM_PROCID"]), of_slurm=True) if count > 1 else nodes
    return several, folder or str(usual)


def describe_slurm_nodes(nodes: NodeOptions, reach: Reach | None) -> str:
    """Describe what was read from Slurm's environment, or which nodes of the job are unused. Empty outside Slurm
    jobs."""
    if nodes.of_slurm:
        where = f", which the other nodes reach at {reach.head}" if reach and nodes.is_first else ""
        return f"Slurm job {os.environ[JOB]}: this is node {nodes.node_rank} of {nodes.nnodes}{where}"
    job_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    step = os.environ.get("SLURM_STEP_ID", "")
    is_task = step.isdigit() and int(step) < FIRST_SPECIAL_STEP
    idle = int(job_nodes) - 1 if job_nodes.isdigit() and not is_task else 0
    if JOB in os.environ and nodes == NodeOptions() and idle:
        others = "another node is" if idle == 1 else f"{idle} other nodes are"
        return (
            f"note: {others} in this job but not in the run; to use all nodes: srun --ntasks-per-node=1 trainspec "
            "run ..."
        )
    return ""


def earlier_start(run: RunDir, command: Sequence[str]) -> Literal["done", "begun"] | None:
    """Return the state that the run had reached before Slurm requeued this job; None if the run had not started."""
    if JOB not in os.environ or not restarts() or not run.run_json.is_file() or job_of(run) != own_job():
        return None
    if read_run_record(run).command != tuple(command):
        return None
    result = read_result(run)
    return "done" if result and result.status == "done" else "begun"


def requeueing(run: RunDir, nodes: NodeOptions, console: PrintableConsole, start: Callable[[StopRequests], int]) -> int:
    """Call `start` and return its exit code. In a Slurm job, requeue the job if that is useful. A repeated signal from
    a scheduler does not request a faster stop, but a repeated signal from a terminal does."""
    if JOB not in os.environ:
        return start(StopRequests())
    note_job(run, own_job())
    limits = Limits(nodes.nnodes or 1, after_hang=False)
    warning = TimeWarning()
    requests = StopRequests() if sys.stdin.isatty() else PatientRequests()

    def end(code: int) -> None:
        requeue_if_of_use(run, own_job(), code, limits, warned=warning.came, console=console)

    try:
        code = start(requests)
    except TrainspecError as error:
        if error.problems[0].code != FENCED:
            end(error.exit_code)
        raise
    except KeyboardInterrupt:
        end(Interrupted.exit_code)
        raise
    if code != EXIT_DONE:
        end(code)
    return code


# How commands print their output, and how their runs continue and end


class Output:
    """Shows the command's output as it is printed, on the first of several nodes. It omits colours, lines that a
    progress bar overwrites, and the empty lines that torchrun prints instead of a progress bar's refreshes. `job`: the
    job of this launch, whose later starts have separate logs."""

    def __init__(self, job: Job):
        self._logs = job.logs
        self._log: Path | None = None
        self._offset = 0

    def look(self, report: Callable[[str], None]) -> None:
        logs = (self._logs.parent.glob(f"{self._logs.name}*/{log}") for log in ("output.log", "node00000/output.log"))
        for log in sorted(chain(*logs)):
            if self._log is None or log > self._log:
                self._log = log
                self._offset = 0
        if self._log is None:
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if not whole:
            return
        self._offset += len(whole)
        if len(whole) > SHOWN_BYTES:
            report(f"... ({len(whole) - SHOWN_BYTES:,} bytes more in {self._log})")
        for line in without_colours(whole[-SHOWN_BYTES:].decode(errors="replace")).removesuffix("\n").split("\n"):
            shown = next((part for part in reversed(line.split("\r")) if part.strip()), "")
            if not _EMPTY_OF_RANK.fullmatch(line):
                report(shown)

    def has_shown(self, text: str) -> bool:
        """Return whether the newest start has printed these lines. torchrun puts the name of the rank before each
        line."""
        printed = without_colours(end_of(self._log)[-SHOWN_BYTES:]).splitlines() if self._log else []
        return all(any(line.endswith(part) for line in printed) for part in text.splitlines())


class CommandRuns:
    """How runs of users' commands continue and end."""

    name = COMMAND

    def resume(
        self,
        run: RunDir,
        changes: Sequence[str],
        nodes: NodeOptions,
        notify: Notify,
        *,
        force: bool,
        as_json: bool,
        detach: bool,
    ) -> int:
        """Restart a run's command in its folder with the same options. The command continues from its own checkpoint,
        which an attached script keeps in the run folder. Raises RecipeError if nothing remains to be done."""
        record = read_run_record(run)
        assert not isinstance(record.command, Absent), "the run must be a user's command"
        name = shlex.quote(str(run.root))
        anew = f"to start over: trainspec run -- {shlex.join(record.command)}"
        if run.job_sbatch.is_file():
            hint = f"submit its job again: sbatch {shlex.quote(str(run.job_sbatch))}"
            raise RecipeError(Problem("own_command", f"the run in {run.root} is a Slurm job", hint=hint))
        if not run.own_job_json.is_file():
            message = f"the run in {run.root} was created by an earlier version"
            raise RecipeError(Problem("own_command", message, hint=anew))
        own_job = read_own_job(run)
        if own_job.num_nodes > 1 or nodes != THIS_NODE:
            message = f"the run in {run.root} is a command on several nodes, which cannot be resumed"
            raise RecipeError(Problem("own_command", message, hint=anew))
        if changes or detach:
            what = f"`{changes[0]}`" if changes else "--detach"
            message = f"{what} only applies to recipes, but the run in {run.root} is your own command"
            raise RecipeError(Problem("own_command", message, hint=f"run trainspec resume {name}"))
        result = read_result(run)
        if result and result.status == "done":
            raise RecipeError(Problem("nothing_left", f"the run in {run.root} is done", hint=anew))
        check_command(record.command)
        console = make_console(as_json=as_json)
        with storage(str(run.root), FOLDER):
            left = _left(run.root, own_job.wanted)
            job = build_own_job(record.command, run.root, detect(), left)
            start = partial(_run, job, record.command, left, None, console, notify=notify, as_json=as_json)
            return requeueing(run, THIS_NODE, console, start)

    def run_in_job(self, run: RunDir, reach: Reach, console: RunConsole, requests: StopRequests, *, force: bool) -> int:
        """Start or continue the command recorded by `trainspec sbatch`."""
        own_job = read_own_job(run)
        command = read_run_record(run).command
        assert not isinstance(command, Absent), "the run must be a user's command"
        result = read_result(run)
        if result and result.status == "done":
            message = f"the run in {run.root} is done"
            hint = "start it again in another folder: --dir"
            raise RecipeError(Problem("nothing_left", message, hint=hint))
        wanted = _left(run.root, own_job.wanted)
        with storage(str(run.root), FOLDER):
            job = build_own_nodes_job(command, run.root, reach.start, own_job.num_nodes, wanted)
            return _run(job, command, wanted, reach, console, requests)

    def limits(self, run: RunDir) -> Limits:
        own = read_own_job(run)
        return Limits(own.num_nodes, own.max_requeues, own.exclude, after_hang=False)

    def decide(self, job: Job, ending: Ending) -> RunOutcome:
        """Return the outcome. The result of a user's command is its exit code. A command that was asked to stop is
        treated as stopped, regardless of its exit code. It is unknown whether it has saved its newest step."""
        failures = find_own_failures(job)
        if ending.stop_requested:
            is_saved = newest_step(job.run) and ending.exit_code is not None
            code = Stopped.exit_code if is_saved else Interrupted.exit_code
            return RunOutcome(result_from_events(job.run, "stopped", ending.exit_code), None, code)
        if ending.exit_code == 0 and not failures:
            return RunOutcome(result_from_events(job.run, "done", ending.exit_code), None, EXIT_DONE)
        result = result_from_events(job.run, "failed", ending.exit_code)
        explanation = explain_own_end(job, ending.exit_code, failures)
        return RunOutcome(result, explanation, explanation.exit_code)

    def hint(self, job: Job, outcome: RunOutcome) -> str:
        explanation = outcome.explanation
        first = ""
        if explanation and explanation.node:
            argv = read_run_record(job.run).argv
            by_hand = not isinstance(argv, Absent) and any(word.startswith("--nnodes") for word in argv)
            first = f"{about_node(job, explanation.node, by_hand=by_hand)}; "
        elif not newest_step(job.run):
            return ""
        elif explanation and explanation.cause:
            # A new start would most likely raise the same exception in the script.
            first = "fix that, and "
        return f"{first}start it again; it continues from its own checkpoint, if any: {self.start_again(job.run)}"

    def start_again(self, run: RunDir) -> str:
        if run.job_sbatch.is_file() or read_own_job(run).num_nodes == 1:
            return command_to_resume(run)
        return "run the same command on each node, in another folder (--dir)"

    def last_lines(self, job: Job, outcome: RunOutcome) -> str:
        steps = outcome.result.steps
        made = f"{'done' if outcome.exit_code == EXIT_DONE else outcome.result.status} after {steps} steps"
        if not steps:
            made = f"{outcome.result.status}; no torch optimizer steps were counted"
        folder = f"run folder  {shown(job.root)}"
        logs = f"output      {shown(job.logs)}"
        lines = [made, folder, logs, f"report      trainspec report {quoted(job.run)}"]
        if outcome.exit_code == Stopped.exit_code:
            lines.append(f"resume      {self.start_again(job.run)}")
        return "\n".join(lines)


RUNS_OF_COMMANDS: RunKind = CommandRuns()
