"""The store through which the processes of a job on several nodes meet: a client of the job's rendezvous server.

torch's own TCPStore listens on every interface and believes whoever connects. This one shows the job's secret first
(`wire/handshake.py`); the server is `launch/rendezvous_server.py`.
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
from trainspec_cli.rundir.secret import read_secret
from trainspec_cli.wire.client import JsonClient

CONNECT_TIMEOUT_S = 60.0
"""The server may be just being started again."""
ANSWER_TIMEOUT_S = 60.0
"""The server answers at once; a wait's own time comes on top."""


def connect() -> JsonClient:
    """Return a connection to the job's rendezvous server. Raises OSError, MachineError."""
    return JsonClient(os.environ[RENDEZVOUS], read_secret(Path(os.environ[SECRET_FILE])), CONNECT_TIMEOUT_S)


class RendezvousStore(dist.Store):
    """torch.distributed's store; each thread has a connection of its own, so that one may wait while another writes.

    Process groups hold the C++ half alone: whoever builds one keeps this object for as long.
    """

    timeout: timedelta
    """How long a key is waited for; a property of the C++ half."""

    def __init__(self, timeout: timedelta):
        super().__init__()
        self.set_timeout(timeout)
        self._secret = read_secret(Path(os.environ[SECRET_FILE]))
        self._connections: dict[int, JsonClient] = {}
        """By the system's number of the thread: torch's own threads have no Python state that lasts."""
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
                client.close()  # what comes late is no answer to the next request
            if not isinstance(error, OSError):
                raise
            raise dist.DistNetworkError(f"the job's rendezvous server, {os.environ[RENDEZVOUS]}: {error}") from error


def _as_text(value: str | bytes | Sequence[int]) -> str:
    """Every byte becomes the character of its number."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _as_bytes(value: str) -> bytes:
    return value.encode("latin-1")
