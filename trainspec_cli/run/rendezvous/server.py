"""`python -m trainspec_cli.run.rendezvous.server DESCRIPTOR SUPERVISOR SECRET_FILE SILENCE_S PATIENCE_S PAUSE_S
GRACE_S`: the rendezvous server of a job.

On an inherited listening socket, it serves a key-value store (torch.distributed's) and the replica groups' quorum.
Nothing that a connection sends is used before its handshake is complete. The number and duration of handshakes are
limited. An error on a connection closes only that connection.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.wire import rendezvous as messages
from trainspec_cli.core.wire.handshake import Challenge
from trainspec_cli.core.wire.rendezvous import LINE_BYTES, RENDEZVOUS_PURPOSE
from trainspec_cli.recipe.records import read_record
from trainspec_cli.run.folder.generations import read_secret
from trainspec_cli.run.job.machine import BACKLOG, allow_connections
from trainspec_cli.run.recovery.reliability import ConnectedGroup, QuorumRules, choose_members
from trainspec_cli.run.rendezvous.handshakes import BAD_REQUEST, Handshakes, prove

TICK_S = 0.05
"""Interval between the server's checks for silent replica groups."""
MAX_CONNECTIONS = 100_000
"""Maximum number of connections of a job; the system's limit may be lower."""
STORE_BYTES = 2**30
"""Maximum size of the store; requests that would exceed it are rejected."""
Write = Callable[[messages.Answer], None]


class KeyValueStore:
    """The server side of torch.distributed's Store, the key-value store that is used to build process groups. Keys and
    values are text; the client encodes bytes."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._changed: dict[str, asyncio.Event] = {}

    async def wait(self, request: messages.WaitRequest) -> messages.KeyValues | messages.MissingKey:
        """Wait until all keys in the request exist, and return their values if the request asks for them."""
        deadline = time.monotonic() + request.timeout_s
        for key in request.keys:
            while key not in self._values:
                changed = self._changed.setdefault(key, asyncio.Event())
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await changed.wait()
                except TimeoutError:
                    return messages.MissingKey(key)
        wanted = request.keys if isinstance(request, messages.GetKeys) else ()
        return messages.KeyValues(tuple(self._values.get(key, "") for key in wanted))

    def answer(self, request: messages.KeyRequest) -> messages.StoreAnswer:
        """Answer a request. Raises ValueError if the store would grow too large, or if the value to add to is not a
        number."""
        value: str | int | bool | None = None
        match request:
            case messages.SetKey(key, new):
                self._put(key, new)
            case messages.AppendToKey(key, new):
                self._put(key, self._values.get(key, "") + new)
            case messages.AddToKey(key, amount):
                value = int(self._put(key, str(int(self._values.get(key, "0")) + amount)))
            case messages.CompareAndSetKey(key, expected, new):
                is_expected = self._values.get(key, "") == expected
                value = self._put(key, new) if is_expected else self._values.get(key, expected)
            case messages.DeleteKey(key):
                value = key in self._values
                if value:
                    self._bytes -= len(key) + len(self._values.pop(key))
            case messages.CountKeys():
                value = len(self._values)
            case messages.CheckKeys(keys):
                value = all(key in self._values for key in keys)
        return messages.StoreAnswer(value)

    def _put(self, key: str, value: str) -> str:
        grown = self._bytes + len(key) + len(value) - (len(self._values[key]) + len(key) if key in self._values else 0)
        if grown > STORE_BYTES:
            raise ValueError(f"the store would hold more than {STORE_BYTES} bytes")
        self._bytes, self._values[key] = grown, value
        if changed := self._changed.pop(key, None):
            changed.set()
        return value


class Quorums:
    """The connected replica groups, and the successive quorums that they form."""

    def __init__(self, rules: QuorumRules, pause_s: float):
        """No quorum is formed for the first `pause_s` seconds, so that groups can reconnect after a restart of the
        server."""
        self._rules, self._begin_s = rules, time.monotonic() + pause_s
        self._groups: dict[str, ConnectedGroup] = {}
        self._requests: dict[str, messages.JoinQuorum] = {}
        self._writers: dict[str, Write] = {}
        self._previous: list[str] = []
        # The start time is part of a quorum's id, because a restarted server counts its quorums from 0 again.
        self._epoch = time.time_ns()
        self._number = 0

    def hear(self, write: Write, request: messages.QuorumRequest) -> None:
        """Handle a replica group's heartbeat, or its request to join the next step."""
        name = request.name
        now_s = time.monotonic()
        if self._writers.get(name) is not write:
            self._groups.pop(name, None)  # a group repeats a request if its connection was lost
        self._writers[name] = write
        self._groups[name] = replace(self._groups.get(name, ConnectedGroup(now_s)), heard_at_s=now_s)
        if isinstance(request, messages.JoinQuorum):
            self._requests[name] = request
            self._groups[name] = ConnectedGroup(now_s, asked_at_s=now_s)
            self.form()

    def leave(self, name: str, write: Write) -> None:
        """Forget the replica group if this connection is still its current one."""
        if self._writers.get(name) is write:
            del self._writers[name], self._groups[name]
            self._requests.pop(name, None)
            self.form()

    def form(self) -> None:
        """Answer the waiting replica groups, if a quorum can be formed now."""
        now_s = time.monotonic()
        members = choose_members(self._groups, self._previous, now_s, self._rules)
        if not members or now_s < self._begin_s:
            return
        requests = [self._requests.pop(name) for name in members]
        # A new quorum number makes the groups reconnect to one another. As long as all of them are healthy, they keep
        # the number and their connections.
        if members != self._previous or any(request.failures for request in requests):
            self._number += 1
        self._previous = members
        quorum = f"{self._epoch}-{self._number}"
        steps = tuple(request.step for request in requests)
        for name, request in zip(members, requests, strict=True):
            self._groups[name] = replace(self._groups[name], asked_at_s=math.inf)
            self._writers[name](messages.FormedQuorum(quorum, tuple(members), steps, request.number))


class RendezvousServer:
    def __init__(self, secret: bytes, quorums: Quorums):
        self._secret = secret
        self.store = KeyValueStore()
        self.quorums = quorums
        self._handshakes = Handshakes()
        self._proven = 0

    async def serve(self, listener: socket.socket, supervisor: int, grace_s: float) -> None:
        """Serve until the supervisor kills this process. If the supervisor itself is killed, serve for at most
        `grace_s` more seconds, while the workers save their state and exit."""
        server = await asyncio.start_server(self._serve_connection, sock=listener, limit=LINE_BYTES, backlog=BACKLOG)
        orphaned_s = 0.0
        while not orphaned_s or (self._proven and time.monotonic() < orphaned_s + grace_s):
            self.quorums.form()
            await asyncio.sleep(TICK_S)
            if os.getppid() != supervisor:
                orphaned_s = orphaned_s or time.monotonic()
        server.close()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. An error is logged and closes only this connection."""

        def write(answer: messages.Answer) -> None:
            writer.write(json.dumps(asdict(answer), allow_nan=False).encode() + b"\n")

        name = ""
        try:
            async with self._handshakes.limited():
                await prove(reader, writer, Challenge(self._secret, RENDEZVOUS_PURPOSE))
            self._proven += 1
            try:
                while line := await reader.readline():
                    plain: JsonObject = json.loads(line)
                    request = read_record(messages.OPERATIONS[str(plain[messages.OPERATION])], plain)
                    if isinstance(request, messages.QuorumRequest):
                        name = request.name
                        self.quorums.hear(write, request)
                    elif isinstance(request, messages.WaitRequest):
                        write(await self.store.wait(request))
                    else:
                        write(self.store.answer(request))
                    await writer.drain()
            finally:
                self._proven -= 1
                self.quorums.leave(name, write)
        except (*BAD_REQUEST, OSError, EOFError, asyncio.CancelledError) as error:
            self._handshakes.note_refusal("rendezvous", writer, error)
        finally:
            writer.transport.abort()


def main() -> None:
    descriptor, supervisor, secret_file, *times_s = sys.argv[1:]
    silence_s, patience_s, pause_s, grace_s = map(float, times_s)
    # Ignore these signals. They go to the entire job, whose workers still need this process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    allow_connections(MAX_CONNECTIONS)
    quorums = Quorums(QuorumRules(silence_s, patience_s), pause_s)
    server = RendezvousServer(read_secret(Path(secret_file)), quorums)
    asyncio.run(server.serve(socket.socket(fileno=int(descriptor)), int(supervisor), grace_s))


if __name__ == "__main__":
    main()
