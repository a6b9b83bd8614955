"""Run a prepared job to its end, print a summary and return an exit code."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from trainspec_cli.balance.advisor import LayoutAdvisor
from trainspec_cli.core.errors import ERRORS_OF_RUNS, EXIT_DONE, Problem
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.changes import describe_recovery
from trainspec_cli.reporter.collect import collect
from trainspec_cli.reporter.console import RunConsole, open_run_log
from trainspec_cli.reporter.live import LiveView
from trainspec_cli.reporter.render import render_summary
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.local import PassedThrough
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.failure import Explanation
from trainspec_cli.run.folder.event_types.events import FirstTextEvent, StepEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.generations import Fence
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_run_record
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.memory_limits import LimitsWatch
from trainspec_cli.run.notify import NOBODY, Notify, notify
from trainspec_cli.run.outcome import conclude
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.run.supervise import Replan, supervise
from trainspec_cli.session.launching.kinds import RECIPE_RUNS, RunKind, shown
from trainspec_cli.session.runs.diagnose import VerdictLines


class Watch(Protocol):
    """Observes a run in progress."""

    def look(self, report: Callable[[str], None]) -> None: ...


class ShownOutput(Watch, Protocol):
    """Shows the output of a run's processes."""

    def has_shown(self, text: str) -> bool:
        """Return whether the newest start has printed these lines, which are then already on the screen."""


def run(
    job: Job,
    plan: Plan | None,
    backend: OpenBackend,
    console: RunConsole,
    limits: LimitsWatch | None = None,
    *,
    advisor: LayoutAdvisor | None = None,
    mail: WorkerMail | None = None,
    as_json: bool = False,
    requests: StopRequests | None = None,
    replan: Replan | None = None,
    notifies: Notify = NOBODY,
    output: ShownOutput | None = None,
    passed: PassedThrough | None = None,
    run_kind: RunKind = RECIPE_RUNS,
) -> int:
    """Supervise the job until its run has ended, and report how it ended; return the exit code.

    `limits` records what is learned about the machine's memory. `advisor` proposes other layouts through `mail`.
    `replan`: see `supervise`. `notifies`: who else is notified when the run ends. `output` shows the output of a user's
    own command. If that output is `passed` through to a terminal, the summary lines go only to the run's log.
    `run_kind` determines the outcome.

    Raises the error for the outcome's exit code if the run failed, WorkerError if another start took over the run, and
    BrokenPipeError if the run succeeded but the reader of the output is gone."""
    mail = mail or WorkerMail()
    looks_deeper = plan is not None and plan.spec.observe.deeper_look
    verdicts = VerdictLines(job.run, (lambda order: mail.send(order, order.looker)) if looks_deeper else None)
    watches = [verdicts, *(one for one in (limits, advisor) if one is not None)]
    requests = requests or StopRequests()

    def say(text: str) -> None:
        if passed:
            passed.look()
            passed.begin_line()
        view.show_message(text)

    def watch(stop_requested: bool) -> None:
        view.watch(stop_requested)
        for one in watches:
            one.look(say)
        if passed:
            passed.look()
        if output:
            output.look(view.note if passed else view.show_message)

    with on_stop_signal(requests.add):  # handle signals until the result is written and reported
        stopping = console.stopping_run_without_reader(requests.add)
        with stopping, open_run_log(job.run, console) as log, LiveView(job.run, plan, console, log) as view:
            if passed:
                passed.on_first = view.yield_terminal
            try:
                ending = supervise(job, plan, backend, watch, say, requests, replan, mail)
            finally:
                if passed:
                    passed.begin_line()
                    passed.close()
        job = ending.job
        if ending.left_behind:
            hanging = ", ".join(map(str, ending.left_behind))
            console.print(f"processes {hanging} are stuck in the kernel and could not be killed")
        Fence(job.run, ending.generation).check()
        outcome = conclude(job, ending, run_kind.decide)
        explanation = outcome.explanation
        reason = explanation.headline if explanation else ""
        if failed := list(notify(notifies, job.run, read_run_record(job.run).recipe, outcome.result, reason)):
            console.report(*failed)
        if outcome.result.status == "failed":
            kind = ERRORS_OF_RUNS[outcome.exit_code]
            assert explanation is not None, "a failed run has an explanation"
            hint = explanation.hint or run_kind.hint(job, outcome)
            raise kind(_failure(job, explanation, console, output, hint, as_json=as_json))
        if console.reader_left:
            raise BrokenPipeError
        if as_json:
            print(json_text({"run": str(job.root), **to_plain(outcome.result), **_first_text(job.run)}))
            return outcome.exit_code
        if explanation:
            console.report(f"{explanation.headline}\n")
        if outcome.exit_code == EXIT_DONE or outcome.result.steps:
            console.print(render_summary(collect(job.root)))
        if outcome.result.recoveries:
            costs = [f"  {describe_recovery(recovery).line}" for recovery in outcome.result.recoveries]
            console.report("failures", *costs, "")
        console.report(run_kind.last_lines(job, outcome))
        if plan is not None and (tracking := list(describe_tracking(plan.spec, job.root))):
            console.report(*tracking)
    return outcome.exit_code


def _failure(
    job: Job, explanation: Explanation, console: RunConsole, output: ShownOutput | None, hint: str, *, as_json: bool
) -> Problem:
    """Print the traceback before the error if it is short enough for the screen and has not been printed by the user's
    script. In JSON output, it is part of the error."""
    message = explanation.headline
    logs = f"logs: {shown(job.logs)}"
    if as_json:
        message = "\n\n".join(filter(None, (message, explanation.detail, logs)))
    else:
        paragraphs = explanation.detail.split("\n\n")
        new = [text for text in paragraphs if text and not (output and output.has_shown(text))]
        console.report("\n" + "\n\n".join((*new, logs)) + "\n")
    return Problem("worker_failed", message, hint=hint)


def _first_text(run: RunDir) -> JsonObject:
    """Return the text of the first batch as shown on the screen; empty for images or user commands."""
    events = takewhile(lambda event: not isinstance(event, StepEvent), read_sound(run.events(0)))
    found = next((event for event in events if isinstance(event, FirstTextEvent)), None)
    if found is None:
        return {}
    parts: list[JsonValue] = [to_plain(part) for part in found.parts]
    return {"first_text": {"tokens": found.tokens, "trained": found.trained, "parts": parts}}


def describe_tracking(spec: RunSpec, root: Path) -> Iterator[str]:
    """Yield a line for each active tracker: where it records, and how to view or upload its records."""
    folder = shlex.quote(shown(root))
    tracking = spec.tracking
    if tracking.tensorboard:
        yield f"tensorboard {folder}/tensorboard; to view it: tensorboard --logdir {folder}/tensorboard"
    if tracking.wandb:
        mode = os.environ.get("WANDB_MODE", "offline")
        upload = f"; to upload it: wandb sync {folder}/wandb/offline-run-*" if mode == "offline" else ""
        yield f"wandb       project {tracking.project}, {mode}, in {folder}/wandb{upload}"
    if tracking.mlflow:
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
        command = f"mlflow ui --backend-store-uri {store}"
        yield f"mlflow      project {tracking.project}, in {store}; to view it: {command}"
