"""Gradient sums over ranks: gradients travel in few bits, but are never added up in that format.

Each rank encodes the parts that the other ranks sum; after an all-to-all, each decodes what it received and sums it in
fp32, in rank order with its own part last, so that the same gradients give the same bits. For an all-reduce, the sums
are encoded and gathered in the same way (ZeRO++, arXiv:2306.10209).

The rank adds the encoding's error to its later gradients (error feedback). If e is the error not sent yet, q = Q(g + a
e) is sent, and e becomes e + g - q: after any number of steps, what was sent plus e is the sum of all gradients, and e
is at most 1 / a times the error of one encoding. If each encoding has an independent error of mean square v, q differs
from g by v (1 + a / (2 - a)) in mean square: by 2 v if all of e is returned at once, and by little more than v if a is
small. Adam counts this as part of the squared gradients, and makes smaller updates because of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from trainspec_cli.engine.comm.codec import GRADIENT_CODECS, Codec
from trainspec_cli.engine.comm.exchange import all_gather

RETURNED = 1 / 8
"""The fraction of the error that an exchange sends (a)."""


class RowExchange(Protocol):
    """Carries rows of bytes between the ranks of a group."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def swap_rows(self, sent_RB: Tensor) -> Tensor:
        """Send row i to rank i, and return the rows that the ranks have sent to this one, by rank."""
        ...

    def gather_rows(self, own_B: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        ...


@dataclass(frozen=True)
class GroupWire:
    """A torch process group."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def swap_rows(self, sent_RB: Tensor) -> Tensor:
        received_RB = torch.empty_like(sent_RB)
        dist.all_to_all_single(received_RB, sent_RB.contiguous(), group=self.group)
        return received_RB

    def gather_rows(self, own_B: Tensor) -> Tensor:
        gathered_B = own_B.new_empty(self.size * len(own_B))
        all_gather(gathered_B, own_B.contiguous(), group=self.group)
        return gathered_B.view(self.size, -1)


class Feedback:
    """The encoding error of one rank's gradients in one exchange, in bf16, which is added to the next gradients.

    A step that does not count (not finite, or not agreed on) leaves it as it was before: the errors of the step's
    exchanges are kept separately until the step is committed or discarded.
    """

    def __init__(self, values: int, device: torch.device):
        self.committed = torch.zeros(values, dtype=torch.bfloat16, device=device)
        """The error as of the last update, which checkpoints store."""
        self._running = torch.zeros_like(self.committed)
        self._is_running = False

    @property
    def newest(self) -> Tensor:
        return self._running if self._is_running else self.committed

    def keep(self, lost: Tensor) -> None:
        self._running.copy_(lost)
        self._is_running = True

    def add(self, start: int, lost: Tensor) -> None:
        """Add to the last argument of `keep`, from `start` on; anything beyond the end is padding."""
        place = self._running[start : start + len(lost)]
        place += lost[: len(place)].to(place.dtype)

    def end_step(self, skipped: Tensor) -> None:
        """End the step; `skipped` (a number on any device) is nonzero if the step updated nothing."""
        if self._is_running:
            stays = skipped.to(self.committed.device).bool()
            self.committed.copy_(torch.where(stays, self.committed, self._running))
        self._is_running = False

    def discard(self) -> None:
        """Discard the step's errors, because the step is repeated."""
        self._is_running = False

    def clear(self) -> None:
        self.committed.zero_()
        self._is_running = False


@dataclass(frozen=True)
class CompressedSum:
    """One of a step's exchanges, always with the same number of values."""

    codec: Codec
    feedback: Feedback | None
    """None for formats whose error is too small to matter."""

    def reduce_scatter(self, x_RN: Tensor, wire: RowExchange) -> Tensor:
        """Return the sum over the ranks of this rank's row, (N,) in fp32; `x_RN` is a row for each rank."""
        return self._sum_rows(x_RN, x_RN.numel(), wire)

    def all_reduce_(self, x: Tensor, wire: RowExchange) -> None:
        """Sum over the ranks, in place; all ranks get the same bits."""
        values = x.numel()
        row = -(-values // (wire.size * self.codec.block)) * self.codec.block
        sum_N = self._sum_rows(pad(x.flatten(), (0, wire.size * row - values)).view(wire.size, row), values, wire)
        sent_1B = self.codec.encode(sum_N[None])
        if self.feedback is not None:
            self.feedback.add(wire.rank * row, sum_N - self.codec.decode(sent_1B, row)[0])
        x.copy_(self.codec.decode(wire.gather_rows(sent_1B[0]), row).view(-1)[:values].view_as(x))

    def _sum_rows(self, x_RN: Tensor, values: int, wire: RowExchange) -> Tensor:
        """`values`: number of values of `x_RN` that are not padding."""
        rows, row = x_RN.shape
        x_RN = x_RN.float()
        if self.feedback is None:
            return self._sum_received(x_RN[wire.rank], self.codec.encode(x_RN), wire)
        lost_RN = pad(self.feedback.newest, (0, rows * row - values)).view(rows, row).float()
        wanted_RN = torch.add(x_RN, lost_RN, alpha=RETURNED)
        sent_RB = self.codec.encode(wanted_RN)
        given_RN = self.codec.decode(sent_RB, row)
        given_RN[wire.rank] = wanted_RN[wire.rank]
        self.feedback.keep(lost_RN.add_(x_RN).sub_(given_RN).view(-1)[:values])
        return self._sum_received(wanted_RN[wire.rank], sent_RB, wire)

    def _sum_received(self, own_N: Tensor, sent_RB: Tensor, wire: RowExchange) -> Tensor:
        """Exchange rows and sum those for this rank; its own row does not travel and is not encoded."""
        received_RB = wire.swap_rows(sent_RB)
        others_RB = torch.cat([received_RB[: wire.rank], received_RB[wire.rank + 1 :]])
        return self.codec.sum(others_RB, len(own_N)).add_(own_N)


@dataclass(frozen=True)
class Compression:
    """The formats of a rank's gradient exchanges, and their errors."""

    inside: str = "full"
    """The format between ranks of one node."""
    across: str = "full"
    is_inside: Callable[[dist.ProcessGroup], bool] = lambda group: True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    feedbacks: dict[str, Feedback] = field(default_factory=dict)
    """Feedbacks by exchange name, which is the same in every start with the same layout."""
    saved_as: str = ""
    """Prefix of the names of this rank's feedback in a checkpoint: it contains the layout, since the feedback is valid
    only there. Empty if checkpoints do not store the feedback."""

    @property
    def is_off(self) -> bool:
        """Return whether gradients are sent uncompressed everywhere."""
        return self.inside == self.across == "full"

    @property
    def feeds_back(self) -> bool:
        """Return whether any format has error feedback."""
        codecs = (GRADIENT_CODECS.get(name) for name in (self.inside, self.across))
        return any(codec is not None and codec.feeds_back for codec in codecs)

    @property
    def saved(self) -> dict[str, Tensor]:
        """Return the entries for a checkpoint, by name."""
        names = self.feedbacks if self.saved_as else ()
        return {f"feedback.{self.saved_as}.{name}": self.feedbacks[name].committed for name in names}

    def of_group(self, name: str, values: int, group: dist.ProcessGroup) -> CompressedSum | None:
        """Return the exchange `name` of `values` gradients over `group`; None if they are sent uncompressed, or not at
        all."""
        return None if group.size() == 1 else self.of(name, values, inside=self.is_inside(group))

    def of(self, name: str, values: int, *, inside: bool) -> CompressedSum | None:
        codec = GRADIENT_CODECS.get(self.inside if inside else self.across)
        if codec is None or not values:
            return None
        if codec.feeds_back and name not in self.feedbacks:
            self.feedbacks[name] = Feedback(values, self.device)
        return CompressedSum(codec, self.feedbacks.get(name))

    def end_step(self, skipped: Tensor) -> None:
        for feedback in self.feedbacks.values():
            feedback.end_step(skipped)

    def discard(self) -> None:
        for feedback in self.feedbacks.values():
            feedback.discard()

    def clear(self) -> None:
        for feedback in self.feedbacks.values():
            feedback.clear()
