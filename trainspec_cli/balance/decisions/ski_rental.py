"""Wait until a change pays: once what was lost without it has come to what it costs.

As in the ski-rental problem (Karlin et al., 1988), that is never more than twice the least possible.
"""

from __future__ import annotations

from math import inf
from typing import Generic, TypeVar

Choice = TypeVar("Choice")


class SkiRental(Generic[Choice]):
    """Follows what is wanted, step by step."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._given: Choice | None = None
        """A choice that was decided and is not in force, such as advice: it is not decided again while it is wanted."""

    def forget(self) -> None:
        """Begin anew, with nothing wanted."""
        self._lost_s = 0.0
        self._given = None

    def count_anew(self) -> None:
        """Forget what was lost so far."""
        self._lost_s = 0.0

    def note_steps(
        self, wanted: Choice, saved_s: float, cost_s: float, steps: int, remaining_steps: float = inf
    ) -> bool:
        """Take in that so many steps were made, each of which would have taken `saved_s` less with what is wanted.

        Return whether it is decided now: what was lost has come to `cost_s`, and the remaining steps win that back.
        """
        if wanted == self._given:
            self._lost_s = 0.0
            return False
        self._lost_s += steps * saved_s
        if self._lost_s < cost_s or remaining_steps * saved_s < cost_s:
            return False
        self._given = wanted
        self._lost_s = 0.0
        return True
