"""Which replica groups take part in a step: agreed on before it, voted on after it.

The quorum, the heartbeats and the vote are torchft's (its coordination servers: one lighthouse for the job, one manager
for each group). The exchange between the groups is ours: on the first error the line is dropped at once, healing copies
plain tensors in place (nothing is unpickled), and every server listens on the job's own interface alone.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchft.coordination import ManagerClient, ManagerServer

from trainspec_cli.engine.elastic.line import Line

HEARTBEAT_INTERVAL = timedelta(milliseconds=100)
CONNECT_TIMEOUT = timedelta(seconds=30)
QUORUM_TIMEOUT = timedelta(hours=1)
"""A quorum waits for groups that live but are busy (writing, evaluating); how long, the lighthouse decides."""
VOTE_TIMEOUT = timedelta(minutes=10)
QUORUM_RETRIES = 60
"""A lighthouse that was killed is back within a few of them."""


@dataclass(frozen=True)
class Place:
    """Where this process stands."""

    group: int
    rank: int
    """Within the group."""
    group_size: int
    host: str
    """The interface of the job."""
    lighthouse: str
    """host:port"""


@dataclass(frozen=True)
class Seat:
    """This group's part in the step to come."""

    groups: tuple[int, ...]
    """Those that take part, in order."""
    rank: int
    """This group's place among them."""
    step: int
    """Updates that the run has made; where it is more than this group had, the state was healed."""
    healed: bool
    names: frozenset[str]
    """Of the groups and of their very start: one that died and came back has another."""


class HealFailedError(RuntimeError):
    """The state is half one group's and half another's: this process must end."""


class Membership:
    """Every method is called by all ranks of a group together."""

    def __init__(self, place: Place, state: Callable[[], Sequence[Tensor]], exchange_timeout_s: float):
        """`state`: all that a healing group copies, always in the same order."""
        self.place, self._state, self._timeout_s = place, state, exchange_timeout_s
        self._line: Line | None = None
        self._line_id: tuple[object, ...] = ()
        self._error: Exception | None = None
        self._failures = 0
        self.failed_anywhere = False
        """Whether any rank of this group had met an error when they last settled."""
        self._server = _start_server(place) if place.rank == 0 else None
        self._client = ManagerClient(_shared_address(self._server), connect_timeout=CONNECT_TIMEOUT)

    def agree(self, step: int) -> Seat:
        """Wait for the groups that are there, and connect to them; heal from one that has come further than `step`."""
        self._error = None
        quorum = self._client._quorum(
            group_rank=self.place.rank,
            step=step,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=QUORUM_TIMEOUT,
            commit_failures=self._failures,
            init_sync=False,
        )
        self._connect(quorum)
        if quorum.recover_dst_replica_ranks:
            self._give_state(quorum.recover_dst_replica_ranks)
        if quorum.heal:
            self._take_state(quorum.recover_src_replica_rank)
        groups = tuple(int(name.partition(":")[0]) for name in quorum.replica_ids)
        return Seat(groups, quorum.replica_rank, quorum.max_step, bool(quorum.heal), frozenset(quorum.replica_ids))

    def sum_(self, tensor: Tensor) -> None:
        """Over all groups, in place; after an error nothing, until the next `agree`."""
        if self._line is not None and self._line.size > 1:
            self._try(lambda line: line.sum_(tensor))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Of all groups in order; empty after an error."""
        gathered: list[Tensor] = []
        self._try(lambda line: gathered.extend(line.gather(tensor)))
        return gathered

    @property
    def failed(self) -> bool:
        """Whether this rank has met an error since `agree`."""
        return self._error is not None

    def settle(self, counts: Tensor) -> None:
        """Every rank of this group gets the greatest of what its ranks hold, and learns whether any met an error."""
        told = torch.cat([counts, torch.tensor([float(self.failed)])])
        if self.place.group_size > 1:
            dist.all_reduce(told, dist.ReduceOp.MAX)
        counts.copy_(told[:-1])
        self.failed_anywhere = bool(told[-1])

    def vote(self, step: int) -> bool:
        """Whether the step counts: no rank of this group has met an error since `agree`."""
        committed = self._client.should_commit(self.place.rank, step, not self.failed, timeout=VOTE_TIMEOUT)
        self._failures = 0 if committed else self._failures + 1
        return committed

    def leave(self) -> None:
        self._line = None
        if self._server is not None:
            self._server.shutdown()

    def _connect(self, quorum: Any) -> None:
        """The line's name holds all that a lighthouse which starts again may count anew."""
        line_id = (quorum.quorum_id, tuple(quorum.replica_ids))
        if self._line is not None and line_id == self._line_id:
            return
        self._line, self._line_id = None, line_id
        members = hashlib.sha256("\n".join(quorum.replica_ids).encode()).hexdigest()[:12]
        name = f"line/{quorum.quorum_id}-{quorum.max_step}-{members}/{self.place.rank}"
        address = f"{quorum.store_address}/{name}"
        try:
            self._line = Line(address, quorum.replica_rank, quorum.replica_world_size, self._timeout_s)
        except (RuntimeError, dist.DistError) as error:
            self._drop(error)

    def _give_state(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._try(partial(Line.send, tensors=self._state(), to=rank))

    def _take_state(self, rank: int) -> None:
        with torch.no_grad():
            self._try(lambda line: line.receive_(self._state(), rank))
        if self.failed:
            raise HealFailedError(f"the group that this one healed from was lost: {self._error}") from self._error

    def _try(self, act: Callable[[Line], None]) -> None:
        if self._line is None:
            return
        try:
            act(self._line)
        except RuntimeError as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Peers that still wait on the line notice at once, and no one waits for a timeout."""
        self._error, self._line = error, None


def _start_server(place: Place) -> ManagerServer:
    """Heartbeats begin here: all that takes time must be done before."""
    return ManagerServer(
        replica_id=f"{place.group:05d}:{uuid.uuid4()}",
        lighthouse_addr=f"http://{place.lighthouse}",
        hostname=place.host,
        bind=f"{place.host}:0",
        store_addr=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        world_size=place.group_size,
        heartbeat_interval=HEARTBEAT_INTERVAL,
        connect_timeout=CONNECT_TIMEOUT,
        quorum_retries=QUORUM_RETRIES,
    )


def _shared_address(server: ManagerServer | None) -> str:
    """Of the group's server, told by rank 0."""
    address = [server.address() if server else ""]
    dist.broadcast_object_list(address, src=0)
    return str(address[0])
