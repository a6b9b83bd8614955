"""What is asked once is what `next_action` decides each time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from trainspec_cli.planner.run.goodput import PATIENCE, start_run
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery import recovery, run_state

ELASTIC = ResilienceSpec(mode="elastic")


@pytest.mark.parametrize("groups", [2, 5])
def test_a_standing_holds_the_phases_that_the_policy_decides(groups: int) -> None:
    """Groups are lost and come back in any order, for longer than the limit of restarts would allow."""
    chance, standing = random.Random(groups), start_run(ELASTIC, groups)
    patient = replace(ELASTIC, max_restarts_per_hour=PATIENCE)
    state, _ = recovery.next_action(recovery.begin(patient, groups, presence="there"), run_state.Tick(0.0))
    away: set[int] = set()
    for _ in range(300):
        group = chance.randrange(groups)
        events: list[run_state.Event]
        if group in away:
            away.remove(group)
            events = [run_state.PresenceChanged(group, "there"), run_state.Stepped(group)]
            standing = standing.after("returned", (group,))
        elif len(away) < groups - 1:
            away.add(group)
            events = [run_state.NodeLost(0, "", "", (group,)), run_state.PresenceChanged(group, "awaited")]
            events.append(run_state.GroupEnded(group, done=False, from_outside=True))
            standing = standing.after("lost", (group,)).after("left", (group,))
        else:
            continue
        for event in events:
            state, _ = recovery.next_action(state, event)
        assert [own.phase for own in standing.state.groups] == [own.phase for own in state.groups]
        assert standing.is_lost == state.is_lost


def test_the_same_way_to_stand_is_one_object() -> None:
    standing = start_run(ELASTIC, 3)
    seen = set()
    for _ in range(20):
        standing = standing.after("lost", (1,)).after("left", (1,)).after("returned", (1,))
        seen.add(id(standing))
    assert len(seen) == 1


def test_a_run_of_one_group_is_lost_with_it() -> None:
    started = start_run(ResilienceSpec(mode="restart"), 1)
    assert not started.is_lost and started.groups == (0,)
    assert started.after("lost", started.groups).is_lost
