"""Sums of gradients over replicas whose matrices travel in low rank (PowerSGD, arXiv:1905.13727, algorithms 1 and 2).

A rank's matrix M is its gradient and all that was lost of earlier ones. With Q of the exchange before, the ranks sum
P = M Q, orthogonalise the sum alike, and sum Q = M^T P; each then has the sum P Q^T, to the same bits, and keeps what
its own part of that lacks, M - P (M^T P)^T. After any number of steps, what was summed and what the ranks keep are
together the sum of all gradients. What the matrices are not travels in full beside P, in one exchange.

Shapes: a matrix is (I, J); R is the rank; N values of a module.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from trainspec_cli.engine.comm.compressed import LOW_RANK, Compression, Feedback, RowExchange
from trainspec_cli.spec.recipe.comm import is_worth_factoring


@dataclass(frozen=True)
class FlatPlace:
    """Where a parameter lies in the flat gradients of its module."""

    start: int
    shape: tuple[int, ...]
    is_factored: bool

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def of(self, x_N: Tensor) -> Tensor:
        return x_N[self.start : self.start + self.values].view(self.shape)


def places_of(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[FlatPlace, ...]:
    """Return the places of parameters of these shapes, one after the other."""
    places, start = list[FlatPlace](), 0
    for shape in shapes:
        places.append(FlatPlace(start, shape, len(shape) == 2 and is_worth_factoring(*shape, rank)))
        start += places[-1].values
    return tuple(places)


@dataclass(frozen=True)
class LowRankSum:
    """One exchange of a step, always of the same parameters."""

    rank: int
    places: tuple[FlatPlace, ...]
    feedback: Feedback
    """What was lost of the gradients; 0 of what travels in full."""
    warm: Feedback
    """Q of the exchange before, of these matrices."""

    def all_reduce_(self, x: Tensor, wire: RowExchange) -> None:
        """Sum over the ranks, in place; all get the same bits."""
        x_N = x.view(-1)
        factored = [place for place in self.places if place.is_factored]
        in_full = [place.of(x_N) for place in self.places if not place.is_factored]
        wanted = [place.of(x_N).float() + place.of(self.feedback.newest) for place in factored]
        projected = [m_IJ @ q_JR for m_IJ, q_JR in zip(wanted, self._split(self.warm.newest), strict=True)]
        summed, rest = _sum_together([*projected, *in_full], wire, len(projected))
        bases = [torch.linalg.qr(p_IR).Q for p_IR in summed]
        own = [m_IJ.mT @ p_IR for m_IJ, p_IR in zip(wanted, bases, strict=True)]
        lost_N = torch.zeros_like(self.feedback.newest)
        for place, m_IJ, p_IR, q_JR in zip(factored, wanted, bases, own, strict=True):
            torch.sub(m_IJ, p_IR @ q_JR.mT, out=place.of(lost_N))
        self.feedback.keep(lost_N)
        seconds, _ = _sum_together(own, wire, len(own))
        self.warm.keep(torch.cat([q.flatten() for q in seconds]))
        for place, p_IR, q_JR in zip(factored, bases, seconds, strict=True):
            place.of(x_N).copy_(p_IR @ q_JR.mT)
        for part, whole in zip(in_full, rest, strict=True):
            part.copy_(whole)

    def _split(self, q_N: Tensor) -> Iterator[Tensor]:
        sizes = [place.shape[1] * self.rank for place in self.places if place.is_factored]
        return (part.view(-1, self.rank) for part in q_N.split(sizes))


def low_rank_sum(
    compression: Compression, name: str, shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup
) -> LowRankSum | None:
    """Return the exchange `name` of parameters of these shapes over `group`; None where none of them is factored."""
    if group.size() == 1 or compression.format_of(inside=compression.is_inside(group)) != LOW_RANK:
        return None
    rank = compression.rank
    places = places_of(shapes, rank)
    factored = [place for place in places if place.is_factored]
    if not factored:
        return None
    values = sum(place.values for place in places)
    warm_values = sum(place.shape[1] for place in factored) * rank

    def draw(q_N: Tensor) -> None:
        """Every rank starts with the same Q."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        q_N.copy_(torch.randn(len(q_N), generator=generator))

    feedback = compression.keep(name, values, torch.float32)
    return LowRankSum(rank, places, feedback, compression.keep(f"{name}.q", warm_values, torch.float32, draw))


def _sum_together(parts: Sequence[Tensor], wire: RowExchange, first: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sums of `parts` over the ranks in fp32: the first so many, and the others."""
    flat_N = torch.cat([part.flatten().float() for part in parts])
    row = -(-len(flat_N) // wire.size)
    rows_RB = pad(flat_N, (0, wire.size * row - len(flat_N))).view(wire.size, row).view(torch.uint8)
    own_N = wire.swap_rows(rows_RB).view(torch.float32).sum(0)
    summed_N = wire.gather_rows(own_N.view(torch.uint8)).view(torch.float32).reshape(-1)[: len(flat_N)]
    sums = [s.view_as(p) for s, p in zip(summed_N.split([p.numel() for p in parts]), parts, strict=True)]
    return sums[:first], sums[first:]
