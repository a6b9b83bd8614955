"""Which replica groups take part in a step: agreed on before it, voted on after it.

Rank 0 of a group asks the job's rendezvous server for the quorum and passes it on to the group's other ranks. On the
first error of an exchange between the groups its connections are dropped at once; healing copies plain tensors in
place, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.engine.comm.rendezvous import connect
from trainspec_cli.engine.elastic.cross_group import CrossGroupComm
from trainspec_cli.engine.elastic.quorum import Quorum, QuorumClient
from trainspec_cli.policy.quorum import plan_healing
from trainspec_cli.spec.canonical import from_plain


@dataclass(frozen=True)
class GroupRank:
    """One process among those of all replica groups."""

    group: int
    rank: int
    """Within the group."""
    group_size: int


@dataclass(frozen=True)
class Participation:
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

    def changes_since(self, before: Participation) -> list[tuple[str, int | None]]:
        """Return ("left" or "joined", group) for each group that was there before and is not now, or the reverse."""
        changes = (("left", before.names - self.names), ("joined", self.names - before.names))
        return [(change, _group_of(name)) for change, names in changes for name in sorted(names)]


NOBODY = Participation((), 0, 0, healed=False, names=frozenset())


def _group_of(name: str) -> int:
    return int(name.partition(":")[0])


class HealFailedError(RuntimeError):
    """The state is half one group's and half another's: this process must end."""


class Membership:
    """Every method is called by all ranks of a group together."""

    def __init__(self, own: GroupRank, state: Callable[[], Sequence[Tensor]], exchange_timeout_s: float):
        """`state` returns the tensors that a healing group copies, always in the same order."""
        self.own, self._state, self._timeout_s = own, state, exchange_timeout_s
        self._comm: CrossGroupComm | None = None
        self._peers = ""
        """The quorum that `_comm` connects."""
        self._error: Exception | None = None
        self._failures = 0
        self.failed_anywhere = False
        """Whether any rank of this group had met an error when they last settled."""
        self._name = broadcast_json(f"{own.group:05d}:{uuid.uuid4()}", str)
        self._client: QuorumClient | None = None
        """Rank 0's connection to the server, opened by the first `agree`: from then on the others wait for this group,
        so all that takes time must be done before."""

    def agree(self, step: int) -> Participation:
        """Wait for the groups that are there, and connect to them; heal from one that has come further than `step`."""
        self._error = None
        quorum = self._join(step)
        place = quorum.names.index(self._name)
        self._connect(quorum, place)
        healing = plan_healing(quorum.steps, place, self.own.rank)
        if healing.gives_to:
            self._give_state(healing.gives_to)
        if healing.takes_from is not None:
            self._take_state(healing.takes_from)
        groups = tuple(map(_group_of, quorum.names))
        return Participation(groups, place, max(quorum.steps), healing.takes_from is not None, frozenset(quorum.names))

    def _join(self, step: int) -> Quorum:
        quorum = None
        if self.own.rank == 0:
            self._client = self._client or QuorumClient(self._name, connect)
            quorum = self._client.join(step, self._failures)
        return broadcast_json(quorum and asdict(quorum), lambda plain: from_plain(Quorum, plain))

    def sum_(self, tensor: Tensor) -> None:
        """Sum over all groups, in place; after an error do nothing, until the next `agree`."""
        if self._comm is not None and self._comm.size > 1:
            self._try(lambda comm: comm.sum_(tensor))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every group's tensor, in order; an empty list after an error."""
        gathered: list[Tensor] = []
        self._try(lambda comm: gathered.extend(comm.gather(tensor)))
        return gathered

    @property
    def failed(self) -> bool:
        """Whether this rank has met an error since `agree`."""
        return self._error is not None

    def settle(self, counts: Tensor) -> None:
        """Give every rank of this group the greatest of its ranks' counts, and find whether any met an error."""
        greatest = torch.cat([counts, torch.tensor([float(self.failed)])])
        if self.own.group_size > 1:
            dist.all_reduce(greatest, dist.ReduceOp.MAX)
        counts.copy_(greatest[:-1])
        self.failed_anywhere = bool(greatest[-1])

    def vote(self) -> bool:
        """Return whether the step counts: no rank of this group has met an error since `agree`."""
        failed = torch.tensor([float(self.failed)])
        if self.own.group_size > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        committed = not failed.any()
        self._failures = 0 if committed else self._failures + 1
        return committed

    def leave(self) -> None:
        self._comm = None
        if self._client:
            self._client.close()

    def _connect(self, quorum: Quorum, place: int) -> None:
        """Connect to the quorum's other groups, unless that was done before.

        The name they meet under holds all that a server which starts again may count anew.
        """
        members = hashlib.sha256("\n".join(quorum.names).encode()).hexdigest()[:12]
        name = f"groups/{quorum.number}-{max(quorum.steps)}-{members}/{self.own.rank}"
        peers = f"{quorum.number}-{members}"
        if self._comm is not None and peers == self._peers:
            return
        self._comm, self._peers = None, peers
        try:
            self._comm = CrossGroupComm(name, place, len(quorum.names), self._timeout_s)
        except (RuntimeError, OSError, dist.DistError) as error:
            self._drop(error)

    def _give_state(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._try(partial(CrossGroupComm.send, tensors=self._state(), to=rank))

    def _take_state(self, rank: int) -> None:
        with torch.no_grad():
            self._try(lambda comm: comm.receive_(self._state(), rank))
        if self.failed:
            raise HealFailedError(f"the group that this one healed from was lost: {self._error}") from self._error

    def _try(self, act: Callable[[CrossGroupComm], None]) -> None:
        if self._comm is None:
            return
        try:
            act(self._comm)
        except RuntimeError as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Drop the connections: peers that still wait on them notice at once, and no one waits for a timeout."""
        self._error, self._comm = error, None
