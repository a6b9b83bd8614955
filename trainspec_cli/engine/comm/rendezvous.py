"""The store of a job on several nodes: a client of the job's rendezvous server.

torch's own TCPStore listens on every interface and trusts every connection. This one proves the job's secret first
(`core/wire/handshake.py`); the server is `run/rendezvous/server.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import TypeVar

import torch.distributed as dist

from trainspec_cli.core.environment_names import RENDEZVOUS, SECRET_FILE
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.wire import rendezvous as messages
from trainspec_cli.core.wire.rendezvous import JsonClient
from trainspec_cli.recipe.records import read_record
from trainspec_cli.run.folder.generations import read_secret

T = TypeVar("T")

CONNECT_TIMEOUT_S = 60.0
"""Long enough for a restart of the server."""
ANSWER_TIMEOUT_S = 60.0
"""The server answers at once; the timeout of a wait is added."""


def connect() -> JsonClient:
    """Return a connection to the job's rendezvous server. Raises OSError, MachineError."""
    return JsonClient(os.environ[RENDEZVOUS], read_secret(Path(os.environ[SECRET_FILE])), CONNECT_TIMEOUT_S)


class RendezvousStore(dist.Store):
    """torch.distributed's store; each thread has its own connection, so that one can wait while another writes.

    Process groups hold only the C++ half: their creator must keep a reference to this object.
    """

    timeout: timedelta
    """The time limit for waiting on a key; a property of the C++ half."""

    def __init__(self, timeout: timedelta):
        super().__init__()
        self.set_timeout(timeout)
        self._secret = read_secret(Path(os.environ[SECRET_FILE]))
        self._connections: dict[int, JsonClient] = {}
        """Connections by native thread id: torch's own threads have no persistent Python state."""
        self._clones: list[RendezvousStore] = []
        self._ask(messages.CheckKeys(()), bool)

    def clone(self) -> RendezvousStore:
        self._clones.append(RendezvousStore(self.timeout))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(messages.SetKey(key, _as_text(value)), NoneType)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_as_bytes(value) for value in self._await(messages.GetKeys(tuple(keys), self.timeout.total_seconds()))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self.timeout if timeout is None else timeout
        self._await(messages.AwaitKeys(tuple(keys), limit.total_seconds()))

    def add(self, key: str, value: int) -> int:
        return self._ask(messages.AddToKey(key, value), int)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(messages.AppendToKey(key, _as_text(value)), NoneType)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = _as_text(expected_value)
        value = _as_text(desired_value)
        return _as_bytes(self._ask(messages.CompareAndSetKey(key, expected, value), str))

    def delete_key(self, key: str) -> bool:
        return self._ask(messages.DeleteKey(key), bool)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(messages.CheckKeys(tuple(keys)), bool)

    def num_keys(self) -> int:
        return self._ask(messages.CountKeys(), int)

    def has_extended_api(self) -> bool:
        return True

    def _await(self, request: messages.WaitRequest) -> tuple[str, ...]:
        answer = self._answer(request, request.timeout_s + ANSWER_TIMEOUT_S)
        if "missing" in answer:
            raise dist.DistStoreError(f"no process has set `{answer['missing']}` within {request.timeout_s:g} s")
        return read_record(messages.KeyValues, answer).values

    def _ask(self, request: messages.KeyRequest, kind: type[T]) -> T:
        """Return the value of the server's answer, which is of `kind`."""
        value = self._answer(request, ANSWER_TIMEOUT_S)["value"]
        if not isinstance(value, kind):
            raise dist.DistNetworkError(f"the job's rendezvous server has answered {value!r}, no {kind.__name__}")
        return value

    def _answer(self, request: messages.KeyRequest | messages.WaitRequest, timeout_s: float) -> JsonObject:
        thread = threading.get_native_id()
        try:
            if thread not in self._connections:
                self._connections[thread] = JsonClient(os.environ[RENDEZVOUS], self._secret, CONNECT_TIMEOUT_S)
            return self._connections[thread].ask(messages.to_json(request), timeout_s)
        except BaseException as error:
            if client := self._connections.pop(thread, None):
                client.close()  # a late answer must not be taken for that of the next request
            if not isinstance(error, OSError):
                raise
            raise dist.DistNetworkError(f"the job's rendezvous server, {os.environ[RENDEZVOUS]}: {error}") from error


def _as_text(value: str | bytes | Sequence[int]) -> str:
    """Map every byte to the character of its number."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _as_bytes(value: str) -> bytes:
    return value.encode("latin-1")
