"""Report the run's speeds to the supervisor, and receive its proposals of other layouts.

The number of the newest proposal is sent in the step's regular exchange (`step_report.py`), so that all ranks learn of
it before the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.verdict import MeasuredLink
from trainspec_cli.run.channel.messages import Proposal, SpeedsReport
from trainspec_cli.run.channel.worker import SupervisorConnection


class SupervisorLink:
    """Every rank makes the same calls, but only rank 0 exchanges messages with the supervisor."""

    def __init__(self, supervisor: SupervisorConnection):
        self._supervisor = supervisor
        self.writes = dist.get_rank() == 0
        self._reported: tuple[object, ...] = ()
        self.links: tuple[MeasuredLink, ...] = ()
        """Known link speeds in the current layout, which are reported together with the ranks' speeds."""
        self._newest: Proposal | None = None
        self.received = 0
        """The number of the last proposal that the ranks have received."""

    # To the supervisor

    def report(
        self,
        step: int,
        step_s: float,
        layout: Layout,
        micro_batches: int,
        samples: Sequence[int],
        speeds: Sequence[Speed | None],
    ) -> None:
        """Report the speeds and samples of all ranks, if they have changed and all are known."""
        known = [speed for speed in speeds if speed is not None]
        news = layout, micro_batches, tuple(samples), tuple(known), self.links
        if not self.writes or len(known) < len(speeds) or news == self._reported:
            return
        self._reported = news
        self._supervisor.send(
            SpeedsReport(
                step=step,
                step_s=step_s,
                layout=layout,
                micro_batches=micro_batches,
                samples=tuple(samples),
                fixed_s=tuple(speed.fixed_s for speed in known),
                per_sample_s=tuple(speed.per_sample_s for speed in known),
                links=self.links,
            )
        )

    # From the supervisor

    def newest_number(self) -> int:
        """Return the number of the newest proposal on rank 0, or 0, and on all other ranks."""
        for proposal in self._supervisor.receive(Proposal):
            self._newest = proposal
        return self._newest.number if self._newest else 0

    def receive(self) -> Proposal:
        """Return the newest proposal on all ranks; only rank 0 has received it. Called collectively by all ranks."""
        plain = to_plain(self._newest) if self._newest else None
        proposal = broadcast_json(plain, lambda received: from_plain(Proposal, received))
        self.received = proposal.number
        return proposal
