"""A worker's end of the connection to its supervisor, and the mailbox between the workers and the supervisor's
threads."""

from __future__ import annotations

import os
import selectors
import threading
from pathlib import Path
from typing import TypeVar

from trainspec_cli.core.environment_names import SECRET_FILE, SUPERVISOR
from trainspec_cli.run.channel.messages import Message, SpeedsReport, WorkerHello, WorkerMessage
from trainspec_cli.run.channel.wire import RETRY_S, Wire, call_hub
from trainspec_cli.run.folder.generations import read_secret

MessageT = TypeVar("MessageT")
FLUSH_S = 1.0
"""Interval for retrying data that did not fit into the socket's buffer."""


class SupervisorConnection:
    """A background thread connects, reconnects after a loss, and receives messages, so that training steps never wait
    for the network. A worker can train without a connection: with an empty `address`, it receives nothing."""

    def __init__(self, address: str = "", secret: bytes = b"", rank: int = 0):
        """`address`: HOST:PORT, or the path of a Unix socket. `rank`: the global rank."""
        self._hello = WorkerHello(rank)
        host, _, port = address.rpartition(":")
        self._address = (host, int(port)) if host else address
        self._secret = secret
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wire: Wire | None = None
        self._unsent: list[WorkerMessage] = []
        self._received: list[Message] = []
        if address:
            threading.Thread(target=self._keep_connected, name="supervisor", daemon=True).start()

    @classmethod
    def of_worker(cls, rank: int) -> SupervisorConnection:
        """Connect to the address in the environment. Raises MachineError if the job's secret cannot be read."""
        address = os.environ.get(SUPERVISOR, "")
        return cls(address, read_secret(Path(os.environ[SECRET_FILE])) if address else b"", rank)

    def send(self, message: WorkerMessage) -> None:
        """Send now, or as soon as the supervisor is connected."""
        with self._lock:
            if not self._address:
                return
            if self._wire is None or self._wire.closed:
                self._unsent.append(message)
            else:
                self._wire.send(message)

    def receive(self, kind: type[MessageT]) -> list[MessageT]:
        """Return the messages of this type that have arrived since the last call, oldest first."""
        with self._lock:
            found: list[MessageT] = [message for message in self._received if isinstance(message, kind)]
            self._received = [message for message in self._received if not isinstance(message, kind)]
            return found

    def close(self) -> None:
        """End the thread within `FLUSH_S`. Nothing is sent or received afterwards."""
        self._closed.set()
        with self._lock:
            if self._wire is not None:
                self._wire.close()

    def _keep_connected(self) -> None:
        while not self._closed.is_set():
            try:
                wire = call_hub(self._address, self._secret)
            except OSError:  # the supervisor, which was listening before workers started, has exited, or a cable is cut
                self._closed.wait(RETRY_S)
                continue
            # select.select does not accept descriptors above 1,023, and a rank may have more connections than that.
            with selectors.DefaultSelector() as ready:
                with self._lock:
                    if self._closed.is_set():
                        wire.close()
                        return
                    ready.register(wire, selectors.EVENT_READ)
                    self._wire = wire
                    for message in (self._hello, *self._unsent):
                        wire.send(message)
                    self._unsent.clear()
                while not wire.closed:
                    ready.select(FLUSH_S)
                    with self._lock:
                        self._received += wire.receive()
                        wire.flush()
            self._closed.wait(RETRY_S)


class WorkerMail:
    """Passes messages between the workers of a run's newest start and the supervisor's threads.

    It exists as long as the run does. The supervisor empties it before each start, and exchanges its messages with the
    hub of that start."""

    def __init__(self) -> None:
        self.speeds: SpeedsReport | None = None
        """The newest report in this start; each report is a new object."""
        self.unsent: list[tuple[WorkerMessage, int | None]] = []
        """Messages, each with the rank of its recipient, or with None for all workers."""

    def send(self, message: WorkerMessage, rank: int | None = None) -> None:
        self.unsent.append((message, rank))

    def clear(self) -> None:
        self.speeds = None
        self.unsent.clear()
