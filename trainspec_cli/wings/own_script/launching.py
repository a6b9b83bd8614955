"""`run`: a command of the user's own, unchanged, with what a recipe gets: a folder, restarts, hangs named, a report. It
also resumes such runs, and runs them in Slurm jobs."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from trainspec_cli import __version__
from trainspec_cli.core.errors import EXIT_DONE, Problem, RecipeError, Stopped, WorkerError
from trainspec_cli.core.printable import without_colours
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine, SlurmSpec
from trainspec_cli.recipe.records import Absent
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.nodes.backend import NodesBackend, Reach
from trainspec_cli.run.failure import end_of, find_failed_nodes
from trainspec_cli.run.folder.files import write_json, write_text
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.known_runs import remember_run
from trainspec_cli.run.folder.paths import COMMAND, RunDir
from trainspec_cli.run.folder.record import Resume, RunRecord, RunResult, read_result, read_run_record, write_run_record
from trainspec_cli.run.job.folder import RUNS, check_free, check_no_run, claim, clear_end, make_folder, storage
from trainspec_cli.run.job.job import Job, git_state, render_command, versions
from trainspec_cli.run.job.machine import NodePlace, detect
from trainspec_cli.run.notify import NOBODY, Notify
from trainspec_cli.run.outcome import RunOutcome
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.supervise import Ending
from trainspec_cli.session.console import RunConsole, make_console
from trainspec_cli.session.launching.in_slurm import Limits
from trainspec_cli.session.launching.kinds import RunKind, about_node, command_to_resume, quoted, shown
from trainspec_cli.session.launching.nodes import Joined, NodeOptions, join
from trainspec_cli.session.launching.run import run
from trainspec_cli.wings.own_script.failure import conclude_own
from trainspec_cli.wings.own_script.in_slurm import (
    describe_place,
    earlier_start,
    find_place,
    heed_no_warning,
    reach_nodes,
    requeueing,
)
from trainspec_cli.wings.own_script.job import (
    OwnJob,
    Wanted,
    build_own_job,
    build_own_node_job,
    build_own_nodes_job,
    check_command,
    check_for_nodes,
    describe_own_command,
    device_name,
    read_own_command,
    read_own_job,
    script_name,
    start_environment,
    what_it_opens,
    why_uncounted,
    write_own_job,
)
from trainspec_cli.wings.own_script.journal import newest_step, restarts_left
from trainspec_cli.wings.own_script.start import JOBS, JOIN_OPTION, OwnCommandBackend
from trainspec_cli.wings.own_script.terminal import PassedOutput

THIS_NODE = NodeOptions()
FOLDER = "--dir"
"""What names the run's folder."""
_EMPTY_OF_RANK = re.compile(r"\[[a-z]+\d+\]:\s*")
SHOWN_BYTES = 2**16
"""Of what a command prints at once, no more is shown here; its log holds all of it."""


def run_command(
    command: Sequence[str],
    folder: str | None,
    wanted: Wanted,
    nodes: NodeOptions = THIS_NODE,
    notify: Notify = NOBODY,
    *,
    as_json: bool,
) -> int:
    """Run the command to its end, as the first node of its run or as another that joins it; return this command's exit
    code. Raises TrainspecError where it is refused, or fails."""
    check_command(command)
    console, nodes, run_dir = make_console(as_json=as_json), *find_place(command, folder, nodes)
    reach = _check(command, run_dir, nodes, wanted)
    if place := describe_place(nodes, reach):
        console.report(place)
    again = None if run_dir == AUTO else earlier_start(RunDir(run_dir), command)
    if again == "done":
        console.report(f"an earlier start of this Slurm job has ended the run in {run_dir}: it is done")
        return EXIT_DONE
    if reach and not nodes.is_first:
        heed_no_warning()
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
        # `resume` takes the same options.
        write_own_job(RunDir(root), OwnJob(nodes.nnodes or 1, wanted, SlurmSpec.max_requeues, None))
        left = _left(root, wanted)
        job = _build(command, root, detect(), left, reach, nodes)
        started = Started(job, command, left, reach, notify, as_json)
        return requeueing(RunDir(root), nodes, console, lambda requests: _run(started, console, requests))


def _check_same(command: Sequence[str], run: RunDir, record: GenerationRecord) -> None:
    """Raise RecipeError where the first node runs another command."""
    known = f"{run.root} holds the run of a recipe"
    if record.kind == COMMAND:
        firsts = read_own_command(record).command
        if tuple(command) == firsts:
            return
        known = f"the first node runs {shlex.join(firsts)}"
    message = f"{known}, and here it is {shlex.join(command)}"
    raise RecipeError(Problem("usage", message, "COMMAND", "give the same command on each node"))


def exit_code_of(run: RunDir, result: RunResult | None) -> int:
    """Return that of this command, which is not the user's own command's: the same as on the first node."""
    codes = {"done": EXIT_DONE, "stopped": Stopped.exit_code}
    if result and result.status in codes:
        return codes[result.status]
    failed = find_failed_nodes(run) if result else []
    return failed[0].exit_code if failed else WorkerError.exit_code


@dataclass(frozen=True)
class Started:
    """What one start of a command runs, and who hears of its end."""

    job: Job
    command: Sequence[str]
    wanted: Wanted
    """With the restarts that are left."""
    reach: Reach | None
    """None where there is this node alone."""
    notify: Notify = NOBODY
    as_json: bool = False


def _run(started: Started, console: RunConsole, requests: StopRequests) -> int:
    """Write down that the run begins or goes on, and supervise it to its end."""
    job = started.job
    reach = started.reach
    with claim(job.run, job.launch_id):
        if job.run.run_json.exists():
            write_own_resume(job, sys.argv[1:], newest_step(job.run))
        else:
            write_own_launch(job, started.command, sys.argv[1:])
        if notes := _notes(started.command):
            console.report(*notes)
        passed = PassedOutput(console.file.fileno()) if console.is_terminal and not reach else None
        describe = partial(describe_own_command, started.command, started.wanted)
        of_nodes = partial(NodesBackend, worker=(), kind=JOBS, describe_work=describe)
        alone = partial(OwnCommandBackend, wanted=started.wanted, device_name=device_name(detect()), passed=passed)
        backend: OpenBackend = partial(of_nodes, reach=reach) if reach else alone
        return run(
            *(job, None, backend, console),
            as_json=started.as_json,
            requests=requests,
            notifies=started.notify,
            output=Output(job),
            passed=passed,
            run_kind=RUNS_OF_COMMANDS,
        )


def write_own_launch(job: Job, command: Sequence[str], argv: Sequence[str]) -> None:
    """Write down what the command is started with. run.json is last: with it the run exists."""
    run = job.run
    check_no_run(run.root, FOLDER)
    write_json(run.versions_json, versions())
    write_text(run.command_txt, render_command(job.command, job.environment, Path.cwd()))
    record = RunRecord(
        recipe=job.program,
        argv=tuple(argv),
        trainspec=__version__,
        created_at=time.time(),
        data_dir=None,
        git=git_state(Path.cwd()),
        command=tuple(command),
    )
    write_run_record(run, record)
    remember_run(run)


def write_own_resume(job: Job, argv: Sequence[str], from_step: int) -> None:
    """Write down that the command is started again in its run."""
    clear_end(job.run)
    write_text(job.run.command_txt, render_command(job.command, job.environment, Path.cwd()))
    record = read_run_record(job.run)
    resume = Resume(tuple(argv), __version__, time.time(), from_step)
    write_run_record(job.run, replace(record, resumes=(*record.resumes, resume)))


def _left(root: Path, wanted: Wanted) -> Wanted:
    """Return what is wanted of a start with the restarts that the run has left of its budget."""
    return replace(wanted, max_restarts=restarts_left(RunDir(root), wanted.max_restarts))


def _check(command: Sequence[str], run_dir: str, nodes: NodeOptions, wanted: Wanted) -> Reach | None:
    """Return how the nodes are reached; None where there is this one alone. Raises RecipeError."""
    reach = reach_nodes(nodes, run_dir, wanted.join_timeout_s)
    if reach and nodes.nnodes:
        check_for_nodes(command, nodes.nnodes)
    return reach


def _build(
    command: Sequence[str], root: Path, machine: Machine, wanted: Wanted, reach: Reach | None, nodes: NodeOptions
) -> Job:
    if reach and nodes.nnodes:
        return build_own_nodes_job(command, root, reach.start, nodes.nnodes, wanted)
    return build_own_job(command, root, machine, wanted)


def show_command(
    command: Sequence[str], folder: str | None, wanted: Wanted, nodes: NodeOptions = THIS_NODE, *, as_json: bool
) -> str:
    """Return what `run_command` would start, and where, as text or as JSON."""
    check_command(command)
    nodes, run_dir = find_place(command, folder, nodes)
    reach = _check(command, run_dir, nodes, wanted)
    check_free(run_dir, FOLDER)
    root = RUNS / script_name(command) / "TIME" if run_dir == AUTO else Path(run_dir)
    job = _build(command, root, detect(), wanted, reach, nodes)
    job = _part_of_node(command, wanted, job, reach, nodes.node_rank) if reach else job
    environment = dict(job.environment) if reach else {**job.environment, **start_environment(job, 1)}
    if as_json:
        return json_text({"run": str(job.root), "command": list(job.command), "environment": environment})
    return "\n".join([*_notes(command), render_command(job.command, environment, Path.cwd())])


def _part_of_node(command: Sequence[str], wanted: Wanted, job: Job, reach: Reach, node: int) -> Job:
    """Return what the first start would have on one of the nodes."""
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
    return build_own_node_job(job.root, detect(), NodePlace(node, record.num_nodes, record.head), record)


def _notes(command: Sequence[str]) -> list[str]:
    uncounted = why_uncounted(command)
    notes = [f"steps cannot be counted: {uncounted}"] if uncounted else []
    return [*notes, *(f"note: {opens}" for opens in [what_it_opens(command)] if opens)]


class Output:
    """Shows what the command prints as it comes, of several nodes on the first; lines that a progress bar writes over
    are left out, and so are colours, and the empty lines that torchrun makes of a bar's refreshes. `job`: of this
    launch, whose later starts have logs of their own."""

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
        """Return whether the newest start has printed these lines here; torchrun puts a rank's name before them."""
        printed = without_colours(end_of(self._log)[-SHOWN_BYTES:]).splitlines() if self._log else []
        return all(any(line.endswith(part) for line in printed) for part in text.splitlines())


class CommandRuns:
    """How the runs of commands continue and end."""

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
        """Start the command of a run again in its folder, with the options that it had. It continues from its own
        checkpoint, which for a script that has attached itself lies in the folder. Raises RecipeError where nothing is
        left to do."""
        record = read_run_record(run)
        assert not isinstance(record.command, Absent), "it is a command of the user's own"
        name = shlex.quote(str(run.root))
        anew = f"to start it anew: trainspec run -- {shlex.join(record.command)}"
        if run.job_sbatch.is_file():
            message = "was made for Slurm"
            hint = f"give its job to Slurm again: sbatch {shlex.quote(str(run.job_sbatch))}"
            raise RecipeError(Problem("own_command", f"the run in {run.root} {message}", hint=hint))
        if not run.own_job_json.is_file():
            raise RecipeError(Problem("own_command", f"an earlier version made the run in {run.root}", hint=anew))
        asked = read_own_job(run)
        if asked.num_nodes > 1 or nodes != THIS_NODE:
            message = f"the run in {run.root} is a command on several nodes, which is not resumed"
            raise RecipeError(Problem("own_command", message, hint=anew))
        if changes or detach:
            what = f"`{changes[0]}` is of a recipe" if changes else "--detach is of a recipe"
            message = f"{what}, and the run in {run.root} is a command of your own"
            raise RecipeError(Problem("own_command", message, hint=f"type trainspec resume {name}"))
        result = read_result(run)
        if result and result.status == "done":
            raise RecipeError(Problem("nothing_left", f"the run in {run.root} is done", hint=anew))
        check_command(record.command)
        console = make_console(as_json=as_json)
        with storage(str(run.root), FOLDER):
            left = _left(run.root, asked.wanted)
            job = build_own_job(record.command, run.root, detect(), left)
            started = Started(job, record.command, left, None, notify, as_json)
            return requeueing(run, THIS_NODE, console, lambda requests: _run(started, console, requests))

    def run_in_job(self, run: RunDir, reach: Reach, console: RunConsole, requests: StopRequests, *, force: bool) -> int:
        """Begin the command that `trainspec sbatch` has written down, or continue it."""
        asked = read_own_job(run)
        command = read_run_record(run).command
        assert not isinstance(command, Absent), "it is a command of the user's own"
        result = read_result(run)
        if result and result.status == "done":
            message = f"the run in {run.root} is done"
            hint = "start it again in another folder: --dir"
            raise RecipeError(Problem("nothing_left", message, hint=hint))
        wanted = _left(run.root, asked.wanted)
        with storage(str(run.root), FOLDER):
            job = build_own_nodes_job(command, run.root, reach.start, asked.num_nodes, wanted)
            return _run(Started(job, command, wanted, reach), console, requests)

    def limits(self, run: RunDir) -> Limits:
        own = read_own_job(run)
        return Limits(own.num_nodes, own.max_requeues, own.exclude, after_hang=False)

    def decide(self, job: Job, ending: Ending) -> RunOutcome:
        return conclude_own(job, ending)

    def hint(self, job: Job, outcome: RunOutcome) -> str:
        explanation = outcome.explanation
        first = ""
        if explanation and explanation.node:
            argv = read_run_record(job.run).argv
            by_hand = not isinstance(argv, Absent) and any(word.startswith("--nnodes") for word in argv)
            first = f"{about_node(job, explanation.node, by_hand=by_hand)}; "
        elif not newest_step(job.run):
            return ""
        elif (
            explanation and explanation.cause
        ):  # an exception of the script's own, which another start would meet again
            first = "correct that, and "
        return f"{first}start it again, from its own checkpoint if it wrote one: {self.start_again(job.run)}"

    def start_again(self, run: RunDir) -> str:
        if run.job_sbatch.is_file() or read_own_job(run).num_nodes == 1:
            return command_to_resume(run)
        return "the same command on each node, in another folder (--dir)"

    def last_lines(self, job: Job, outcome: RunOutcome) -> str:
        steps = outcome.result.steps
        made = f"{'done' if outcome.exit_code == EXIT_DONE else outcome.result.status} after {steps} steps"
        if not steps:
            made = f"{outcome.result.status}; no optimizer step of torch was seen, and none could be counted"
        folder = f"run folder  {shown(job.root)}"
        logs = f"output      {shown(job.logs)}"
        lines = [made, folder, logs, f"report      trainspec report {quoted(job.run)}"]
        if outcome.exit_code == Stopped.exit_code:
            lines.append(f"resume      {self.start_again(job.run)}")
        return "\n".join(lines)


RUNS_OF_COMMANDS: RunKind = CommandRuns()
