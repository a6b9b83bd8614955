"""The held-out loss of a run's evaluations: which was the best, whether it rises, and when to end for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

RISES = 2
"""The loss rises where so many evaluations in a row were each above the one before,"""
MARGIN = 1.01
"""and the last of them is above the best one by this factor."""


@dataclass(frozen=True)
class HeldoutLosses:
    """The memory of the evaluations so far; the same on every rank."""

    best_step: int | None = None
    best_loss: float | None = None
    last_loss: float | None = None
    last_step: int | None = None
    """The step of the last evaluation."""
    since_best: int = 0
    """Evaluations since the best one."""
    rises: int = 0
    """Evaluations up to the last one that were each above the one before."""

    def after(self, step: int, loss: float | None) -> HeldoutLosses:
        """Return the losses with one more, that of the evaluation after `step`. One that is not finite is worse than
        any other."""
        rises = self.rises + 1 if self.last_loss is not None and _order(loss) > self.last_loss else 0
        last = replace(self, last_loss=loss, last_step=step, rises=rises, since_best=self.since_best + 1)
        if _order(loss) < _order(self.best_loss):
            return replace(last, best_step=step, best_loss=loss, since_best=0)
        return last

    def has_ended(self, patience: int | None) -> bool:
        """Return whether the run is to end, since so many evaluations in a row were none better than the best."""
        return patience is not None and self.since_best >= patience

    @property
    def is_rising(self) -> bool:
        return self.best_loss is not None and self.rises >= RISES and _order(self.last_loss) > MARGIN * self.best_loss

    def describe_best(self) -> str:
        """`lowest, 1.234, at step 40`; of a run without a finite loss `never finite`."""
        if self.best_loss is None:
            return "never finite"
        return f"lowest, {self.best_loss:.4g}, at step {self.best_step}"


def _order(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
