"""Make a change once the time lost without it equals the cost of the change.

As in the ski-rental problem (Karlin et al., 1988), the total loss is never more than twice the optimum.
"""

from __future__ import annotations

from math import inf
from typing import Generic, TypeVar

Choice = TypeVar("Choice")
ADVICE_S = 30.0
"""Advice is given once a change has been wanted for this many seconds of training. Waiting costs nothing, because
advice changes nothing. On a busy machine, other programs may slow down one rank after another, each for a few
seconds."""


def patience_s(mode: str) -> float:
    """Return the minimum time in seconds that a scheduler in this mode waits before a decision."""
    return 0.0 if mode == "auto" else ADVICE_S


class SkiRental(Generic[Choice]):
    """Tracks, step by step, the change that is wanted."""

    def __init__(self, patience_s: float = 0.0) -> None:
        """`patience_s`: minimum training time in seconds before a decision."""
        self._patience_s = patience_s
        self._waited_s = 0.0
        self._lost_s = 0.0
        self._given: Choice | None = None
        """A choice that was made but not applied, such as advice. It is not made again while it remains wanted."""

    def forget(self) -> None:
        """Reset to the state in which no change is wanted."""
        self.count_anew()
        self._given = None

    def count_anew(self) -> None:
        """Set the lost time to 0."""
        self._waited_s = self._lost_s = 0.0

    def note_steps(
        self,
        wanted: Choice,
        saved_s: float,
        cost_s: float,
        steps: int,
        remaining_steps: float = inf,
        step_s: float = 0.0,
    ) -> bool:
        """Record `steps` steps of `step_s`, each of which would have taken `saved_s` less with the desired change.

        Return True if it is time to make the change: `cost_s` has been lost without it, and the remaining steps recover
        that cost."""
        if wanted == self._given:
            self.count_anew()
            return False
        self._lost_s += steps * saved_s
        self._waited_s += steps * step_s
        if self._waited_s < self._patience_s or self._lost_s < cost_s or remaining_steps * saved_s < cost_s:
            return False
        self._given = wanted
        self.count_anew()
        return True
