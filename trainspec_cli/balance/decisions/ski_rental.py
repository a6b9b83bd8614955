"""Wait until a change pays: once what was lost without it has come to what it costs.

As in the ski-rental problem (Karlin et al., 1988), that is never more than twice the least possible.
"""

from __future__ import annotations

from math import inf
from typing import Generic, TypeVar

Choice = TypeVar("Choice")
ADVICE_S = 30.0
"""Advice is given where a change has been wanted for this many seconds of training. Waiting costs nothing, since
nothing would change; on a busy machine other programs slow one rank for some seconds, and then another."""


def patience_s(mode: str) -> float:
    """Return the seconds that a scheduler in this mode waits for, beyond what a change costs."""
    return 0.0 if mode == "auto" else ADVICE_S


class SkiRental(Generic[Choice]):
    """Follows what is wanted, step by step."""

    def __init__(self, patience_s: float = 0.0) -> None:
        """`patience_s`: what is wanted is decided after this many seconds of steps at the earliest."""
        self._patience_s = patience_s
        self._waited_s = 0.0
        self._lost_s = 0.0
        self._given: Choice | None = None
        """A choice that was decided and is not in force, such as advice: it is not decided again while it is wanted."""

    def forget(self) -> None:
        """Begin anew, with nothing wanted."""
        self.count_anew()
        self._given = None

    def count_anew(self) -> None:
        """Forget what was lost so far."""
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
        """Take in that so many steps of `step_s` were made, each of which would have taken `saved_s` less with what is
        wanted.

        Return whether it is decided now: what was lost has come to `cost_s`, and the remaining steps win that back.
        """
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
