"""Backends that run the processes of a run, on this node (`local.py`) or on several nodes (`nodes/`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.hub import Hub
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import Event


class RunBackend(Protocol):
    """The processes of one generation of a run. Only `poll` and `kill()` read input or block."""

    generation: int

    @property
    def hub(self) -> Hub | None:
        """Messages for the workers; None if the workers are not the engine's and do not use the channel."""

    def start(self, group: int, number: int) -> None:
        """Start a replica group for the `number`-th time; in a single-group run this starts the entire run."""

    def poll(self) -> list[Event]:
        """Return the events since the last call; call it about ten times per second. Raises TrainspecError if the run
        cannot start or continue."""

    def stop(self, group: int | None = None) -> None:
        """Ask all workers to write a checkpoint and end, and record that a stop was requested. With `group`: ask only
        the workers of that group, because it has lost its torchrun."""

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        """Kill what is left of a group at once; `poll` reports when that is done. None: kill everything, wait until it
        has ended, and release the generation's resources; return the ids of processes that could not be ended."""


OpenBackend = Callable[[Job, Plan | None], RunBackend]
"""Opens a generation of a run: the generation owns the run from then on, and nothing has been started. Without a plan
the job is a tool's: one group, which is never restarted."""
