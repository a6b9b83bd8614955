"""Sums of gradients over data-parallel ranks, which go while the backward pass still runs (gloo).

On a CPU FSDP2 waits for every collective. Here it takes an exchange for done once its module's gradients are in a
bucket. A thread sums the buckets one after another, over process groups of their own, while the backward computes the
gradients of the blocks before; the step waits for the last of them. Each value is summed in the order of ranks, so that
neither the thread nor the size of buckets changes a bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainspec_cli.engine.comm.codec import end_connections
from trainspec_cli.engine.comm.compressed import CompressedSum, GroupWire
from trainspec_cli.engine.comm.exchange import Peers, all_reduce_, reduce_scatter, sent_bytes
from trainspec_cli.engine.comm.forking import Background

MOST_WAITING = 2
"""Buckets that wait while one is summed: enough that the link is never idle for want of one, and all the memory that
gradients on their way take."""


@dataclass(frozen=True, eq=False)
class Route:
    """The ranks that sum a module's gradients: first those of the shards, each of which keeps a row, then replicas."""

    shards: Peers | None
    replicas: Peers | None

    @property
    def rows(self) -> int:
        return self.shards.size if self.shards else 1


@dataclass(frozen=True)
class Summand:
    """The gradients of one module after one backward."""

    route: Route
    rows_RN: Tensor
    """A row for each rank of the shards, in the format in which sums travel."""
    sum_N: Tensor
    """Memory of the sum of this rank's row; that of `rows_RN` itself, where there is one row of this format."""
    earlier_N: Tensor | None
    """The sum of the step's backwards before, which is added to it."""
    over_shards: CompressedSum | None
    over_replicas: CompressedSum | None

    @property
    def is_compressed(self) -> bool:
        return self.over_shards is not None or self.over_replicas is not None


TimeSum = Callable[[Peers, float | None], AbstractContextManager[object]]
"""(ranks, bytes that each sends, or None where encoding takes time as well) -> what times an exchange."""


def timed(peers: Peers, sends_bytes: float | None) -> AbstractContextManager[object]:
    return peers.time(sends_bytes)


def untimed(_peers: Peers, _sends_bytes: float | None) -> AbstractContextManager[object]:
    return nullcontext()


@torch.no_grad()
def sum_together(summands: Sequence[Summand], time_sum: TimeSum) -> None:
    """Sum summands of one route together; one that is compressed goes alone."""
    first = summands[0]
    rows_RN = torch.cat([summand.rows_RN for summand in summands], dim=1) if len(summands) > 1 else first.rows_RN
    own_N = rows_RN[0]
    if first.route.shards is not None:
        own_N = _sum_over_shards(rows_RN, first.route.shards, first.over_shards, time_sum)
    if first.route.replicas is not None:
        _sum_over_replicas_(own_N, first.route.replicas, first.over_replicas, time_sum)
    for summand, part in zip(summands, own_N.split([len(summand.sum_N) for summand in summands]), strict=True):
        if part.data_ptr() != summand.sum_N.data_ptr():
            summand.sum_N.copy_(part)
        if summand.earlier_N is not None:
            summand.sum_N.add_(summand.earlier_N)


def _sum_over_shards(rows_RN: Tensor, shards: Peers, compressed: CompressedSum | None, time_sum: TimeSum) -> Tensor:
    if compressed is not None:
        with time_sum(shards, None):
            return compressed.reduce_scatter(rows_RN, GroupWire(shards.group))
    own_N = rows_RN.new_empty(rows_RN.shape[1])
    with time_sum(shards, sent_bytes(rows_RN.nbytes, shards.size)):
        reduce_scatter(own_N, rows_RN, group=shards.group)
    return own_N


def _sum_over_replicas_(x: Tensor, replicas: Peers, compressed: CompressedSum | None, time_sum: TimeSum) -> None:
    if compressed is not None:
        with time_sum(replicas, None):
            compressed.all_reduce_(x, GroupWire(replicas.group))
    elif replicas.tiers is not None:
        with time_sum(replicas, replicas.tiers.sent_bytes(x)):
            replicas.tiers.sum_(x)
    else:
        with time_sum(replicas, 2 * sent_bytes(x.nbytes, replicas.size)):
            all_reduce_(x, replicas.group)


@dataclass(frozen=True)
class Bucket:
    summands: list[Summand] = field(default_factory=list)
    summed: Future[None] = field(default_factory=Future)

    @property
    def nbytes(self) -> int:
        return sum(summand.rows_RN.nbytes for summand in self.summands)

    def takes(self, summand: Summand) -> bool:
        """Return whether `summand` can be summed together with those that are in it."""
        return not self.summands or (self.summands[0].route is summand.route and not summand.is_compressed)

    def sum(self) -> None:
        try:
            sum_together(self.summands, untimed)
        except BaseException as error:
            self.summed.set_exception(error)
            raise
        self.summands.clear()  # they hold gradients
        self.summed.set_result(None)


class ExchangeClock(Protocol):
    def collective(self) -> AbstractContextManager[object]: ...

    def note_beside(self, begin_s: float, end_s: float) -> None: ...


class GradientSums:
    """The sums of one train state. Per step: `add` in the backward passes, then `finish`."""

    def __init__(self, clock: ExchangeClock):
        self._clock = clock
        self._beside = Background(torch.device("cpu"), clock.note_beside, MOST_WAITING, give_up=end_connections)
        self._bucket, self._sent = Bucket(), Bucket()
        """The one that is being filled, and the last one that was given to the thread."""
        self._sent.summed.set_result(None)
        self._modules = list[ModuleSums]()
        self.bucket_bytes = 0
        """A bucket is summed once it has so many bytes; 0: each module's gradients by themselves."""
        self.holds_back = False
        """Every exchange is waited for at once: such a step shows how fast the links are. One that encodes shows
        nothing, and goes on as ever."""
        self.sizes_bytes = list[int]()
        """The gradients that the last step has summed, each module's after each backward, in their order."""
        self.can_join = True
        """False where gradients travel in fewer bits, each module's in blocks of its own."""
        self.waited_s = 0.0
        """The time that the last step has waited for sums."""

    def add(self, summand: Summand) -> None:
        """Sum a module's gradients, of whose result nobody may ask before `finish`. All ranks add alike."""
        self.sizes_bytes.append(summand.rows_RN.nbytes)
        self.can_join = self.can_join and not summand.is_compressed
        if self.holds_back and not summand.is_compressed:
            self._wait_in(self._beside.wait)
            sum_together([summand], timed)
            return
        if not self._bucket.takes(summand):
            self._send()
        self._bucket.summands.append(summand)
        if summand.is_compressed or self._bucket.nbytes >= self.bucket_bytes:
            self._send()

    def begin(self) -> None:
        """Begin a step."""
        self.sizes_bytes = []
        self.waited_s = 0.0

    def finish(self) -> None:
        """Wait until all is summed. Raises the first error of an exchange."""
        self._send()
        self._wait_in(self._beside.wait)
        for module in self._modules:
            module.forget()

    def take_error(self) -> BaseException | None:
        """Return the first error of an exchange, which explains what other errors a step has."""
        return self._beside.take_error()

    def await_added(self) -> Callable[[], object]:
        """Return what waits, in any thread, until all that was added so far is summed; it raises what the sum did."""
        return (self._bucket if self._bucket.summands else self._sent).summed.result

    def close(self) -> None:
        """End the thread: the state is not used any more."""
        self._beside.close()

    def of_module(self, *arguments: Any) -> ModuleSums:
        """Return the exchanges of a module: as of `ModuleSums`."""
        self._modules.append(ModuleSums(self, *arguments))
        return self._modules[-1]

    def _send(self) -> None:
        if self._bucket.summands:
            self._sent, self._bucket = self._bucket, Bucket()
            self._wait_in(partial(self._beside.start, self._sent.sum))

    def _wait_in(self, act: Callable[[], None]) -> None:
        started_s = time.perf_counter()
        with self._clock.collective():
            act()
        self.waited_s += time.perf_counter() - started_s


class ModuleSums:
    """The exchanges of one module, as FSDP2 calls them: its reduce-scatter over several shards, and a hook that has the
    sum over shards. Both return before anything is summed."""

    def __init__(
        self,
        sums: GradientSums,
        route: Route,
        trained: Callable[[], Sequence[nn.Parameter]],
        look: Callable[[Tensor], None],
        over_shards: CompressedSum | None,
        over_replicas: CompressedSum | None,
    ):
        """`trained` returns the module's parameters; `look` is shown their gradients before they are summed."""
        self._sums = sums
        self._route = route
        self._trained = trained
        self._look = look
        self._over_shards = over_shards
        self._over_replicas = over_replicas
        self._input: Tensor | None = None
        self._earlier: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input, in the format of the exchange, then for the output, which it would cast to the
        parameters' format too early: it is of this format at once."""
        held = self._trained()[0].dtype
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        if self._route.shards is None and held == dtype:
            return self._input
        return torch.empty(*size, dtype=held, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_options: Any) -> None:
        """Stand for the reduce-scatter: `add` has what it was given."""

    def add(self, output: Tensor) -> None:
        """Give what FSDP2 has copied together to be summed into `output`."""
        assert self._input is not None, "FSDP2 has asked for it"
        rows_RN = self._input.view(self._route.rows, -1)
        self._input = None
        self._look(rows_RN)
        earlier = self._take_earlier()
        self._sums.add(Summand(self._route, rows_RN, output, earlier, self._over_shards, self._over_replicas))
        self._earlier = output

    def _take_earlier(self) -> Tensor | None:
        """Return the sum of the step's earlier backwards; FSDP2, which would add to it at once, finds none."""
        trained = self._trained()
        if all(parameter.grad is None for parameter in trained):
            return None
        assert self._earlier is not None, "gradients of the step before were cleared"
        for parameter in trained:
            parameter.grad = None
        return self._earlier

    def forget(self) -> None:
        """The step's gradients are summed."""
        self._earlier = None
