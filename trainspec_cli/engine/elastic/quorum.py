"""A replica group's client of the quorum: one process asks for it, and its connection is the group's sign of life."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from trainspec_cli.wire.client import JsonClient

BEAT_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 30 * 60.0
"""A quorum waits for groups that live but are busy (writing, evaluating)."""


@dataclass(frozen=True)
class Quorum:
    """The replica groups that make the next step together."""

    number: str
    """Another one whenever the members change, or one of them has met an error."""
    names: tuple[str, ...]
    steps: tuple[int, ...]
    """Updates that each of them has made."""


class QuorumClient:
    """Sends heartbeats from a thread of its own until `close`."""

    def __init__(self, name: str, connect: Callable[[], JsonClient]):
        """`name` is this very start's. `connect` is called again where the server has been started again."""
        self._name, self._connect = name, connect
        self._connection = connect()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._asked = 0
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def join(self, step: int, failures: int) -> Quorum:
        """Ask for a place in the step after `step`, and wait for the quorum. Raises OSError."""
        self._asked += 1
        while True:
            connection = self._connection
            try:
                self._send(connection, op="join", step=step, failures=failures, number=self._asked)
                while (answer := connection.receive(ANSWER_TIMEOUT_S))["number"] != self._asked:
                    pass  # what was asked on a connection that was lost
            except TimeoutError:
                raise
            except OSError:
                self._replace(connection)
                continue
            return Quorum(answer["quorum"], tuple(answer["names"]), tuple(answer["steps"]))

    def close(self) -> None:
        self._closed.set()
        self._connection.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_INTERVAL_S):
            connection = self._connection
            try:
                self._send(connection, op="beat")
            except OSError:
                with contextlib.suppress(OSError):  # `join` raises what is wrong
                    self._replace(connection)

    def _replace(self, broken: JsonClient) -> None:
        """The server has ended, and is started again on the same port: connect anew, unless that is done already."""
        with self._lock:
            if self._connection is broken:
                broken.close()
                self._connection = self._connect()

    def _send(self, connection: JsonClient, **request: str | int) -> None:
        with self._lock:
            connection.send({"name": self._name, **request})
