"""Decide how a run ended (done, stopped or failed) once its processes have exited, and write `result.json` if it is
missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trainspec_cli.core.errors import ERRORS_OF_RUNS, Interrupted, MachineError, Stopped, WorkerError
from trainspec_cli.recipe.records import ABSENT, Absent
from trainspec_cli.run.failure import Explanation, explain_end, find_failures
from trainspec_cli.run.folder.accounting import account_run, read_recoveries
from trainspec_cli.run.folder.event_types.events import EvalEvent, StepEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.memory import newest_copy, remove_copies
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult, read_result, write_result
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.supervise import Ending


@dataclass(frozen=True)
class RunOutcome:
    result: RunResult
    explanation: Explanation | None = None
    """The explanation of a failure, or None."""
    command_code: int | None = None
    """The exit code of this command. None: use the result's exit code, which may come from a user-defined command."""

    @property
    def exit_code(self) -> int:
        if self.command_code is not None:
            return self.command_code
        assert self.result.exit_code is not None, "a run that has ended has an exit code"
        return self.result.exit_code


def conclude_recipe(job: Job, ending: Ending) -> RunOutcome:
    """Use the workers' own result if they left one; otherwise derive it from the run folder.

    Workers that stopped without a request have failed. A worker that fails after the run has finished changes nothing,
    unless it reported an error. If a worker fails while torchrun stops the others, that is a failure, not a requested
    stop."""
    failures = find_failures(job)
    if ending.given_up:
        nodes = [failure for failure in failures if failure.whole_node]
        # Only a node that had joined had workers that could fail.
        had_workers = not nodes or any(not node.never_came for node in nodes)
        code = WorkerError.exit_code if had_workers else MachineError.exit_code
        result = result_from_events(job.run, "failed", code)
        return RunOutcome(result, Explanation(ending.given_up, exit_code=code, node=next(iter(nodes), None)))
    # Ranks that lost their connection to the failed rank exit too, but their exit codes do not show the cause.
    causes = [failure for failure in failures if not failure.consequence]
    explanation = explain_end(job, ending.exit_code, failures) if failures or ending.exit_code else None
    left = read_result(job.run)
    if left is not None:
        self_reported = any(failure.self_reported for failure in causes)
        if not self_reported if left.status == "done" else ending.stop_requested and not causes:
            return RunOutcome(left, explanation)
    elif ending.stop_requested and not causes:
        exit_code = Stopped.exit_code if job.run.newest_step else Interrupted.exit_code
        return RunOutcome(result_from_events(job.run, "stopped", exit_code))
    explanation = explanation or explain_end(job, ending.exit_code, failures)
    code = explanation.exit_code if explanation.exit_code in ERRORS_OF_RUNS else WorkerError.exit_code
    return RunOutcome(result_from_events(job.run, "failed", code), explanation)


Decide = Callable[[Job, Ending], RunOutcome]
"""Decides how a run ended, and adds the cost of its failures."""


def conclude(job: Job, ending: Ending, decide: Decide = conclude_recipe) -> RunOutcome:
    """Return how the run ended, with the cost of its failures. Copies in this node's memory are dropped if the run is
    over and the same step is on disk."""
    outcome = decide(job, ending)
    if outcome.result.status != "failed" and job.run.newest_step >= newest_copy(job.run):
        remove_copies(job.run)
    recoveries = tuple(read_recoveries(read_sound(job.run.events(0))))
    result = replace(outcome.result, recoveries=recoveries)
    if result.status == "failed" and outcome.explanation:
        result = replace(result, reason=outcome.explanation.headline, hint=outcome.explanation.hint or ABSENT)
    write_result(job.run, result)
    return replace(outcome, result=result)


def result_from_events(run: RunDir, status: str, exit_code: int | None) -> RunResult:
    """Return the result derived from rank 0's events; values that only the workers know are null."""
    step: StepEvent | None = None
    evaluation: EvalEvent | None = None
    for event in read_sound(run.events(0)):
        if isinstance(event, StepEvent):
            step = event
        elif isinstance(event, EvalEvent):
            evaluation = event
    time_s = account_run(run)
    return RunResult(
        status=status,
        exit_code=exit_code,
        steps=step.step if step else 0,
        final_loss=step.loss if step else None,
        heldout_bits_per_byte=_present(evaluation.heldout_bits_per_byte) if evaluation else None,
        xz_bits_per_byte=_present(evaluation.xz_bits_per_byte) if evaluation else None,
        tokens_per_s=None,
        goodput=time_s.goodput,
        time_s=time_s,
    )


def _present(value: float | Absent | None) -> float | None:
    return None if isinstance(value, Absent) else value
