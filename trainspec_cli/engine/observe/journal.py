"""A worker's journal: its events, and those of rank 0 in the trackers that the recipe asks for too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainspec_cli.engine.observe.trackers import TRACKERS
from trainspec_cli.rundir.event_types import Event, StartEvent
from trainspec_cli.rundir.events import EventWriter
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.recipe.run import RunSpec


class Journal:
    def __init__(self, run_dir: RunDir, rank: int, spec: RunSpec | None):
        """Open the journal; without a spec no tracker is used."""
        self._run_dir = run_dir
        self._events = EventWriter(run_dir.events(rank), rank)
        self._fence = Fence.of_worker(run_dir)
        tracked = spec if rank == 0 else None
        self._trackers = [
            make(run_dir, tracked) for key, make in TRACKERS.items() if tracked and getattr(tracked.tracking, key)
        ]

    def write(self, event: Event) -> None:
        """Raises WorkerError where a newer start owns the run."""
        self._fence.check_now_and_then()
        self._events.write(event)
        for tracker in self._trackers:
            tracker.record(event)

    def events_of(self, rank: int) -> Path:
        """Return the file that another rank writes its events to."""
        return self._run_dir.events(rank)

    def close(self) -> None:
        self._events.close()
        for tracker in self._trackers:
            tracker.close()


class GroupJournal:
    """The journal of a process of a replica group: its own events, and while its group leads, the run's log too."""

    def __init__(self, run_dir: RunDir, group: int, rank: int, spec: RunSpec):
        self._run_dir, self._writes_log, self._spec = run_dir, rank == 0, spec
        self._own = EventWriter(run_dir.group_events(group, rank), rank)
        self._group = group
        self._log: Journal | None = None
        self._start: StartEvent | None = None

    def events_of(self, rank: int) -> Path:
        """Return the file that another rank of the same group writes its events to."""
        return self._run_dir.group_events(self._group, rank)

    def write(self, event: Event) -> None:
        if isinstance(event, StartEvent):
            self._start = event
        self._own.write(event)
        if self._log:
            self._log.write(event)

    def lead(self, leads: bool, step: int) -> None:
        """Write the run's log from `step` on where this group leads; a new leader begins with a `start` of its own."""
        if leads and self._writes_log and self._log is None:
            self._log = Journal(self._run_dir, 0, self._spec)
            if self._start:
                self._log.write(replace(self._start, step=step))
        elif not leads:
            self._close_log()

    def _close_log(self) -> None:
        if self._log:
            self._log.close()
            self._log = None

    def close(self) -> None:
        self._close_log()
        self._own.close()
