"""The exposed part of a step's exchanges: the time in which they went on and nothing was computed beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]
"""(begin, end) in seconds of one clock."""


@dataclass(frozen=True)
class ExchangeTime:
    seconds: float
    """Time in which at least one exchange went on."""
    exposed_s: float
    """The part of it in which nothing was computed."""


def exchange_time(exchanges: Iterable[Interval], computing: Iterable[Interval]) -> ExchangeTime:
    """Return how long the exchanges took and how much of that was exposed; intervals may overlap, in any order."""
    going_on, busy = _union(exchanges), _union(computing)
    seconds = _length_s(going_on)
    return ExchangeTime(seconds, seconds - _common_s(going_on, busy))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same time, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _length_s(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _common_s(first: list[Interval], second: list[Interval]) -> float:
    """Return how long the time is that lies in both, each of which is a union."""
    common_s, place = 0.0, 0
    for begin, end in first:
        while place < len(second) and second[place][1] <= begin:
            place += 1
        at = place
        while at < len(second) and second[at][0] < end:
            common_s += min(end, second[at][1]) - max(begin, second[at][0])
            at += 1
    return common_s
