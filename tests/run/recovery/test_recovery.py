"""The state machine of a run's recovery as a table: in a state, an event leads to a phase and to actions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage
from trainspec_cli.run.recovery.recovery import (
    ANSWER_S,
    FAILURE_GRACE_S,
    LISTING_S,
    RESTART_WINDOW_S,
    begin,
    enough_groups,
    may_restart,
    next_action,
    pause_s,
)
from trainspec_cli.run.recovery.run_state import (
    Action,
    AgentsFailed,
    ArchiveErrors,
    BeginGeneration,
    Begun,
    ChangeNodes,
    Event,
    Expect,
    GroupEnded,
    GroupState,
    Inform,
    Kill,
    Launch,
    MarkFailure,
    NodeBack,
    NodeLost,
    NodeReturned,
    NodeSlow,
    NodesSeen,
    NodeStopRequested,
    NodeUnfit,
    Noted,
    Orphaned,
    PresenceChanged,
    RecordLosses,
    Refuse,
    RendezvousRestarted,
    Retried,
    RunState,
    Stepped,
    Stop,
    StopRequested,
    TakeSetting,
    Tick,
    WorkerFailed,
)

GRACE_S = 30.0
RESTART = ResilienceSpec(mode="restart", max_restarts_per_hour=2)
ELASTIC = ResilienceSpec(mode="elastic", max_restarts_per_hour=2, exchange_timeout_s=60.0)
NOW = 10_000.0
RUNNING = GroupState("running", "there", starts=1, checkpoint_step=10)
WAITING = GroupState("waiting", "there")
DONE, GONE = GroupState("done", "there", starts=1), GroupState("gone", "there", starts=1)


def a_run(*groups: GroupState, **more: Any) -> RunState:
    """A run that has stepped, of these groups."""
    resilience = RESTART if len(groups) == 1 else ELASTIC
    about = {
        "checkpoint_step": 10,
        "now_s": NOW,
        "has_begun": True,
        "has_stepped": True,
        "expected_groups": len(groups),
    }
    return RunState(resilience, groups, GRACE_S, **(about | more))


def ended(group: int = 0, **more: Any) -> GroupEnded:
    """A worker was killed, and a checkpoint was written since the start."""
    about = {"done": False, "headline": "it broke", "exit_code": 1, "from_outside": True, "checkpoint_step": 20}
    return GroupEnded(group, **(about | more))


ALONE = a_run(RUNNING)
PAIR = a_run(RUNNING, RUNNING)
FOUR, TWO = MemorySetting(4, "none", "none"), MemorySetting(2, "none", "none")
FULL = MemorySetting(1, "full", "none")
SHORT = Shortage(FOUR, "dp_shard=2")
LADDER = a_run(RUNNING, memory_ladder=(FOUR, TWO))
TWO_FROM_20, TWO_FROM_0 = (
    Inform(f"it broke; the run continues from step {step} with micro-batches of 2 samples") for step in (20, 0)
)
BACK_FROM_20 = Inform("it broke; the run starts again from step 20")
AGAIN = "group 0: it broke; it starts again"
TOO_OFTEN = "group 0: it broke; it is not restarted: it failed too often"
LATE = NOW + 100
SLOW = NodeSlow(1, "b", "it is slow")
LEAVING = a_run(RUNNING._replace(kill_at_s=NOW + GRACE_S), leaving=(SLOW,))
LOST, ANOTHER, BACK = NodeLost(1, "b", "off", (0,)), NodeLost(2, "c", "off", (0,)), NodeReturned(1, "b", "it is back")
SURVIVING = ALONE._replace(survives_lost_nodes=True)
HIT = SURVIVING._replace(groups=(RUNNING._replace(phase="ending"),), leaving=(LOST,))

TABLE: list[tuple[str, RunState, Event, list[str], tuple[Action, ...]]] = [
    # Starting
    ("its nodes have come", a_run(WAITING._replace(presence="awaited")), PresenceChanged(0, "there"),
     ["running"], (Launch(0, 1),)),
    ("one node is missing", a_run(WAITING), PresenceChanged(0, "awaited"), ["waiting"], ()),
    ("time alone brings no node", a_run(WAITING._replace(presence="awaited")), Tick(LATE), ["waiting"], ()),
    ("the pause is not over", a_run(WAITING._replace(start_at_s=LATE), RUNNING), Tick(LATE - 1),
     ["waiting", "running"], ()),
    ("the pause is over", a_run(WAITING._replace(starts=3, start_at_s=LATE), RUNNING), Tick(LATE),
     ["running", "running"], (Launch(0, 4),)),
    ("a new generation is opened first", a_run(WAITING._replace(starts=1, needs_generation=True)), Tick(LATE),
     ["waiting"], (BeginGeneration(),)),
    # One group: failures
    ("a worker failed: the others may report", ALONE, WorkerFailed(0), ["running"], (MarkFailure(),)),
    ("the same failure is marked once", a_run(RUNNING._replace(kill_at_s=LATE)), WorkerFailed(0), ["running"], ()),
    ("orphans get a request to save", ALONE, Orphaned(0), ["running"], (MarkFailure(), Stop(0))),
    ("the time to report is over", a_run(RUNNING._replace(kill_at_s=LATE)), Tick(LATE + 0.1), ["ending"], (Kill(0),)),
    ("the time to report is not over", a_run(RUNNING._replace(kill_at_s=LATE)), Tick(LATE), ["running"], ()),
    ("it ended well", ALONE, ended(done=True, exit_code=0), ["done"], ()),
    ("a failure after the result changes nothing", a_run(RUNNING._replace(phase="ending")), ended(done=True), ["done"],
     ()),
    ("killed, with a newer checkpoint", ALONE, ended(), ["waiting"], (BACK_FROM_20,)),
    ("killed, with an older checkpoint", ALONE, ended(checkpoint_step=10), ["waiting"],
     (Inform("it broke; the run starts again from step 10"),)),
    ("it crashed, without a checkpoint", ALONE, ended(checkpoint_step=0), ["gone"], ()),
    ("killed, without a checkpoint", ALONE, ended(checkpoint_step=0, was_killed=True), ["waiting"],
     (Inform("it broke; the run starts again from the beginning"),)),
    ("killed, without a checkpoint, and twice without a step", a_run(RUNNING._replace(failures_in_a_row=1)),
     ended(checkpoint_step=0, was_killed=True), ["gone"], ()),
    ("killed by the kernel for want of memory, without a checkpoint", ALONE,
     ended(checkpoint_step=0, shortage=SHORT, was_killed=True),
     ["gone"], ()),
    ("an error of its own, with progress", ALONE, ended(from_outside=False, own_error=True), ["waiting"],
     (BACK_FROM_20,)),
    ("an error of its own, without progress", ALONE,
     ended(from_outside=False, own_error=True, checkpoint_step=10), ["gone"], ()),
    ("nobody says why, without progress", ALONE, ended(from_outside=False, checkpoint_step=10), ["gone"], ()),
    ("an error that was foreseen", ALONE, ended(foreseen=True), ["gone"], ()),
    ("its memory ran out", LADDER, ended(shortage=SHORT, foreseen=True, own_error=True), ["waiting"],
     (TakeSetting(0, SHORT, TWO, "it broke"), TWO_FROM_20)),
    ("its memory ran out before a checkpoint", LADDER, ended(shortage=SHORT, checkpoint_step=0), ["waiting"],
     (TakeSetting(0, SHORT, TWO, "it broke"), TWO_FROM_0)),
    ("its memory ran out, restarted too often",
     a_run(RUNNING._replace(restarts_s=(NOW - 9, NOW - 5)), memory_ladder=(FOUR, TWO)),
     ended(shortage=SHORT), ["waiting"], (TakeSetting(0, SHORT, TWO, "it broke"), TWO_FROM_20)),
    ("memory runs out although less was taken", a_run(RUNNING._replace(taken=TWO), memory_ladder=(FOUR, TWO, FULL)),
     ended(shortage=SHORT), ["waiting"],
     (TakeSetting(0, SHORT, FULL, "it broke"),
      Inform("it broke; the run continues from step 20 with micro-batches of 1 sample, recompute=full"))),
    ("nothing takes less memory", a_run(RUNNING, memory_ladder=(FOUR,)), ended(shortage=SHORT, foreseen=True), ["gone"],
     ()),
    ("without a ladder", ALONE, ended(shortage=SHORT, foreseen=True), ["gone"], ()),
    ("memory ran out, mode none", LADDER._replace(resilience=replace(RESTART, mode="none")), ended(shortage=SHORT),
     ["gone"], ()),
    ("memory ran out while it stops", LADDER._replace(stop_requested=True), ended(shortage=SHORT), ["gone"], ()),
    ("processes are left behind", ALONE, ended(left_behind=(7,)), ["gone"], ()),
    ("a stop was requested", a_run(RUNNING, stop_requested=True), ended(), ["gone"], ()),
    ("mode none", ALONE._replace(resilience=replace(RESTART, mode="none")), ended(), ["gone"], ()),
    ("restarted too often", a_run(RUNNING._replace(restarts_s=(NOW - 9, NOW - 5))), ended(), ["gone"], ()),
    ("restarted long ago", a_run(RUNNING._replace(restarts_s=(NOW - RESTART_WINDOW_S, NOW - 5))), ended(), ["waiting"],
     (BACK_FROM_20,)),
    ("an end that is known already", a_run(GONE), ended(), ["gone"], ()),
    # One group: nodes
    ("a lost node ends the run", ALONE, NodeLost(1, "b", "off", (0,)), ["ending"], (RecordLosses(), Kill(0))),
    ("a node that never came", a_run(WAITING._replace(presence="awaited")), NodeLost(1, "b", "off", ()), ["gone"],
     (RecordLosses(),)),
    ("a lost node is left behind", SURVIVING, LOST, ["ending"], (MarkFailure(), Kill(0))),
    ("another one is lost meanwhile", HIT, ANOTHER, ["ending"], ()),
    ("the others have ended", HIT, ended(), ["waiting"], ()),
    ("so did they without a checkpoint", HIT, ended(checkpoint_step=0), ["waiting"], ()),
    ("the next generation has other nodes",
     SURVIVING._replace(groups=(WAITING._replace(starts=1, needs_generation=True),), leaving=(LOST, ANOTHER)),
     Tick(LATE), ["waiting"], (ChangeNodes((LOST, ANOTHER)), BeginGeneration())),
    ("a node is lost before the next generation",
     SURVIVING._replace(groups=(WAITING._replace(starts=1, needs_generation=True),)), LOST, ["waiting"], ()),
    ("a slow node is lost while it leaves", LEAVING._replace(survives_lost_nodes=True), LOST, ["ending"],
     (MarkFailure(), Kill(0))),
    ("lost too often", HIT._replace(groups=(HIT.groups[0]._replace(restarts_s=(NOW - 9, NOW - 5)),)), ended(), ["gone"],
     (RecordLosses(),)),
    ("a person stops the run meanwhile", HIT._replace(stop_requested=True), ended(), ["gone"], (RecordLosses(),)),
    ("lost in a run that stops", SURVIVING._replace(stopping=True), LOST, ["ending"], (RecordLosses(), Kill(0))),
    ("a node does not come to a restart", SURVIVING._replace(groups=(WAITING._replace(starts=1),)),
     replace(LOST, groups=()), ["waiting"], ()),
    ("one does not come that the start was to do without",
     SURVIVING._replace(groups=(WAITING._replace(starts=1),), replaced=(1,)), replace(LOST, groups=()), ["gone"],
     (RecordLosses(),)),
    ("one does not come to the first start after a takeover",
     SURVIVING._replace(groups=(WAITING,), took_over=True), replace(LOST, groups=()), ["waiting"], ()),
    ("one does not come to a start that waits for it",
     SURVIVING._replace(groups=(WAITING._replace(starts=1),), resilience=replace(RESTART, after_node_loss="wait")),
     replace(LOST, groups=()), ["gone"], (RecordLosses(),)),
    ("a node that returned is unfit", SURVIVING._replace(groups=(WAITING._replace(starts=1),)),
     NodeUnfit(1, "b", "no GPU"), ["waiting"], ()),
    ("nor does it again and again",
     SURVIVING._replace(groups=(WAITING._replace(starts=1, restarts_s=(NOW - 9, NOW - 5)),)),
     replace(LOST, groups=()), ["gone"], (RecordLosses(),)),
    ("a node does not come to the first start", SURVIVING._replace(groups=(WAITING,)), replace(LOST, groups=()),
     ["gone"], (RecordLosses(),)),
    ("a node is back", ALONE, BACK, ["running"], (Inform("it is back"), Stop())),
    ("a node is back, but restarts are needed for losses",
     a_run(RUNNING._replace(restarts_s=(NOW - 9, NOW - 5))), BACK, ["running"], ()),
    ("it takes part from the next start", LEAVING._replace(leaving=(BACK,)), ended(), ["waiting"], ()),
    ("an unfit node", a_run(WAITING._replace(presence="awaited")), NodeUnfit(1, "b", "no GPU"), ["gone"],
     (RecordLosses(),)),
    ("no agent could be started", a_run(WAITING._replace(presence="awaited")), AgentsFailed(3), ["gone"], ()),
    # One group: a node is too slow
    ("a slow node is left out by a stop", ALONE, SLOW, ["running"], (Inform("it is slow"), Stop())),
    ("a second one waits", LEAVING, replace(SLOW, node=2), ["running"], ()),
    ("one that was left out already", a_run(RUNNING, left_out=(1,)), SLOW, ["running"], ()),
    ("a run that fails makes that good first", a_run(RUNNING._replace(kill_at_s=LATE)), SLOW, ["running"], ()),
    ("a run that waits", a_run(WAITING), SLOW, ["waiting"], ()),
    ("a run that stops", a_run(RUNNING, stopping=True), SLOW, ["running"], ()),
    ("a run that is to stop", a_run(RUNNING, stop_requested=True), SLOW, ["running"], ()),
    ("a run that has not stepped", a_run(RUNNING, has_stepped=False), SLOW, ["running"], ()),
    ("slow, mode none", ALONE._replace(resilience=replace(RESTART, mode="none")), SLOW, ["running"], ()),
    ("its workers have ended", LEAVING, ended(from_outside=False), ["waiting"], ()),
    ("its workers do not end in time", LEAVING, Tick(NOW + GRACE_S + 0.1), ["ending"], (Kill(0),)),
    ("they were killed without a newer checkpoint", LEAVING, ended(checkpoint_step=10), ["waiting"],
     (Inform("it broke; the run starts again from step 10"),)),
    ("one fails meanwhile, with progress", LEAVING, ended(own_error=True), ["waiting"],
     (BACK_FROM_20,)),
    ("one fails meanwhile, for good", LEAVING, ended(foreseen=True), ["gone"], ()),
    ("the run was done before it could stop", LEAVING, ended(done=True), ["done"], ()),
    ("a person stops it meanwhile", LEAVING._replace(stop_requested=True), ended(), ["gone"], ()),
    ("some of its processes are left behind", LEAVING, ended(left_behind=(7,)), ["gone"], ()),
    ("other nodes stand by", ALONE, NodesSeen(("a", "b")), ["running"], ()),
    ("with several groups, no group is left out", PAIR, SLOW, ["running", "running"], ()),
    # Several groups: failures
    ("a worker failed: its group is killed", PAIR, WorkerFailed(0), ["ending", "running"], (Kill(0),)),
    ("it is killed once", a_run(RUNNING._replace(phase="ending"), RUNNING), WorkerFailed(0), ["ending", "running"], ()),
    ("a group was killed", PAIR, ended(), ["waiting", "running"], (ArchiveErrors(0), Inform(AGAIN))),
    ("a group's memory ran out", a_run(RUNNING, RUNNING, memory_ladder=(FOUR, TWO)),
     ended(shortage=SHORT, foreseen=True, own_error=True), ["waiting", "running"],
     (ArchiveErrors(0), TakeSetting(0, SHORT, TWO, "it broke"),
      Inform("group 0: it broke; it starts again with micro-batches of 2 samples"))),
    ("a group has an error of its own", PAIR, ended(own_error=True), ["waiting", "running"],
     (ArchiveErrors(0), Inform(AGAIN))),
    ("it fails before the run has stepped", a_run(RUNNING, RUNNING, has_stepped=False), ended(own_error=True),
     ["gone", "running"], (Inform("group 0: it broke"), Stop())),
    ("it is killed before the run has stepped", a_run(RUNNING, RUNNING, has_stepped=False), ended(),
     ["waiting", "running"], (ArchiveErrors(0), Inform(AGAIN))),
    ("a foreseen error ends all", PAIR, ended(foreseen=True), ["gone", "running"],
     (Inform("group 0: it broke"), Stop())),
    ("it fails again and again", a_run(RUNNING._replace(failures_in_a_row=2), RUNNING), ended(),
     ["waiting", "running"], (ArchiveErrors(0), Inform(f"{AGAIN} after 2 s"))),
    ("it failed too often", a_run(RUNNING._replace(restarts_s=(NOW - 9, NOW - 5)), RUNNING), ended(),
     ["gone", "running"], (ArchiveErrors(0), Inform(TOO_OFTEN), Expect(1))),
    ("it waits for its nodes", a_run(RUNNING._replace(presence="awaited"), RUNNING), ended(), ["waiting", "running"],
     (ArchiveErrors(0), Inform("group 0: it broke; it starts again when its nodes are back"))),
    ("while the run stops", a_run(RUNNING, RUNNING, stopping=True), ended(), ["gone", "running"], (ArchiveErrors(0),)),
    ("after another has ended well", a_run(RUNNING, DONE), ended(), ["gone", "done"], (ArchiveErrors(0),)),
    ("one ends well, the others wait no more", a_run(RUNNING, WAITING), ended(done=True, exit_code=0), ["done", "gone"],
     ()),
    ("what a group that ended well has left behind is killed",
     a_run(RUNNING._replace(phase="ending", kill_at_s=NOW - 1), RUNNING), ended(done=True), ["done", "running"], ()),
    ("one ends well while it is killed", a_run(RUNNING._replace(phase="ending"), RUNNING), ended(done=True),
     ["waiting", "running"], (ArchiveErrors(0), Inform(AGAIN))),
    # Several groups: stuck
    ("the others stepped without it", a_run(RUNNING._replace(stepped_s=NOW), RUNNING._replace(stepped_s=NOW + 55)),
     Tick(NOW + 55), ["ending", "running"], (Kill(0),)),
    ("the others are not far ahead", a_run(RUNNING._replace(stepped_s=NOW), RUNNING._replace(stepped_s=NOW + 53)),
     Tick(NOW + 55), ["running", "running"], ()),
    ("the others retry, and it does not",
     a_run(RUNNING._replace(stepped_s=NOW), RUNNING._replace(stepped_s=NOW, retried_s=NOW + 60)),
     Tick(NOW + 60 + ANSWER_S + 0.1), ["ending", "running"], (Kill(0),)),
    ("it may still answer", a_run(RUNNING._replace(stepped_s=NOW), RUNNING._replace(stepped_s=NOW, retried_s=NOW + 60)),
     Tick(NOW + 60 + ANSWER_S), ["running", "running"], ()),
    ("it retries as well",
     a_run(*[RUNNING._replace(stepped_s=NOW, retried_s=NOW + 60)] * 2), Tick(NOW + 63), ["running", "running"], ()),
    ("it has not stepped yet", a_run(RUNNING, RUNNING._replace(stepped_s=NOW + 500)), Tick(NOW + 500),
     ["running", "running"], ()),
    # Several groups: nodes
    ("a node is lost with its group", PAIR, NodeLost(1, "b", "off", (1,)), ["running", "ending"], (Kill(1),)),
    ("a node is lost that two groups share", PAIR, NodeLost(0, "a", "off", (0, 1)), ["ending", "ending"],
     (Kill(0), Kill(1))),
    ("a node that runs nothing is lost", PAIR, NodeLost(1, "b", "off", ()), ["running", "running"], ()),
    ("a node is back", PAIR, NodeBack(1, "b"), ["running", "running"],
     (Inform("node 1 (b) is connected again"),)),
    ("a message", PAIR, Noted("so"), ["running", "running"], (Inform("so"),)),
    ("a group is not waited for", a_run(RUNNING, WAITING), PresenceChanged(1, "away"), ["running", "waiting"],
     (Expect(1),)),
    ("a group is away and returns", a_run(RUNNING, WAITING._replace(presence="away"), expected_groups=1),
     PresenceChanged(1, "there"), ["running", "running"], (Launch(1, 1), Expect(2))),
    ("an unfit node before anything ran", a_run(WAITING, WAITING), NodeUnfit(1, "b", "no GPU"), ["waiting", "waiting"],
     (Refuse("unfit_host", "node 1 (b): no GPU"),)),
    ("a node returns unfit", PAIR, NodeUnfit(1, "b", "no GPU"), ["running", "running"],
     (Inform("node 1 (b) came back but cannot take part: no GPU"),)),
    ("no agent could be started of several groups", a_run(WAITING, WAITING), AgentsFailed(3), ["waiting", "waiting"],
     (Refuse("agents_failed", "the node-agent launcher exited with code 3"),)),
    ("a node comes unfit while its group waits", a_run(RUNNING, WAITING), NodeUnfit(1, "b", "no GPU"),
     ["running", "waiting"], (Inform("node 1 (b) came back but cannot take part: no GPU"),)),
    ("an unfit node that has no name yet", PAIR, NodeUnfit(1, "", "no GPU"), ["running", "running"],
     (Inform("node 1 came back but cannot take part: no GPU"),)),
    ("a node is lost whose group waits already", a_run(RUNNING, WAITING), NodeLost(1, "b", "off", (1,)),
     ["running", "waiting"], ()),
    ("a node is lost whose group has ended well", a_run(RUNNING, DONE), NodeLost(1, "b", "off", (1,)),
     ["running", "done"], ()),
    ("agents that ended when one group ran", a_run(RUNNING, WAITING), AgentsFailed(3), ["running", "waiting"], ()),
    ("agents that ended when groups ran", PAIR, AgentsFailed(3), ["running", "running"], ()),
    ("the rendezvous server is back", PAIR, RendezvousRestarted(), ["running", "running"],
     (Inform("the rendezvous server ended; it starts again"),)),
    # Stopping
    ("a request to stop", ALONE, StopRequested(1), ["running"], (Stop(),)),
    ("a request is passed on once", a_run(RUNNING, stop_requested=True, stopping=True), StopRequested(1), ["running"],
     ()),
    ("an agent's request", PAIR, NodeStopRequested(1), ["running", "running"], (Stop(),)),
    ("those that wait stay away", a_run(RUNNING, WAITING), StopRequested(1), ["running", "gone"], (Stop(),)),
]  # fmt: skip


@pytest.mark.parametrize(("state", "event", "phases", "actions"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_table(state: RunState, event: Event, phases: list[str], actions: tuple[Action, ...]) -> None:
    after, found = next_action(state, event)
    assert ([group.phase for group in after.groups], found) == (phases, actions)
    assert not after.killed or any(isinstance(action, Refuse) for action in actions)


def test_workers_of_one_group_have_the_grace_time_and_that_of_the_list() -> None:
    after, _ = next_action(ALONE, WorkerFailed(0))
    assert after.groups[0].kill_at_s == NOW + FAILURE_GRACE_S + LISTING_S
    sooner, _ = next_action(after, Orphaned(0))
    assert sooner.groups[0].kill_at_s == NOW + FAILURE_GRACE_S


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (ALONE._replace(has_begun=False), StopRequested(1)),
        (PAIR._replace(has_begun=False), StopRequested(1)),
        (ALONE._replace(stop_requested=True, stopping=True), StopRequested(2)),
        (ALONE._replace(deadline_s=LATE), Tick(LATE + 0.1)),
    ],
    ids=["nothing to save", "nothing to save in groups", "second request", "deadline"],
)
def test_what_is_left_is_killed(state: RunState, event: Event) -> None:
    after, actions = next_action(state, event)
    assert (after.killed, after.is_over, actions) == (True, True, ())


def test_a_request_to_stop_has_a_deadline() -> None:
    after, _ = next_action(ALONE, StopRequested(1))
    assert (after.stop_requested, after.deadline_s, after.killed) == (True, NOW + GRACE_S, False)
    later, _ = next_action(after._replace(now_s=NOW + 5), StopRequested(1))
    assert later.deadline_s == NOW + GRACE_S
    assert not next_action(after, Tick(NOW + GRACE_S))[0].killed


def test_a_new_generation_is_waited_for_and_begins_with_nothing_to_save() -> None:
    state = a_run(WAITING._replace(starts=1, needs_generation=True), exit_code=1)
    state, actions = next_action(state, Tick(LATE))
    assert actions == (BeginGeneration(),)
    assert (state.has_begun, state.exit_code, state.groups[0].presence) == (False, None, "awaited")
    state, actions = next_action(state, PresenceChanged(0, "there"))
    assert actions == (Launch(0, 2),)
    assert (state.groups[0].restarts_s, state.groups[0].checkpoint_step) == ((LATE,), 10)


def test_the_newest_checkpoint_is_what_the_next_start_has_to_surpass() -> None:
    state, _ = next_action(ALONE, ended(checkpoint_step=20))
    state, _ = next_action(state, Tick(LATE))
    state, _ = next_action(state, PresenceChanged(0, "there"))
    assert state.groups[0].checkpoint_step == 20
    state, _ = next_action(state, ended(own_error=True, from_outside=False, checkpoint_step=20))
    assert state.is_over


def test_nothing_has_happened_to_a_run_that_begins() -> None:
    group = GroupState("waiting", "awaited", 0, (), -math.inf, math.inf, 0, False, 0, 0.0, 0.0)
    begun = begin(RESTART, 2, GRACE_S, 7)
    assert begun.last_failure
    assert begun._replace(last_failure="") == RunState(
        *(RESTART, (group, group), GRACE_S, 7),
        now_s=0.0,
        deadline_s=math.inf,
        stop_requested=False,
        stopping=False,
        killed=False,
        has_begun=False,
        has_stepped=False,
        expected_groups=0,
        given_up="",
        last_failure="",
        exit_code=None,
    )
    assert begin(RESTART) == begin(RESTART, 1, 0.0, 0, "awaited")


def test_an_end_says_nothing_that_was_not_seen() -> None:
    """Without checkpoint and without a word, a run is not started again; a group that fails is."""
    assert next_action(ALONE, GroupEnded(0, done=False))[0].is_over
    after, actions = next_action(PAIR, GroupEnded(0, done=False))
    assert after.groups[0].phase == "waiting"
    assert actions == (ArchiveErrors(0), Inform("group 0: ; it starts again"))
    assert GroupEnded(0, done=False) == GroupEnded(0, False, "", None, False, False, False, 0, (), None, False)


def test_a_first_start_is_no_restart() -> None:
    state, _ = next_action(begin(RESTART, presence="there"), Tick(NOW))
    assert (state.groups[0].starts, state.groups[0].restarts_s) == (1, ())


def test_a_start_with_less_memory_is_no_restart_after_a_failure() -> None:
    """It does not count, and the failures that follow count as usual."""
    state, _ = next_action(LADDER, ended(shortage=SHORT))
    for event in (Tick(LATE), PresenceChanged(0, "there")):
        state, _ = next_action(state, event)
    assert (state.groups[0].starts, state.groups[0].restarts_s) == (2, ())
    for event in (ended(), Tick(LATE + 1), PresenceChanged(0, "there")):
        state, _ = next_action(state, event)
    assert (state.groups[0].starts, state.groups[0].restarts_s) == (3, (LATE + 1,))


def test_a_start_without_a_slow_node_is_no_restart_after_a_failure() -> None:
    """Also of a run that may fail no more; and the node is not left out again."""
    state = a_run(RUNNING._replace(restarts_s=(NOW - 9, NOW - 5), failures_in_a_row=3))
    for event in (SLOW, ended(from_outside=False), Tick(NOW), PresenceChanged(0, "there")):
        state, actions = next_action(state, event)
    assert actions == (Launch(0, 2),)
    assert (state.groups[0].restarts_s, state.groups[0].kill_at_s) == ((NOW - 9, NOW - 5), math.inf)
    assert (state.leaving, state.left_out, state.groups[0].is_planned) == ((), (1,), False)
    assert next_action(state, SLOW) == (state, ())
    state, _ = next_action(state, ended())
    assert state.is_over, "the failures that follow count as usual"


def test_a_run_that_leaves_a_node_out_has_as_long_to_stop_as_at_a_request() -> None:
    state, _ = next_action(ALONE, SLOW)
    assert (state.groups[0].kill_at_s, state.stop_requested, state.stopping) == (NOW + GRACE_S, False, False)
    assert next_action(state, Tick(NOW + GRACE_S)) == (state._replace(now_s=NOW + GRACE_S), ())
    state, actions = next_action(state, StopRequested(1))
    assert (actions, state.deadline_s) == ((Stop(),), NOW + GRACE_S)


def test_a_step_ends_a_row_of_failures_and_a_retry_does_not() -> None:
    state = a_run(RUNNING._replace(failures_in_a_row=3), RUNNING, has_stepped=False)
    state, _ = next_action(state, Retried(0))
    assert (state.groups[0].failures_in_a_row, state.groups[0].retried_s, state.has_stepped) == (3, NOW, False)
    state, _ = next_action(state, Stepped(0))
    assert (state.groups[0].failures_in_a_row, state.groups[0].stepped_s, state.has_stepped) == (0, NOW, True)


def test_the_first_event_of_the_workers_is_something_to_save() -> None:
    state, _ = next_action(ALONE._replace(has_begun=False), Begun(0))
    assert state.has_begun


def test_too_few_groups_end_the_run_with_their_losses_and_the_reason() -> None:
    state = PAIR._replace(resilience=replace(ELASTIC, min_groups=2, max_restarts_per_hour=0))
    state, actions = next_action(state, ended())
    assert actions == (ArchiveErrors(0), Inform(TOO_OFTEN), Expect(1), RecordLosses(), Stop())
    for fact in ("1 of 2 ", "resilience.min_groups is 2", "it broke"):
        assert fact in state.given_up
    assert (state.stopping, state.deadline_s, state.stop_requested) == (True, NOW + GRACE_S, False)


def test_groups_that_may_come_are_counted_from_the_beginning() -> None:
    state, actions = next_action(begin(ELASTIC, 3), PresenceChanged(1, "awaited"))
    assert actions == (Expect(3),)
    assert next_action(state, PresenceChanged(1, "there"))[1] == (Launch(1, 1),)


def test_a_run_is_over_when_no_group_runs_or_waits() -> None:
    assert [a_run(group, GONE).is_over for group in (RUNNING, WAITING, DONE, GONE)] == [False, False, True, True]
    assert not a_run(RUNNING._replace(phase="ending")).is_over


def test_the_state_is_lost_when_no_group_runs() -> None:
    assert [a_run(group, WAITING).is_lost for group in (RUNNING, RUNNING._replace(phase="ending"))] == [False, True]


def test_restarts_are_bounded_by_the_hour() -> None:
    assert may_restart(RESTART, (), now_s=0)
    assert not may_restart(RESTART, (10.0, 20.0), now_s=3600)
    assert may_restart(RESTART, (10.0, 20.0), now_s=3611)
    assert not may_restart(ResilienceSpec(mode="none"), (), now_s=0)


def test_what_worked_starts_again_at_once_and_what_does_not_ever_later() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 4)] == [0, 1, 2, 4]
    assert pause_s(5000) == 60


def test_the_run_goes_on_down_to_the_least_number_of_groups() -> None:
    resilience = replace(ELASTIC, min_groups=2)
    assert (enough_groups(resilience, 2), enough_groups(resilience, 1)) == (True, False)


def test_times_of_a_start_are_forgotten_at_the_next() -> None:
    old = WAITING._replace(starts=1, kill_at_s=5.0, stepped_s=5.0, retried_s=5.0)
    group = next_action(a_run(old, RUNNING), Tick(NOW))[0].groups[0]
    assert (group.kill_at_s, group.stepped_s, group.retried_s) == (math.inf, 0.0, 0.0)


def own_failure(steps: int, **more: Any) -> GroupEnded:
    return GroupEnded(0, done=False, headline="it failed", exit_code=1, checkpoint_step=steps, **more)


def fail_own(state: RunState, *failures: GroupEnded) -> tuple[RunState, list[str]]:
    """Start a command of the user's own, and again after each failure; -> what people hear."""
    heard = []
    for number, failure in enumerate(failures):
        state, _ = next_action(state, PresenceChanged(0, "there"))
        state, actions = next_action(state, failure)
        heard += [action.text for action in actions if isinstance(action, Inform)]
        state, _ = next_action(state, Tick(1e4 * (number + 1)))
    return state, heard


def test_a_command_of_ones_own_has_one_budget_for_the_whole_job() -> None:
    begun = begin(ResilienceSpec(mode="none"), restarts_left=2)
    state, heard = fail_own(begun, own_failure(5), own_failure(9), own_failure(20))
    assert len(heard) == 2 and "1 more" in heard[0] and "last restart" in heard[1]
    assert state.is_over


def test_a_command_whose_steps_nobody_counts_is_started_again_after_it_has_worked_for_long() -> None:
    begun = begin(ResilienceSpec(mode="none"), restarts_left=2)
    worked = own_failure(0, has_worked=True)
    assert not fail_own(begun, worked, worked)[0].is_over
    assert fail_own(begun, worked, worked, worked)[0].is_over, "its budget is used up"
    assert fail_own(begun, worked, own_failure(0))[0].is_over, "it ended immediately"
    assert fail_own(begun, own_failure(0, has_worked=True, foreseen=True))[0].is_over


def test_a_command_of_ones_own_that_makes_no_step_is_not_started_again() -> None:
    begun = begin(ResilienceSpec(mode="none"), restarts_left=9)
    assert fail_own(begun, own_failure(0))[0].is_over
    assert fail_own(begun, own_failure(0, from_outside=True))[0].is_over
    assert fail_own(begun, own_failure(5), own_failure(5))[0].is_over
    assert not fail_own(begun, own_failure(5), own_failure(5, from_outside=True))[0].is_over


@pytest.mark.parametrize(
    ("second", "is_over"),
    [
        ({"cause": "ValueError at a.py:3", "reached_step": 31}, True),
        ({"cause": "ValueError at a.py:3", "reached_step": 32}, False),
        ({"cause": "ValueError at a.py:4", "reached_step": 31}, False),
        ({"cause": "", "reached_step": 31}, False),
        ({"cause": "ValueError at a.py:3", "reached_step": 31, "has_worked": True}, False),
    ],
    ids=["same", "further", "elsewhere", "unknown", "uncounted"],
)
def test_the_same_exception_without_progress_ends_a_command(second: dict[str, Any], is_over: bool) -> None:
    begun = begin(ResilienceSpec(mode="none"), restarts_left=9)
    first = own_failure(31, cause="ValueError at a.py:3", reached_step=31)
    assert fail_own(begun, first, own_failure(62, **second))[0].is_over is is_over


def lose_node(state: RunState, node: int = 1) -> RunState:
    """A node of a running command dies, and the other nodes' processes end."""
    state, _ = next_action(state, PresenceChanged(0, "there"))
    state, actions = next_action(state, NodeLost(node, "b", "is off", (0,)))
    assert Kill(0) in actions
    return next_action(state, own_failure(5, foreseen=True))[0]


def test_a_command_of_ones_own_restarts_without_a_lost_node_within_its_budget() -> None:
    begun = begin(ResilienceSpec(mode="none"), restarts_left=1, survives_lost_nodes=True)
    state, actions = next_action(lose_node(begun), Tick(1.0))
    assert [type(action) for action in actions] == [ChangeNodes, BeginGeneration]
    assert not state.is_over and state.restarts_left == 0
    assert lose_node(state).is_over, "its budget is used up"


def test_a_command_of_ones_own_ends_with_a_lost_node_where_its_job_is_requeued() -> None:
    assert lose_node(begin(ResilienceSpec(mode="none"), restarts_left=3)).is_over


@pytest.mark.parametrize("exit_code", [0, 1, None])
def test_a_command_of_ones_own_restarts_with_a_node_that_returned_whatever_its_exit_code(exit_code: int | None) -> None:
    state = begin(ResilienceSpec(mode="none"), restarts_left=0, survives_lost_nodes=True)
    for event in (PresenceChanged(0, "there"), Stepped(0), NodeReturned(1, "b", "is back")):
        state, actions = next_action(state, event)
    assert Stop() in actions
    ended = GroupEnded(0, done=exit_code == 0, exit_code=exit_code, checkpoint_step=5)
    state, _ = next_action(state, ended)
    assert next_action(state, Tick(1.0))[1] == (ChangeNodes((NodeReturned(1, "b", "is back"),)), BeginGeneration())
