"""The hub knows of each node's agent whether it has come, is there, has left or is lost, and reaches all of them."""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from dataclasses import dataclass, replace

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.wire.handshake import ANSWER_BYTES, TIMEOUT_S, Challenge, HandshakeError, connect
from trainspec_cli.recipe.results.doctor import NodeReport
from trainspec_cli.run.backend.nodes import messages
from trainspec_cli.run.backend.nodes.messages import Beat, Message, decode, encode

# The connection between the hub and an agent: messages over TCP, once both have shown that they know the secret.
#
# Neither end blocks: both look at their sockets while they do their own work. A peer that is silent for too long is
# lost, whether its process hangs, its node is off or its cable is cut (TCP by itself would wait for a quarter of an
# hour).


PURPOSE = "hub"
BEAT_INTERVAL_S = 1.0
PIECE_BYTES = 65536
RETRY_S = 0.2
CALL_TIMEOUT_S = 60.0
"""An agent that the hub has sent away, as it does when too many knock at once, calls again for this long."""
LINE_BYTES = 2**22
"""A peer that sends a longer line, or leaves as much unread, is cut off."""
SHOWN_BYTES = 80
"""Bytes that are shown of a line that is no message."""


def call_hub(address: tuple[str, int], secret: bytes) -> Wire:
    """Raises OSError where the hub is not reached, or does not know the secret."""
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            return Wire(connect(address, secret, PURPOSE))
        except ConnectionResetError:  # too many knock at once
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


class Knock:
    """A connection to the hub that has proved nothing yet."""

    def __init__(self, connection: socket.socket, secret: bytes):
        """Raises OSError where the other end has gone already."""
        connection.setblocking(False)
        self._connection, self._challenge = connection, Challenge(secret, PURPOSE)
        self._answer, self._deadline = b"", time.monotonic() + TIMEOUT_S
        connection.send(self._challenge.nonce)  # an empty buffer takes 32 bytes

    def advance(self) -> Wire | None:
        """Return the wire once the other end has proved itself; None until then.

        Raises OSError where it never will: a wrong proof, a closed connection, too long a silence.
        """
        if time.monotonic() > self._deadline:
            raise HandshakeError("the connection has proved nothing in time")
        try:
            piece = self._connection.recv(ANSWER_BYTES - len(self._answer))
        except BlockingIOError:
            return None
        if not piece:
            raise HandshakeError("the connection was closed")
        self._answer += piece
        if len(self._answer) < ANSWER_BYTES:
            return None
        self._connection.send(self._challenge.accept(self._answer))
        return Wire(self._connection)

    def close(self) -> None:
        self._connection.close()


class Wire:
    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._connection = connection
        self._unread = b""
        self._unsent = b""
        self._heard_at = self._beat_at = time.monotonic()
        self.closed = False
        self.was_heard = False
        """The peer has sent something."""
        self.fault = ""
        """Why the connection was closed here: the peer sent what is no message."""

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self._flush()
        if len(self._unsent) > LINE_BYTES:
            self.close()

    def beat(self) -> None:
        """Send a beat where none was sent for `BEAT_INTERVAL_S`; to be called often."""
        if time.monotonic() - self._beat_at >= BEAT_INTERVAL_S:
            self._beat_at = time.monotonic()
            self.send(Beat())

    def receive(self) -> list[Message]:
        """Return the messages that have come, without beats; at most `LINE_BYTES` at once. A peer that sends what is no
        message is cut off."""
        self._read()
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > LINE_BYTES:
            self.close()
        received: list[Message] = []
        for line in lines:
            try:
                received.append(decode(line))
            except (ValueError, RecipeError):
                self.fault = f"sent what the hub does not understand: {line[:SHOWN_BYTES].decode(errors='replace')!r}"
                self.close()
                break
        return [message for message in received if not isinstance(message, Beat)]

    def _read(self) -> None:
        while not self.closed and len(self._unread) <= LINE_BYTES:
            try:
                piece = self._connection.recv(PIECE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self.closed = not piece
            if piece:
                self._heard_at = time.monotonic()
                self.was_heard = True
                self._unread += piece

    def close(self) -> None:
        self.closed = True
        self._connection.close()

    def _flush(self) -> None:
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True


MAX_ACCEPTED = 256
"""The most connections that are accepted in one poll: a flood of them does not keep the hub from its agents."""


def max_knocks(num_nodes: int) -> int:
    """Return how many connections may be in their handshake at once; one more ends the oldest. Each is polled at least
    twice, so that an agent has the time between two polls to answer in."""
    return num_nodes + 2 * MAX_ACCEPTED


@dataclass
class RemoteNode:
    """A node of the job, as the hub knows it by its agent."""

    node: int
    hostname: str = ""
    wire: Wire | None = None
    has_left: bool = False
    """Its agent has ended in order."""
    loss: str = ""
    """Why it counts as lost."""
    lost_at_s: float = -math.inf
    """Monotonic time when one that had come was lost."""
    refusal: str = ""
    """Why it cannot take part."""
    report: NodeReport | None = None
    """The findings of its examination."""
    admitted: bool = False
    """True where workers may start there."""

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
        return f"node {self.node}" + (f" ({self.hostname})" if self.hostname else "")


@dataclass(frozen=True)
class Came:
    """The agent of a node has come; the node may have been lost before."""


@dataclass(frozen=True)
class Lost:
    """The agent of a node is lost, or did not come; `RemoteNode.loss` says why."""


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
    ):
        """Agents prove that they know `secret`. `welcomes_back`: a node that was lost may come back."""
        self._secret = secret
        self._timeout_s = timeout_s
        self._welcomes_back = welcomes_back
        self._join_deadline = time.monotonic() + join_timeout_s
        self._missing = f"did not come within {join_timeout_s:g} s" + (f" ({join_key})" if join_key else "")
        self.nodes = [RemoteNode(node) for node in range(num_nodes)]
        self._knocks: deque[Knock] = deque()
        self._max_knocks = max_knocks(num_nodes)
        self._newcomers: deque[Wire] = deque()
        self._server = listener
        self._server.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def poll(self) -> list[News]:
        """Return what the agents report and who came or was lost, and let them hear the hub; to be called several times
        a second."""
        news = self._welcome()
        for node in self.nodes:
            if not node.is_gone:
                news += self._attend(node)
        return news

    def send(self, message: messages.HubMessage) -> None:
        for node in self.nodes:
            node.send(message)

    def close(self) -> None:
        self._server.close()
        for knock in self._knocks:
            knock.close()
        for wire in [*self._newcomers, *(node.wire for node in self.nodes if node.wire)]:
            wire.close()

    def _welcome(self) -> list[News]:
        for knock in list(self._knocks):
            try:
                wire = knock.advance()
            except OSError:
                knock.close()
                self._knocks.remove(knock)
                continue
            if wire:
                self._knocks.remove(knock)
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
        return news

    def _accept(self) -> None:
        """Take in who has connected. Where that leaves no descriptors, or too many knock, the oldest are sent away."""
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors are left, or the other end has gone already
                if not self._knocks:
                    return
                self._knocks.popleft().close()
                continue
            if len(self._knocks) >= self._max_knocks:
                self._knocks.popleft().close()
            try:
                self._knocks.append(Knock(connection, self._secret))
            except OSError:  # it is gone already
                connection.close()

    def _introduce(self, wire: Wire, received: list[messages.Message]) -> list[News]:
        """Take an agent for the node that it names, unless that has one already; others are sent away."""
        hello, *others = received
        if not isinstance(hello, messages.Hello) or not self._is_free(hello.node):
            if isinstance(hello, messages.Hello) and hello.node in range(len(self.nodes)) and not self._welcomes_back:
                wire.send(messages.NumberTaken(self.nodes[hello.node].hostname))
            wire.close()
            return []
        node = self.nodes[hello.node] = RemoteNode(hello.node, hello.hostname, wire)
        wire.send(messages.Beat())  # the agent waits for it, or to be sent away
        return [(node, Came()), *self._take(node, others)]

    def _is_free(self, number: int) -> bool:
        if not 0 <= number < len(self.nodes):
            return False
        node = self.nodes[number]
        return node.wire is None or (self._welcomes_back and node.is_gone)

    def _attend(self, node: RemoteNode) -> list[News]:
        if node.wire is None:
            if time.monotonic() <= self._join_deadline:
                return []
            return _lose(node, self._missing)
        news = self._take(node, node.wire.receive())
        node.wire.beat()
        if node.is_gone or not (loss := self._loss_of_wire(node.wire)):
            return news
        return [*news, *_lose(node, loss)]

    def _loss_of_wire(self, wire: Wire) -> str:
        if wire.fault:
            return wire.fault
        if wire.closed:
            return "closed its connection without notice: its processes were killed, or the node went down"
        if wire.silent_s > self._timeout_s:
            return f"has not been heard of for {self._timeout_s:g} s: the node is off, hangs, or its link is cut"
        return ""

    def _take(self, node: RemoteNode, received: list[messages.Message]) -> list[News]:
        """Pass on what an agent may send; one that sends anything else is lost."""
        news: list[News] = []
        for message in received:
            if not isinstance(message, messages.AgentMessage) or isinstance(message, messages.Hello):
                return [*news, *_lose(node, f"sent what the hub does not understand: {type(message).__name__}")]
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
