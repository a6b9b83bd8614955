"""Simulated time: a heap of (time, counter, action), and a seeded source of chance."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Takes actions in the order of their time; those of one time in the order in which they were scheduled."""

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self._heap: list[tuple[float, int, Action]] = []
        self._counter = itertools.count()

    def after(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._counter), action))

    def peek_s(self) -> float:
        """Time of the next action; infinity when none is left."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> None:
        """Move on to the next action and take it. Raises IndexError when none is left."""
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
