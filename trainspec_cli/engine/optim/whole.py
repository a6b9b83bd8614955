"""Whole matrices out of the parts that ranks hold, each on one rank, and their parts back to the ranks.

Of so many matrices as ranks hold parts, each rank gets one: what is done to them is divided among the ranks, and a rank
receives as much as it sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.comm.exchange import TimeCollective, sent_bytes
from trainspec_cli.engine.shares import Split


def gather_own(parts: Sequence[Tensor], splits: Sequence[Sequence[Split]], time: TimeCollective) -> list[Tensor]:
    """Return the whole matrices that are this rank's, put together from every rank's `parts`.

    `splits[i]` says how matrix i is split, innermost first, over the same groups for all; rank r of a group gets every
    matrix whose number is r, counted round and round. Called together by the ranks of the groups.
    """
    if not splits or not splits[0]:
        return list(parts)
    group, own = splits[0][0].group, [several[0] for several in splits]
    ranks, rank = group.size(), group.rank()
    sent = [[parts[number] for number in range(to, len(parts), ranks)] for to in range(ranks)]
    mine = range(rank, len(parts), ranks)
    shapes = [_shapes(parts[number], own[number]) for number in mine]
    received = _swap(
        sent, [[of_ranks[sender] for of_ranks in shapes] for sender in range(ranks)], parts[0], group, time
    )
    wholes = [
        torch.cat([received[sender][place] for sender in range(ranks)], own[number].dim)
        for place, number in enumerate(mine)
    ]
    return gather_own(wholes, [splits[number][1:] for number in mine], time)


def scatter_own(
    wholes: Sequence[Tensor], like: Sequence[Tensor], splits: Sequence[Sequence[Split]], time: TimeCollective
) -> list[Tensor]:
    """Return this rank's parts, of the shapes of `like`, of the matrices that `gather_own` gave to the ranks."""
    if not splits or not splits[0]:
        return list(wholes)
    group, own = splits[0][0].group, [several[0] for several in splits]
    ranks, rank = group.size(), group.rank()
    mine = range(rank, len(like), ranks)
    inner = [like[number].new_empty(_joined(like[number], own[number])) for number in mine]
    held = scatter_own(wholes, inner, [splits[number][1:] for number in mine], time)
    cut = [whole.split(own[number].sizes, own[number].dim) for number, whole in zip(mine, held, strict=True)]
    numbers = [list(range(sender, len(like), ranks)) for sender in range(ranks)]
    sent = [[pieces[to] for pieces in cut] for to in range(ranks)]
    received = _swap(
        sent, [[like[number].shape for number in of_sender] for of_sender in numbers], like[0], group, time
    )
    by_number = {
        number: part
        for of_sender, came in zip(numbers, received, strict=True)
        for number, part in zip(of_sender, came, strict=True)
    }
    return [by_number[number] for number in range(len(like))]


def _shapes(part: Tensor, split: Split) -> list[torch.Size]:
    """Return the shape of each rank's part."""
    return [_resized(part, split.dim, size) for size in split.sizes]


def _joined(part: Tensor, split: Split) -> torch.Size:
    return _resized(part, split.dim, split.size)


def _resized(part: Tensor, dim: int, size: int) -> torch.Size:
    return torch.Size([size if place == dim else length for place, length in enumerate(part.shape)])


def _swap(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[torch.Size]],
    like: Tensor,
    group: dist.ProcessGroup,
    time: TimeCollective,
) -> list[list[Tensor]]:
    """Send `sent[r]` to rank r; return what came from each rank, of `shapes`, all in the format of `like`. A rank may
    have nothing to send."""
    out = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    out_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    in_sizes = [sum(math.prod(shape) for shape in of_rank) for of_rank in shapes]
    received = like.new_empty(sum(in_sizes))
    with time(sent_bytes(out.nbytes, group.size())):
        dist.all_to_all_single(received, out, in_sizes, out_sizes, group=group)
    return [
        [piece.view(shape) for piece, shape in zip(block.split(list(map(math.prod, of_rank))), of_rank, strict=True)]
        for block, of_rank in zip(received.split(in_sizes), shapes, strict=True)
    ]
