"""Time exchanges by mesh axis: the transfer, without the wait for the last rank.

In a sampled step, the ranks of an exchange first meet at a barrier. The time that a rank waits there shows how much
earlier it arrived than the last rank, which waits least. Then all ranks start the transfer at once. If every rank
finished with the last byte, the shortest time of any rank in the complete exchange would suffice, without a barrier;
but on gloo a rank with a slow outgoing link finishes first, since the kernel buffers what it sends. Exchanges on a GPU
run on separate streams and are not timed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from trainspec_cli.balance.decisions.links import TIMED_EXCHANGES, Transfer, transfer_of
from trainspec_cli.engine.comm.exchange import TimeCollective
from trainspec_cli.engine.observe.clock import StepClock

GROUPS = "groups"
"""The axis of replica groups."""


class LinkTimer:
    """Called around each exchange of one process group, in the same way by all its ranks, with the bytes that a rank
    sends."""

    def __init__(self, clock: StepClock, group: dist.ProcessGroup, *, is_hidden: bool = False):
        """`is_hidden`: other work overlaps with the exchanges, unless they are timed."""
        self._clock = clock
        self._group = group
        self._is_hidden = is_hidden
        self._is_sampled = False
        self._calls, self._stride = 0, 1
        """Every `_stride`-th exchange of a sampled step is timed."""
        self._timed: list[tuple[float, float, float]] = []
        """(bytes, seconds, seconds of waiting)"""
        self._meeting_s = 0.0

    @contextmanager
    def __call__(self, sent_bytes: float | None = None) -> Iterator[bool]:
        """Count the block as exposed communication; yields whether it is timed, and must then be complete at its end.
        This must not depend on the number of bytes, which differs between the experts' ranks."""
        with self._clock.collective():
            if sent_bytes is not None:
                self._calls += 1
            if sent_bytes is None or not self._is_sampled or (self._calls - 1) % self._stride:
                yield False
                return
            waited_s = self._meet()
            if not self._timed:
                self._meeting_s = self._meet()  # at a second barrier, no rank is late
            started_s = time.perf_counter()
            yield True
            self._timed.append((sent_bytes, time.perf_counter() - started_s, waited_s))

    def _meet(self) -> float:
        """Wait for all ranks; return the seconds waited."""
        started_s = time.perf_counter()
        dist.barrier(self._group)
        return time.perf_counter() - started_s

    def begin(self, is_sampled: bool) -> None:
        self._is_sampled = is_sampled
        self._calls = 0
        self._timed.clear()

    def end(self) -> None:
        """End a step, and set the stride so that the next sampled step times the wanted number of exchanges."""
        self._is_sampled, self._stride = False, max(1, -(-self._calls // TIMED_EXCHANGES))

    @property
    def timed(self) -> Sequence[tuple[float, float, float]]:
        """Return bytes, seconds and seconds of waiting of each exchange that was timed in the last sampled step."""
        return self._timed

    @property
    def cost_s(self) -> float:
        """Return the additional time that the sample took: its barriers, and exchanges that are otherwise hidden."""
        meetings_s = (len(self._timed) + 1) * self._meeting_s if self._timed else 0.0
        return meetings_s + (sum(seconds for _, seconds, _ in self._timed) if self._is_hidden else 0.0)


class LinkTimers:
    """The timers of a train state, by axis.

    Each process group has its own timer, even if two groups have the same axis: ranks must meet at its barrier in the
    same thread and order in which they call that group.
    """

    def __init__(self, clock: StepClock):
        self._clock = clock
        self._timers: dict[tuple[str, str], LinkTimer] = {}
        self._across = Transfer()
        self._held_back_bytes = Counter[str]()
        """Bytes that this rank sends along each axis in a sampled step, and that are hidden by other work in all other
        steps."""
        self.is_due: Callable[[int], bool] = lambda _step: False
        """Given the number of updates: True if the next step is to be sampled; other replica groups are told in
        advance."""

    def of(self, axis: str, group: dist.ProcessGroup, *, is_hidden: bool = False) -> TimeCollective:
        """Return the timer for the exchanges of `group`, one of this rank's groups along `axis`; always the same
        object."""
        if self._clock.on_gpu or group.size() == 1:
            return self._clock.collective
        key = axis, group.group_name
        return self._timers.setdefault(key, LinkTimer(self._clock, group, is_hidden=is_hidden))

    def of_held_back(self, axis: str, group: dist.ProcessGroup) -> TimeCollective:
        """Return the timer for exchanges that overlap with other work except in sampled steps, which is what such steps
        cost."""
        time_exchange = self.of(axis, group)

        @contextmanager
        def timed(sent_bytes: float | None = None) -> Iterator[bool]:
            self._held_back_bytes[axis] += round(sent_bytes or 0)
            with time_exchange(sent_bytes) as has_to_end:
                yield has_to_end

        return timed

    def begin(self, is_sampled: bool) -> None:
        """Begin a step, sampled on every rank or on none."""
        self._across = Transfer()
        self._held_back_bytes.clear()
        for timer in self._timers.values():
            timer.begin(is_sampled)

    def end(self) -> None:
        for timer in self._timers.values():
            timer.end()

    def note_across(self, sent_bytes: float, seconds: float, waited_s: float) -> None:
        """Record an exchange between replica groups, which was held back until all had met; that took `waited_s`."""
        self._across = Transfer(sent_bytes, seconds, waited_s)

    def transfer(self, axis: str) -> Transfer:
        """Return the measurements of `axis` in the last sampled step."""
        if axis == GROUPS:
            return self._across
        return transfer_of(
            [one for (of_axis, _), timer in self._timers.items() if of_axis == axis for one in timer.timed]
        )

    @property
    def cost_s(self) -> float:
        held_back_s = self._across.seconds
        for axis, held_back_bytes in self._held_back_bytes.items():
            if (one := self.transfer(axis)).sent_bytes:
                held_back_s += one.seconds * held_back_bytes / one.sent_bytes
        return sum(timer.cost_s for timer in self._timers.values()) + held_back_s
