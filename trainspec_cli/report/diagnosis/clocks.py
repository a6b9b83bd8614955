"""How far the nodes' clocks are apart, measured by the exchange that ends each step.

No rank leaves it before the last one has entered it, and all leave it within the time that it takes from then on: the
differences of the times at which they left, each by its node's clock, are those of the clocks, but for that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trainspec_cli.balance.decisions.speeds import spread


@dataclass(frozen=True)
class ClockOffset:
    """A node's clock is ahead of the first node's by `offset_s`, known within `error_s`."""

    node: int
    offset_s: float
    error_s: float | None
    """None where no exchange shows it; the offset is 0 then."""
    exchanges: int
    """Exchanges that show it."""


@dataclass(frozen=True)
class Leaving:
    """A rank has left the exchange that ends a step."""

    at: float
    """Unix seconds by its node's clock."""
    took_s: float
    """The shortest such exchange of these steps, waiting included."""


def clock_offsets(nodes: Sequence[int], left: Sequence[Mapping[int, Leaving]]) -> tuple[ClockOffset, ...]:
    """Return the offsets of all nodes; `left` holds for each rank when it left the exchanges of which steps."""
    first = min(nodes, default=0)
    return tuple(_offset(node, first, nodes, left) for node in sorted(set(nodes)))


def _offset(node: int, first: int, nodes: Sequence[int], left: Sequence[Mapping[int, Leaving]]) -> ClockOffset:
    if node == first:
        return ClockOffset(node, 0.0, 0.0, 0)
    here, there = (_of_node(one, nodes, left) for one in (node, first))
    common = sorted(here.keys() & there.keys())
    if not common:
        return ClockOffset(node, 0.0, None, 0)
    middle, deviation = spread([here[step].at - there[step].at for step in common])
    transfer_s = median(min(here[step].took_s, there[step].took_s) for step in common)
    return ClockOffset(node, middle, transfer_s + 1.2533 * deviation / len(common) ** 0.5, len(common))


def _of_node(node: int, nodes: Sequence[int], left: Sequence[Mapping[int, Leaving]]) -> dict[int, Leaving]:
    """Return when the first rank of a node left each exchange: others may have waited for a processor."""
    ranks = [left[rank] for rank, home in enumerate(nodes) if home == node]
    steps = set().union(*ranks) if ranks else set()
    return {step: min((of[step] for of in ranks if step in of), key=lambda one: one.at) for step in steps}
