"""Decide which replica groups take part in a step. They agree on this before the step, and vote after it on whether it
counts.

Rank 0 of a group asks the job's rendezvous server for the quorum and sends it to the other ranks of the group. At the
first error in an exchange between groups, its connections are closed immediately. A group heals by copying plain
tensors in place; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.core.wire.rendezvous import FormedQuorum, GroupBeat, JoinQuorum, JsonClient, QuorumRequest, to_json
from trainspec_cli.engine.comm.codec import Connection, open_connections
from trainspec_cli.engine.comm.compressed import CompressedSum
from trainspec_cli.engine.comm.joining import connect
from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.engine.elastic.cross_group import CrossGroupComm
from trainspec_cli.recipe.records import from_plain, read_record, to_plain
from trainspec_cli.run.recovery.reliability import plan_healing

BEAT_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 30 * 60.0
"""Time in seconds for which a quorum waits for groups that are alive but busy (writing a checkpoint or evaluating)."""


@dataclass(frozen=True)
class GroupRank:
    """A process's position among all replica groups."""

    group: int
    rank: int
    """The rank within the group."""
    group_size: int


@dataclass(frozen=True)
class Participation:
    """The quorum of the next step, and this group's position in it."""

    groups: tuple[int, ...]
    """The groups that take part, in order."""
    rank: int
    """This group's position among these groups."""
    step: int
    """Number of updates made by the run. If this is more than this group had made, its state was healed."""
    healed: bool
    names: frozenset[str]
    """The groups' names, which identify their current starts; a restarted group has a new name."""

    def changes_since(self, before: Participation) -> list[tuple[str, int | None]]:
        """Return ("left", group) for each group that is no longer present, and ("joined", group) for each new one."""
        changes = (("left", before.names - self.names), ("joined", self.names - before.names))
        return [(change, _group_of(name)) for change, names in changes for name in sorted(names)]


NOBODY = Participation((), 0, 0, healed=False, names=frozenset())


def _group_of(name: str) -> int:
    return int(name.partition(":")[0])


class HealFailedError(RuntimeError):
    """Healing was interrupted, so the state is a mixture of two groups' states, and this process must end."""


class Membership:
    """One group's membership in the quorum. Every method is called collectively by all ranks of the group."""

    def __init__(
        self, own: GroupRank, state: Callable[[], Sequence[Tensor]], exchange_timeout_s: float, device: torch.device
    ):
        """`state` returns the tensors that a healing group copies, always in the same order. Gradients are on `device`
        or on the host."""
        self.own = own
        self._state = state
        self._timeout_s = exchange_timeout_s
        self._device = device
        self._comm: CrossGroupComm | None = None
        self.connections: frozenset[Connection] = frozenset()
        """The connections to the other groups."""
        self._peers = ""
        """The quorum whose groups `_comm` is connected to."""
        self._error: Exception | None = None
        self._failures = 0
        self.failed_anywhere = False
        """True if any rank of this group had an error before the last vote."""
        self._name = broadcast_json(f"{own.group:05d}:{uuid.uuid4()}", str)
        self._client: QuorumClient | None = None
        """Rank 0's connection to the server, opened by the first call of `agree`. From then on, the other groups wait
        for this group, so slow work must be done earlier."""

    def agree(self, step: int) -> Participation:
        """Wait for the quorum and connect to its groups. Heal from a group that has made more updates than `step`."""
        self._error = None
        quorum = self._join(step)
        place = quorum.names.index(self._name)
        self._connect(quorum, place)
        healing = plan_healing(quorum.steps, place, self.own.rank)
        for rank in healing.gives_to:
            self._try(lambda comm, to=rank: comm.send(self._state(), to))  # type: ignore[misc]
        source = healing.takes_from
        if source is not None:
            with torch.no_grad():
                self._try(lambda comm: comm.receive_(self._state(), source))
            if self.failed:
                raise HealFailedError(f"the group that this one healed from was lost: {self._error}") from self._error
        groups = tuple(map(_group_of, quorum.names))
        return Participation(groups, place, max(quorum.steps), healing.takes_from is not None, frozenset(quorum.names))

    def _join(self, step: int) -> FormedQuorum:
        quorum = None
        if self.own.rank == 0:
            self._client = self._client or QuorumClient(self._name, connect)
            quorum = self._client.join(step, self._failures)
        return broadcast_json(quorum and to_plain(quorum), lambda plain: from_plain(FormedQuorum, plain))

    def sum_(self, tensor: Tensor, compressed: CompressedSum | None = None) -> None:
        """Sum over all groups, in place. After an error, do nothing until the next `agree`."""
        if self._comm is not None and self._comm.size > 1:
            if compressed is None:
                self._try(lambda comm: comm.sum_(tensor))
            else:
                self._try(lambda comm: compressed.all_reduce_(tensor, comm))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all groups, in order; an empty list after an error."""
        gathered: list[Tensor] = []
        self._try(lambda comm: gathered.extend(comm.gather(tensor)))
        return gathered

    @property
    def staged_because(self) -> str:
        """Return the reason why gradients are sent to other groups through host memory; empty if they are not."""
        return "" if self._comm is None else self._comm.staged_because

    @property
    def failed(self) -> bool:
        """True if this rank has had an error since `agree`."""
        return self._error is not None

    def agree_on_counts(self, counts: Tensor) -> None:
        """Replace this rank's counts with their maximum over the group, and determine whether any rank had an error."""
        greatest = torch.cat([counts, torch.tensor([float(self.failed)])])
        if self.own.group_size > 1:
            dist.all_reduce(greatest, dist.ReduceOp.MAX)
        counts.copy_(greatest[:-1])
        self.failed_anywhere = bool(greatest[-1])

    def vote(self) -> bool:
        """Return whether the step counts, that is, whether no rank of this group has had an error since `agree`."""
        failed = torch.tensor([float(self.failed)])
        if self.own.group_size > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        committed = not failed.any()
        self._failures = 0 if committed else self._failures + 1
        return committed

    def fail(self, reason: str) -> None:
        """Make the step fail in all groups, because this group cannot send the data that others are waiting for."""
        self._drop(RuntimeError(reason))

    def leave(self) -> None:
        self._close()
        if self._client:
            self._client.close()

    def _connect(self, quorum: FormedQuorum, place: int) -> None:
        """Connect to the other groups of the quorum, unless already connected. The name of their rendezvous contains
        all counters that are reset if the server restarts."""
        members = hashlib.sha256("\n".join(quorum.names).encode()).hexdigest()[:12]
        name = f"groups/{quorum.quorum}-{max(quorum.steps)}-{members}/{self.own.rank}"
        peers = f"{quorum.quorum}-{members}"
        if self._comm is not None and peers == self._peers:
            return
        self._close()
        self._peers = peers
        others = set(open_connections())
        try:
            self._comm = CrossGroupComm(name, place, len(quorum.names), self._timeout_s, self._device)
            self.connections = frozenset(open_connections()) - others
        except (RuntimeError, OSError, dist.DistError) as error:
            self._drop(error)

    def _try(self, act: Callable[[CrossGroupComm], None]) -> None:
        comm = self._comm
        if comm is None:
            return
        try:
            act(comm)
        except RuntimeError as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Close the connections. Peers that are still waiting on them detect this immediately, without a timeout."""
        self._error = error.with_traceback(None)  # the traceback's frames would keep the connections open
        self._close()

    def _close(self) -> None:
        comm = self._comm
        self._comm = None
        if comm is not None:
            comm.close()


class QuorumClient:
    """Sends heartbeats from a separate thread until `close` is called."""

    def __init__(self, name: str, connect: Callable[[], JsonClient]):
        """`name`: this start's unique name. `connect` is called again if the server restarts."""
        self._name = name
        self._connect = connect
        self._connection = connect()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._asked = 0
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def join(self, step: int, failures: int) -> FormedQuorum:
        """Ask to take part in the step after `step`, and wait for the quorum. Raises OSError."""
        self._asked += 1
        while True:
            connection = self._connection
            try:
                self._send(connection, JoinQuorum(self._name, step, failures, self._asked))
                while (answer := read_record(FormedQuorum, connection.receive(ANSWER_TIMEOUT_S))).number != self._asked:
                    pass  # the request was lost when the connection broke
            except TimeoutError:
                raise
            except OSError:
                self._replace(connection)
                continue
            return answer

    def close(self) -> None:
        self._closed.set()
        self._connection.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_INTERVAL_S):
            connection = self._connection
            try:
                self._send(connection, GroupBeat(self._name))
            except OSError:
                with contextlib.suppress(OSError):  # `join` will raise the error
                    self._replace(connection)

    def _replace(self, broken: JsonClient) -> None:
        """Reconnect to a server that was restarted on the same port, unless this has already been done."""
        with self._lock:
            if self._connection is broken:
                broken.close()
                self._connection = self._connect()

    def _send(self, connection: JsonClient, request: QuorumRequest) -> None:
        with self._lock:
            connection.send(to_json(request))
