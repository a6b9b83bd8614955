"""Join the process group at a worker's start, and leave it at the end."""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from trainspec_cli.core.environment_names import STORE_FILE
from trainspec_cli.engine.accelerators import enter, process_group_backends
from trainspec_cli.engine.comm.codec import Connection, borrow, open_connections, read_tcp_info
from trainspec_cli.engine.comm.forking import fork_workers
from trainspec_cli.engine.comm.rendezvous import RendezvousStore
from trainspec_cli.run.folder.event_types.events import ConnectionCounts

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_stores: list[dist.Store] = []
"""References that keep stores alive: process groups hold only their C++ half."""


def join_processes(device_type: str) -> torch.device:
    """Join the other ranks of this generation, and return this rank's device."""
    device = enter(device_type)
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    _stores.append(_open_store(world_size))
    backends = process_group_backends(device.type)
    dist.init_process_group(backends, store=_stores[-1], rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    return device


def _open_store(world_size: int) -> dist.Store:
    """Return a store: a private file on a single node, else a client of the rendezvous server (torchrun.py)."""
    if STORE_FILE in os.environ:
        file_store = dist.FileStore(os.environ[STORE_FILE], world_size)
        file_store.set_timeout(COLLECTIVE_TIMEOUT)
        return file_store
    from trainspec_cli.engine.comm.rendezvous import RendezvousStore

    store = RendezvousStore(COLLECTIVE_TIMEOUT)
    _stores.append(store)
    return dist.PrefixStore(f"workers/{os.environ['TORCHELASTIC_RUN_ID']}", store)


def leave_processes() -> NoReturn:
    """Leave the process group and exit with 0; exit handlers run, but the interpreter is not finalised.

    Gloo's threads need its lock to drop the tensors of finished work. A thread that asks for it during finalisation
    aborts the process (pytorch/pytorch#179291), and the run would look failed at its very end. Destroying the groups
    stops only the threads of groups without references.
    """
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# `python -m trainspec_cli.engine.comm.torchrun OPTIONS -m MODULE ARGUMENTS`: torchrun with a private rendezvous.
#
# torchrun's own rendezvous unpickles data from a store that anyone who reaches the port can write, and hands that
# store to the workers. Here a single node opens no port: its workers use a file that only their user can read.
# Several nodes use the job's rendezvous server, which requires the job's secret.


BACKEND = "trainspec"
NOWHERE = RendezvousStoreInfo("127.0.0.1", 0)
"""A dummy: torchrun passes the workers the address of a TCP store, and there is none."""


class PrivateRendezvous(RendezvousHandler):
    """A rendezvous with known members: each node's number, and how many there are, are given."""

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
        """Do nothing: there is no second rendezvous."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        return True


def main() -> None:
    from torch.distributed import run

    rendezvous_handler_registry.register(BACKEND, PrivateRendezvous)
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


if __name__ == "__main__":
    main()


# How this process's connections do: bytes, segments sent again and round-trip times, counted by the kernel.
#
# Both ends of a connection know it by the same two addresses, so that a reader of all ranks' counts finds out between
# which ranks it goes.


TIMEOUTS_OFFSET = 240
"""`tcpi_total_rto` in `struct tcp_info`, since Linux 6.7."""
NEEDLESS_OFFSET = 216
"""`tcpi_dsack_dups`, since Linux 4.19: segments that had arrived when they were sent again; a process that had no
processor to acknowledge them lets them seem lost."""
FIELDS = struct.Struct("=68xI28xI52xI8xQ24xQQ")
"""Of `struct tcp_info`: round-trip time in us, segments sent again, data segments, busy time in us, bytes sent, bytes
sent again."""
COUNTED = 2**32
"""The kernel counts segments up to this, and then from 0."""
LISTED_EVERY = 16
"""Connections are looked for again after so many windows; most are opened at a run's start."""
REPORTED = 6
"""The connections that sent most are reported."""


@dataclass(frozen=True)
class ConnectionState:
    """A connection's counters since it was opened."""

    rtt_s: float
    resent: int
    segments: int
    sent_bytes: int
    busy_s: float
    timeouts: int


class ConnectionCounter:
    def __init__(self) -> None:
        self._cuts = 0
        self._ends: dict[Connection, tuple[str, str]] = {}
        self._before: dict[Connection, ConnectionState] = {}

    def cut(self) -> tuple[ConnectionCounts, ...]:
        """Return what was counted since the last call, of the connections that sent most."""
        if self._cuts % LISTED_EVERY == 0:
            self._find()
        self._cuts += 1
        counted = [counts for connection in list(self._ends) if (counts := self._count(connection)) is not None]
        return tuple(sorted(counted, key=lambda one: one.sent_bytes, reverse=True)[:REPORTED])

    def _find(self) -> None:
        connections = list(open_connections())
        self._ends = {one: self._ends.get(one) or ends_of(one[0]) for one in connections}
        self._before = {one: self._before[one] for one in connections if one in self._before}

    def _count(self, connection: Connection) -> ConnectionCounts | None:
        now = state_of(connection)
        before = self._before.get(connection)
        if now is None:
            return None
        self._before[connection] = now
        if before is None or now.sent_bytes <= before.sent_bytes:
            return None
        local, peer = self._ends[connection]
        return ConnectionCounts(
            local=local,
            peer=peer,
            sent_bytes=now.sent_bytes - before.sent_bytes,
            segments=(now.segments - before.segments) % COUNTED,
            resent=max(0, now.resent - before.resent),
            timeouts=max(0, now.timeouts - before.timeouts),
            busy_s=max(0.0, now.busy_s - before.busy_s),
            rtt_s=now.rtt_s,
        )


def ends_of(descriptor: int) -> tuple[str, str]:
    """Return the addresses of both ends; empty texts where it is closed."""
    with suppress(OSError), borrow(descriptor) as end:
        return _shown(end.getsockname()), _shown(end.getpeername())
    return "", ""


def _shown(address: tuple[object, ...]) -> str:
    """Return `10.0.0.1:29500`; an IPv4 address within IPv6 is shown as itself."""
    return f"{str(address[0]).removeprefix('::ffff:')}:{address[1]}"


def state_of(connection: Connection) -> ConnectionState | None:
    """Return a connection's counters; None where it is closed."""
    info = read_tcp_info(connection)
    if info is None:
        return None
    rtt_us, resent, segments, busy_us, sent, again = FIELDS.unpack_from(info)
    (timeouts,) = struct.unpack_from("=H", info, TIMEOUTS_OFFSET) if len(info) >= TIMEOUTS_OFFSET + 2 else (0,)
    (needless,) = struct.unpack_from("=I", info, NEEDLESS_OFFSET) if len(info) >= NEEDLESS_OFFSET + 4 else (0,)
    return ConnectionState(rtt_us / 1e6, resent - needless, segments, sent - again, busy_us / 1e6, timeouts)
