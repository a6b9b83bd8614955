"""Decide which nodes a run with one replica group uses after nodes were lost, dropped or connected.

The supervisor calls `select_nodes` and `is_worth_a_restart` with the nodes that it observes (`RunNodes` in
`run/supervise.py`). `SimulatedSupervisor` calls the same functions and the same state machine for simulated nodes, so
that goodput, `disturb=` and rehearsed faults follow what the supervisor would do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from trainspec_cli.recipe.keys.resilience import NodeLossResponse, ResilienceSpec
from trainspec_cli.run.recovery import recovery, run_state
from trainspec_cli.run.recovery.run_state import NodeChange, NodeLost, NodeReturned, NodeSlow, NodeUnfit

Planned = TypeVar("Planned")
"""The plan of a run on some number of nodes: a `Plan` for the supervisor, its speed for a forecast."""


@dataclass(frozen=True)
class NodesAtHand:
    """The nodes that a start may use, by number."""

    own: tuple[int, ...]
    """The nodes of the last start."""
    spares: tuple[int, ...]
    """The other connected nodes, in the order in which they are used."""
    planned: int
    """Number of nodes that the run was planned for."""


@dataclass(frozen=True)
class NextStart(Generic[Planned]):
    plan: Planned
    nodes: tuple[int, ...]
    joined: tuple[int, ...]
    """The spares among `nodes`."""
    freed: tuple[int, ...]
    """Nodes of the last start that are connected but not needed, because no layout uses them."""
    not_enough: int
    """Number of connected nodes, if no layout uses more of them than this start; otherwise 0."""


def select_nodes(
    at_hand: NodesAtHand,
    reasons: Sequence[NodeChange],
    after_node_loss: NodeLossResponse,
    plan_for: Callable[[int], Planned | None],
    here: int | None = None,
) -> NextStart[Planned] | None:
    """Return the next start: without the nodes that leave, and with the spares that are needed to have as many nodes as
    planned. None if no layout fits the nodes that are left, or if the recipe says to wait for a lost node.

    `plan_for` returns the plan for a number of nodes; None if no layout fits. `here`: the node of the supervisor. If
    the agent of this node was lost, the next start has another one."""
    dropped = {one.node for one in reasons if isinstance(one, (NodeSlow, NodeUnfit))}
    lost = {one.node for one in reasons if isinstance(one, NodeLost)} - {here}
    gone = dropped | lost
    own = _without(at_hand.own, gone)
    spares = _without(at_hand.spares, gone)
    before = len(at_hand.own)
    if lost and after_node_loss == "wait":
        smallest = before
    else:  # a slow node is dropped only if a layout fits without it
        smallest = before - 1 if all(isinstance(one, NodeSlow) for one in reasons) else 1
    available = len(own) + len(spares)
    largest = min(at_hand.planned, available)
    for number in range(largest, smallest - 1, -1):
        if (plan := plan_for(number)) is not None:
            joined = spares[: max(0, number - len(own))]
            not_enough = available if number < largest else 0
            return NextStart(plan, own[:number] + joined, joined, own[number:], not_enough)
    return None


def _without(nodes: tuple[int, ...], gone: Collection[int]) -> tuple[int, ...]:
    # A forecast calls this for thousands of nodes, so it avoids a loop over them.
    for node in gone:
        if node in nodes:
            place = nodes.index(node)
            nodes = nodes[:place] + nodes[place + 1 :]
    return nodes


def is_worth_a_restart(remaining_s: float, nodes: int, restart_s: float) -> bool:
    """Return whether a run on `nodes` nodes ends sooner if it restarts with one more. The speed is assumed to be
    proportional to the number of nodes."""
    return remaining_s / (nodes + 1) > restart_s


Source = Literal["memory", "disk"]
"""Where a restarted run reads its state: the copies in the nodes' memory, or a checkpoint."""


def restores_from(before: Sequence[int], lost: Collection[int], after: Sequence[int], *, copies: bool) -> Source:
    """Return where a restart on the nodes `after` reads the state of a run that had the nodes `before`.

    Each node keeps a copy of its own state and of its predecessor's (`engine/checkpoint/memory.py`). The copies are
    complete unless a node and its successor are both lost. They can only be used by the same number of nodes."""
    if not copies or len(after) != len(before):
        return "disk"
    gone = [place for place, node in enumerate(before) if node in lost]
    return "memory" if all((place + 1) % len(before) not in gone for place in gone) else "disk"


@dataclass(frozen=True)
class NodesDecision(Generic[Planned]):
    """What a run does after an event."""

    kind: Literal["none", "restart", "wait", "end"]
    """It continues, restarts now, restarts once its nodes are connected, or ends."""
    nodes: tuple[int, ...]
    """The nodes of the next start, or of the running one."""
    joined: tuple[int, ...]
    """The spares among `nodes` that replace other nodes."""
    plan: Planned
    source: Source
    """Where a restart reads its state."""


class SimulatedSupervisor(Generic[Planned]):
    """The decisions of a supervisor about a simulated run with one replica group. Nodes 0, 1, ... are the run's own
    ones, and the next numbers are connected spares."""

    def __init__(
        self,
        resilience: ResilienceSpec,
        nodes: int,
        spares: int,
        plan_for: Callable[[int], Planned | None],
        *,
        copies: bool = False,
    ) -> None:
        """`copies`: whether the nodes keep copies of the state in memory."""
        whole = plan_for(nodes)
        assert whole is not None, "a run has a plan for all of its nodes"
        self.resilience = resilience
        self.planned = nodes
        self.plan = whole
        self.own = tuple(range(nodes))
        self.absent: set[int] = set()
        """The run's own nodes that are not connected."""
        self.others = tuple(range(nodes, nodes + spares))
        """The other nodes, in the order in which they are used. As in a run, lost nodes are the last ones."""
        self.away: set[int] = set()
        """Those of the others that are not connected."""
        self._plan_for = plan_for
        self._copies = copies
        self._joined: tuple[int, ...] = ()
        """The spares that the last decision uses."""
        self._checkpoint = 1
        """Number of checkpoints. The first one stands for the beginning of the run."""
        self._not_enough = 0
        """Number of connected nodes for which no plan uses more of them than before."""
        self._lost: set[int] = set()
        """Nodes lost since the last step."""
        self._stepped_on = self.own
        """The nodes of the last step, whose memory holds the copies."""
        self._begin()
        self.note_step(0.0)

    def _begin(self) -> None:
        self.state = recovery.begin(
            self.resilience,
            checkpoint_step=self._checkpoint,
            survives_lost_nodes=self.resilience.survives_lost_nodes,
        )
        self._see_nodes()

    @property
    def is_running(self) -> bool:
        return self.state.groups[0].phase == "running"

    @property
    def spares(self) -> tuple[int, ...]:
        return tuple(node for node in self.others if node not in self.away)

    def note_step(self, now_s: float) -> None:
        """Note that the run takes steps with its current nodes."""
        self._handle(run_state.Tick(now_s))
        self._handle(run_state.Stepped(0))
        self._stepped_on = self.own
        self._lost.clear()

    def lose_node(self, now_s: float, node: int) -> NodesDecision[Planned]:
        """One of the run's own nodes is lost."""
        self.absent.add(node)
        self._lost.add(node)
        return self._decide(now_s, NodeLost(node, "", "is lost", (0,)))

    def fail(self, now_s: float) -> NodesDecision[Planned]:
        """A process fails, and no node is lost."""
        return self._decide(now_s, run_state.WorkerFailed(0))

    def connect(self, now_s: float, node: int) -> NodesDecision[Planned]:
        """A node connects: a lost node that was repaired, or a new one. A run that has waited for it restarts. A run
        that waits for another node has ended by then (`run.join_timeout_s`), and is started again."""
        if node in self.absent:
            self.absent.remove(node)
            return self._decide(now_s, run_state.Tick(now_s))
        self.away.remove(node)
        if self.is_running:
            return self._recovery("none")
        self._start_again()
        return self._recovery("end")

    def use_spares(self, now_s: float, remaining_s: float, restart_s: float) -> NodesDecision[Planned]:
        """Restart a run on fewer nodes than planned with more nodes, if some are connected and it then ends sooner."""
        number = len(self.own)
        spares = self.spares
        can_grow = number < self.planned and number + len(spares) > max(self._not_enough, number)
        if not self.is_running or not can_grow or not is_worth_a_restart(remaining_s, number, restart_s):
            return self._recovery("none")
        return self._decide(now_s, NodeReturned(spares[0], "", "is connected"))

    def _decide(self, now_s: float, event: run_state.Event) -> NodesDecision[Planned]:
        starts = self.state.groups[0].starts
        self._joined = ()
        self._handle(run_state.Tick(now_s))
        was_running = self.is_running
        actions = self._handle(event)
        # Workers that were asked to stop have written a checkpoint.
        is_stopped = any(isinstance(action, run_state.Stop) for action in actions)
        is_killed = any(isinstance(action, run_state.Kill) for action in actions)
        self._checkpoint += is_stopped
        if was_running and (is_stopped or is_killed or isinstance(event, run_state.WorkerFailed)):
            about = {"from_outside": True, "was_killed": True, "checkpoint_step": self._checkpoint}
            self._handle(run_state.GroupEnded(0, done=False, **about))  # type: ignore[arg-type]
        # The pause between failures is a part of the time that a start takes.
        self._handle(run_state.Tick(max(now_s, self.state.groups[0].start_at_s)))
        if self.state.is_over:
            self._start_again()
            return self._recovery("end")
        self._see_nodes()
        if self.state.groups[0].starts > starts:
            return self._recovery("restart")
        return self._recovery("none" if self.is_running else "wait")

    def _start_again(self) -> None:
        """A forecast is about how long the work takes, so it assumes that a run that has ended is started again at
        once, on as many nodes as planned."""
        whole = self._plan_for(self.planned)
        assert whole is not None, "a run has a plan for all of its nodes"
        own = sorted(self.own, key=lambda node: node in self.absent)
        spares = self.spares
        there = len(own) - len(self.absent)
        self._joined = spares[: self.planned - there]
        own[there:there] = self._joined
        self._use(whole, tuple(own[: self.planned]), tuple(own[self.planned :]))
        self._begin()

    def _see_nodes(self) -> None:
        self._handle(run_state.PresenceChanged(0, "awaited" if self.absent else "there"))

    def _handle(self, event: run_state.Event) -> tuple[run_state.Action, ...]:
        self.state, actions = recovery.next_action(self.state, event)
        for action in actions:
            if isinstance(action, run_state.ChangeNodes):
                self._change_nodes(action.reasons)
        return actions

    def _change_nodes(self, reasons: Sequence[NodeChange]) -> None:
        at_hand = NodesAtHand(self.own, self.spares, self.planned)
        chosen = select_nodes(at_hand, reasons, self.resilience.after_node_loss, self._plan_for)
        if chosen is None:
            return
        self._not_enough = chosen.not_enough
        self._joined = chosen.joined
        lost = tuple(one.node for one in reasons if isinstance(one, NodeLost))
        self.others = (*chosen.freed, *self.others)
        self._use(chosen.plan, chosen.nodes, lost)

    def _use(self, plan: Planned, nodes: tuple[int, ...], last: tuple[int, ...]) -> None:
        """Use other nodes; `last`: nodes that become the last of the others."""
        self.others = (*(node for node in self.others if node not in self._joined), *last)
        left = {node for node in self.absent if node not in nodes}
        self.away |= left
        self.absent -= left
        self.own = nodes
        self.plan = plan

    def _recovery(self, kind: Literal["none", "restart", "wait", "end"]) -> NodesDecision[Planned]:
        source = restores_from(self._stepped_on, self._lost, self.own, copies=self._copies)
        return NodesDecision(kind, self.own, self._joined if kind != "none" else (), self.plan, source)


def groups_of_node(node: int, num_nodes: int, replica_groups: int) -> range:
    """Return the replica groups that run on a node: either one group, which may span several complete nodes, or several
    groups."""
    first = node * replica_groups // num_nodes
    end = -(-(node + 1) * replica_groups // num_nodes)
    return range(first, end)
