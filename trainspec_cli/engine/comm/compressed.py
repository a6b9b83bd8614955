"""Sum gradients over ranks. Gradients are sent with few bits per value, but never summed in that format.

Each rank encodes the rows that the other ranks sum. After an all-to-all, it decodes the received rows and sums them in
fp32, in rank order with its own row last, so that results are bitwise reproducible. For an all-reduce, the sums are
encoded and gathered in the same way (ZeRO++, arXiv:2306.10209).

Each rank adds its encoding errors to its later gradients (error feedback). If e is the error that has not been sent
yet, q = Q(g + a e) is sent, and e becomes e + g - q. After any number of steps, the sum of everything sent plus e
equals the sum of all gradients, and e is at most 1 / a times the error of one encoding. If the errors of encodings are
independent and have the mean square v, the mean square of q - g is v (1 + a / (2 - a)): 2 v if all of e is sent at
once, and slightly more than v if a is small. In Adam, this error increases the second moment, so updates become
smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from trainspec_cli.engine.comm.codec import GRADIENT_CODECS, Codec
from trainspec_cli.engine.comm.exchange import all_gather

RETURNED = 1 / 8
"""The fraction of the error that is sent in each exchange (a in the text above)."""
PART_VALUES = 2**24
"""Number of values that are encoded or decoded at once, unless a row cannot be split. Encoding uses up to 20 bytes per
value, and runs in a stream whose memory no other stream can use."""
ALIGNED = 2048
"""Rows are split at multiples of this number, which is a multiple of every codec's block size."""


class RowExchange(Protocol):
    """All-to-all and all-gather of byte buffers between the ranks of a group."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def swap_rows(self, sent_RB: Tensor) -> Tensor:
        """Send row i to rank i, and return the rows that this rank receives, by sender."""
        ...

    def gather_rows(self, own_B: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        ...


@dataclass(frozen=True)
class GroupWire:
    """Exchanges byte buffers over a torch process group."""

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
    """The encoding error of one rank's gradients in one exchange, in bf16. It is added to the next gradients.

    A step that does not count (because a value is not finite, or a rank failed) leaves the error unchanged. The errors
    of a step's exchanges are therefore kept separately until the step is committed or discarded.
    """

    def __init__(self, values: int, device: torch.device):
        self.committed = torch.zeros(values, dtype=torch.bfloat16, device=device)
        """The error after the last update, which is stored in checkpoints."""
        self._running = torch.zeros_like(self.committed)
        self._is_running = False

    @property
    def newest(self) -> Tensor:
        return self._running if self._is_running else self.committed

    def keep(self, start: int, lost: Tensor) -> None:
        """Replace the errors from position `start` on. Values beyond the end are padding."""
        place = self._running[start : start + len(lost)]
        place.copy_(lost[: len(place)])
        self._is_running = True

    def add(self, start: int, lost: Tensor) -> None:
        """Add to the errors passed to `keep`, from position `start` on. Values beyond the end are padding."""
        place = self._running[start : start + len(lost)]
        place += lost[: len(place)].to(place.dtype)

    def end_step(self, skipped: Tensor) -> None:
        """End the step. `skipped` (a number on any device) is nonzero if the step did not update anything."""
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
    """One of a step's exchanges. It always has the same number of values."""

    codec: Codec
    feedback: Feedback | None
    """The error feedback; None for formats with a negligible error."""

    def reduce_scatter(self, x_RN: Tensor, wire: RowExchange) -> Tensor:
        """Return the sum of this rank's row over the ranks, (N,) in fp32. `x_RN` contains a row for each rank."""
        return self._sum_rows(x_RN.reshape(-1), x_RN.shape[1], wire)

    def all_reduce_(self, x: Tensor, wire: RowExchange) -> None:
        """Sum over the ranks, in place. The result is bitwise identical on all ranks."""
        row = -(-x.numel() // (wire.size * self.codec.block)) * self.codec.block
        sum_N = self._sum_rows(x.reshape(-1), row, wire)
        sent_1B = self.codec.encode(sum_N[None])
        if self.feedback is not None:
            self.feedback.add(wire.rank * row, sum_N - self.codec.decode(sent_1B, row)[0])
        flat = x.reshape(-1)
        for start, values in decode_parts(self.codec, wire.gather_rows(sent_1B[0]), row):
            place = flat[start : start + len(values)]
            place.copy_(values[: len(place)])
        if not x.is_contiguous():
            x.copy_(flat.view_as(x))

    def _sum_rows(self, x: Tensor, row: int, wire: RowExchange) -> Tensor:
        """`x` contains a row for each rank; the last row may be shorter."""
        sent_RB = x.new_empty((wire.size, self.codec.ranges(row, 0, row)[-1][1]), dtype=torch.uint8)
        own_N = x.new_empty(row, dtype=torch.float32)
        lost = None if self.feedback is None else self.feedback.newest
        for rows, columns in _parts(self.codec, wire.size, row, splits_rows=self.codec.splits_rows):
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            start = rows.start * row + columns.start
            wanted_RN = _padded(x, start, shape).float()
            if lost is not None:
                lost_RN = _padded(lost, start, shape).float()
                gradient_RN = wanted_RN
                wanted_RN = torch.add(gradient_RN, lost_RN, alpha=RETURNED)
                lost_RN += gradient_RN
            encoded_RB = self.codec.encode(wanted_RN)
            first = 0
            for begin, end in self.codec.ranges(row, columns.start, columns.stop):
                sent_RB[rows, begin:end] = encoded_RB[:, first : first + end - begin]
                first += end - begin
            is_own = wire.rank in range(rows.start, rows.stop)
            own = wire.rank - rows.start
            if is_own:
                own_N[columns] = wanted_RN[own]
            if self.feedback is not None:
                given_RN = self.codec.decode(encoded_RB, shape[1])
                if is_own:
                    given_RN[own] = wanted_RN[own]
                self.feedback.keep(start, lost_RN.sub_(given_RN).view(-1))
        return self._sum_received(own_N, sent_RB, wire)

    def _sum_received(self, own_N: Tensor, sent_RB: Tensor, wire: RowExchange) -> Tensor:
        """Exchange rows and sum the received ones, in place. This rank's own row is neither sent nor encoded."""
        received_RB = wire.swap_rows(sent_RB)
        row = len(own_N)
        width = max(1, PART_VALUES // wire.size // ALIGNED) * ALIGNED
        for start in range(0, row, width):
            end = min(start + width, row)
            ranges = self.codec.ranges(row, start, end)
            others = (received_RB[: wire.rank], received_RB[wire.rank + 1 :])
            others_RB = torch.cat([torch.cat([rows[:, first:last] for first, last in ranges], 1) for rows in others])
            own_N[start:end] += self.codec.sum(others_RB, end - start)
        return own_N


def decode_parts(codec: Codec, encoded_RB: Tensor, row: int) -> Iterator[tuple[int, Tensor]]:
    """Decode rows of `row` values part by part. Yields (position of the part's first value, the part's values in
    fp32)."""
    for rows, columns in _parts(codec, len(encoded_RB), row, splits_rows=True):
        ranges = codec.ranges(row, columns.start, columns.stop)
        part_RB = torch.cat([encoded_RB[rows, begin:end] for begin, end in ranges], 1)
        yield rows.start * row + columns.start, codec.decode(part_RB, columns.stop - columns.start).reshape(-1)


def _parts(codec: Codec, rows: int, row: int, *, splits_rows: bool) -> Iterator[tuple[slice, slice]]:
    """Split rows into parts of at most `PART_VALUES` values, each of which is several rows or a part of one row. The
    values of a part are adjacent in memory."""
    if row <= PART_VALUES or not splits_rows:
        number = max(1, PART_VALUES // max(1, row))
        yield from ((slice(first, min(first + number, rows)), slice(0, row)) for first in range(0, rows, number))
        return
    for number in range(rows):
        for first in range(0, row, PART_VALUES):
            yield slice(number, number + 1), slice(first, min(first + PART_VALUES, row))


def _padded(x: Tensor, start: int, shape: tuple[int, int]) -> Tensor:
    """Return the values of `x` from `start` on in this shape, padded with zeros."""
    part = x[start : start + shape[0] * shape[1]]
    missing = shape[0] * shape[1] - len(part)
    return (pad(part, (0, missing)) if missing else part).view(shape)


@dataclass(frozen=True)
class Compression:
    """The formats of a rank's gradient exchanges, and their accumulated errors."""

    inside: str = "full"
    """The format used between ranks of one node."""
    across: str = "full"
    is_inside: Callable[[dist.ProcessGroup], bool] = lambda group: True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    feedbacks: dict[str, Feedback] = field(default_factory=dict)
    """Error feedback by exchange name. Names are the same in every start with the same layout."""
    saved_as: str = ""
    """Name prefix of this rank's feedback in a checkpoint. It contains the layout, because the feedback is only valid
    in the same layout. Empty if checkpoints do not store the feedback."""

    @property
    def is_off(self) -> bool:
        """Return whether all gradients are sent uncompressed."""
        return self.inside == self.across == "full"

    @property
    def feeds_back(self) -> bool:
        """Return whether any format has error feedback."""
        codecs = (GRADIENT_CODECS.get(name) for name in (self.inside, self.across))
        return any(codec is not None and codec.feeds_back for codec in codecs)

    @property
    def saved(self) -> dict[str, Tensor]:
        """Return the entries to store in a checkpoint, by name."""
        names = self.feedbacks if self.saved_as else ()
        return {f"feedback.{self.saved_as}.{name}": self.feedbacks[name].committed for name in names}

    def of_group(self, name: str, values: int, group: dist.ProcessGroup) -> CompressedSum | None:
        """Return the exchange called `name`, of `values` gradients over `group`; None if these gradients are sent
        uncompressed or not at all."""
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
