"""Runs a job again from its last checkpoint when it fails, for as long as that gets it on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from trainspec_cli.launch.backend.executor import Executor
from trainspec_cli.launch.failure import WorkerFailure, find_failures
from trainspec_cli.launch.job.command import torchrun_command
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.outcome import explain_ending
from trainspec_cli.launch.signals import StopRequests
from trainspec_cli.launch.supervise import Ending, supervise
from trainspec_cli.policy.recovery import may_restart
from trainspec_cli.rundir.event_types import RecoveryEvent, StepEvent
from trainspec_cli.rundir.events import EventWriter, read_sound
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.memory import newest_copy
from trainspec_cli.spec.recipe.resilience import ResilienceSpec


def supervise_with_restarts(
    job: Job,
    executor: Executor,
    resilience: ResilienceSpec,
    watch: Callable[[bool], None],
    say: Callable[[str], None],
    requests: StopRequests | None = None,
) -> tuple[Job, Ending]:
    """As `supervise`; -> the last start and its ending.

    A worker's own error is followed by another start when a checkpoint was written since the last: else it would come
    again at the same place, as one that was foreseen would anywhere. What came from outside (a signal) need not come
    again, so any checkpoint will do.
    """
    restarts_s: list[float] = []
    requests = requests or StopRequests()
    while True:
        begun_from = _newest_checkpoint(job)
        ending = supervise(job, executor, watch, requests)
        now_s, failures = time.monotonic(), find_failures(job)
        over = ending.stop_requested or ending.left_behind or _is_done(job)
        if over or _comes_again(job, ending, failures, begun_from) or not may_restart(resilience, restarts_s, now_s):
            return job, ending
        restarts_s.append(now_s)
        headline = explain_ending(job, ending, failures).headline
        say(f"{headline}; the run starts again from step {_newest_checkpoint(job)}")
        if requests.count:
            return job, replace(ending, stop_requested=True)
        _note_restart(job)
        job = _next_start(job, len(restarts_s) + 1)


def _is_done(job: Job) -> bool:
    """A result that says `stopped` is none: nobody wanted that."""
    return job.run.result_json.is_file() and read_json(job.run.result_json)["status"] == "done"


def _comes_again(job: Job, ending: Ending, failures: list[WorkerFailure], begun_from: int) -> bool:
    """Whether another start would most likely end in the same way."""
    causes = [failure for failure in failures if not failure.consequence]
    by_signal = bool(causes) or (ending.exit_code or 0) < 0  # a worker's, or torchrun's own
    from_outside = by_signal and not any(failure.own_words for failure in causes)
    enough = _newest_checkpoint(job) > (0 if from_outside else begun_from)
    return not enough or any(failure.foreseen for failure in causes)


def _newest_checkpoint(job: Job) -> int:
    """On disk, or in this host's memory."""
    return max(newest_copy(job.run), *job.run.checkpoint_steps(), 0)


def _note_restart(job: Job) -> None:
    """What the failed start left of its end goes to its logs, and the story says what is lost."""
    job.run.result_json.unlink(missing_ok=True)
    for words in job.run.errors_folder.glob("*.json"):
        words.rename(job.logs / words.name)
    step = max((event.step for event in read_sound(job.run.events(0)) if isinstance(event, StepEvent)), default=0)
    log = EventWriter(job.run.events(0), rank=0)
    lost_steps = step - _newest_checkpoint(job)
    log.write(RecoveryEvent(step=step, change="restart", group=None, stall_s=None, lost_steps=lost_steps))
    log.close()


def _next_start(job: Job, number: int) -> Job:
    first_logs = job.logs.with_name(job.logs.name.partition("_start")[0])
    logs = first_logs.with_name(f"{first_logs.name}_start{number:03d}")
    command = torchrun_command(job.world_size, logs, job.worker) if job.worker else job.command
    return replace(job, logs=logs, command=command)
