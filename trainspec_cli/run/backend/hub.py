"""The hub of one start of a run. It exchanges messages with the nodes' agents and the workers.

It tracks for each agent whether it has joined, is connected, has left or is lost. For a worker, it tracks only the
connection: the worker's node detects when it has exited."""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, replace

from trainspec_cli.core.printable import label_node
from trainspec_cli.recipe.results.doctor import NodeReport
from trainspec_cli.run.channel import messages
from trainspec_cli.run.channel.wire import PendingPeer, Wire

MAX_ACCEPTED = 256
"""Maximum number of connections that one poll accepts, so that a flood of connections does not keep the hub from
serving its agents."""


def max_pending(num_nodes: int) -> int:
    """Return the maximum number of simultaneous handshakes; starting another closes the oldest. The number is high
    enough for each handshake to be polled at least twice, so that an agent can answer in between. A worker whose
    connection is closed reconnects."""
    return num_nodes + 2 * MAX_ACCEPTED


@dataclass
class RemoteNode:
    """A node of the job, as the hub knows it through the node's agent."""

    node: int
    hostname: str = ""
    wire: Wire | None = None
    has_left: bool = False
    """True if the node's agent has exited cleanly."""
    loss: str = ""
    """Why the node is considered lost."""
    lost_at_s: float = -math.inf
    """Monotonic time when a node that had joined was lost."""
    refusal: str = ""
    """Why the node cannot take part in the run."""
    report: NodeReport | None = None
    """The report of the checks on the node."""
    admitted: bool = False
    """True if workers may start on the node."""

    @property
    def is_gone(self) -> bool:
        return self.has_left or bool(self.loss)

    @property
    def is_connected(self) -> bool:
        return self.wire is not None and not self.is_gone

    def send(self, message: messages.HubMessage) -> None:
        if self.wire:
            self.wire.send(message)

    @property
    def name(self) -> str:
        return label_node(self.node, self.hostname)


@dataclass(frozen=True)
class Came:
    """The agent of a node has connected; the node may have been lost before."""


@dataclass(frozen=True)
class Lost:
    """The agent of a node was lost, or never connected; `RemoteNode.loss` states why."""


News = tuple[RemoteNode, messages.AgentMessage | Came | Lost]


class Hub:
    def __init__(
        self,
        num_nodes: int,
        secret: bytes,
        listener: socket.socket,
        timeout_s: float,
        join_timeout_s: float,
        join_key: str = "",
        *,
        welcomes_back: bool = False,
        num_own: int | None = None,
    ):
        """`secret`: agents must prove that they know it. `welcomes_back`: whether a lost node may rejoin. `num_own`:
        the nodes after this number are spares, which may always rejoin."""
        self._secret = secret
        self._timeout_s = timeout_s
        self._welcomes_back = welcomes_back
        self._num_own = num_nodes if num_own is None else num_own
        self._join_deadline = time.monotonic() + join_timeout_s
        self._missing = f"did not join within {join_timeout_s:g} s" + (f" ({join_key})" if join_key else "")
        self.nodes = [RemoteNode(node) for node in range(num_nodes)]
        self._pending: deque[PendingPeer] = deque()
        self._max_pending = max_pending(num_nodes)
        self._newcomers: deque[Wire] = deque()
        self._server = listener
        self._server.setblocking(False)
        self._workers: dict[int, Wire] = {}
        """The workers' connections by global rank."""
        self._ready = selectors.DefaultSelector()
        """The connections with unread input. Of a run's thousands of workers, few have sent anything since the last
        poll."""
        self._for_later: dict[type, messages.WorkerMessage] = {}
        """The newest message of each type, for workers that connect later."""
        self._speeds: messages.SpeedsReport | None = None

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def poll(self) -> list[News]:
        """Receive messages, and send those that are due. Return the agents' reports, and which nodes have joined or
        been lost. Call this several times per second."""
        for peer in list(self._pending):
            try:
                wire = peer.advance()
            except OSError:
                peer.close()
                self._pending.remove(peer)
                continue
            if wire:
                self._pending.remove(peer)
                self._newcomers.append(wire)
        news: list[News] = []
        for wire in list(self._newcomers):
            received = wire.receive()
            if received:
                news += self._introduce(wire, received)
            elif wire.silent_s > self._timeout_s:
                wire.close()
            if received or wire.closed:
                self._newcomers.remove(wire)
        self._accept()
        for node in self.nodes:
            if not node.is_gone:
                news += self._attend(node)
        for wire in self._workers.values():
            wire.flush()
        for key, _ in self._ready.select(0):
            self._handle(key.data, self._workers[key.data].receive())
        return news

    def lose(self, place: int, why: str) -> list[News]:
        """Consider a node lost, because whoever started its agent reports so. Return the news of it; none if the node
        had left or was lost before."""
        node = self.nodes[place]
        return [] if node.is_gone else _lose(node, why)

    def send(self, message: messages.HubMessage) -> None:
        for node in self.nodes:
            node.send(message)

    def send_to_workers(self, message: messages.WorkerMessage, rank: int | None = None) -> None:
        """Send to the worker with this rank if it is connected, or to all workers. Workers that connect later also
        receive the message."""
        if rank is None:
            self._for_later[type(message)] = message
        for other, wire in self._workers.items():
            if rank in (None, other):
                wire.send(message)

    def take_speeds(self) -> messages.SpeedsReport | None:
        """Return the newest speeds that rank 0 has reported. Each report is returned only once."""
        speeds = self._speeds
        self._speeds = None
        return speeds

    def close(self) -> None:
        self._server.close()
        self._ready.close()
        for peer in self._pending:
            peer.close()
        nodes = (node.wire for node in self.nodes if node.wire)
        for wire in [*self._newcomers, *nodes, *self._workers.values()]:
            wire.close()

    def _accept(self) -> None:
        """Accept new connections. If no descriptors are left or too many handshakes are in progress, close the
        oldest."""
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptors are left, or the peer has already closed the connection
                if not self._pending:
                    return
                self._pending.popleft().close()
                continue
            if len(self._pending) >= self._max_pending:
                self._pending.popleft().close()
            try:
                self._pending.append(PendingPeer(connection, self._secret, self._timeout_s))
            except OSError:  # the peer has already closed the connection
                connection.close()

    def _introduce(self, wire: Wire, received: list[messages.Message]) -> list[News]:
        """Accept an agent for the node that it names, unless that node already has an agent; other agents are
        rejected."""
        hello, *others = received
        if isinstance(hello, messages.WorkerHello):
            # Register a worker's connection. After a restart or a reconnect, it replaces the previous one.
            if hello.rank in self._workers:
                self._forget(hello.rank)
            self._workers[hello.rank] = wire
            self._ready.register(wire, selectors.EVENT_READ, hello.rank)
            for message in self._for_later.values():
                wire.send(message)
            self._handle(hello.rank, others)
            return []
        if not isinstance(hello, messages.Hello) or not self._is_free(hello.node):
            if isinstance(hello, messages.Hello) and hello.node in range(len(self.nodes)):
                holder = self.nodes[hello.node]
                if holder.is_connected and not self._welcomes_back:
                    wire.send(messages.NumberTaken(holder.hostname))
            wire.close()
            return []
        node = self.nodes[hello.node] = RemoteNode(hello.node, hello.hostname, wire)
        wire.send(messages.Beat())  # the agent waits for this message, or for a rejection
        return [(node, Came()), *self._take(node, others)]

    def _handle(self, rank: int, received: list[messages.Message]) -> None:
        for message in received:
            if isinstance(message, messages.SpeedsReport):
                self._speeds = message
            elif isinstance(message, messages.ShortageNote):  # the other workers wait for this rank without knowing why
                self.send_to_workers(message)
            else:
                self._workers[rank].close()
        if self._workers[rank].closed:
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        wire = self._workers.pop(rank)
        self._ready.unregister(wire)
        wire.close()

    def _is_free(self, number: int) -> bool:
        if not 0 <= number < len(self.nodes):
            return False
        node = self.nodes[number]
        return node.wire is None or (node.is_gone and (self._welcomes_back or number >= self._num_own))

    def _attend(self, node: RemoteNode) -> list[News]:
        wire = node.wire
        if wire is None:
            return _lose(node, self._missing) if time.monotonic() > self._join_deadline else []
        news = self._take(node, wire.receive())
        wire.beat()
        loss = wire.fault
        if wire.closed and not loss:
            loss = "closed its connection without notice: its processes were killed, or the node went down"
            if wire.is_unreachable:
                loss = f"does not answer for {wire.unreachable_s:g} s: the node is off, or its network link is down"
        elif not loss and wire.silent_s > self._timeout_s:
            loss = (
                f"has sent nothing for {self._timeout_s:g} s: the node is off or hanging, or its network link is down"
            )
        return [*news, *_lose(node, loss)] if loss and not node.is_gone else news

    def _take(self, node: RemoteNode, received: list[messages.Message]) -> list[News]:
        """Return the messages if all of them are of types that an agent may send. Otherwise the agent is considered
        lost."""
        news: list[News] = []
        for message in received:
            if not isinstance(message, messages.AgentMessage) or isinstance(message, messages.Hello):
                return [*news, *_lose(node, f"sent an invalid message: {type(message).__name__}")]
            if isinstance(message, messages.NodeExamined):
                node.report = replace(message.report, heard_at=time.time())
            node.has_left = node.has_left or isinstance(message, messages.Goodbye)
            news.append((node, message))
        return news


def _lose(node: RemoteNode, why: str) -> list[News]:
    node.loss = why
    if node.wire:
        node.wire.close()
        node.lost_at_s = time.monotonic()
    return [(node, Lost())]
