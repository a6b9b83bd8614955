"""The backend of a command of the user's own on this node alone."""

from __future__ import annotations

import socket
from dataclasses import replace

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder import generations
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import Event, PresenceChanged
from trainspec_cli.wings.own_script.job import start_environment
from trainspec_cli.wings.own_script.node import OwnNode
from trainspec_cli.wings.own_script.start import GROUP, OwnStart
from trainspec_cli.wings.own_script.terminal import PassedOutput

HERE = 0
"""This node's number."""


class OwnCommandBackend:
    """One start of the command. `device_name`: what its ranks run on, for people. `passed`: shows its output on a
    terminal."""

    def __init__(self, job: Job, plan: Plan | None, *, device_name: str, passed: PassedOutput | None = None):
        assert plan is None and job.own is not None, "it has no plan"
        self.generation = generations.begin(job.run)
        started = start_environment(job, self.generation, on_terminal=passed is not None)
        added = {GENERATION: str(self.generation), **started}
        self._job = replace(job, environment={**job.environment, **added})
        self._node = OwnNode(self._job, self.generation, device_name, passed)
        self._start: OwnStart | None = None
        self._unreported: list[Event] = [PresenceChanged(GROUP, "there")]

    def start(self, group: int, number: int) -> None:
        self._start = OwnStart(self._job, number, [HERE], self._node.record_hang)
        self._node.start(group, number)

    def poll(self) -> list[Event]:
        events, self._unreported = self._unreported, []
        if self._start is None:
            return events
        for message in self._node.poll():
            events += self._start.hear(HERE, socket.gethostname(), message)
        events += self._start.poll()
        if self._start.has_ended:
            self._start = None
        return events

    def stop(self, group: int | None = None) -> None:
        self._node.stop(group)

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        if group is not None:
            self._node.kill(group)
            return ()
        return self._node.close()
