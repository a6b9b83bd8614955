"""Report the run's speeds to the supervisor, and receive other layouts from it, by files in the run folder.

The number of the newest proposal travels with the figures of the step's own exchange (`scheduling.py`), so that all
ranks take it up before the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.core.errors import MachineError
from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import read_record, to_plain
from trainspec_cli.recipe.results.verdict import MeasuredLink
from trainspec_cli.run.folder.event_types.events import WarningEvent
from trainspec_cli.run.folder.files import FileWatch
from trainspec_cli.run.folder.looks import ProposalRecord, SpeedsReport, read_proposal, write_speeds
from trainspec_cli.run.folder.paths import RunDir

LOOK_INTERVAL_S = 1.0
"""Rank 0 looks for a proposal at most so often."""


class SupervisorLink:
    """Every rank calls it; rank 0 alone touches files."""

    def __init__(self, run_dir: RunDir, journal: Journal, now: Callable[[], float] = time.monotonic):
        """Proposals that are there already were made to an earlier start."""
        self._run_dir = run_dir
        self._journal = journal
        self._now = now
        self.writes = dist.get_rank() == 0
        self._told: tuple[object, ...] = ()
        self.links: tuple[MeasuredLink, ...] = ()
        """The links whose speeds are known, in the layout in force; they are written with the ranks' speeds."""
        self._file = FileWatch(run_dir.proposal_json) if self.writes else None
        self._looked_s = now()
        self._newest: ProposalRecord | None = None
        self.received = 0
        """The number of the last proposal that the ranks have taken up."""

    # Up

    def tell(
        self,
        step: int,
        step_s: float,
        layout: Layout,
        micro_batches: int,
        samples: Sequence[int],
        speeds: Sequence[Speed | None],
    ) -> None:
        """Write down the speeds of all ranks, and the samples that each has, where that is news and all are known. A
        disk that does not take it stops no run: the supervisor goes on with what it knows."""
        known = [speed for speed in speeds if speed is not None]
        news = layout, micro_batches, tuple(samples), tuple(known), self.links
        if not self.writes or len(known) < len(speeds) or news == self._told:
            return
        self._told = news
        report = SpeedsReport(
            step=step,
            step_s=step_s,
            layout=layout,
            micro_batches=micro_batches,
            samples=tuple(samples),
            fixed_s=tuple(speed.fixed_s for speed in known),
            per_sample_s=tuple(speed.per_sample_s for speed in known),
            links=self.links,
        )
        try:
            write_speeds(self._run_dir, report)
        except OSError as error:
            self._warn(step, f"the supervisor does not get the new speeds: {error}")

    # Down

    def look(self, step: int) -> int:
        """Return the number of the newest proposal of this start; 0 without one, and on other ranks."""
        if self._file is None or self._now() - self._looked_s < LOOK_INTERVAL_S:
            return self._newest.number if self._newest else 0
        self._looked_s = self._now()
        try:
            if self._file.has_changed():
                self._newest = read_proposal(self._run_dir)
        except (MachineError, OSError) as error:
            self._warn(step, f"a proposal of the supervisor is passed over: {error}")
        return self._newest.number if self._newest else 0

    def receive(self) -> ProposalRecord:
        """Return the newest proposal, which rank 0 knows. Called by every rank together."""
        plain = to_plain(self._newest) if self._newest else None
        record = broadcast_json(plain, lambda plain: read_record(ProposalRecord, plain))
        self.received = record.number
        return record

    def _warn(self, step: int, message: str) -> None:
        self._journal.write(WarningEvent(step=step, message=message))
