"""Differentiable collectives on activations (B, S, D). They come in pairs: the backward pass of one is the forward pass
of the other.

A region is a module whose matrices are split over tp. Every rank needs the full input of a region, and its output is a
sum over ranks. With sequence parallelism (arXiv:2205.05198), activations between regions are split along the sequence.
They are gathered before a region, and the region's output is summed and scattered along the sequence in one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

Purpose = Literal["gradients", "parameters"]
Wait = Callable[[], object]
"""Waits for an exchange in progress. On gloo, the host waits; on an accelerator, the current stream."""
Started = tuple[Tensor, Callable[[], Tensor]]
"""An exchange in progress: its result, which must not be read yet, and a function that waits and returns it."""


class TimeCollective(Protocol):
    """Returns a context manager that times one exchange, given the number of bytes that this rank sends or, if the
    message is negligible, None on all ranks of the group."""

    def __call__(self, sent_bytes: float | None = None, /) -> AbstractContextManager[bool]:
        """Yield whether the exchange must be complete at the end of the block, even if it could overlap with other
        work."""


# torch 2.13 renamed these functions; torch 2.11 has only the old names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def is_on_gloo(group: dist.ProcessGroup | None = None) -> bool:
    return str(dist.get_backend(group)) == "gloo"


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup, **options: Any) -> None:
    """Sum `whole`, which contains a row for each rank, over the ranks. Each rank gets the sum of its own row in
    `output`.

    On gloo, the ranks exchange rows, and each sums its row in fp32, in rank order. gloo's own reduce-scatter is an
    all-reduce that sends twice as many bytes and sums in an order that depends on a value's position in the message.
    """
    if is_on_gloo(group):
        start_reduce_scatter(output, whole, group)()
    else:
        _reduce_scatter(output, whole, group=group, **options)


def start_reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Wait:
    """Start `reduce_scatter`. Until the returned function is called, `whole` must not change."""
    if not is_on_gloo(group):
        in_progress: Wait = _reduce_scatter(output, whole, group=group, async_op=True).wait
        return in_progress
    sent_RB = whole.contiguous().view(group.size(), -1).view(torch.uint8)
    received_RB = torch.empty_like(sent_RB)
    receive = start_swap(received_RB, sent_RB, group)

    def sum_rows() -> None:
        receive()
        first, *others = received_RB.view(whole.dtype)
        total = first.float() if first.dtype.itemsize < torch.float32.itemsize else first
        for row in others:
            total += row
        output.copy_(total.view_as(output))

    return sum_rows


def all_reduce_(x: Tensor, group: dist.ProcessGroup) -> None:
    """Sum contiguous `x` over the ranks, in place. On gloo, values are summed in rank order, independently of their
    position in the message."""
    if is_on_gloo(group):
        _sum_by_rows(x, group, ())
    else:
        dist.all_reduce(x, group=group)


def sum_in_tiers(x: Tensor, levels: Sequence[dist.ProcessGroup]) -> None:
    """Sum contiguous `x` over the ranks of all levels, innermost first, in place."""
    inside, *beyond = levels
    if beyond:
        _sum_by_rows(x, inside, beyond)
    else:
        all_reduce_(x, inside)


def _sum_by_rows(x: Tensor, group: dist.ProcessGroup, beyond: Sequence[dist.ProcessGroup]) -> None:
    """Sum contiguous `x` over the ranks, in place. Each rank sums one row, including over the outer levels, and then
    all ranks gather all sums."""
    flat = x.view(-1)
    missing = -len(flat) % group.size()
    whole = pad(flat, (0, missing)) if missing else flat
    own = whole.new_empty(len(whole) // group.size())
    reduce_scatter(own, whole, group=group)
    if beyond:
        sum_in_tiers(own, beyond)
    if is_on_gloo(group):  # exchanging rows takes one step; gloo's gather forwards them from rank to rank
        swap_rows(whole.view(group.size(), -1), own.view(1, -1).expand(group.size(), -1), group)
    else:
        all_gather(whole, own, group=group)
    if missing:
        flat.copy_(whole[:-missing])


def sent_bytes(whole_bytes: float, ranks: int) -> float:
    """Return the number of bytes that each of `ranks` ranks sends in a gather, a reduce-scatter or an all-to-all:
    everything except its own part. In an all-reduce, a rank sends twice as much."""
    return whole_bytes * (ranks - 1) / ranks


def swap_rows(received_RB: Tensor, sent_RB: Tensor, group: dist.ProcessGroup) -> None:
    """On gloo, send row i of `sent_RB` to rank i, and store the row received from rank i in row i of `received_RB`."""
    start_swap(received_RB, sent_RB, group)()


def start_swap(received_RB: Tensor, sent_RB: Tensor, group: dist.ProcessGroup) -> Wait:
    """Start `swap_rows`. Receives are posted first: between two ranks, gloo's all-to-all queues its ready-to-receive
    notice behind the data that it sends, so one direction often waits for the other."""
    rank = group.rank()
    others = [peer for peer in range(group.size()) if peer != group.rank()]
    under_way = [dist.irecv(received_RB[peer], group=group, group_src=peer) for peer in others]
    under_way += [dist.isend(sent_RB[peer], group=group, group_dst=peer) for peer in others]
    received_RB[rank] = sent_RB[rank]

    def wait() -> None:
        for work in under_way:
            assert work is not None, "this rank is in the group"
            work.wait()

    return wait


@dataclass(frozen=True)
class Tiers:
    """A group whose ranks are spread evenly over several elements (such as switches) of the network's tiers. Sums are
    first computed within an element, so each rank exchanges only its part with other elements (Thakur et al. 2005 in
    each tier). The order of summation differs from that of one all-reduce over all ranks."""

    levels: tuple[dist.ProcessGroup, ...]
    """This rank's process groups, innermost first: the ranks below the same element and then, for each tier, the ranks
    at the same position within the elements of the tier below."""

    def sum_(self, x: Tensor) -> None:
        """Sum over all ranks, in place; `x` is contiguous."""
        sum_in_tiers(x, self.levels)

    def sent_bytes(self, x: Tensor) -> float:
        """Return the number of bytes that each rank sends in `sum_`."""
        total = 0.0
        part_bytes = float(x.nbytes)
        for group in self.levels:
            total += 2 * sent_bytes(part_bytes, group.size())
            part_bytes /= group.size()
        return total


@dataclass(frozen=True)
class Peers:
    """A process group and the timer of its collectives."""

    group: dist.ProcessGroup
    time: TimeCollective
    tiers: Tiers | None = None
    """Tiers of `sum_`; None for a single all-reduce."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.tiers is not None:
            with self.time(self.tiers.sent_bytes(x)):
                self.tiers.sum_(x)
            return x
        with self.time(2 * sent_bytes(x.nbytes, self.size)):
            dist.all_reduce(x, group=self.group)
        return x

    def maximum_(self, x: Tensor) -> Tensor:
        with self.time():
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def gather_sequence(self, x_BSD: Tensor) -> Tensor:
        """Gather (B, S / n, D) into (B, S, D). The result is contiguous; otherwise every matmul in a region would save
        a separate copy."""
        return self.start_gather(x_BSD, at_once=True)[1]()

    def scatter_sum(self, x_BSD: Tensor) -> Tensor:
        """Sum (B, S, D) over the ranks, and return this rank's (B, S / n, D)."""
        return self.start_scatter(x_BSD, at_once=True)[0]

    def start_gather(self, x_BSD: Tensor, *, at_once: bool = False) -> Started:
        """Start `gather_sequence`; with `at_once`, also wait until it is complete."""
        mine_SBD = x_BSD.transpose(0, 1).contiguous()
        all_SBD = mine_SBD.new_empty((mine_SBD.shape[0] * self.size, *mine_SBD.shape[1:]))
        end = self._start(
            sent_bytes(all_SBD.nbytes, self.size),
            lambda: all_gather(all_SBD, mine_SBD, group=self.group, async_op=True).wait,
            at_once,
        )
        whole_BSD = all_SBD.transpose(0, 1)

        def finish() -> Tensor:
            end()
            return whole_BSD.contiguous()

        return whole_BSD, finish

    def start_scatter(self, x_BSD: Tensor, *, at_once: bool = False) -> Started:
        """Start `scatter_sum`; with `at_once`, also wait until it is complete."""
        whole_SBD = x_BSD.transpose(0, 1).contiguous()
        mine_SBD = whole_SBD.new_empty((whole_SBD.shape[0] // self.size, *whole_SBD.shape[1:]))
        end = self._start(
            sent_bytes(whole_SBD.nbytes, self.size),
            lambda: start_reduce_scatter(mine_SBD, whole_SBD, self.group),
            at_once,
        )
        mine_BSD = mine_SBD.transpose(0, 1)

        def finish() -> Tensor:
            end()
            return mine_BSD

        return mine_BSD, finish

    def start_sum(self, x: Tensor) -> Started:
        """Start summing a copy of the tensor over the ranks."""
        total = x.clone()

        def begin() -> Wait:
            work = dist.all_reduce(total, group=self.group, async_op=True)
            assert work is not None, "this rank is in the group"
            wait: Wait = work.wait
            return wait

        end = self._start(2 * sent_bytes(x.nbytes, self.size), begin, at_once=False)

        def finish() -> Tensor:
            end()
            return total

        return total, finish

    def _start(self, sent: float, begin: Callable[[], Wait], at_once: bool) -> Wait:
        """Return a function that waits until an exchange is complete."""
        with self.time(sent) as has_to_end:
            wait = begin()
            if has_to_end or at_once:
                wait()
                return lambda: None

        def end() -> None:
            with self.time():
                wait()

        return end


class _Mirror(torch.autograd.Function):
    """An autograd function that runs one exchange in the forward pass and another in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(gradient), None, None


def cross(
    x: Tensor, ahead: Callable[[Tensor], Tensor], start: Callable[[Tensor], Started]
) -> tuple[Tensor, int | None]:
    """Run one exchange in the forward pass. In the backward pass, start another exchange as soon as its gradient is
    complete; other work can run until its result is needed.

    Return (the result, the position of that other work in autograd's order; None if nothing needs a gradient).
    """
    in_progress: list[Callable[[], Tensor]] = []
    # Autograd runs the node with the highest number first, and numbers them in the order of the forward pass.
    x = _Finish.apply(x, in_progress)
    between: Any = _same(x).grad_fn
    return _Start.apply(x, ahead, start, in_progress), between and between._sequence_nr()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ahead: Callable[[Tensor], Tensor],
        start: Callable[[Tensor], Started],
        in_progress: list[Callable[[], Tensor]],
    ) -> Tensor:
        ctx.start = start
        ctx.in_progress = in_progress
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        unfinished, finish = ctx.start(gradient)
        ctx.in_progress.append(finish)
        return unfinished, None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_progress: list[Callable[[], Tensor]]) -> Tensor:
        ctx.in_progress = in_progress
        return _same(x)

    @staticmethod
    def backward(ctx: Any, _unfinished: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.in_progress.pop()(), None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def enter_region(x_BSD: Tensor, peers: Peers, sequence_parallel: bool) -> tuple[Tensor, int | None]:
    """Return the full input of a region on every rank, and the position that `cross` returns. The backward pass sums
    the ranks' gradients."""
    if sequence_parallel:
        return cross(x_BSD, peers.gather_sequence, peers.start_scatter)
    return cross(x_BSD, _same, peers.start_sum)


def leave_region(x_BSD: Tensor, peers: Peers, sequence_parallel: bool) -> tuple[Tensor, int | None]:
    """Return the sum of the ranks' outputs, and the position that `cross` returns. In the backward pass, each rank gets
    the full gradient."""
    if sequence_parallel:
        return cross(x_BSD, peers.scatter_sum, peers.start_gather)
    return cross(x_BSD, lambda x: peers.sum_(x.clone()), lambda gradient: (gradient, lambda: gradient))


@torch.compiler.disable
def exchange(x: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return _Mirror.apply(x, ahead, back)
