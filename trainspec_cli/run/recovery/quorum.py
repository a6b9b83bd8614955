"""Decide which replica groups make the next step together, and which heal from which, on plain numbers.

The rules are those of torchft's lighthouse (github.com/pytorch/torchft, `quorum_compute`), restated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectedGroup:
    heard_at_s: float
    asked_at_s: float = math.inf
    """The time when it asked to take part in the next step; infinite while it computes."""

    @property
    def asks(self) -> bool:
        return self.asked_at_s < math.inf


@dataclass(frozen=True)
class QuorumRules:
    silence_s: float
    """A replica group that was silent for this long counts as dead."""
    patience_s: float
    """How long waiting replica groups wait for one that is alive but does not ask."""


def choose_members(
    groups: Mapping[str, ConnectedGroup], previous: Collection[str], now_s: float, rules: QuorumRules
) -> list[str]:
    """Return the names of the replica groups that make the next step, in order; empty while they have to wait.

    They start at once if all of the previous quorum ask. Else more than half of the living must ask; they start when
    all of the living ask, or when the first of them has waited long enough.
    """
    living = {name: each for name, each in groups.items() if now_s - each.heard_at_s <= rules.silence_s}
    asking = {name: each for name, each in living.items() if each.asks}
    if previous and all(name in asking for name in previous):
        return sorted(asking)
    if not asking or 2 * len(asking) <= len(living):
        return []
    waited_s = now_s - min(each.asked_at_s for each in asking.values())
    return sorted(asking) if len(asking) == len(living) or waited_s >= rules.patience_s else []


@dataclass(frozen=True)
class Healing:
    """The copies that one rank of a replica group makes before the step, to and from the same rank of others."""

    gives_to: tuple[int, ...]
    """Indices in the quorum of the groups that copy the state from it."""
    takes_from: int | None
    """Index of the group that it copies the state from; None if its own is the newest."""


def plan_healing(steps: Sequence[int], place: int, rank: int) -> Healing:
    """Plan the copies of rank `rank` of the group at index `place`; `steps` are the updates that each group has made.

    Groups that are behind copy from those in front, in turn; each rank starts at another one, which spreads the load.
    """
    front = [other for other, step in enumerate(steps) if step == max(steps)]
    behind = [other for other, step in enumerate(steps) if step < max(steps)]
    sources = {other: front[(number + rank) % len(front)] for number, other in enumerate(behind)}
    return Healing(tuple(other for other, source in sources.items() if source == place), sources.get(place))
