"""The store of a job on several nodes: a client of the job's rendezvous server.

torch's own TCPStore listens on every interface and trusts every connection. This one proves the job's secret first
(`wire/handshake.py`); the server is `launch/rendezvous/server.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainspec_cli.environment_names import RENDEZVOUS, SECRET_FILE
from trainspec_cli.rundir.generations import read_secret
from trainspec_cli.wire.client import JsonClient

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
        self._ask("check", keys=[])

    def clone(self) -> RendezvousStore:
        self._clones.append(RendezvousStore(self.timeout))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=_as_text(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_as_bytes(value) for value in self._await("get", keys, self.timeout)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await("wait", keys, self.timeout if timeout is None else timeout)

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key=key, amount=value))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key=key, value=_as_text(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, value = _as_text(expected_value), _as_text(desired_value)
        return _as_bytes(self._ask("compare_set", key=key, expected=expected, value=value))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys=list(keys)))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def has_extended_api(self) -> bool:
        return True

    def _await(self, operation: str, keys: Sequence[str], timeout: timedelta) -> list[str]:
        seconds = timeout.total_seconds()
        request = {"op": operation, "keys": list(keys), "timeout_s": seconds}
        answer = self._answer(request, seconds + ANSWER_TIMEOUT_S)
        if "missing" in answer:
            raise dist.DistStoreError(f"no process has set `{answer['missing']}` within {seconds:g} s")
        return list(answer["values"])

    def _ask(self, operation: str, **request: Any) -> Any:
        return self._answer({"op": operation, **request}, ANSWER_TIMEOUT_S)["value"]

    def _answer(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        thread = threading.get_native_id()
        try:
            if thread not in self._connections:
                self._connections[thread] = JsonClient(os.environ[RENDEZVOUS], self._secret, CONNECT_TIMEOUT_S)
            return self._connections[thread].ask(request, timeout_s)
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
