"""The states of a path: the table, and random histories through it."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from trainspec_cli.planner.planes.paths import STATES, TRANSITIONS, PathCounts, PathEvent, next_state
from trainspec_cli.spec.results.planes import PathState

EVENTS = get_args(PathEvent)


def test_the_table_speaks_of_every_state_and_event() -> None:
    assert {state for state, _ in TRANSITIONS} == set(STATES) == set(get_args(PathState))
    assert {event for _, event in TRANSITIONS} == set(EVENTS)


@pytest.mark.parametrize(
    ("history", "state"),
    [
        (("marked", "turn"), "good"),
        (("marked", "lost"), "assumed_bad"),
        (("lost", "turn"), "assumed_bad"),
        (("lost", "probed"), "good"),
        (("deny", "probed"), "denied"),
        (("deny", "allow", "probed"), "good"),
        (("deny", "allow"), "assumed_bad"),
        (("lost", "deny", "lost"), "denied"),
        (("allow",), "good"),
    ],
)
def test_a_history(history: tuple[PathEvent, ...], state: PathState) -> None:
    now: PathState = "good"
    for event in history:
        now = next_state(now, event)
    assert now == state


@pytest.mark.parametrize("seed", range(20))
def test_a_path_that_lost_comes_back_by_a_probe_alone_and_a_denied_one_only_when_it_is_allowed(seed: int) -> None:
    chance, state = random.Random(seed), "good"
    for _ in range(500):
        event = chance.choice(EVENTS)
        after = next_state(state, event)  # type: ignore[arg-type]
        if state == "assumed_bad" and after == "good":
            assert event == "probed"
        if state == "denied" and after != "denied":
            assert (event, after) == ("allow", "assumed_bad")
        state = after


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_what_paths_one_by_one_come_to(seed: int) -> None:
    """A crowd of paths, told the same: some of those in one state hear an event."""
    chance = random.Random(seed)
    counts, paths = PathCounts(50), ["good"] * 50
    for _ in range(300):
        state, event = chance.choice(STATES), chance.choice(EVENTS)
        number = chance.randrange(20)
        hearing = [place for place, now in enumerate(paths) if now == state][:number]
        assert counts.move(state, event, number) == len(hearing)
        for place in hearing:
            paths[place] = next_state(state, event)
        assert counts.paths == {known: paths.count(known) for known in STATES}
        assert counts.unused == paths.count("denied") + paths.count("assumed_bad")
