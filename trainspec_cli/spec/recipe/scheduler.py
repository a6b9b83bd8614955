"""The scheduler: whether and how a run follows the speeds that its ranks really have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trainspec_cli.spec.field_types import AUTO, AutoInt, Range

SchedulerMode = Literal["off", "advise", "auto"]


@dataclass(frozen=True)
class SchedulerSpec:
    mode: SchedulerMode = "advise"
    """off: nothing is measured. advise: write what would be changed, and change nothing. auto: change it.

    Where memory runs out, advise and auto both take smaller micro-batches of the same global batch, then recompute and
    offload, and go on; with off the run ends.

    advise is the default, since two runs of a recipe then compute the same bits whatever their ranks' speeds: other
    shares sum the same gradients in another order.
    """
    change: Annotated[float, Range(0.01, 1)] = 0.1
    """A rank's speed has changed when several steps in a row take longer or less by this fraction, and by more than
    the rank's own noise."""
    max_micro_batch_size: AutoInt = AUTO
    """Samples of a rank's micro-batch, at most; auto is what memory allows, up to twice the plan's."""
