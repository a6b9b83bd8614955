"""The hub: knows of each host's agent whether it has come, runs, has ended or is lost, and speaks to all of them."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from trainspec_cli.launch.nodes.wire import Wire


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
    report: dict[str, Any] | None = None
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
        self, num_nodes: int, token: str, timeout_s: float, join_timeout_s: float, *, welcomes_back: bool = False
    ):
        """`welcomes_back`: a host that was lost may take its seat again."""
        self._token, self._timeout_s, self._welcomes_back = token, timeout_s, welcomes_back
        self._join_deadline = time.monotonic() + join_timeout_s
        self._join_timeout_s = join_timeout_s
        self.members = [Member(node) for node in range(num_nodes)]
        self._strangers: list[Wire] = []
        self._server = socket.create_server(("", 0), backlog=num_nodes + 8)
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
        for wire in [*self._strangers, *(member.wire for member in self.members if member.wire)]:
            wire.close()

    def _welcome(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._strangers.append(Wire(*self._server.accept()))
        for wire in list(self._strangers):
            said = wire.hear()
            if said and (member := self._seat(wire, said[0])):
                self._take_down(member, said[1:])
            if wire.closed or wire.silent_s > self._timeout_s:
                wire.close()
            if wire.closed or any(member.wire is wire for member in self.members):
                self._strangers.remove(wire)

    def _seat(self, wire: Wire, words: list[str]) -> Member | None:
        """Only who knows the token, and only where nobody sits yet; others are sent away."""
        known = len(words) == 4 and words[:2] == ["hello", self._token] and words[2].isdigit()
        node = int(words[2]) if known else len(self.members)
        if node >= len(self.members) or not self._is_free(self.members[node]):
            wire.close()
            return None
        self.members[node] = Member(node, words[3], wire)
        return self.members[node]

    def _is_free(self, seat: Member) -> bool:
        return seat.wire is None or (self._welcomes_back and seat.gone)

    def _attend(self, member: Member) -> None:
        if member.wire is None:
            if time.monotonic() > self._join_deadline:
                member.loss = f"did not come within {self._join_timeout_s:g} s"
            return
        self._take_down(member, member.wire.hear())
        member.wire.beat()
        if member.gone:
            return
        if member.wire.closed:
            member.loss = "closed its connection without a word: its processes were killed, or the host went down"
        elif member.wire.silent_s > self._timeout_s:
            member.loss = f"has not been heard of for {self._timeout_s:g} s: the host is off, hangs, or its link is cut"
        if member.loss:
            member.lost_at = time.monotonic()
            member.wire.close()

    def _take_down(self, member: Member, said: list[list[str]]) -> None:
        for words in said:
            if words[0] == "ended":
                member.exit_code = int(words[1])
            elif words[0] == "report":
                member.report = {**json.loads(" ".join(words[1:])), "heard_at": time.time()}
            elif words[0] == "failed":
                member.complaint = " ".join(words[1:])
            else:
                member.told.append(words)
