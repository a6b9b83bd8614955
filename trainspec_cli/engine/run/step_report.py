"""Each rank's report in a step. It is sent in the exchange that the step needs anyway for its loss: a separate
collective in each step would cost more than these few numbers. All ranks report the same parts in the same step,
because they choose them from values known to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainspec_cli.balance.decisions.links import Transfer


class SpeedFigures(NamedTuple):
    """One rank's speed. `StepScheduler` produces these values and learns from them."""

    fixed_s: float
    per_sample_s: float
    noise: float
    change_s: float
    """The measured cost of a change of sample shares, in seconds."""
    last_s: float
    """The rank's compute time in its last step, in seconds."""
    waited_s: float
    """Time per micro-batch that the rank waited for exchanges, in seconds."""
    proposal: float
    """The number of the supervisor's newest proposal, which only rank 0 knows."""
    shown_steps: float = 0.0
    """Number of steps that have confirmed a change in the rank's speed."""
    is_settled: float = 1.0
    """1 if there were enough steps for small speed differences to be significant, otherwise 0."""
    update_s: float = 0.0
    """Duration of the update, as in `Speed`."""


class LinkFigures(NamedTuple):
    """This rank's measurements in a sample of the links. `StepLinks` produces them and learns from them."""

    transfers: tuple[Transfer, ...]
    """One entry for each mesh axis and, in a pipeline, another for the backward direction."""
    cost_s: float
    """The cost of the sample on this rank, in seconds."""
    step_s: float
    """The step time that the cost is compared with, in seconds."""


class BucketFigures(NamedTuple):
    """The measurements with one gradient bucket size. `StepBuckets` produces them and learns from them."""

    bucket_bytes: float
    waited_s: float
    """Time that the step waited for gradients, in seconds."""
    step_s: float
    gradient_bytes: float
    """Total size in bytes of the gradients of all blocks that may share a bucket."""
    largest_block_bytes: float


@dataclass(frozen=True)
class StepReport:
    """One rank's report in a step. Counts and requests are summed over the ranks; the other parts are gathered. A part
    is None on all ranks or on none.
    """

    stop: bool = False
    """True if this rank received a request to stop."""
    writing: bool = False
    """True if this rank is writing a checkpoint."""
    steps_to_sample: int = 0
    """Number of steps until the next sample of the links. Only rank 0 sets it; 0 means no change."""
    speed: SpeedFigures | None = None
    links: LinkFigures | None = None
    buckets: BucketFigures | None = None

    @property
    def sums(self) -> tuple[float, float, float]:
        """Return the numbers to sum over the ranks, named as in `StepOutcome`."""
        return float(self.stop), float(self.writing), float(self.steps_to_sample)

    @property
    def row(self) -> list[float]:
        """Return the parts as a list of numbers, which `like` can read."""
        numbers = [*(self.speed or ())]
        if self.links is not None:
            for one in self.links.transfers:
                numbers += [one.sent_bytes, one.seconds, one.waited_s]
            numbers += [self.links.cost_s, self.links.step_s]
        return [*numbers, *(self.buckets or ())]

    def like(self, row: Sequence[float]) -> StepReport:
        """Return another rank's report for the same step, whose parts are in `row`."""
        numbers = iter(row)

        def following(count: int) -> list[float]:
            return [next(numbers) for _ in range(count)]

        speed = None
        links = None
        buckets = None
        if self.speed is not None:
            speed = SpeedFigures(*following(len(self.speed)))
        if self.links is not None:
            transfers = tuple(Transfer(*following(3)) for _ in self.links.transfers)
            links = LinkFigures(transfers, *following(2))
        if self.buckets is not None:
            buckets = BucketFigures(*following(len(self.buckets)))
        return StepReport(speed=speed, links=links, buckets=buckets)
