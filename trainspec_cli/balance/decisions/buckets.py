"""The size of the buckets in which gradients are summed, found by tries in a run's first steps.

A large bucket pays the latency of an exchange once for many gradients, and leaves more of the last exchange without a
backward to hide it: b* = sqrt(S a B), of S bytes, latency a and bandwidth B, balances both. Steps take sizes around it
in turns, and the one whose exchanges are waited for least is kept. All ranks see the same figures and decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

ONE_BY_ONE = 0
"""Each block's gradients by themselves."""
WARM_STEPS, ROUNDS = 3, 3
"""The first steps of a start connect and warm up; then each size is tried so often."""
SPREAD = 4
"""A size is so many times the one below it."""
WORTH, BETTER = 0.01, 0.95
"""Sizes are tried where this part of a step is spent waiting, and one is taken for better below this part of that of
the first."""


def sizes_to_try(total_bytes: int, block_bytes: int, planned_bytes: float | None) -> tuple[int, ...]:
    """Return sizes in the order in which they are preferred, `planned_bytes` (b*) first where it is known; none where
    there is one block alone, the largest of which has `block_bytes`."""
    if total_bytes <= block_bytes:
        return ()
    middle = planned_bytes or math.sqrt(total_bytes * block_bytes)
    sizes = [_between(ONE_BY_ONE, middle * factor, total_bytes) for factor in (1, SPREAD, 1 / SPREAD)]
    first = [sizes[0], ONE_BY_ONE] if planned_bytes else [ONE_BY_ONE, sizes[0]]
    return tuple(dict.fromkeys(size if size > block_bytes else ONE_BY_ONE for size in (*first, *sizes[1:])))


def _between(least: float, size: float, most: float) -> int:
    return round(min(max(size, least), most))


@dataclass
class BucketTries:
    """Tries `sizes` in turns, step after step."""

    sizes: Sequence[int]
    waited_s: dict[int, list[float]] = field(default_factory=dict)
    is_done: bool = False

    @property
    def size(self) -> int:
        """Return the size of the next step's buckets: in the end the best."""
        if self.is_done:
            return self.best
        return min(self.sizes, key=lambda size: len(self.waited_s.get(size, ())))

    @property
    def best(self) -> int:
        """Return the size that is waited for least, or the first one where that is hardly longer."""
        usual_s = self.usual_s
        least = min(usual_s, key=lambda size: usual_s[size])
        return least if usual_s[least] < BETTER * usual_s.get(self.sizes[0], math.inf) else self.sizes[0]

    @property
    def usual_s(self) -> dict[int, float]:
        """Return how long a step waits for gradients with each size that was tried."""
        return {size: median(seconds) for size, seconds in self.waited_s.items()}

    def note(self, size: int, waited_s: float, step_s: float) -> None:
        """Take in a step with buckets of `size`, of whose `step_s` the ranks have waited `waited_s` on average."""
        if size not in self.sizes or self.is_done:
            return
        self.waited_s.setdefault(size, []).append(waited_s)
        has_all = all(len(self.waited_s.get(one, ())) >= ROUNDS for one in self.sizes)
        is_first = sum(map(len, self.waited_s.values())) == 1
        self.is_done = has_all or (is_first and waited_s < WORTH * step_s)
