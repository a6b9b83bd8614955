"""What rank 0 tells the supervisor of the run's speeds, by a file in the run folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from trainspec_cli.engine.observe.journal import GroupJournal, Journal
from trainspec_cli.policy.speeds import Speed
from trainspec_cli.rundir.event_types import WarningEvent
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.speeds import SpeedsReport, write_speeds
from trainspec_cli.spec.recipe.layout import Layout


class SupervisorLink:
    """Every rank calls it; rank 0 alone touches files."""

    def __init__(self, run_dir: RunDir, journal: Journal | GroupJournal):
        self._run_dir, self._journal = run_dir, journal
        self._told: tuple[object, ...] = ()
        self.writes = dist.get_rank() == 0

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
        news = layout, micro_batches, tuple(samples), tuple(known)
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
        )
        try:
            write_speeds(self._run_dir, report)
        except OSError as error:
            self._journal.write(WarningEvent(step=step, message=f"the supervisor is not told of new speeds: {error}"))
