"""Random histories of a run's recovery: what holds after every event, whatever came before it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery.recovery import RESTART_WINDOW_S, begin, next_action, pause_s
from trainspec_cli.run.recovery.run_state import (
    Action,
    AgentsFailed,
    BeginGeneration,
    Begun,
    Event,
    Expect,
    GroupEnded,
    Kill,
    Launch,
    NodeBack,
    NodeLost,
    NodeReturned,
    NodeSlow,
    NodeStopRequested,
    NodeUnfit,
    Orphaned,
    PresenceChanged,
    RendezvousRestarted,
    Retried,
    RunState,
    Stepped,
    Stop,
    StopRequested,
    Tick,
    WorkerFailed,
)

GROUPS = 3
NEXT = {
    "waiting": {"waiting", "running", "gone"},
    "running": {"running", "ending", "waiting", "done", "gone"},
    "ending": {"ending", "waiting", "done", "gone"},
    "done": {"done"},
    "gone": {"gone"},
}
"""Phases that may follow one, in one event; `waiting` after `running` is a failure that the group's end tells."""
EVENTS = st.one_of(
    st.builds(Tick, st.floats(0.1, 2000)),  # seconds since the last one
    st.builds(PresenceChanged, st.integers(0, 2), st.sampled_from(["there", "there", "awaited", "away"])),
    st.builds(Begun, st.integers(0, 2)),
    st.builds(Stepped, st.integers(0, 2)),
    st.builds(Retried, st.integers(0, 2)),
    st.builds(WorkerFailed, st.integers(0, 2)),
    st.builds(Orphaned, st.integers(0, 2)),
    st.builds(
        GroupEnded,
        st.integers(0, 2),
        done=st.sampled_from([False, False, False, True]),
        headline=st.just("it broke"),
        foreseen=st.sampled_from([False] * 9 + [True]),
        own_error=st.booleans(),
        from_outside=st.booleans(),
        checkpoint_step=st.integers(0, 50),
    ),
    st.builds(NodeLost, st.integers(0, 2), st.just("b"), st.just("off"), st.sampled_from([(0,), (1,), (0, 1), ()])),
    st.builds(NodeBack, st.integers(0, 2)),
    st.builds(NodeUnfit, st.integers(0, 2), st.just("b"), st.just("no GPU")),
    st.builds(NodeSlow, st.integers(0, 2), st.just("b"), st.just("slow")),
    st.builds(NodeReturned, st.integers(0, 2), st.just("b"), st.just("back")),
    st.just(RendezvousRestarted()),
)
ENDINGS = st.one_of(st.builds(StopRequested, st.just(1)), st.builds(NodeStopRequested, st.just(1)))
HISTORIES = st.tuples(st.lists(EVENTS, max_size=60), st.lists(ENDINGS, max_size=1), st.lists(EVENTS, max_size=10)).map(
    lambda parts: [*parts[0], *parts[1], *parts[2]]
)
MODES = [
    (ResilienceSpec(mode="restart", max_restarts_per_hour=2), 1),
    (ResilienceSpec(mode="none"), 1),
    (ResilienceSpec(mode="elastic", max_restarts_per_hour=2, exchange_timeout_s=60.0), GROUPS),
    (ResilienceSpec(mode="elastic", max_restarts_per_hour=6, min_groups=2), GROUPS),
]


def fitted(event: Event, state: RunState) -> Event:
    """The same event in a run with as many groups and a clock that moves on."""
    if isinstance(event, Tick):
        return Tick(state.now_s + event.now_s)
    if isinstance(event, NodeLost):
        return replace(event, groups=tuple(group for group in event.groups if group < len(state.groups)))
    return replace(event, group=event.group % len(state.groups)) if hasattr(event, "group") else event


@pytest.mark.parametrize(("resilience", "groups"), MODES, ids=["restart", "none", "elastic", "two at least"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(history=HISTORIES, presence=st.sampled_from(["there", "awaited"]), survives=st.booleans())
def test_what_holds_in_every_history(
    resilience: ResilienceSpec, groups: int, history: list[Event], presence, survives: bool
) -> None:
    state = begin(resilience, groups, stop_grace_s=30.0, presence=presence, survives_lost_nodes=survives)
    for planned in history:
        event = fitted(planned, state)
        before, (state, actions) = state, next_action(state, event)
        check_phases(before, state, event)
        check_starts(before, state, actions)
        check_ends(before, state, actions)
        if state.is_over:
            break


def check_phases(before: RunState, after: RunState, event: Event) -> None:
    for number, (was, now) in enumerate(zip(before.groups, after.groups, strict=True)):
        assert now.phase in NEXT[was.phase]
        if was.phase in ("running", "ending") and now.phase in ("waiting", "gone", "done"):
            assert isinstance(event, GroupEnded) and event.group == number, "processes are there until they end"


def check_starts(before: RunState, after: RunState, actions: tuple[Action, ...]) -> None:
    """A group starts where its nodes are there and its pause is over, and not more often than is allowed."""
    launched = {action.group: action.number for action in actions if isinstance(action, Launch)}
    started = [number for number, group in enumerate(after.groups) if group.starts > before.groups[number].starts]
    assert sorted(launched) == started
    for number in started:
        was, now = before.groups[number], after.groups[number]
        assert (was.phase, now.phase, now.presence) == ("waiting", "running", "there")
        assert after.now_s >= was.start_at_s
        assert launched[number] == now.starts == was.starts + 1
        assert was.is_planned == (was.starts > 0 and now.restarts_s == was.restarts_s)
        recent = [at for at in now.restarts_s if after.now_s - at < RESTART_WINDOW_S]
        assert len(recent) <= after.resilience.max_restarts_per_hour
        assert after.resilience.mode != "none" or now.starts == 1
        assert (now.kill_at_s, now.stepped_s, now.retried_s) == (math.inf, 0.0, 0.0)
        assert not after.stopping
    waits = [n for n, group in enumerate(after.groups) if before.groups[n].phase != "waiting" == group.phase]
    for number in waits:
        group = after.groups[number]
        assert group.start_at_s == after.now_s + pause_s(group.failures_in_a_row)
        failed = before.groups[number].failures_in_a_row + 1
        assert group.failures_in_a_row == (0 if group.is_planned else failed)
        assert group.needs_generation == after.is_alone
    if any(isinstance(action, BeginGeneration) for action in actions):
        assert after.is_alone and not after.has_begun and after.exit_code is None


def asks(leaving: tuple[Event, ...]) -> bool:
    """Whether workers are asked to end, rather than killed."""
    return bool(leaving) and not any(isinstance(one, NodeLost) for one in leaving)


def check_ends(before: RunState, after: RunState, actions: tuple[Action, ...]) -> None:
    """A killed group was running and is now ending; a run stops after one request, and keeps its deadline."""
    killed = [action.group for action in actions if isinstance(action, Kill)]
    assert killed == [
        number
        for number, group in enumerate(after.groups)
        if before.groups[number].phase == "running" and group.phase == "ending"
    ]
    assert sum(isinstance(action, Stop) and action == Stop() for action in actions) == (
        (after.stopping and not before.stopping) or (asks(after.leaving) and not before.leaving)
    )
    if after.stopping:
        assert after.deadline_s <= after.now_s + after.stop_grace_s
        assert not any(group.phase == "waiting" for group in after.groups)
    assert after.deadline_s <= before.deadline_s
    if not after.is_alone and after.expected_groups != before.expected_groups:
        assert Expect(after.expected_groups) in actions
    if after.given_up and not before.given_up:
        assert after.expected_groups < after.resilience.min_groups


def test_a_group_that_fails_again_and_again_waits_for_its_pause() -> None:
    """It fails three times without a step: the third start is 2 s after the third failure."""
    state = begin(ResilienceSpec(mode="elastic"), 2, presence="there")
    state, _ = next_action(state, Tick(100.0))
    for failures in (1, 2, 3):
        state, _ = next_action(state, GroupEnded(0, done=False, from_outside=True))
        due_s = state.now_s + pause_s(failures)
        assert state.groups[0].start_at_s == due_s
        if failures > 1:
            state, actions = next_action(state, Tick(due_s - 0.01))
            assert actions == ()
        state, actions = next_action(state, Tick(due_s))
        assert actions == (Launch(0, failures + 1),)


def test_a_group_that_waits_for_its_node_starts_when_it_comes_and_its_pause_is_over() -> None:
    state = begin(ResilienceSpec(mode="elastic"), 2, presence="there")
    state, _ = next_action(state, Tick(100.0))
    state, _ = next_action(state, PresenceChanged(0, "awaited"))
    for _ in range(3):
        state, _ = next_action(state, GroupEnded(0, done=False, from_outside=True))
        state, actions = next_action(state, PresenceChanged(0, "there"))
        if actions == ():
            state, actions = next_action(state, Tick(state.groups[0].start_at_s))
        assert Launch(0, state.groups[0].starts) in actions
        state, _ = next_action(state, PresenceChanged(0, "awaited"))


def test_orphans_of_a_group_that_has_ended_are_no_news() -> None:
    state = begin(ResilienceSpec(), presence="there")
    assert next_action(state, Orphaned(0)) == (state, ())
    assert next_action(state, AgentsFailed(3))[0].exit_code == 3
