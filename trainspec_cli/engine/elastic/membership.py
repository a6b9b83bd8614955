"""Which replica groups take part in a step: agreed on before it, voted on after it.

Rank 0 of a group asks the job's rendezvous server for the quorum and tells the others. On the first error of an
exchange between the groups the line is dropped at once; healing copies plain tensors in place, and nothing is
unpickled.
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
from trainspec_cli.engine.elastic.line import Line
from trainspec_cli.engine.elastic.quorum import Quorum, QuorumClient
from trainspec_cli.policy.quorum import plan_healing
from trainspec_cli.spec.canonical import from_plain


@dataclass(frozen=True)
class Place:
    """Where this process stands."""

    group: int
    rank: int
    """Within the group."""
    group_size: int


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
        self._line_name = ""
        self._error: Exception | None = None
        self._failures = 0
        self.failed_anywhere = False
        """Whether any rank of this group had met an error when they last settled."""
        self._name = broadcast_json(f"{place.group:05d}:{uuid.uuid4()}", str)
        # From here on the others wait for this group: all that takes time must be done before.
        self._client = QuorumClient(self._name, connect) if place.rank == 0 else None

    def agree(self, step: int) -> Seat:
        """Wait for the groups that are there, and connect to them; heal from one that has come further than `step`."""
        self._error = None
        quorum = self._join(step)
        place = quorum.names.index(self._name)
        self._connect(quorum, place)
        healing = plan_healing(quorum.steps, place, self.place.rank)
        if healing.gives_to:
            self._give_state(healing.gives_to)
        if healing.takes_from is not None:
            self._take_state(healing.takes_from)
        groups = tuple(int(name.partition(":")[0]) for name in quorum.names)
        return Seat(groups, place, max(quorum.steps), healing.takes_from is not None, frozenset(quorum.names))

    def _join(self, step: int) -> Quorum:
        quorum = self._client.join(step, self._failures) if self._client else None
        return broadcast_json(quorum and asdict(quorum), lambda plain: from_plain(Quorum, plain))

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
        failed = torch.tensor([float(self.failed)])
        if self.place.group_size > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        committed = not failed.any()
        self._failures = 0 if committed else self._failures + 1
        return committed

    def leave(self) -> None:
        self._line = None
        if self._client:
            self._client.close()

    def _connect(self, quorum: Quorum, place: int) -> None:
        """The line's name holds all that a server which starts again may count anew."""
        members = hashlib.sha256("\n".join(quorum.names).encode()).hexdigest()[:12]
        name = f"line/{quorum.number}-{max(quorum.steps)}-{members}/{self.place.rank}"
        same = f"{quorum.number}-{members}"
        if self._line is not None and same == self._line_name:
            return
        self._line, self._line_name = None, same
        try:
            self._line = Line(name, place, len(quorum.names), self._timeout_s)
        except (RuntimeError, OSError, dist.DistError) as error:
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
