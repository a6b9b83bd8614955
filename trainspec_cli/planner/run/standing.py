"""How the replica groups of a simulated run stand, by the decisions of `run.recovery.next_action`.

A run fails a thousand times and stands in few ways: what follows a change from one of them is asked once. The actions
that the decisions name take the time that the simulation says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery import recovery, run_state

Change = Literal["lost", "left", "returned"]
"""What happens to groups: a node of theirs is lost, they are away until it is replaced, or they step again."""
PATIENCE = 10**6
"""Restarts an hour: somebody starts again what the recipe's limit would end, since what is asked is how long the work
takes."""


class Standing:
    """A state of the run, and those that follow from it as far as they were asked for."""

    def __init__(self, state: run_state.RunState, known: dict[run_state.RunState, Standing]) -> None:
        self.state = state
        self.is_lost = state.is_lost
        self.groups = tuple(range(len(state.groups)))
        self._known = known
        known[state] = self
        self._after: dict[tuple[Change, tuple[int, ...]], Standing] = {}

    def after(self, change: Change, groups: tuple[int, ...]) -> Standing:
        key = change, groups
        if key not in self._after:
            state = self.state
            for event in _events(change, groups):
                state, _ = recovery.next_action(state, event)
            state = _without_history(state, groups) if change == "returned" else state
            self._after[key] = self._known.get(state) or Standing(state, self._known)
        return self._after[key]


def start_run(resilience: ResilienceSpec, groups: int) -> Standing:
    """Return how a run of so many groups stands once it trains."""
    patient = replace(resilience, max_restarts_per_hour=PATIENCE)
    state, _ = recovery.next_action(recovery.begin(patient, groups, presence="there"), run_state.Tick(0.0))
    return Standing(state, {})


def _events(change: Change, groups: tuple[int, ...]) -> Iterator[run_state.Event]:
    if change == "lost":
        yield run_state.NodeLost(0, "", "", groups)
    for group in groups:
        if change == "left":
            yield run_state.PresenceChanged(group, "awaited")
            yield run_state.GroupEnded(group, done=False, from_outside=True)
        if change == "returned":
            yield run_state.PresenceChanged(group, "there")
            yield run_state.Stepped(group)


def _without_history(state: run_state.RunState, returned: tuple[int, ...]) -> run_state.RunState:
    """Forget the starts of groups that are back, which nothing but the limit of restarts asks for."""
    groups = list(state.groups)
    for group in returned:
        groups[group] = groups[group]._replace(starts=1, restarts_s=(), start_at_s=-math.inf)
    return state._replace(groups=tuple(groups))
