"""FSDP2 (torch 2.13) on an account: units are gathered, let go, and their gradients reduced.

What it holds is as read from its source: a forward keeps its all-gather's buffer until the next one's parameters are
copied out, a backward gathers the unit before while it works on its own, and the buffer of a reduce-scatter lives
until the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.plan.memory.engine.run import Account
from trainspec_cli.plan.memory.engine.units import Unit

MASTER_WIDTH = 4.0
"""Bytes of a parameter as it is kept, of its gradient there and of each moment."""


@dataclass
class Sharded:
    """A unit's state."""

    unit: Unit
    is_gathered: bool = False
    prefetched: bool = False
    gradient_bytes: float = 0.0
    """Unsharded gradients, as autograd made them."""
    accumulated_bytes: float = 0.0
    """The same in the format of the exchange, waiting for the last micro-batch."""
    has_gradient: bool = False


class Sharding:
    """The sharded parameters of one stage. `keeps`: they are gathered once a step; else they are freed after each
    forward and each backward."""

    def __init__(self, account: Account, width: float, reduce_width: float, *, keeps: bool):
        self.account, self.width, self.reduce_width, self.keeps = account, width, reduce_width, keeps
        self.buffer_bytes = 0.0
        """Bytes of the last forward's all-gather."""
        self.reduced_bytes = 0.0
        """Bytes of the last reduce-scatter."""

    def gather(self, part: Sharded) -> None:
        """Gather the part's parameters in a forward."""
        if part.is_gathered or not part.unit.full:
            return
        size, account = part.unit.gathered * self.width, self.account
        if part.unit.shards > 1:
            self.prefetch(part)
            account.add("collectives", -self.buffer_bytes)
            self.buffer_bytes, part.prefetched = size, False
        self._copy_out(part, size)

    def _copy_out(self, part: Sharded, size: float) -> None:
        self.account.add("gathered", size)
        self.account.touch(size if part.unit.reorders else 0.0)
        part.is_gathered = True

    def end_forward(self) -> None:
        self.account.add("collectives", -self.buffer_bytes)
        self.buffer_bytes = 0.0

    def free_after_forward(self, part: Sharded) -> None:
        if not self.keeps and part.unit.shards > 1:
            self.free(part)

    def free(self, part: Sharded) -> None:
        if part.is_gathered:
            self.account.add("gathered", -part.unit.gathered * self.width)
            part.is_gathered = False

    def prefetch(self, part: Sharded | None) -> None:
        if part is None or part.is_gathered or part.prefetched or part.unit.shards == 1:
            return
        self.account.touch((part.unit.gathered + part.unit.own) * self.width, "collectives")
        self.account.add("collectives", part.unit.gathered * self.width)
        part.prefetched = True

    def gather_again(self, part: Sharded) -> None:
        """Gather the part's parameters in a backward, where the buffer is freed at once."""
        if part.is_gathered:
            return
        size = part.unit.gathered * self.width
        self._copy_out(part, size)
        if part.prefetched:
            self.account.add("collectives", -size)
        part.prefetched = False

    def make_early_gradient(self, part: Sharded) -> None:
        size = part.unit.early * self.width
        self.account.add("gradients", size)
        part.gradient_bytes += size

    def make_gradient(self, part: Sharded, *, put_off: bool = False) -> None:
        """Or what was put off of it. A second one is added to the first, into new memory."""
        size = (part.unit.trained.full - (part.unit.early if put_off else 0.0)) * self.width
        if part.gradient_bytes:
            self.account.touch(part.unit.trained.largest * self.width, "gradients")
        self.account.add("gradients", size - part.gradient_bytes)
        part.gradient_bytes = size

    def after_backward(self, part: Sharded, *, exchanges: bool, last: bool) -> None:
        """Free the parameters, unless micro-batches follow for which they are kept; where nothing is exchanged yet,
        gradients take the format of the exchange."""
        if last or not self.keeps:
            self.free(part)
        if not exchanges and part.gradient_bytes and self.reduce_width != self.width and not part.accumulated_bytes:
            part.accumulated_bytes = part.unit.trained.full * self.reduce_width
            self.account.add("gradients", part.accumulated_bytes)
        if part.accumulated_bytes:
            self.account.add("gradients", -part.gradient_bytes)
            part.gradient_bytes = 0.0
        if exchanges:
            self._reduce(part)

    def _reduce(self, part: Sharded) -> None:
        """Copied into one buffer, summed over ranks; the own part stays: over one rank, the buffer itself."""
        waiting = part.gradient_bytes + part.accumulated_bytes
        if not waiting:
            return
        account, size = self.account, part.unit.trained.gathered * self.reduce_width
        if part.unit.shards == 1 and self.reduce_width == MASTER_WIDTH and not part.has_gradient:
            account.add("collectives", -self.reduced_bytes)
            account.add("gradients", size)
            account.add("gradients", -waiting)
            part.gradient_bytes = part.accumulated_bytes = self.reduced_bytes = 0.0
            part.has_gradient = True
            return
        account.touch(part.unit.trained.largest * self.width if part.unit.reorders else 0.0, "collectives")
        account.add("collectives", -self.reduced_bytes)
        account.add("collectives", size)
        # foreach_reduce frees its list of whole gradients after the copy, but a loop's variable keeps the last one
        # until the function returns: of a first stage that is the whole embedding's.
        last_rows, row = part.unit.trained.matrices[-1]
        last = last_rows * row * (self.reduce_width if part.accumulated_bytes else self.width)
        lingering = last if part.unit.shards > 1 else 0.0
        account.add("gradients", lingering - waiting)
        own = part.unit.trained.own * MASTER_WIDTH
        narrow = part.unit.trained.own * (self.reduce_width if self.reduce_width < MASTER_WIDTH else 0.0)
        account.touch(narrow + own, "collectives" if part.has_gradient else "gradients")
        account.add("gradients", 0.0 if part.has_gradient else own)
        account.add("gradients", -lingering)
        part.gradient_bytes = part.accumulated_bytes = 0.0
        self.reduced_bytes, part.has_gradient = size, True

    def end_backward(self) -> None:
        self.account.add("collectives", -self.reduced_bytes)
        self.reduced_bytes = 0.0
