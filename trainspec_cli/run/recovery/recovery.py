"""Recovery from failures: a pure state machine over a run's replica groups; an ordinary run has one group.

The supervisor calls `next_action(state, event)` with its backend's observations, and the goodput simulation calls it
with random events. A replica group passes through these phases:

    waiting -> running -> done                 it ended successfully
                  |
                  +----> ending -> waiting     it failed, and is restarted when its pause is over and its nodes are
                             |                 connected
                             +---> gone        it is not restarted

A single-group run keeps its state only in checkpoints. After a failure its workers have a grace period to report, and
it restarts as a new generation from its newest checkpoint, if a restart is likely to make progress. With several
groups, a failed one is killed immediately: the others hold the state, continue, and heal it when it returns. After an
out-of-memory failure, the next start uses a setting that needs less memory (`memory.py`); if none is left, the run
ends.

A single-group run drops a node that is too slow (`RunNodes` in `supervise.py`): it writes a checkpoint, exits and
restarts without the node. A run with several groups keeps its slow nodes and assigns them fewer samples.

When a node dies, its agent's connection closes, or is silent for `run.node_timeout_s` (`backend/hub.py`). The backend
(`backend/nodes/backend.py`) records why the groups that ran there will fail (`GroupStart` in `backend/observe.py`), and
reports NodeLost. Here, `_node_lost` orders those groups to be killed. When no process of a group is left, GroupEnded
follows. A single-group run restarts with a spare or on fewer nodes, and later on all of them again (`RunNodes`). Under
Slurm, it ends with exit code 5 (the loss is recorded in errors/nodeNNNNN.json), and its job is requeued without the
node. With several groups, the others continue, and the group waits for its node until the node has been away for too
long. Under Slurm, a second job brings another node (`run/slurm/replacement.py`). A user's command restarts within its
budget, on nodes selected by `CommandNodes`.
"""

from __future__ import annotations

import math
from typing import Any

from trainspec_cli.core.printable import label_node
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.tables import MemorySetting
from trainspec_cli.run.recovery.memory import next_setting
from trainspec_cli.run.recovery.run_state import (
    Action,
    AgentsFailed,
    ArchiveErrors,
    BeginGeneration,
    Begun,
    ChangeNodes,
    Decision,
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
    Presence,
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

FAILURE_GRACE_S = 10
"""Time in seconds that workers may take to exit once one of them, or their torchrun, has failed."""
LISTING_S = 2.0
"""Time in seconds that torchrun may take, after a worker has failed, to end the other workers and list how each of them
exited."""
RESTART_WINDOW_S = 3600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STUCK = 0.9
"""A group is treated as stuck once the others have waited for it for this fraction of `resilience.exchange_timeout_s`.
It is below 1 because clocks are read only 10 times per second."""
ANSWER_S = 2.0
"""Time in seconds that a group may take to retry a failed exchange."""


def begin(
    resilience: ResilienceSpec,
    groups: int = 1,
    stop_grace_s: float = 0.0,
    checkpoint_step: int = 0,
    presence: Presence = "awaited",
    memory_ladder: tuple[MemorySetting, ...] = (),
    restarts_left: int | None = None,
    *,
    survives_lost_nodes: bool = False,
    took_over: bool = False,
) -> RunState:
    """Return the state of a run before anything has been started."""
    return RunState(
        resilience,
        (GroupState(presence=presence),) * groups,
        stop_grace_s,
        checkpoint_step,
        memory_ladder=memory_ladder,
        restarts_left=restarts_left,
        survives_lost_nodes=survives_lost_nodes and (resilience.mode == "restart" or restarts_left is not None),
        took_over=took_over,
    )


def next_action(state: RunState, event: Event) -> Decision:
    """Return the state after `event`, and the resulting actions in order."""
    match event:
        case Tick():
            return _tick(state, event)
        case Begun():
            return state._replace(has_begun=True), ()
        case Stepped(group):
            state = state._replace(has_stepped=True, has_begun=True)
            return _change(state, group, stepped_s=state.now_s, failures_in_a_row=0), ()
        case Retried(group):
            return _change(state, group, retried_s=state.now_s), ()
        case PresenceChanged(group, presence):
            return _count_groups(state, group, _start_if_due(_change(state, group, presence=presence), group))
        case GroupEnded(group):
            return _count_groups(state, group, _group_ended(state, event))
        case WorkerFailed():
            # Kill the group, because the others hold its state. In a single-group run, workers may report and exit by
            # themselves.
            if state.groups[event.group].phase != "running":
                return state, ()
            if not state.is_alone:
                return _change(state, event.group, phase="ending"), (Kill(event.group),)
            return _kill_within(state, event.group, FAILURE_GRACE_S + LISTING_S)
        case Orphaned():
            # Let workers that have lost their torchrun save their state.
            if state.groups[event.group].phase != "running":
                return state, ()
            state, actions = _kill_within(state, event.group, FAILURE_GRACE_S)
            return state, (*actions, Stop(event.group))
        case NodeLost():
            return _node_lost(state, event)
        case NodeUnfit():
            name = label_node(event.node, event.hostname)
            if state.is_alone:
                return _node_lost(state, event)
            if not any(group.starts for group in state.groups):
                return state._replace(killed=True), (Refuse("unfit_host", f"{name}: {event.why}", event.hint),)
            return state, (Inform(f"{name} came back but cannot take part: {event.why}"),)
        case NodeSlow() | NodeReturned():
            # Change the nodes of a healthy single-group run: ask its workers to write a checkpoint and exit, within the
            # time allowed for a stop. Failures take precedence, and a run that is ending is not changed.
            only = state.groups[0]
            over = state.is_over or state.is_ending or state.stop_requested
            over = over or (state.resilience.mode == "none" and state.restarts_left is None)
            over = over or not state.is_alone or event.node in state.left_out or bool(state.leaving)
            if over or not state.has_stepped or only.phase != "running" or only.kill_at_s < math.inf:
                return state, ()
            # A node that is lost again and again must not use up all restarts.
            recent = recent_restarts(only.restarts_s, state.now_s)
            if isinstance(event, NodeReturned) and 2 * len(recent) > state.resilience.max_restarts_per_hour:
                return state, ()
            state = _change(state, 0, kill_at_s=state.now_s + state.stop_grace_s)
            return state._replace(leaving=(event,)), (Inform(event.why), Stop())
        case AgentsFailed():
            return _agents_failed(state, event)
        case StopRequested() | NodeStopRequested() if state.is_over:  # a run that has ended cannot be stopped
            return state, ()
        case StopRequested(times):
            state = state._replace(stop_requested=True)
            # Workers that have not written anything yet have nothing to save, and a second request means that the user
            # does not want to wait.
            if times > 1 or not state.has_begun:
                return _drop_waiting(state)._replace(killed=True), ()
            return _stop(state)
        case NodeStopRequested():
            return _stop(state._replace(stop_requested=True))
        case RendezvousRestarted():
            return state, (Inform("the rendezvous server ended; it starts again"),)
        # What happens next depends on the presence of the groups' nodes
        case NodeBack():
            return state, (Inform(f"{label_node(event.node, event.hostname)} is connected again"),)
        case Noted(text):
            return state, (Inform(text),)
        case NodesSeen():
            return state, ()


def recent_restarts(restarts_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    """Return the restarts that count towards the limit."""
    return tuple(at for at in restarts_s if now_s - at < RESTART_WINDOW_S)


def may_restart(resilience: ResilienceSpec, restarts_s: tuple[float, ...], now_s: float) -> bool:
    """Return whether a failed start may be followed by another one, given earlier restarts at `restarts_s`."""
    return resilience.mode != "none" and len(recent_restarts(restarts_s, now_s)) < resilience.max_restarts_per_hour


def pause_s(failures_in_a_row: int) -> float:
    """Return the pause before the next start: none after the first failure since the last step, then doubling each
    time."""
    if failures_in_a_row <= 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures_in_a_row - 2, 30)))


def enough_groups(resilience: ResilienceSpec, groups_left: int) -> bool:
    """Return whether the run continues with the groups that are running or can come back."""
    return groups_left >= resilience.min_groups


# Events: time passes, groups start and take steps


def _tick(state: RunState, event: Tick) -> Decision:
    state = state._replace(now_s=event.now_s)
    # The workers were asked to stop, and have used up their time.
    if event.now_s > state.deadline_s:
        return state._replace(killed=True), ()
    actions: list[Action] = []
    newest_step_s = max(group.stepped_s for group in state.groups)
    newest_retry_s = max(group.retried_s for group in state.groups)
    for number, group in enumerate(state.groups):
        # The others have waited for this group as long as allowed, while it neither took a step nor retried. They may
        # be unable to continue without it, because a quorum is more than half of the live groups. This is only assumed
        # if another group has since taken a step, or retried without an answer.
        allowed_until_s = max(group.stepped_s, group.retried_s) + STUCK * state.resilience.exchange_timeout_s
        asked = newest_retry_s > allowed_until_s and event.now_s - newest_retry_s > ANSWER_S
        stuck = group.stepped_s > 0 and (newest_step_s > allowed_until_s or asked)
        if group.phase == "running" and (stuck or event.now_s > group.kill_at_s):
            state = _change(state, number, phase="ending")
            actions.append(Kill(number))
        elif group.phase == "waiting":
            state, started = _start_if_due(state, number)
            actions += started
    return state, tuple(actions)


def _start_if_due(state: RunState, number: int) -> Decision:
    group = state.groups[number]
    if group.phase != "waiting" or state.now_s < group.start_at_s:
        return state, ()
    # A new generation has a new rendezvous, new logs and a new backend, which reports the connected nodes again.
    if group.needs_generation:
        state = _change(state, number, needs_generation=False, presence="awaited")
        changes = (ChangeNodes(state.leaving),) if state.leaving else ()
        slow = tuple(one.node for one in state.leaving if isinstance(one, NodeSlow))
        replaced = tuple(one.node for one in state.leaving if not isinstance(one, NodeReturned))
        state = state._replace(leaving=(), left_out=(*state.left_out, *slow), replaced=(*state.replaced, *replaced))
        return state._replace(has_begun=False, exit_code=None), (*changes, BeginGeneration())
    if group.presence != "there":
        return state, ()
    starts = group.starts + 1
    restarts_s = group.restarts_s
    # The first start, and a planned one (to use less memory or drop a node), do not count as failures.
    if group.starts and not group.is_planned:
        restarts_s = (*recent_restarts(restarts_s, state.now_s), state.now_s)
    state = _change(
        *(state, number),
        phase="running",
        starts=starts,
        restarts_s=restarts_s,
        is_planned=False,
        kill_at_s=math.inf,
        checkpoint_step=state.checkpoint_step,
        stepped_s=0.0,
        retried_s=0.0,
    )
    return state._replace(replaced=()), (Launch(number, starts),)


# Events: workers and groups fail


def _kill_within(state: RunState, number: int, seconds: float) -> Decision:
    kill_at_s = state.groups[number].kill_at_s
    known = kill_at_s < math.inf
    state = _change(state, number, kill_at_s=min(kill_at_s, state.now_s + seconds))
    return state, () if known else (MarkFailure(),)


def _group_ended(state: RunState, event: GroupEnded) -> Decision:
    group = state.groups[event.group]
    if group.phase not in ("running", "ending"):
        return state, ()
    state = state._replace(exit_code=event.exit_code, checkpoint_step=event.checkpoint_step)
    only_orphans_killed = group.kill_at_s < math.inf
    # A user's command may exit with code 0 when it is asked to stop.
    has_left = bool(state.leaving) and state.restarts_left is not None
    if event.done and not has_left and (state.is_alone or group.phase == "running" or only_orphans_killed):
        return _drop_waiting(_change(state, event.group, phase="done")), ()
    state = _change(state, event.group, phase="gone", failures_in_a_row=group.failures_in_a_row + 1)
    # The group was asked to exit, so this is a failure only if it exited in another way.
    if state.leaving:
        return _after_leaving(state, event)
    state = state._replace(last_failure=event.headline)
    return (_after_failure_of_run if state.is_alone else _after_failure_of_group)(state, event)


def _after_failure_of_run(state: RunState, event: GroupEnded) -> Decision:
    """Restart from the newest checkpoint, or end the run. (How the run ended is reported elsewhere.)"""
    group = state.groups[0]
    over = state.stop_requested or state.stopping or bool(event.left_behind)
    if not over and (taken := _less_memory(state, event)):
        state, actions, words = _take(state, event, taken)
        state = _change(state, 0, needs_generation=True)
        return state, (
            *actions,
            Inform(f"{event.headline}; the run continues from step {event.checkpoint_step} {words}"),
        )
    # Another start would most likely only repeat the error.
    over = over or _comes_again(group, event, has_budget=state.restarts_left is not None)
    if state.restarts_left is not None:
        return (state, ()) if over else _restart_of_budget(state, event)
    if over or not may_restart(state.resilience, group.restarts_s, state.now_s):
        return state, ()
    state, _ = _wait(state, 0)
    state = _change(state, 0, needs_generation=True)
    place = f"step {event.checkpoint_step}" if event.checkpoint_step else "the beginning"
    return state, (Inform(f"{event.headline}; the run starts again from {place}"),)


def _restart_of_budget(state: RunState, event: GroupEnded) -> Decision:
    """Restart a job with a fixed number of restarts, as long as any are left. If the same exception occurs at the same
    place twice without a step in between, it is assumed to be a bug that would recur."""
    left = state.restarts_left or 0
    group = state.groups[0]
    if event.cause == group.cause != "" and event.reached_step <= group.reached_step and not event.has_worked:
        why = "the previous start failed at the same place without a further step, so it is not restarted"
        return state, (Inform(f"{event.headline}; {why}"),)
    if not left:
        return state, ()
    state = _change(state, 0, cause=event.cause, reached_step=event.reached_step)
    state, _ = _wait(state._replace(restarts_left=left - 1), 0)
    state = _change(state, 0, needs_generation=True)
    after = "this is the last restart" if left == 1 else f"{left - 1} more restarts are left"
    return state, (Inform(f"{event.headline}; the command starts again, and {after}"),)


def _comes_again(group: GroupState, event: GroupEnded, *, has_budget: bool) -> bool:
    """Return whether another start would most likely end in the same way. This is the case for an anticipated error,
    and for an error of the run itself if no new checkpoint was written. External failures may not recur, so the run
    restarts if there is a checkpoint. After SIGKILL, it restarts even without a checkpoint, unless the kernel sent the
    signal because memory ran out, or the previous start also ended without a step."""
    if event.has_worked or event.foreseen:
        return event.foreseen
    if not event.from_outside:
        return event.checkpoint_step <= group.checkpoint_step
    if has_budget:
        return event.checkpoint_step <= 0
    may_begin_anew = event.was_killed and event.shortage is None and group.failures_in_a_row <= 1
    return event.checkpoint_step <= 0 and not may_begin_anew


def _after_failure_of_group(state: RunState, event: GroupEnded) -> Decision:
    """Restart the group, continue without it, or end the run."""
    failure = f"group {event.group}: {event.headline}"
    if not state.is_ending and (taken := _less_memory(state, event)):
        state, actions, words = _take(state, event, taken)
        return state, (ArchiveErrors(event.group), *actions, Inform(f"{failure}; it starts again {words}"))
    # The other groups run the same code on the same recipe, so this group's error would end them too.
    if event.foreseen or (event.own_error and not state.has_stepped):
        state, actions = _stop(state)
        return state, (Inform(failure), *actions)
    archive = ArchiveErrors(event.group)
    if state.is_ending:
        return state, (archive,)
    if not may_restart(state.resilience, state.groups[event.group].restarts_s, state.now_s):
        return state, (archive, Inform(f"{failure}; it is not restarted: it failed too often"))
    state, follows = _wait(state, event.group)
    return state, (archive, Inform(f"{failure}; {follows}"))


def _less_memory(state: RunState, event: GroupEnded) -> MemorySetting | None:
    """Return the next setting after an out-of-memory failure; None after any other failure, or if no setting is left.
    Starts with less memory do not count towards `max_restarts_per_hour`, because each setting is used only once."""
    if event.shortage is None or state.resilience.mode == "none":
        return None
    return next_setting(state.memory_ladder, event.shortage.failed, state.groups[event.group].taken)


def _take(state: RunState, event: GroupEnded, taken: MemorySetting) -> tuple[RunState, tuple[Action, ...], str]:
    """Let a group wait for its next start with less memory; return the difference, for messages."""
    assert event.shortage is not None, "the group ran out of memory"
    state = _change(state, event.group, taken=taken, is_planned=True, failures_in_a_row=0)
    state, _ = _wait(state, event.group)
    words = f"with {taken.describe(event.shortage.failed)}"
    return state, (TakeSetting(event.group, event.shortage, taken, event.headline),), words


def _wait(state: RunState, number: int) -> tuple[RunState, str]:
    """Let a group wait for its next start; return what happens next, for messages."""
    group = state.groups[number]
    pause = pause_s(group.failures_in_a_row)
    state = _change(state, number, phase="waiting", start_at_s=state.now_s + pause)
    if group.presence != "there":
        return state, "it starts again when its nodes are back"
    return state, f"it starts again after {pause:.0f} s" if pause else "it starts again"


# Events: nodes come and go


def _node_lost(state: RunState, event: NodeLost | NodeUnfit) -> Decision:
    """Kill the groups that ran on the node, because they cannot continue without it."""
    # A group that is already waiting or ending stays as it is, because its processes are gone or are being killed.
    groups = event.groups if isinstance(event, NodeLost) else ()
    hit = [number for number in groups if state.groups[number].phase == "running"]
    kill = tuple(map(Kill, hit))
    for number in hit:
        state = _change(state, number, phase="ending")
    if not state.is_alone:
        return state, kill
    only = state.groups[0]
    if state.survives_lost_nodes and not (state.stopping or state.stop_requested):
        without = state._replace(leaving=(*state.leaving, event))
        if only.phase != "waiting":
            return without, ((MarkFailure(), *kill) if hit else kill)
        if only.needs_generation:
            return without, ()
        if _does_without(state, event.node):
            restarts_s = (*only.restarts_s, state.now_s)
            return _change(without, 0, needs_generation=True, is_planned=bool(only.starts), restarts_s=restarts_s), ()
    unfit = isinstance(event, NodeUnfit) and not only.starts
    return (_drop_waiting(state)._replace(exit_code=1) if unfit else _drop_waiting(state)), (RecordLosses(), *kill)


def _does_without(state: RunState, node: int) -> bool:
    """Return whether a run whose restart a node does not take part in restarts again without it. This restart may have
    been one without the node already, or the recipe may say to wait for lost nodes, for which the time is over."""
    only = state.groups[0]
    has_run = only.starts > 0 or state.took_over
    may_leave = state.resilience.after_node_loss == "continue" and node not in state.replaced
    return has_run and may_leave and _may_restart_run(state)


def _may_restart_run(state: RunState) -> bool:
    if state.restarts_left is not None:
        return state.restarts_left > 0
    return may_restart(state.resilience, state.groups[0].restarts_s, state.now_s)


def _after_leaving(state: RunState, event: GroupEnded) -> Decision:
    """Restart with other nodes. If a node was lost, or the workers did not exit as requested, this is a failure."""
    group = state.groups[0]
    over = state.stop_requested or state.stopping or bool(event.left_behind)
    has_budget = state.restarts_left is not None
    state = state._replace(last_failure=event.headline)
    if any(isinstance(one, NodeLost) for one in state.leaving):
        if over or not _may_restart_run(state):
            return state, (RecordLosses(),)
        if state.restarts_left is not None:
            state = state._replace(restarts_left=state.restarts_left - 1)
        state, _ = _wait(_change(state, 0, needs_generation=True), 0)
        return state, ()
    failed = event.own_error or event.foreseen or event.checkpoint_step <= group.checkpoint_step
    # The exit code of a user's command that was asked to stop says nothing.
    if over or (failed and not has_budget):
        return _after_failure_of_run(state, event)
    state = _change(state, 0, is_planned=True, needs_generation=True, failures_in_a_row=0)
    state, _ = _wait(state, 0)
    return state, ()


def _agents_failed(state: RunState, event: AgentsFailed) -> Decision:
    if state.is_alone:
        return _drop_waiting(state)._replace(exit_code=event.exit_code), ()
    if any(group.starts for group in state.groups):
        return state, ()
    message = f"the node-agent launcher exited with code {event.exit_code}"
    return state._replace(killed=True), (Refuse("agents_failed", message),)


# Decisions that end the run


def _stop(state: RunState) -> Decision:
    """Ask the workers to write a checkpoint and exit; waiting groups are not restarted."""
    if state.stopping:
        return state, ()
    deadline_s = min(state.deadline_s, state.now_s + state.stop_grace_s)
    return _drop_waiting(state)._replace(stopping=True, deadline_s=deadline_s), (Stop(),)


def _drop_waiting(state: RunState) -> RunState:
    groups = tuple(group._replace(phase="gone") if group.phase == "waiting" else group for group in state.groups)
    return state._replace(groups=groups)


def _count_groups(before: RunState, number: int, decision: Decision) -> Decision:
    """After a decision about group `number`, update how many groups are running or may join. If that has changed, the
    workers are informed. A run with several groups ends if too few are left."""
    state, actions = decision
    if before.expected_groups and _may_come(before.groups[number]) == _may_come(state.groups[number]):
        return decision
    # A single-group run ends with its group anyway, and a run that is already ending needs no other reason.
    if state.is_alone or state.is_ending or state.killed:
        return decision
    left = sum(map(_may_come, state.groups))
    if left != state.expected_groups:
        state = state._replace(expected_groups=left)
        actions = (*actions, Expect(left))
    if enough_groups(state.resilience, left):
        return state, actions
    given_up = (
        f"{left} of {len(state.groups)} replica groups are left, and resilience.min_groups is "
        f"{state.resilience.min_groups}; the last failure: {state.last_failure}"
    )
    state, stop = _stop(state._replace(given_up=given_up))
    return state, (*actions, RecordLosses(), *stop)


def _may_come(group: GroupState) -> bool:
    return group.phase in ("running", "ending") or (group.phase == "waiting" and group.presence != "away")


def _change(state: RunState, number: int, **changes: Any) -> RunState:
    groups = state.groups
    changed = groups[number]._replace(**changes)
    return state._replace(groups=(*groups[:number], changed, *groups[number + 1 :]))
