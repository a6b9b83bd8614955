"""The hub: knows of each host's agent whether it has come, runs, has ended or is lost, and speaks to all of them."""

from __future__ import annotations

import json
import math
import socket
import time
from collections import deque
from dataclasses import dataclass, field, replace

from trainspec_cli.errors import RecipeError
from trainspec_cli.launch.backend.nodes.wire import Knock, Wire
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.results.doctor import NodeReport

MAX_ACCEPTED = 256
"""In one look: a flood of connections does not keep the hub from its members."""


def max_knocks(num_nodes: int) -> int:
    """Return how many connections may be in their handshake at once; one more ends the oldest. Each is looked at twice
    at least, so that an agent has the time between two looks to answer in."""
    return num_nodes + 2 * MAX_ACCEPTED


@dataclass
class Member:
    """One host's agent."""

    node: int
    host: str = ""
    wire: Wire | None = None
    exit_code: int | None = None
    """torchrun's there, when it has ended."""
    loss: str = ""
    """Why it counts as lost."""
    complaint: str = ""
    """Why it did not start."""
    report: NodeReport | None = None
    """What the examination of the host found."""
    admitted: bool = False
    """Whether workers may start there."""
    lost_at: float = -math.inf
    """When one that had come was lost (monotonic)."""
    told: list[list[str]] = field(default_factory=list)
    """What it said of its replica groups, as words; for whoever runs these to take."""

    @property
    def gone(self) -> bool:
        return self.exit_code is not None or bool(self.loss)

    def say(self, line: str) -> None:
        if self.wire:
            self.wire.say(line)

    @property
    def name(self) -> str:
        return f"node {self.node}" + (f" ({self.host})" if self.host else "")


class Hub:
    def __init__(
        self,
        num_nodes: int,
        secret: bytes,
        listener: socket.socket,
        timeout_s: float,
        join_timeout_s: float,
        *,
        welcomes_back: bool = False,
    ):
        """Agents prove that they know `secret`. `welcomes_back`: a host that was lost may take its seat again."""
        self._secret, self._timeout_s, self._welcomes_back = secret, timeout_s, welcomes_back
        self._join_deadline = time.monotonic() + join_timeout_s
        self._join_timeout_s = join_timeout_s
        self.members = [Member(node) for node in range(num_nodes)]
        self._knocks: deque[Knock] = deque()
        self._max_knocks = max_knocks(num_nodes)
        self._newcomers: deque[Wire] = deque()
        self._server = listener
        self._server.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    @property
    def all_gone(self) -> bool:
        return all(member.gone for member in self.members)

    @property
    def exit_code(self) -> int | None:
        """The first that is not 0; None while somebody runs."""
        codes = [member.exit_code for member in self.members if member.exit_code is not None]
        return next((code for code in codes if code), 0) if self.all_gone and codes else None

    def poll(self) -> None:
        """Hear everybody and let them hear us; to be called several times a second."""
        self._welcome()
        for member in self.members:
            if not member.gone:
                self._attend(member)

    def tell(self, word: str) -> None:
        for member in self.members:
            member.say(word)

    def close(self) -> None:
        self._server.close()
        for knock in self._knocks:
            knock.close()
        for wire in [*self._newcomers, *(member.wire for member in self.members if member.wire)]:
            wire.close()

    def _welcome(self) -> None:
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
        for wire in list(self._newcomers):
            said = wire.hear()
            if said:
                self._seat(wire, said)
            elif wire.silent_s > self._timeout_s:
                wire.close()
            if said or wire.closed:
                self._newcomers.remove(wire)
        self._accept()

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

    def _seat(self, wire: Wire, said: list[list[str]]) -> None:
        """Give the agent its place where nobody has it yet; others are sent away."""
        words = said[0]
        known = len(words) == 3 and words[0] == "hello" and _is_number(words[1], len(self.members))
        if not known or not self._is_free(self.members[int(words[1])]):
            wire.close()
            return
        member = self.members[int(words[1])] = Member(int(words[1]), words[2], wire)
        self._take_down(member, said[1:])

    def _is_free(self, seat: Member) -> bool:
        return seat.wire is None or (self._welcomes_back and seat.gone)

    def _attend(self, member: Member) -> None:
        if member.wire is None:
            if time.monotonic() > self._join_deadline:
                member.loss = f"did not come within {self._join_timeout_s:g} s"
            return
        self._take_down(member, member.wire.hear())
        member.wire.beat()
        if member.exit_code is not None:
            return
        member.loss = member.loss or self._loss_of_wire(member.wire)
        if member.loss:
            member.lost_at = time.monotonic()
            member.wire.close()

    def _loss_of_wire(self, wire: Wire) -> str:
        if wire.closed:
            return "closed its connection without a word: its processes were killed, or the host went down"
        if wire.silent_s > self._timeout_s:
            return f"has not been heard of for {self._timeout_s:g} s: the host is off, hangs, or its link is cut"
        return ""

    def _take_down(self, member: Member, said: list[list[str]]) -> None:
        """An agent that says what is not in the protocol (`wire.py`) is lost."""
        for words in said:
            try:
                self._take_down_line(member, words)
            except (ValueError, IndexError, TypeError, RecipeError):
                member.loss = f"said what the hub does not understand: {' '.join(words)[:80]!r}"
                return

    def _take_down_line(self, member: Member, words: list[str]) -> None:
        if words[0] == "ended":
            member.exit_code = int(words[1])
        elif words[0] == "report":
            report = from_plain(NodeReport, json.loads(" ".join(words[1:])))
            member.report = replace(report, heard_at=time.time())
        elif words[0] == "failed":
            member.complaint = " ".join(words[1:])
        elif words[0] in ("lost", "done", "dropped") and all(_is_number(word) for word in words[1:3]):
            int(words[3 if words[0] == "lost" else 2])
            member.told.append(words)
        else:
            raise ValueError("unknown")


def _is_number(word: str, below: int | None = None) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10 and (below is None or int(word) < below)
