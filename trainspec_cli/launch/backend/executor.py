"""What an executor offers: it turns a job into processes that can be watched, asked to stop, and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from trainspec_cli.launch.failure import WorkerFailure
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.rendezvous.address import Rendezvous
from trainspec_cli.spec.results.plan import Plan


class Running(Protocol):
    @property
    def generation(self) -> int:
        """Of this start, among all of the run's."""

    def exit_code(self) -> int | None:
        """torchrun's exit code; negative for a signal, None while it runs."""

    def anything_left(self) -> bool:
        """Whether any process of the job lives, torchrun's orphans included; these are sent home."""

    def ask_to_stop(self) -> None:
        """Ask the workers to write a checkpoint and end, and note that somebody wanted it."""

    def end(self) -> tuple[int, ...]:
        """End at once whatever is left; called in any case, when the supervisor leaves.

        Returns the ids of processes that even so could not be ended.
        """


class RunningGroup(Protocol):
    """The processes of one start of a replica group."""

    @property
    def job(self) -> Job:
        """With the ranks and the logs of this start."""

    def failure(self) -> WorkerFailure | None:
        """A worker that has failed, torchrun itself, or a host that is lost."""

    def is_done(self) -> bool:
        """Whether all of it ended well."""

    def end(self) -> None:
        """End at once whatever is left."""

    def is_gone(self) -> bool:
        """Whether nothing is left that was told to end."""


Presence = Literal["there", "awaited", "away"]
"""Of a replica group's hosts: all are there; some may still come; or one is not waited for (it may come all the
same)."""


class GroupExecutor(Protocol):
    """Where replica groups run, one start after another."""

    @property
    def generation(self) -> int:
        """Of this start, among all of the run's."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the groups meet."""

    def poll(self) -> Sequence[str]:
        """To be called about ten times a second; -> what people should know of the hosts.

        Raises TrainspecError where the run cannot begin or go on.
        """

    def presence(self, group: int) -> Presence: ...

    def start(self, group: int, number: int) -> RunningGroup:
        """The group's start of this number, from 1."""

    def ask_to_stop(self) -> None:
        """Ask all workers to write a checkpoint and end."""

    def note_losses(self) -> None:
        """Write down the hosts that are lost: the run ends because of them."""

    def end(self) -> tuple[int, ...]:
        """As `Running.end`, for all groups."""


class Executor(Protocol):
    def submit(self, job: Job) -> Running: ...

    def submit_groups(self, job: Job, plan: Plan) -> GroupExecutor:
        """Nothing of the groups runs until they are started."""
