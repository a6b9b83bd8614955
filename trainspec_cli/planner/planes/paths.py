"""The state of a path, which an entropy value stands for, in a queue pair that sprays (arXiv:2606.18170).

| state | an ECN mark | a turn | a loss | a probe's answer | denied | allowed |
|---|---|---|---|---|---|---|
| good | skip | | assumed bad | | denied | |
| skip | | good | assumed bad | | denied | |
| assumed bad | | | | good | denied | |
| denied | | | | | | assumed bad |

An empty cell leaves the state. Packets go over good paths alone: one that was marked is passed over for a turn; one
that lost a packet until a probe of it is answered (meanwhile another path of its plane is taken); one that the NIC
knows to lead nowhere (its port is down) until it is allowed again and probed. The states are published; which event
leads where is this model's reading.
"""

from __future__ import annotations

from typing import Literal

from trainspec_cli.spec.results.planes import PathState

PathEvent = Literal["marked", "turn", "lost", "probed", "deny", "allow"]

TRANSITIONS: dict[tuple[PathState, PathEvent], PathState] = {
    ("good", "marked"): "skip",
    ("good", "lost"): "assumed_bad",
    ("good", "deny"): "denied",
    ("skip", "turn"): "good",
    ("skip", "lost"): "assumed_bad",
    ("skip", "deny"): "denied",
    ("assumed_bad", "probed"): "good",
    ("assumed_bad", "deny"): "denied",
    ("denied", "allow"): "assumed_bad",
}
STATES: tuple[PathState, ...] = ("good", "skip", "denied", "assumed_bad")


def next_state(state: PathState, event: PathEvent) -> PathState:
    return TRANSITIONS.get((state, event), state)


class PathCounts:
    """The number of paths in each state, of all queue pairs together: so many events move so many."""

    def __init__(self, good: int):
        self.paths: dict[PathState, int] = {"good": good, "skip": 0, "denied": 0, "assumed_bad": 0}

    def move(self, state: PathState, event: PathEvent, number: int) -> int:
        """Let the event come to `number` paths in `state`, or to all that are; return how many it came to."""
        moved = min(number, self.paths[state])
        self.paths[state] -= moved
        self.paths[next_state(state, event)] += moved
        return moved

    @property
    def unused(self) -> int:
        return self.paths["denied"] + self.paths["assumed_bad"]
