"""Runs a job from its start to its end: passes on requests to stop, keeps the deadlines, leaves nothing running."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainspec_cli.launch.backend.executor import Executor, Running
from trainspec_cli.launch.backend.processes import POLL_S
from trainspec_cli.launch.job.environment import FAILURE_GRACE_S
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.signals import StopRequests, on_stop_signal
from trainspec_cli.rundir.event_types import EndedMark, FailureMark, LaunchMark
from trainspec_cli.rundir.events import EventWriter, spoken_bytes
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.stops import was_stop_noted

LISTING_S = 2.0
"""torchrun ends its workers within `FAILURE_GRACE_S` itself, and then lists how each of them ended."""
SUPERVISOR = -1
"""Stands for a rank in the supervisor's marks."""


@dataclass(frozen=True)
class Ending:
    """How the processes came to an end; what it means for the run is `outcome.conclude`'s to say."""

    exit_code: int | None
    """torchrun's; None when it was still there and had to be killed."""
    stop_requested: bool
    """By a person or a scheduler, of the supervisor or of a host's agent."""
    killed: bool
    """By the supervisor: at a deadline, or on a second request."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be ended (stuck in the kernel)."""
    given_up: str = ""
    """Why the supervisor ended the run, where it did (too few replica groups were left)."""
    generation: int | None = None
    """Of the start that ended."""


def supervise(
    job: Job, executor: Executor, watch: Callable[[bool], None], requests: StopRequests | None = None
) -> Ending:
    """Submit `job` and return when all its processes have ended. `watch` is called about ten times a second,
    with whether a stop has been asked for.

    A first request to stop asks the workers to write a checkpoint and end, within the job's `stop_grace_s`; before
    they have said their first word there is nothing to write, and they are killed. A second request kills at once.
    When one worker fails, or torchrun does, the others have `FAILURE_GRACE_S`.
    """
    requests, marks = requests or StopRequests(), EventWriter(job.run.supervisor_events, SUPERVISOR)
    with on_stop_signal(requests.add):
        marks.write(LaunchMark())
        spoken_bytes_before = spoken_bytes(job.run)
        running = executor.submit(job)
        watched = _Watched(running, job, requests, marks, spoken_bytes_before)
        try:
            while running.anything_left() and not watched.given_up:
                watch(watched.stop_requested)
                watched.act()
                time.sleep(POLL_S)
        finally:
            exit_code = running.exit_code()
            left_behind = running.end()
            marks.write(EndedMark(exit_code=exit_code))
            marks.close()
        watch(watched.stop_requested)
    generation = running.generation
    return Ending(
        exit_code, was_stopped(job.run, generation, requests), watched.given_up, left_behind, generation=generation
    )


def was_stopped(run: RunDir, generation: int, requests: StopRequests) -> bool:
    """Whether somebody wanted this start to stop: the supervisor was asked, or the agent of a host."""
    return requests.count > 0 or was_stop_noted(run, generation)


class _Watched:
    """What has been asked of the job so far, and until when it has to answer."""

    def __init__(
        self, running: Running, job: Job, requests: StopRequests, marks: EventWriter, spoken_bytes_before: int
    ):
        self._running = running
        self._job = job
        self._requests, self._marks = requests, marks
        self._spoken_bytes_before = spoken_bytes_before
        self._deadline = math.inf
        self._failing = False
        self.stop_requested = False
        self.given_up = False

    def act(self) -> None:
        if self._requests.count and not self.stop_requested:
            self._pass_on_request()
        if not self._failing:
            self._look_for_failure()
        if self._requests.count > 1 or time.monotonic() > self._deadline:
            self.given_up = True

    def _pass_on_request(self) -> None:
        self.stop_requested = True
        if spoken_bytes(self._job.run) > self._spoken_bytes_before:
            self._running.ask_to_stop()
            self._end_within(self._job.stop_grace_s)
        else:
            self.given_up = True

    def _look_for_failure(self) -> None:
        """A worker has left its last words, or torchrun was killed and has left workers behind."""
        orphaned = self._running.exit_code() is not None
        if orphaned or any(self._job.run.errors_folder.glob("*.json")):
            self._failing = True
            self._marks.write(FailureMark())
            self._end_within(FAILURE_GRACE_S + LISTING_S)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)
