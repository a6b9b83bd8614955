"""Run a job that is written down to its end, a summary and an exit code."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from trainspec_cli.balance.advisor import LayoutAdvisor
from trainspec_cli.core.errors import ERRORS_OF_RUNS, EXIT_DONE, Problem, Stopped
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.compose.origins import show_path
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.report.changes import describe_recovery
from trainspec_cli.report.collect import collect
from trainspec_cli.report.live import LiveView
from trainspec_cli.report.render import render_summary
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.observe import newest_step
from trainspec_cli.run.failure import Explanation
from trainspec_cli.run.folder.event_types.training import FirstTextEvent, StepEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.generations import Fence
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_run_record
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.memory_limits import LimitsWatch
from trainspec_cli.run.notify import NOBODY, Notify, notify
from trainspec_cli.run.outcome import RunOutcome, conclude
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.run.slow_nodes import Replan
from trainspec_cli.run.supervise import Ending, supervise
from trainspec_cli.session.console import RunConsole, open_run_log
from trainspec_cli.session.runs.diagnose import VerdictLines
from trainspec_cli.wings.own_script.terminal import PassedOutput


class Watch(Protocol):
    """Looks at a run while it goes on."""

    def look(self, report: Callable[[str], None]) -> None: ...


def run(
    job: Job,
    plan: Plan | None,
    backend: OpenBackend,
    console: RunConsole,
    limits: LimitsWatch | None = None,
    *,
    advisor: LayoutAdvisor | None = None,
    as_json: bool = False,
    requests: StopRequests | None = None,
    replan: Replan | None = None,
    notifies: Notify = NOBODY,
    output: Watch | None = None,
    passed: PassedOutput | None = None,
) -> int:
    """Supervise the job until its run has ended, and report how it ended; return the exit code. `limits` remembers
    what it learns of the machine's memory, and `advisor` proposes other layouts; `replan` is as of `supervise`;
    `notifies` says who else is notified of the end. Without a plan it is a command of the user's own, whose `output` is
    shown; where it is `passed` through to a terminal, its lines go to the run's log alone.

    Raises the error whose exit code the result states where it failed (of a command of the user's own WorkerError),
    WorkerError where it was begun anew by another start while it ran, BrokenPipeError where it ended well and nobody
    reads that.
    """
    verdicts = VerdictLines(job.run, looks_deeper=plan is not None and plan.spec.observe.deeper_look)
    watches = [verdicts, *(watch for watch in (limits, advisor) if watch is not None)]
    requests = requests or StopRequests()
    with on_stop_signal(requests.add):  # until the result is written and reported
        ending = _supervise(job, plan, backend, console, watches, requests, replan, output, passed)
        job = ending.job
        if ending.left_behind:
            hanging = ", ".join(map(str, ending.left_behind))
            console.print(f"processes {hanging} hang in the kernel and could not be ended")
        Fence(job.run, ending.generation).check()
        outcome = conclude(job, ending)
        reason = outcome.explanation.headline if outcome.explanation else ""
        if failed := list(notify(notifies, job.run, read_run_record(job.run).recipe, outcome.result, reason)):
            console.report(*failed)
        if outcome.result.status == "failed":
            kind = ERRORS_OF_RUNS[outcome.exit_code]
            raise kind(_failure(job, outcome.explanation, console, as_json=as_json))
        if console.reader_left:
            raise BrokenPipeError
        if as_json:
            print(json_text({"run": str(job.root), **to_plain(outcome.result), **_first_text(job.run)}))
        else:
            _report_end(job, outcome, console)
            if plan is not None and (tracking := list(describe_tracking(plan.spec, job.root))):
                console.report(*tracking)
    return outcome.exit_code


def _supervise(
    job: Job,
    plan: Plan | None,
    backend: OpenBackend,
    console: RunConsole,
    watches: Sequence[Watch],
    requests: StopRequests,
    replan: Replan | None,
    output: Watch | None,
    passed: PassedOutput | None,
) -> Ending:
    """Show what the job does until it ends; return how its last start ended."""

    def say(text: str) -> None:
        if passed:
            passed.look()
            passed.begin_line()
        view.say(text)

    def watch(stop_requested: bool) -> None:
        view.watch(stop_requested)
        for one in watches:
            one.look(say)
        if passed:
            passed.look()
        if output:
            output.look(view.note if passed else view.say)

    stopping = console.stopping_run_without_reader(requests.add)
    with stopping, open_run_log(job.run, console) as log, LiveView(job.run, plan, console, log) as view:
        if passed:
            passed.on_first = view.yield_terminal
        try:
            return supervise(job, plan, backend, watch, say, requests, replan)
        finally:
            if passed:
                passed.begin_line()
                passed.close()


def _failure(job: Job, explanation: Explanation | None, console: RunConsole, *, as_json: bool) -> Problem:
    """Print the traceback ahead of the error, where it does not push it off the screen; in JSON it belongs to it."""
    assert explanation is not None, "a failed run has an explanation"
    detail = "\n\n".join(filter(None, (explanation.detail, f"logs: {_shown(job.logs)}")))
    message = explanation.headline
    if as_json:
        message = f"{message}\n\n{detail}"
    else:
        console.report(f"\n{detail}\n")
    step = 0 if job.own else job.run.newest_step
    hint = f"go on from step {step}: {_resume_command(job.run)}" if step else ""
    if job.own and not job.nodes and newest_step(read_sound(job.run.events(0))):
        hint = f"start it again from its own checkpoint: {_resume_command(job.run)}"
    return Problem("worker_failed", message, hint=explanation.hint or hint)


def _first_text(run: RunDir) -> JsonObject:
    """Return what the screen showed of the first batch; nothing of a run of images, or of a command."""
    events = takewhile(lambda event: not isinstance(event, StepEvent), read_sound(run.events(0)))
    found = next((event for event in events if isinstance(event, FirstTextEvent)), None)
    if found is None:
        return {}
    parts: list[JsonValue] = [to_plain(part) for part in found.parts]
    return {"first_text": {"tokens": found.tokens, "trained": found.trained, "parts": parts}}


def _report_end(job: Job, outcome: RunOutcome, console: RunConsole) -> None:
    if outcome.explanation:
        console.report(f"{outcome.explanation.headline}\n")
    if outcome.exit_code == EXIT_DONE or outcome.result.steps:
        console.print(render_summary(collect(job.root)))
    if outcome.result.recoveries:
        costs = [f"  {describe_recovery(recovery).line}" for recovery in outcome.result.recoveries]
        console.report("failures", *costs, "")
    console.report(_last_own_lines(job, outcome) if job.own else _last_lines(job.run, outcome))


def _last_lines(run: RunDir, outcome: RunOutcome) -> str:
    folder, report = f"run folder  {_shown(run.root)}", f"report      trainspec report {_quoted(run)}"
    if outcome.exit_code == EXIT_DONE:
        return f"done after {outcome.result.steps} steps\n{folder}\n{report}"
    if outcome.exit_code == Stopped.exit_code:
        stopped = f"stopped with a checkpoint at step {run.newest_step}"
        return f"{stopped}\n{folder}\n{report}\nresume      {_resume_command(run)}"
    return f"interrupted before there was a checkpoint\n{folder}"


def describe_tracking(spec: RunSpec, root: Path) -> Iterator[str]:
    """Yield a line for each tracker that is on: where it records, and how that is shown or uploaded."""
    shown = shlex.quote(_shown(root))
    tracking = spec.tracking
    if tracking.tensorboard:
        yield f"tensorboard {shown}/tensorboard; to look at it: tensorboard --logdir {shown}/tensorboard"
    if tracking.wandb:
        mode = os.environ.get("WANDB_MODE", "offline")
        upload = f"; to upload it: wandb sync {shown}/wandb/offline-run-*" if mode == "offline" else ""
        yield f"wandb       project {tracking.project}, {mode}, in {shown}/wandb{upload}"
    if tracking.mlflow:
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{shown}/mlflow.db"
        command = f"mlflow ui --backend-store-uri {store}"
        yield f"mlflow      project {tracking.project}, in {store}; to look at it: {command}"


def _last_own_lines(job: Job, outcome: RunOutcome) -> str:
    steps = outcome.result.steps
    made = f"{'done' if outcome.exit_code == EXIT_DONE else outcome.result.status} after {steps} steps"
    if not steps:
        made = f"{outcome.result.status}; no optimizer step of torch was seen, and none could be counted"
    folder, logs = f"run folder  {_shown(job.root)}", f"output      {_shown(job.logs)}"
    lines = [made, folder, logs, f"report      trainspec report {_quoted(job.run)}"]
    if outcome.exit_code == Stopped.exit_code and not job.nodes:
        lines.append(f"resume      {_resume_command(job.run)}")
    return "\n".join(lines)


def _resume_command(run: RunDir) -> str:
    if run.job_sbatch.is_file():
        return f"sbatch {shlex.quote(_shown(run.job_sbatch))}"
    return f"trainspec resume {_quoted(run)}"


def _quoted(run: RunDir) -> str:
    return shlex.quote(_shown(run.root))


def _shown(path: Path) -> str:
    """Return the path as it would be typed here."""
    return show_path(path, Path.cwd())
