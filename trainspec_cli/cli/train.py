"""What `launch` and `resume` share: from a job that is written down to a summary and an exit code."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from trainspec_cli.cli.console import PrintableConsole
from trainspec_cli.compose.origins import show_path
from trainspec_cli.errors import EXIT_DONE, MachineError, Problem, Stopped, WorkerError
from trainspec_cli.launch.backend import OpenBackend
from trainspec_cli.launch.backend.local import LocalBackend
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.outcome import Explanation, Outcome, conclude
from trainspec_cli.launch.signals import StopRequests, on_stop_signal
from trainspec_cli.launch.supervise import Ending, supervise
from trainspec_cli.report.collect import collect
from trainspec_cli.report.live import LiveView
from trainspec_cli.report.render import render_summary
from trainspec_cli.report.text import describe_recovery
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.results.plan import Plan


class ViewConsole(PrintableConsole):
    """A console whose reader may go away (`| head`): the command ends then, with the exit code that a shell gives it.

    While a run goes on that stops it in order, as a closed terminal does; before and after there is nothing to save.
    """

    reader_left = False
    run_goes_on = False

    def on_broken_pipe(self) -> None:
        self.quiet = self.reader_left = True
        if not self.run_goes_on:
            raise BrokenPipeError
        signal.raise_signal(signal.SIGHUP)


def make_console(*, as_json: bool) -> Console:
    """With `--json` the output belongs to a program, and people look at the error output."""
    return ViewConsole(stderr=as_json)


def train(
    job: Job,
    plan: Plan,
    console: Console,
    *,
    as_json: bool,
    backend: OpenBackend = LocalBackend,
    requests: StopRequests | None = None,
) -> int:
    """Run the job (on this node, where no other backend is given) and tell how it ended; -> the exit code.

    Raises WorkerError where it failed, or was begun anew by another start while it ran; BrokenPipeError where it ended
    well and nobody reads that.
    """
    ending = _run(job, plan, console, backend, requests or StopRequests())
    job = ending.job
    if ending.left_behind:
        console.print(f"processes {', '.join(map(str, ending.left_behind))} hang in the kernel and could not be ended")
    Fence(job.run, ending.generation).check()
    outcome = conclude(job, ending)
    if outcome.result["status"] == "failed":
        kind = MachineError if outcome.exit_code == MachineError.exit_code else WorkerError
        raise kind(_failure(job, outcome.explanation, console, as_json=as_json))
    if isinstance(console, ViewConsole) and console.reader_left:
        raise BrokenPipeError
    if as_json:
        print(json_text({"run": str(job.root), **outcome.result}))
    else:
        _tell_end(job, outcome, console)
    return outcome.exit_code


def _run(job: Job, plan: Plan, console: Console, backend: OpenBackend, requests: StopRequests) -> Ending:
    """Supervise the job, and show what it does."""
    with _stopped_without_reader(console), on_stop_signal(requests.add), LiveView(job.run, plan, console) as view:
        return supervise(job, plan, backend, view.watch, view.say, requests)


@contextmanager
def _stopped_without_reader(console: Console) -> Iterator[None]:
    """A reader that goes away during the block asks the run to stop."""
    if isinstance(console, ViewConsole):
        console.run_goes_on = True
    yield
    if isinstance(console, ViewConsole):
        console.run_goes_on = False


def _failure(job: Job, explanation: Explanation | None, console: Console, *, as_json: bool) -> Problem:
    """The traceback goes ahead of the error, where it does not push it off the screen; in JSON it belongs to it."""
    assert explanation is not None, "a failed run says why"
    detail = "\n\n".join(filter(None, (explanation.detail, f"logs: {shown(job.logs)}")))
    message = explanation.headline
    if as_json:
        message = f"{message}\n\n{detail}"
    else:
        console.print(f"\n{detail}\n", markup=False, highlight=False, soft_wrap=True)
    return Problem("worker_failed", message, hint=explanation.hint or _resume_hint(job.run))


def _resume_hint(run: RunDir) -> str:
    steps = run.checkpoint_steps()
    return f"go on from step {steps[-1]}: {resume_command(run)}" if steps else ""


def _tell_end(job: Job, outcome: Outcome, console: Console) -> None:
    if outcome.explanation:
        console.print(f"{outcome.explanation.headline}\n", markup=False, highlight=False, soft_wrap=True)
    if outcome.exit_code == EXIT_DONE or outcome.result["steps"]:
        console.print(render_summary(collect(job.root)))
    if outcome.result["recoveries"]:
        costs = [f"  {describe_recovery(recovery)}" for recovery in outcome.result["recoveries"]]
        console.print("\n".join(["failures", *costs, ""]), markup=False, highlight=False, soft_wrap=True)
    console.print(_last_words(job.run, outcome), markup=False, highlight=False, soft_wrap=True)


def _last_words(run: RunDir, outcome: Outcome) -> str:
    folder, report = f"run folder  {shown(run.root)}", f"report      trainspec report {_quoted(run)}"
    if outcome.exit_code == EXIT_DONE:
        return f"done after {outcome.result['steps']} steps\n{folder}\n{report}"
    if outcome.exit_code == Stopped.exit_code:
        step = run.checkpoint_steps()[-1]
        return f"stopped with a checkpoint at step {step}\n{folder}\n{report}\nresume      {resume_command(run)}"
    return f"interrupted before there was a checkpoint\n{folder}"


def resume_command(run: RunDir) -> str:
    if run.job_sbatch.is_file():
        return f"sbatch {shlex.quote(shown(run.job_sbatch))}"
    return f"trainspec resume {_quoted(run)}"


def _quoted(run: RunDir) -> str:
    return shlex.quote(shown(run.root))


def shown(path: Path) -> str:
    """As it would be typed here."""
    return show_path(path, Path.cwd())
