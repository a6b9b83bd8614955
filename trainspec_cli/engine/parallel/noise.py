"""Measure the squared norms of the gradients of parts of a step's samples, for the gradient noise scale.

A part consists of the samples that one data-parallel rank processes between two exchanges: a micro-batch, or all its
samples in the step. Its gradient G is read just before it is summed with those of other parts. If the part is a
fraction w of the step's samples, its mean gradient is g = G / w, and w |g|^2 = |G|^2 / w is summed over the parts
(`balance/batch/batch.py` explains why). How the gradient is distributed over the ranks that work on a part depends on
the parameter (`Held`). Experts are trained jointly by the data-parallel ranks whose tokens they get, so an expert's
part consists of the samples of all these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.engine.comm.exchange import Peers, reduce_scatter, sent_bytes
from trainspec_cli.engine.mesh import Mesh

Held = Literal["own", "copied", "partial", "twin"]
"""How tp ranks hold a parameter's gradient. own: no other tp rank has this part. copied: every tp rank has the full
gradient. partial: the full gradient is the sum over tp ranks. twin (a tied embedding): it is the sum over the two ends
of the pipeline."""


@dataclass(frozen=True)
class SampleParts:
    """Number of samples in each of this rank's micro-batches of a step."""

    step_samples: int
    """Number of samples in the step, over all ranks and replica groups."""
    own: Sequence[int]
    expert: Sequence[int]
    """Number of samples in each micro-batch, over all ranks whose tokens this rank's experts get; empty without ep."""

    def weights(self, micro_batch: int | None) -> tuple[float, float]:
        """Return the fraction of the step's samples that is in a micro-batch (None: in all micro-batches), as a pair
        (for all parameters except experts, for experts)."""
        taken = slice(None) if micro_batch is None else slice(micro_batch, micro_batch + 1)
        return sum(self.own[taken]) / self.step_samples, sum(self.expert[taken]) / self.step_samples

    def count(self, *, every_micro_batch: bool) -> tuple[int, int]:
        """Return the number of parts that contain samples, as a pair (on this rank, on the ranks that share
        experts)."""
        both = (self.own, self.expert)
        first, second = (sum(map(bool, sizes)) if every_micro_batch else int(any(sizes)) for sizes in both)
        return first, second


def parts_of(division: Division, mesh: Mesh, samples: int, step_samples: int) -> SampleParts:
    """Return the parts of a step with `step_samples` samples. `division` divides this replica group's `samples`."""
    sizes = [division.of_rank(rank, 0, samples).sizes for rank in mesh.expert_data_ranks]
    of_experts = [sum(turn) for turn in zip(*sizes, strict=True)] if mesh.experts else []
    return SampleParts(step_samples, division.of_rank(mesh.data_rank, 0, samples).sizes, of_experts)


@dataclass(frozen=True)
class Columns:
    """The positions of an FSDP2 group's gradients in the buffer to reduce, which has a row for each rank and contiguous
    columns for each parameter."""

    ranks: int
    sizes: tuple[int, ...]
    held: tuple[Held, ...]
    experts: bool
    """True if these are experts that are spread over ep."""


class NoiseProbe:
    """Sums |G|^2 / w over the parts that this rank computes, alone or with other ranks. Adding up all ranks' sums gives
    the total."""

    def __init__(self, device: torch.device, cp: Peers, tp: Peers, ends: Peers):
        self._cp = cp
        self._tp = tp
        self._ends = ends
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        """This rank's share of [sum of |G|^2 / w, its value for experts, number of parts, its value for experts]."""
        self._parts: SampleParts | None = None
        self._weights = (0.0, 0.0)
        self._twins: list[Tensor] = []

    def begin(self, parts: SampleParts | None) -> None:
        """Begin a step. If `parts` is None, its gradients are not measured."""
        self.sums.zero_()
        self._twins.clear()
        self._parts = parts
        self._weights = (0.0, 0.0)

    def weigh(self, micro_batch: int | None) -> None:
        """Set which part the gradients exchanged next belong to."""
        if self._parts is not None:
            self._weights = self._parts.weights(micro_batch)

    @torch.no_grad()
    def add(self, gradients: Tensor, columns: Columns) -> None:
        """Measure gradients that are about to be reduced. All ranks of a part call this in the same order, because they
        may have to communicate."""
        weight = self._weights[columns.experts]
        if weight == 0.0:
            return
        rows = gradients.view(columns.ranks, -1)
        assert rows.shape[1] == sum(columns.sizes), "all trained parameters have gradients"
        if columns.experts:
            self.sums[1] += _square(rows) / weight
            return
        if self._cp.size > 1:
            # First, the ranks that hold other parts of the same sequences sum their gradients, and each keeps some of
            # the rows.
            kept = rows.new_empty((rows.shape[0] // self._cp.size, rows.shape[1]))
            with self._cp.time(sent_bytes(rows.nbytes, self._cp.size)):
                reduce_scatter(kept, rows, group=self._cp.group)
            rows = kept
        self.sums[0] += self._squared_norm(rows, columns) / weight

    def _squared_norm(self, rows: Tensor, columns: Columns) -> Tensor:
        """Return this rank's share of the squared norm, without twins."""
        if set(columns.held) <= {"own"}:
            return _square(rows)
        by_kind: dict[Held, list[Tensor]] = {}
        for held, part in zip(columns.held, rows.split(columns.sizes, dim=1), strict=True):
            by_kind.setdefault(held, []).append(part)
        self._twins += [part.clone() for part in by_kind.pop("twin", [])]
        if partial := by_kind.pop("partial", []):
            by_kind.setdefault("copied", []).append(self._tp.sum_(torch.cat(partial, dim=1)))
        shares = {"own": 1, "copied": self._tp.size}
        squares = [_square(part) / shares[held] for held, parts in by_kind.items() for part in parts]
        return torch.stack(squares).sum() if squares else rows.new_zeros((), dtype=torch.float64)

    @torch.no_grad()
    def end(self, *, every_micro_batch: bool, ranks_of_part: int, ranks_of_experts: int) -> None:
        """Add the values that are known only after the last exchange: those of twins, and this rank's share of the
        number of parts. `ranks_of_part`: number of ranks that compute a part together. `ranks_of_experts`: the same for
        an expert's part."""
        if self._parts is None:
            return
        if self._twins:
            whole = self._ends.sum_(torch.stack(self._twins).sum(0))
            self.sums[0] += _square(whole) / self._ends.size / self._weights[0]
            self._twins.clear()
        own, expert = self._parts.count(every_micro_batch=every_micro_batch)
        self.sums[2] += own / ranks_of_part
        self.sums[3] += expert / ranks_of_experts


def _square(gradient: Tensor) -> Tensor:
    return gradient.float().square().sum().double()
