"""What an executor offers: it turns a job into processes that can be watched, asked to stop, and ended."""

from __future__ import annotations

from typing import Protocol

from trainspec_cli.launch.job import Job


class Running(Protocol):
    @property
    def generation(self) -> int:
        """Of this start, among all of the run's."""

    def exit_code(self) -> int | None:
        """torchrun's exit code; negative for a signal, None while it runs."""

    def anything_left(self) -> bool:
        """Whether any process of the job lives, torchrun's orphans included."""

    def ask_to_stop(self) -> None:
        """Ask the workers to write a checkpoint and end."""

    def end(self) -> tuple[int, ...]:
        """End at once whatever is left; called in any case, when the supervisor leaves.

        Returns the ids of processes that even so could not be ended.
        """


class Executor(Protocol):
    def submit(self, job: Job) -> Running: ...
