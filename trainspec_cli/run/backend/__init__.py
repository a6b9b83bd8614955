"""Backends run the processes of a run: on this node (`local.py`), or on several (`nodes/`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.hub import Hub
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import Event


class RunBackend(Protocol):
    """The processes of one generation of a run. Only `poll` and `kill()` look at anything or wait."""

    generation: int

    @property
    def hub(self) -> Hub | None:
        """What reaches the workers; None where they are not the engine's, and know nothing of it."""

    def start(self, group: int, number: int) -> None:
        """Start a replica group, for the `number`th time; all of a run of one group."""

    def poll(self) -> list[Event]:
        """Return what has happened since the last call; to be called about ten times a second.

        Raises TrainspecError where the run cannot begin or go on.
        """

    def stop(self, group: int | None = None) -> None:
        """Ask all workers to write a checkpoint and end, and note that somebody wanted it; or those of one group alone,
        because they have lost their torchrun."""

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        """End at once what is left of a group; `poll` reports when that is done. None: end everything, wait for it, and
        give back what the generation held; -> the ids of processes that could not be ended."""


OpenBackend = Callable[[Job, Plan | None], RunBackend]
"""Opens a generation of a run: it owns the run from then on, and nothing has been started. Without a plan the job is a
tool's: one group, that is never started again."""
