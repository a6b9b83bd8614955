"""Move the state from one layout to another, in memory and between the same processes.

Tensors are moved in buckets, and the old layout's memory for a bucket is freed before the next bucket is moved, so that
only a small part of the state exists twice. Until the last bucket has arrived, the move can be undone. If a rank cannot
continue, it reports this before the bucket's messages are sent, and all ranks undo the moves made so far.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.core.printable import format_bytes
from trainspec_cli.engine.checkpoint.files import Held, Span, TensorPart, copy_twins, overlap, slices
from trainspec_cli.engine.checkpoint.memory import CODES, DTYPES
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.recipe.records import convert

# Compute the slices that ranks send to one another to move the state from one layout to another.
#
# As in a checkpoint, a part is identified by the full tensor's name and the part's position in it. Tenplex
# (arXiv:2312.05181) also derives its exchanges from such coordinates.


BUCKET_BYTES = 2**26
"""Maximum size in bytes of a rank's tensors in a bucket, in the old and the new layout together. A bucket contains at
least one tensor."""


@dataclass(frozen=True)
class PartPlace:
    """The position and format of a rank's part of a full tensor, without its content."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]

    @staticmethod
    def of(part: TensorPart) -> PartPlace:
        return PartPlace(part.name, part.tensor.dtype, part.offsets, part.shape, part.full_shape)

    @property
    def plain(self) -> list[Any]:
        return [self.name, CODES[self.dtype], self.offsets, self.shape, self.full_shape]

    @staticmethod
    def read(plain: Sequence[Any]) -> PartPlace:
        """Create from JSON; the inverse of `plain`. Raises ValueError and KeyError."""
        name, code, *places = plain
        offsets, shape, full_shape = (convert(tuple[int, ...], place) for place in places)
        return PartPlace(convert(str, name), DTYPES[code], offsets, shape, full_shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Move:
    """A slice of a full tensor that one rank holds in the old layout, and one rank (possibly the same) in the new
    layout."""

    name: str
    dtype: torch.dtype
    spans: tuple[Span, ...]
    """The span in each dim of the full tensor."""
    source: int
    target: int

    @property
    def bytes(self) -> int:
        return math.prod(end - begin for begin, end in self.spans) * self.dtype.itemsize

    @property
    def stays(self) -> bool:
        return self.source == self.target


Places = Sequence[Sequence[PartPlace]]
"""The parts of every rank: `places[rank]`. A rank has at most one part per name."""


def plan_moves(old: Places, new: Places) -> list[Move]:
    """Return the moves that fill every part of `new` from `old`, each element exactly once, ordered by name.

    Slices that a rank already holds are copied locally. If several ranks hold a slice, they share the work of sending
    it. All ranks compute the same result from the same input. Raises ValueError if an element is missing from the old
    layout or has a different format there.
    """
    holders: dict[str, dict[tuple[int, ...], list[tuple[int, PartPlace]]]] = defaultdict(lambda: defaultdict(list))
    for rank, places in enumerate(old):
        for place in places:
            holders[place.name][place.offsets].append((rank, place))
    moves: list[Move] = []
    for target, places in enumerate(new):
        for place in places:
            found = list[Move]()
            for chunk in holders[place.name].values():
                ranks = [rank for rank, _ in chunk]
                held = chunk[0][1]
                if (held.dtype, held.full_shape) != (place.dtype, place.full_shape):
                    raise ValueError(f"{place.name} has a different shape or format in the new layout")
                spans = overlap(place, held)
                if spans is not None:
                    source = target if target in ranks else ranks[target % len(ranks)]
                    found.append(Move(place.name, place.dtype, tuple(spans), source, target))
            if sum(move.bytes for move in found) != place.bytes:
                raise ValueError(
                    f"the ranks together do not hold every element of {place.name}, of shape {list(place.full_shape)}"
                )
            moves += found
    return sorted(moves, key=lambda move: (move.name, move.target, move.source, move.spans))


def fill_buckets(old: Places, new: Places, limit_bytes: int) -> list[list[str]]:
    """Divide the names of all tensors, in order, into buckets. In each bucket, no rank's tensors of both layouts
    together exceed the limit. A tensor that exceeds it alone gets a separate bucket."""
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for rank, places in (*enumerate(old), *enumerate(new)):
        for place in places:
            sizes[place.name][rank] += place.bytes
    buckets: list[list[str]] = []
    taken: Counter[int] = Counter()
    for name in sorted(sizes):
        together = taken + sizes[name]
        if not buckets or max(together.values(), default=0) > limit_bytes:
            buckets.append([])
            taken = Counter()
        buckets[-1].append(name)
        taken.update(sizes[name])
    return buckets


def peak_bytes(
    old: Sequence[PartPlace],
    new: Sequence[PartPlace],
    moves: Sequence[Move],
    buckets: Sequence[Sequence[str]],
    rank: int,
) -> int:
    """Return the maximum size of the state on any rank during the move, in bytes, including messages. For each bucket,
    first the new parts are allocated, and then the messages. Once these have arrived, the old parts are freed.
    """
    before, after = ({place.name: place.bytes for place in places} for places in (old, new))
    messages: dict[str, int] = defaultdict(int)
    for move in moves:
        if not move.stays and rank in (move.source, move.target):
            messages[move.name] += move.bytes
    held = peak = sum(before.values())
    for bucket in buckets:
        held += sum(after.get(name, 0) for name in bucket)
        peak = max(peak, held + sum(messages[name] for name in bucket))
        held -= sum(before.get(name, 0) for name in bucket)
    return peak


MESSAGE_CHARS = 500


class ReshardError(Exception):
    """The state could not be moved. All ranks raise this error, and their state is unchanged."""


@dataclass(frozen=True)
class Resharded:
    """Bytes moved and held during a change of layout."""

    moved_bytes: int
    """Bytes sent between ranks, summed over all ranks."""
    peak_bytes: int
    """Maximum size of the state on any rank during the move, in bytes."""


def agree_on_failure(own: str) -> str:
    """Return, on every rank, the failure message of the first rank that failed; empty if none did. Called collectively
    by all ranks. If no rank failed, this takes one small exchange."""
    failed = torch.tensor([int(bool(own))])
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not failed.item():
        return ""
    failures = gather_json(own[:MESSAGE_CHARS], lambda text: convert(str, text))
    return next(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure)


class Storages:
    """This rank's parts in one layout. Their memory can be freed and reallocated by name."""

    def __init__(self, parts: Sequence[TensorPart]):
        self.parts = {part.name: part for part in parts}
        self._sizes = {
            name: _storage_bytes(part.tensor)
            for name, part in self.parts.items()
            if part.tensor.untyped_storage().resizable()
        }
        self.fixed_bytes = sum(part.bytes for name, part in self.parts.items() if name not in self._sizes)
        """Size in bytes of the parts that share memory with numpy. torch frees such memory only when the last reference
        is gone."""

    def take(self, names: Sequence[str]) -> None:
        """Reallocate the memory of parts. Raises MemoryError or RuntimeError if that fails."""
        for name in names:
            if name in self._sizes:
                self.parts[name].tensor.untyped_storage().resize_(self._sizes[name])

    def give_back(self, names: Sequence[str]) -> None:
        """Free the memory of parts, discarding their content."""
        for name in names:
            if name in self._sizes:
                self.parts[name].tensor.untyped_storage().resize_(0)


def _storage_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of the storage to allocate. FSDP2 pads a parameter's storage, and a moment's storage may
    already have been freed."""
    needed = (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()
    return max(needed, tensor.untyped_storage().nbytes())


@torch.no_grad()
def reshard(
    old: Held,
    new: Held,
    prepare: Callable[[int, int], None] = lambda bucket, buckets: None,
    room_bytes: Callable[[], float] = lambda: math.inf,
    bucket_bytes: int = BUCKET_BYTES,
) -> Resharded:
    """Allocate the memory of `new`, fill it from `old`, and free the memory of `old`. Called collectively by all ranks.

    `prepare` is called with (bucket, number of buckets) before each bucket; it may raise an error to report that this
    rank cannot continue. `room_bytes` is the additional memory that this rank may use; if it is not enough, nothing is
    moved. `bucket_bytes`: the limit of `fill_buckets`. Raises ReshardError on all ranks if any rank could not move its
    parts.
    """
    before = Storages(old.parts())
    after = Storages(new.parts())
    after.give_back(list(after.parts))
    held = _places(before), _places(after)
    try:
        moves = plan_moves(*held)
        buckets = fill_buckets(*held, bucket_bytes)
    except ValueError as error:
        raise ReshardError(str(error)) from error  # all ranks get the same error
    own = dist.get_rank()
    peak = peak_bytes(held[0][own], held[1][own], moves, buckets, own) + before.fixed_bytes
    needed_bytes = peak - sum(place.bytes for place in held[0][own])
    left_bytes = room_bytes()
    lacking = ""
    if needed_bytes > left_bytes:
        left = format_bytes(left_bytes)
        lacking = (
            f"the move takes {format_bytes(needed_bytes)} in addition to the memory in use, but only {left} are left"
        )
    if reason := agree_on_failure(lacking):
        raise ReshardError(reason)
    by_name = _by_name(moves)
    for number, names in enumerate(buckets):
        of_bucket = [move for name in names for move in by_name[name]]
        failure = _move(of_bucket, names, before, after, partial(prepare, number, len(buckets)))
        if failure:
            _move_back(buckets[:number], _by_name(plan_moves(held[1], held[0])), before, after)
            raise ReshardError(failure)
    first = {id(share) for share in unique_shares(new.shares)}
    for share in new.shares:
        if id(share) not in first:  # a second copy of a parameter has no separate moments
            for moment in new.optimizer.state[share.local].values():
                moment.untyped_storage().resize_(_storage_bytes(moment))
    copy_twins(new.shares, new.optimizer)
    sent = sum(move.bytes for move in moves if not move.stays)
    return Resharded(sent, max(gather_json(peak, lambda size: convert(int, size))))


def _places(storages: Storages) -> Places:
    own = [PartPlace.of(part).plain for part in storages.parts.values()]
    return gather_json(own, lambda plain: [PartPlace.read(place) for place in plain])


def _by_name(moves: Sequence[Move]) -> dict[str, list[Move]]:
    by_name: dict[str, list[Move]] = defaultdict(list)
    for move in moves:
        by_name[move.name].append(move)
    return by_name


def _move_back(
    buckets: Sequence[Sequence[str]], by_name: dict[str, list[Move]], before: Storages, after: Storages
) -> None:
    """Move the state back from `after` to `before`. These moves are not simply the reverse: if several ranks held a
    part, only one of them sent it away, but all get it back. Raises RuntimeError if even that fails; the run then
    restarts from its newest checkpoint."""
    for names in reversed(buckets):
        back = [move for name in names for move in by_name[name]]
        if error := _move(back, names, after, before, lambda: None):
            raise RuntimeError(f"the state could not be moved back to the previous layout: {error}")


# Moving one bucket


@dataclass(frozen=True)
class _Message:
    """All slices of a bucket that one rank sends to another, on one device type."""

    moves: Sequence[Move]
    buffer: Tensor

    @staticmethod
    def allocate(moves: Sequence[Move], side: Storages) -> _Message:
        device = side.parts[moves[0].name].tensor.device
        return _Message(moves, torch.empty(sum(move.bytes for move in moves), dtype=torch.uint8, device=device))

    def contents(self) -> Iterator[tuple[Move, Tensor]]:
        """Yield a view of the buffer for each slice, with the slice's dtype and shape."""
        parts = self.buffer.split([move.bytes for move in self.moves])
        for move, part in zip(self.moves, parts, strict=True):
            yield move, part.view(move.dtype).view([end - begin for begin, end in move.spans])


def _move(
    moves: Sequence[Move], names: Sequence[str], source: Storages, target: Storages, prepare: Callable[[], None]
) -> str | None:
    """Move the tensors of a bucket. If any rank has too little memory, return the failure, which is the same on every
    rank, and leave everything unchanged."""
    failure = ""
    outgoing = list[_Message]()
    incoming = list[_Message]()
    try:
        prepare()
        target.take(names)
        outgoing, incoming = _pack(moves, source, target)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if reason := agree_on_failure(failure):
        target.give_back(names)
        return reason
    # torch can only batch messages of the same device type.
    operations = defaultdict[str, list[dist.P2POp]](list)
    for message in outgoing:
        sent = dist.P2POp(dist.isend, message.buffer, message.moves[0].target)
        operations[message.buffer.device.type].append(sent)
    for message in incoming:
        received = dist.P2POp(dist.irecv, message.buffer, message.moves[0].source)
        operations[message.buffer.device.type].append(received)
    for batch in operations.values():
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
    for move in moves:
        if move.stays and move.target == dist.get_rank():
            _slice(target.parts[move.name], move).copy_(_slice(source.parts[move.name], move))
    for move, content in (received for message in incoming for received in message.contents()):
        _slice(target.parts[move.name], move).copy_(content)
    source.give_back(names)
    return None


def _pack(moves: Sequence[Move], source: Storages, target: Storages) -> tuple[list[_Message], list[_Message]]:
    """Return (this rank's outgoing messages, filled; its incoming messages)."""
    outgoing: dict[tuple[int, str], list[Move]] = defaultdict(list)
    incoming: dict[tuple[int, str], list[Move]] = defaultdict(list)
    own = dist.get_rank()
    for move in sorted(
        moves, key=lambda move: -move.dtype.itemsize
    ):  # sort by element size, so that every slice is aligned
        if move.stays:
            continue
        if move.source == own:
            outgoing[move.target, source.parts[move.name].tensor.device.type].append(move)
        if move.target == own:
            incoming[move.source, target.parts[move.name].tensor.device.type].append(move)
    sent = []
    for _, group in sorted(outgoing.items()):
        message = _Message.allocate(group, source)
        for move, content in message.contents():
            content.copy_(_slice(source.parts[move.name], move))
        sent.append(message)
    return sent, [_Message.allocate(group, target) for _, group in sorted(incoming.items())]


def _slice(part: TensorPart, move: Move) -> Tensor:
    """Return a view of one slice of a part; for a scalar, the entire part."""
    return part.tensor[slices(move.spans, part.offsets)] if move.spans else part.tensor
