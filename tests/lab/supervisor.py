"""A worker's connection to a supervisor that the test plays itself."""

from __future__ import annotations

from trainspec_cli.run.channel.messages import WorkerMessage
from trainspec_cli.run.channel.worker import SupervisorConnection


class PlayedSupervisor(SupervisorConnection):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[WorkerMessage] = []
        """What the worker has reported."""

    def send(self, message: WorkerMessage) -> None:
        self.sent.append(message)

    def deliver(self, message: WorkerMessage) -> None:
        self._received.append(message)
