"""Join the process group when a worker starts, and leave it when the worker ends."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from trainspec_cli.core.environment_names import RENDEZVOUS, SECRET_FILE, STORE_FILE
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.wire import rendezvous as messages
from trainspec_cli.core.wire.rendezvous import JsonClient
from trainspec_cli.engine.accelerators import enter, process_group_backends, started_kind
from trainspec_cli.engine.comm.forking import ENGINE, fork_workers, import_program
from trainspec_cli.engine.comm.standing_by import stand_by
from trainspec_cli.recipe.records import read_record
from trainspec_cli.run.folder.generations import read_secret

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_stores: list[dist.Store] = []
"""Keeps the Python part of stores alive, because process groups refer only to the C++ part."""


def join_processes(device_type: str) -> torch.device:
    """Join the other ranks of this start, and return this rank's device."""
    device = enter(device_type)
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    _stores.append(_open_store(world_size))
    backends = process_group_backends(device.type)
    dist.init_process_group(backends, store=_stores[-1], rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    return device


def _open_store(world_size: int) -> dist.Store:
    """Return a store: a private file on a single node, otherwise a client of the rendezvous server."""
    if STORE_FILE in os.environ:
        file_store = dist.FileStore(os.environ[STORE_FILE], world_size)
        file_store.set_timeout(COLLECTIVE_TIMEOUT)
        return file_store
    store = RendezvousStore(COLLECTIVE_TIMEOUT)
    _stores.append(store)
    return dist.PrefixStore(f"workers/{os.environ['TORCHELASTIC_RUN_ID']}", store)


def leave_processes() -> NoReturn:
    """Leave the process group and exit with 0; exit handlers run, but the interpreter is not finalised.

    Gloo's threads need the interpreter lock to release the tensors of finished work. A thread that requests it during
    finalisation aborts the process (pytorch/pytorch#179291), and the run would appear to fail at its very end.
    Destroying the groups stops only the threads of groups without references. Wait for the accelerator first, because
    it may still be sending data to another rank.
    """
    if started_kind() is not None:
        torch.accelerator.synchronize()
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# `python -m trainspec_cli.engine.comm.joining OPTIONS -m MODULE ARGUMENTS`: torchrun with a private rendezvous.
#
# torchrun's own rendezvous unpickles data from a store that anyone with access to the port can write to, and passes
# that store to the workers. Here, a single node does not open a port: its workers use a file that only their user can
# read. Several nodes use the job's rendezvous server, which requires the job's secret.


BACKEND = "trainspec"
NOWHERE = RendezvousStoreInfo("127.0.0.1", 0)
"""A dummy address: torchrun passes the address of a TCP store to the workers, but no such store is opened here."""


class PrivateRendezvous(RendezvousHandler):
    """A rendezvous with known members: the number of nodes and each node's rank are fixed."""

    def __init__(self, parameters: RendezvousParameters):
        self._node = parameters.get_as_int("node", 0) or 0
        self._num_nodes = parameters.max_nodes
        self._store = dist.HashStore() if self._num_nodes == 1 else RendezvousStore(COLLECTIVE_TIMEOUT)
        self._name = parameters.run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.PrefixStore(self._name, self._store), self._node, self._num_nodes, NOWHERE)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing, because there is no second rendezvous."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        return True


def main() -> None:
    from torch.distributed import run

    rendezvous_handler_registry.register(BACKEND, PrivateRendezvous)
    if sys.argv[1:2] == ["--standby"]:
        import_program(ENGINE, ())
        stand_by(int(sys.argv[2]))
    asked = run.parse_args(sys.argv[1:])
    if asked.module:
        fork_workers(asked.training_script, asked.training_script_args)
    folder = tempfile.mkdtemp(prefix="trainspec-")
    try:
        os.environ.pop(STORE_FILE, None)
        if asked.nnodes == "1":
            os.environ[STORE_FILE] = str(Path(folder, "store"))
        run.main()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# The store of a job on several nodes: a client of the job's rendezvous server.
#
# torch's own TCPStore listens on every interface and trusts every connection. This store first proves that it knows the
# job's secret (`core/wire/handshake.py`). The server is `run/rendezvous/server.py`.


T = TypeVar("T")

CONNECT_TIMEOUT_S = 60.0
"""Time limit for connecting: long enough for a restart of the server."""
ANSWER_TIMEOUT_S = 60.0
"""Time limit for an answer. The server answers immediately, except when waiting for a key; that wait's timeout is
added."""


def connect() -> JsonClient:
    """Return a connection to the job's rendezvous server. Raises OSError or MachineError."""
    return JsonClient(os.environ[RENDEZVOUS], read_secret(Path(os.environ[SECRET_FILE])), CONNECT_TIMEOUT_S)


class RendezvousStore(dist.Store):
    """A store for torch.distributed; each thread has its own connection, so that one can wait while another writes.

    Process groups refer only to its C++ part, so their creator must keep a reference to this object.
    """

    timeout: timedelta
    """The time limit for waiting for a key. It overrides a property of the C++ part."""

    def __init__(self, timeout: timedelta):
        super().__init__()
        self.set_timeout(timeout)
        self._secret = read_secret(Path(os.environ[SECRET_FILE]))
        self._connections: dict[int, JsonClient] = {}
        """Connections by native thread ID, because torch's threads have no persistent Python state."""
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
        """Return the value in the server's answer, which must have the type `kind`."""
        value = self._answer(request, ANSWER_TIMEOUT_S)["value"]
        if not isinstance(value, kind):
            raise dist.DistNetworkError(f"the job's rendezvous server answered {value!r}, not {kind.__name__}")
        return value

    def _answer(self, request: messages.KeyRequest | messages.WaitRequest, timeout_s: float) -> JsonObject:
        thread = threading.get_native_id()
        try:
            if thread not in self._connections:
                self._connections[thread] = JsonClient(os.environ[RENDEZVOUS], self._secret, CONNECT_TIMEOUT_S)
            return self._connections[thread].ask(messages.to_json(request), timeout_s)
        except BaseException as error:
            if client := self._connections.pop(thread, None):
                client.close()  # a late answer must not be mistaken for the answer to the next request
            if not isinstance(error, OSError):
                raise
            raise dist.DistNetworkError(f"the job's rendezvous server, {os.environ[RENDEZVOUS]}: {error}") from error


def _as_text(value: str | bytes | Sequence[int]) -> str:
    """Convert bytes to text, each byte to the character with the same code."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _as_bytes(value: str) -> bytes:
    return value.encode("latin-1")


if __name__ == "__main__":
    main()
