"""A worker's end of the connection to its supervisor, and the supervisor's side for those who follow the run."""

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
"""What the connection had no room for is sent again this often."""


class SupervisorConnection:
    """A thread connects, again where the connection is lost, and takes in what comes: no step waits for it. A worker
    needs none of it to train, so that one without a supervisor (`address` is empty) hears nothing."""

    def __init__(self, address: str = "", secret: bytes = b"", rank: int = 0):
        """`address`: HOST:PORT, or the path of a Unix socket. `rank`: among all of the run's."""
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
        """Connect as the environment says. Raises MachineError where the job's secret cannot be read."""
        address = os.environ.get(SUPERVISOR, "")
        return cls(address, read_secret(Path(os.environ[SECRET_FILE])) if address else b"", rank)

    def send(self, message: WorkerMessage) -> None:
        """Send now, or once the supervisor is connected."""
        with self._lock:
            if not self._address:
                return
            if self._wire is None or self._wire.closed:
                self._unsent.append(message)
            else:
                self._wire.send(message)

    def take(self, kind: type[MessageT]) -> list[MessageT]:
        """Return the messages of this type that have come since the last call, oldest first."""
        with self._lock:
            found: list[MessageT] = [message for message in self._received if isinstance(message, kind)]
            self._received = [message for message in self._received if not isinstance(message, kind)]
            return found

    def close(self) -> None:
        """The thread ends within `FLUSH_S`; nothing is sent or received any more."""
        self._closed.set()
        with self._lock:
            if self._wire is not None:
                self._wire.close()

    def _keep_connected(self) -> None:
        while not self._closed.is_set():
            try:
                wire = call_hub(self._address, self._secret)
            except OSError:  # the supervisor begins to listen before workers start: it has ended, or a cable is cut
                self._closed.wait(RETRY_S)
                continue
            # Not select.select, which takes no descriptor beyond 1,023: a rank may have more connections to others.
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
    """Passes messages between those in the supervisor's process who follow a run and the workers of its newest start.

    It lives as long as the run; the supervisor empties it before each start, and moves what it holds to the start's hub
    and back.
    """

    def __init__(self) -> None:
        self.speeds: SpeedsReport | None = None
        """The newest report of this start; a newer one is another object."""
        self.unsent: list[tuple[WorkerMessage, int | None]] = []
        """Messages for the worker of a rank, or for all."""

    def tell(self, message: WorkerMessage, rank: int | None = None) -> None:
        self.unsent.append((message, rank))

    def clear(self) -> None:
        self.speeds = None
        self.unsent.clear()
