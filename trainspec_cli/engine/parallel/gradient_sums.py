"""Sum gradients over data-parallel ranks during the backward pass (gloo).

On a CPU, FSDP2 waits for every collective. Here, an exchange returns to FSDP2 as soon as the module's gradients are in
a bucket. A thread sums the buckets one after another, over separate process groups, while the backward pass continues
with earlier blocks. The step waits for the last bucket. Each value is summed in rank order, so the result is bitwise
identical with and without the thread, and for any bucket size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.engine.comm.codec import end_connections
from trainspec_cli.engine.comm.compressed import CompressedSum, GroupWire
from trainspec_cli.engine.comm.exchange import Peers, TimeCollective, all_reduce_, reduce_scatter, sent_bytes
from trainspec_cli.engine.comm.forking import Background

MOST_WAITING = 2
"""Maximum number of buckets that wait while one is being summed. This keeps the link busy, but limits the memory taken
by queued gradients."""


@dataclass(frozen=True, eq=False)
class Route:
    """The ranks over which a module's gradients are summed: first the shard ranks, each of which keeps one row, and
    then the replicas."""

    shards: Peers | None
    replicas: Peers | None

    @property
    def rows(self) -> int:
        return self.shards.size if self.shards else 1


@dataclass(frozen=True)
class Summand:
    """The gradients of one module after one backward pass."""

    route: Route
    rows_RN: Tensor
    """The gradients: a row for each shard rank, in the exchange format."""
    sum_N: Tensor
    """Memory for the sum of this rank's row; the memory of `rows_RN` if that has a single row in the same format."""
    earlier_N: Tensor | None
    """The sum over the step's previous backward passes, which is added to this one."""
    over_shards: CompressedSum | None
    over_replicas: CompressedSum | None


@torch.no_grad()
def sum_together(summands: Sequence[Summand], *, timed: bool) -> None:
    """Sum the summands of one route in one exchange; a compressed summand gets a separate exchange. Only the main
    thread times exchanges."""
    first = summands[0]
    shards = first.route.shards
    rows_RN = torch.cat([summand.rows_RN for summand in summands], dim=1) if len(summands) > 1 else first.rows_RN
    own_N = rows_RN[0]
    if shards is not None:
        time_exchange = shards.time if timed else _untimed
        if first.over_shards is not None:
            with time_exchange():
                own_N = first.over_shards.reduce_scatter(rows_RN, GroupWire(shards.group))
        else:
            own_N = rows_RN.new_empty(rows_RN.shape[1])
            with time_exchange(sent_bytes(rows_RN.nbytes, shards.size)):
                reduce_scatter(own_N, rows_RN, group=shards.group)
    if first.route.replicas is not None:
        sum_over_replicas_(own_N, first.route.replicas, first.over_replicas, timed=timed)
    for summand, part in zip(summands, own_N.split([len(summand.sum_N) for summand in summands]), strict=True):
        if part.data_ptr() != summand.sum_N.data_ptr():
            summand.sum_N.copy_(part)
        if summand.earlier_N is not None:
            summand.sum_N.add_(summand.earlier_N)


def sum_over_replicas_(x: Tensor, replicas: Peers, compressed: CompressedSum | None, *, timed: bool = True) -> None:
    """Sum over the replicas, in place. If the time includes encoding, no link speed is measured."""
    time_exchange = replicas.time if timed else _untimed
    if compressed is not None:
        with time_exchange():
            compressed.all_reduce_(x, GroupWire(replicas.group))
    elif replicas.tiers is not None:
        with time_exchange(replicas.tiers.sent_bytes(x)):
            replicas.tiers.sum_(x)
    else:
        with time_exchange(2 * sent_bytes(x.nbytes, replicas.size)):
            all_reduce_(x, replicas.group)


def _untimed(_sends_bytes: float | None = None) -> AbstractContextManager[bool]:
    return nullcontext(False)


@dataclass(frozen=True)
class Bucket:
    summands: list[Summand] = field(default_factory=list)
    summed: Future[None] = field(default_factory=Future)

    def sum(self) -> None:
        try:
            sum_together(self.summands, timed=False)
        except BaseException as error:
            self.summed.set_exception(error)
            raise
        self.summands.clear()  # free the gradients
        self.summed.set_result(None)


class GradientSums:
    """Sums the gradients of one train state. Each step calls `add` in the backward passes, and then `finish`."""

    def __init__(self, time_wait: TimeCollective, note_beside: Callable[[float, float], None]):
        """`note_beside` is called with the times at which an exchange in the thread began and ended."""
        self._time_wait = time_wait
        self._beside = Background(torch.device("cpu"), note_beside, MOST_WAITING, give_up=end_connections)
        self._bucket, self._sent = Bucket(), Bucket()
        """The bucket that is being filled, and the last bucket that was passed to the thread."""
        self._sent.summed.set_result(None)
        self.modules = list[ModuleSums]()
        self.bucket_bytes = 0
        """A bucket is summed once it has reached this many bytes. If 0, each module's gradients are summed
        separately."""
        self.holds_back = False
        """True if every exchange is awaited immediately, because the step measures the links. Exchanges of encoded
        gradients do not measure a link, so they run as usual."""
        self.sizes_bytes = list[int]()
        """Sizes of the gradients summed in the last step, for each module after each backward pass, in order."""
        self.can_join = True
        """False if gradients are compressed, because each module is then encoded in separate blocks."""
        self.waited_s = 0.0
        """Time that the last step waited for sums, in seconds."""

    def add(self, summand: Summand) -> None:
        """Sum a module's gradients. The result may only be read after `finish`. All ranks call this in the same
        order."""
        self.sizes_bytes.append(summand.rows_RN.nbytes)
        is_compressed = summand.over_shards is not None or summand.over_replicas is not None
        self.can_join = self.can_join and not is_compressed
        if self.holds_back and not is_compressed:
            self._wait_in(self._beside.wait)
            sum_together([summand], timed=True)
            return
        waiting = self._bucket.summands
        if waiting and (is_compressed or waiting[0].route is not summand.route):
            self._send()
        self._bucket.summands.append(summand)
        bucket_bytes = sum(one.rows_RN.nbytes for one in self._bucket.summands)
        if is_compressed or bucket_bytes >= self.bucket_bytes:
            self._send()

    def begin(self) -> None:
        """Begin a step."""
        self.sizes_bytes = []
        self.waited_s = 0.0

    def finish(self) -> None:
        """Wait until all gradients are summed. Raises the first error of an exchange."""
        self._send()
        self._wait_in(self._beside.wait)
        for module in self.modules:
            module.earlier = None  # the next step starts a new sum

    def take_error(self) -> BaseException | None:
        """Return the first error of an exchange, which caused the step's other errors."""
        return self._beside.take_error()

    def await_added(self) -> Callable[[], object]:
        """Return a function that waits, in any thread, until all gradients added so far are summed. It raises the first
        error of these sums."""
        return (self._bucket if self._bucket.summands else self._sent).summed.result

    def close(self) -> None:
        """End the thread when the state is no longer used."""
        self._beside.close()

    def _send(self) -> None:
        if self._bucket.summands:
            self._sent, self._bucket = self._bucket, Bucket()
            self._wait_in(partial(self._beside.start, self._sent.sum))

    def _wait_in(self, act: Callable[[], None]) -> None:
        started_s = time.perf_counter()
        with self._time_wait():
            act()
        self.waited_s += time.perf_counter() - started_s


class ModuleSums:
    """One module's exchanges, wrapped in the interface that FSDP2 expects: a reduce-scatter over several shards, and a
    hook that receives the sum over shards. Both return before anything is summed."""

    def __init__(
        self,
        sums: GradientSums,
        route: Route,
        trained: Callable[[], Sequence[nn.Parameter]],
        look: Callable[[Tensor], None],
        over_shards: CompressedSum | None,
        over_replicas: CompressedSum | None,
    ):
        """`trained` returns the module's trained parameters; `look` gets their gradients before they are summed."""
        self._sums = sums
        self._route = route
        self._trained = trained
        self._look = look
        self._over_shards = over_shards
        self._over_replicas = over_replicas
        self._input: Tensor | None = None
        self.earlier: Tensor | None = None
        """The sum over the step's backward passes so far."""
        sums.modules.append(self)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2: at the first call the input, in the exchange format, and then the output. The
        output has the parameters' format from the start, because FSDP2 would cast it too early otherwise."""
        held = self._trained()[0].dtype
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        if self._route.shards is None and held == dtype:
            return self._input
        return torch.empty(*size, dtype=held, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_options: Any) -> None:
        """Replaces FSDP2's reduce-scatter. Does nothing, because `add` already has the input."""

    def add(self, output: Tensor) -> None:
        """Sum FSDP2's copied gradients into `output`."""
        assert self._input is not None, "FSDP2 has requested the output buffer"
        rows_RN = self._input.view(self._route.rows, -1)
        self._input = None
        self._look(rows_RN)
        trained = self._trained()
        earlier = None
        if any(parameter.grad is not None for parameter in trained):
            earlier = self.earlier
            assert earlier is not None, "the previous step's gradients were cleared"
            for parameter in trained:
                parameter.grad = None  # otherwise FSDP2 would add to this gradient immediately
        self._sums.add(Summand(self._route, rows_RN, output, earlier, self._over_shards, self._over_replicas))
        self.earlier = output
