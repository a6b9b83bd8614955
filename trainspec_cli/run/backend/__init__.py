"""Backends that run the processes of a run, on this node (`local.py`) or on several nodes (`nodes/`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.hub import Hub
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import Event


class RunBackend(Protocol):
    """The processes of one generation of a run. Only `poll` and `kill()` receive messages or may block."""

    generation: int

    @property
    def hub(self) -> Hub | None:
        """The hub that sends messages to the workers; None if the workers run a program other than the engine, because
        such workers do not connect to a hub."""

    def start(self, group: int, number: int) -> None:
        """Start a replica group for the `number`-th time. In a single-group run, this starts the entire run."""

    def poll(self) -> list[Event]:
        """Return the events since the last call. Call this about ten times per second. Raises TrainspecError if the run
        cannot start or continue."""

    def stop(self, group: int | None = None) -> None:
        """Ask all workers to write a checkpoint and exit, and record that a stop was requested. With `group`, ask only
        the workers of that group, because its torchrun is gone."""

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        """Immediately kill whatever is left of a group; `poll` reports when that is done. With None, kill everything,
        wait for it to exit, release the generation's resources, and return the ids of processes that could not be
        killed."""


OpenBackend = Callable[[Job, Plan | None], RunBackend]
"""Opens a generation of a run. From then on, the run belongs to this generation, but nothing has been started yet.
Without a plan, the job belongs to a tool: it has one group, which is never restarted."""
