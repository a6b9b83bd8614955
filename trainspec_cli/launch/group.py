"""One replica group as its supervisor keeps book of it: its starts, one after another, and how each of them fares."""

from __future__ import annotations

import time
from typing import Literal

from trainspec_cli.launch.backend.executor import GroupExecutor, RunningGroup
from trainspec_cli.launch.failure import WorkerFailure
from trainspec_cli.rundir.events import EventTail
from trainspec_cli.rundir.paths import RunDir

State = Literal["running", "ending", "waiting", "done", "gone"]
"""ending: it failed, and what is left of it is being ended. waiting: for its next start. done: it ended well. gone: it
will not be started again."""


class ReplicaGroup:
    def __init__(self, number: int, run: RunDir):
        self.number, self._run = number, run
        self.state: State = "waiting"
        self.start_at = 0.0
        self.starts_s: list[float] = []
        self.failures_in_a_row = 0
        self.failure: WorkerFailure | None = None
        """That the last start ended with; None where it lived."""
        self._running: RunningGroup | None = None
        self._events = EventTail(run.group_events(number, 0))
        self.stepped_at = 0.0
        """When it was last seen to have made a step; 0 before the first of this start."""
        self.retried_at = 0.0
        """When it was last seen to begin a step again, because an exchange had failed."""

    @property
    def running(self) -> RunningGroup:
        assert self._running is not None, "it was started"
        return self._running

    def start(self, executor: GroupExecutor) -> None:
        self._running = executor.start(self.number, len(self.starts_s) + 1)
        self.stepped_at, self.retried_at = 0.0, 0.0
        self._events.read()  # those of the start before
        self.starts_s.append(time.monotonic())
        self.state = "running"

    def look(self, now_s: float) -> None:
        """Note whether it has made a step since the last look, or tried to."""
        kinds = {event.type for event in self._events.read()}
        if "step" in kinds:
            self.stepped_at, self.failures_in_a_row = now_s, 0
        if "retry" in kinds:
            self.retried_at = now_s

    def end(self, failure: WorkerFailure | None) -> None:
        """Of this start, because of `failure`, or because the others wait for it."""
        self.failure, self.state = failure, "ending"
        self.running.end()

    def put_errors_away(self) -> None:
        """What a start that is made good again said of its end is kept among its logs."""
        job = self.running.job
        for rank in job.ranks or ():
            words = self._run.error(rank)
            if words.exists():
                words.rename(job.logs / words.name)
