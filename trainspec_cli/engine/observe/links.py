"""Time exchanges by mesh axis. Only the transfer is timed, not the wait for the last rank to arrive.

In a sampled step, the ranks of an exchange first wait at a barrier. Then all ranks start the transfer at the same time.
A rank's waiting time shows how much earlier it arrived than the last rank, which waits least. If every rank finished
only when its last byte had arrived, no barrier would be needed: the shortest time of any rank would be the transfer
time. But on gloo a rank with a slow outgoing link finishes first, because the kernel buffers what it sends.

On an accelerator, the barrier is an all-reduce of one number in the exchange's stream, and events in that stream
measure the times. So sampling delays neither the host nor other streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from trainspec_cli.balance.decisions.links import TIMED_EXCHANGES, Transfer, transfer_of
from trainspec_cli.engine.comm.exchange import TimeCollective
from trainspec_cli.engine.digest import Span, elapsed_s
from trainspec_cli.engine.observe.clock import StepClock

GROUPS = "groups"
"""The axis name for exchanges between replica groups."""


@dataclass(frozen=True)
class TimedExchange:
    sent_bytes: float
    transfer: Span
    waiting: Span
    """The time at the barrier before the transfer."""


@dataclass(frozen=True)
class GroupSample:
    """The timed exchanges of one process group in a step."""

    timed: Sequence[TimedExchange]
    meeting: Span | None
    """The duration of a barrier that all ranks enter at the same time; None if no exchange was timed."""
    is_hidden: bool

    def exchanges(self) -> list[tuple[float, float, float]]:
        """Return (bytes, transfer time, waiting time) for each exchange, in seconds."""
        return [(one.sent_bytes, elapsed_s(*one.transfer), elapsed_s(*one.waiting)) for one in self.timed]

    @property
    def cost_s(self) -> float:
        """Return the additional time caused by the sample, in seconds: its barriers, and exchanges that would otherwise
        be hidden."""
        if self.meeting is None:
            return 0.0
        transfers_s = sum(elapsed_s(*one.transfer) for one in self.timed) if self.is_hidden else 0.0
        return (len(self.timed) + 1) * elapsed_s(*self.meeting) + transfers_s


class LinkTimer:
    """Times the exchanges of one process group. Each call, given the number of bytes that the rank sends, returns a
    context manager for one exchange. All ranks of the group make the same calls."""

    def __init__(self, clock: StepClock, group: dist.ProcessGroup, *, is_hidden: bool = False):
        """`is_hidden`: the exchanges overlap with other work, unless they are timed."""
        self._clock = clock
        self._group = group
        self._is_hidden = is_hidden
        self._is_sampled = False
        self._calls, self._stride = 0, 1
        """Every `_stride`-th exchange of a sampled step is timed."""
        self._timed: list[TimedExchange] = []
        self._meeting: Span | None = None

    @contextmanager
    def __call__(self, sent_bytes: float | None = None) -> Iterator[bool]:
        """Count the block as exposed communication. Yields whether it is timed; if so, the exchange must be complete at
        the end of the block. This decision must not depend on the number of bytes, which differs between ranks if there
        are experts."""
        with self._clock.collective():
            if sent_bytes is not None:
                self._calls += 1
            if sent_bytes is None or not self._is_sampled or (self._calls - 1) % self._stride:
                yield False
                return
            waiting = self._meet()
            if self._meeting is None:
                self._meeting = self._meet()  # all ranks enter a second barrier at the same time
            started = self._clock.mark()
            yield True
            transfer = started, self._clock.mark()
            self._timed.append(TimedExchange(sent_bytes, transfer, waiting))

    def _meet(self) -> Span:
        """Wait for all ranks: on an accelerator only the current stream, on a CPU this thread."""
        began = self._clock.mark()
        if self._clock.on_gpu:
            dist.all_reduce(torch.zeros(1, device=self._clock.device), group=self._group)
        else:
            dist.barrier(self._group)
        return began, self._clock.mark()

    def begin(self, is_sampled: bool) -> None:
        self._is_sampled = is_sampled
        self._calls = 0
        self._timed = []
        self._meeting = None

    def end(self) -> GroupSample:
        """End a step. Set the stride so that the next sampled step times about the intended number of exchanges."""
        self._is_sampled = False
        self._stride = max(1, -(-self._calls // TIMED_EXCHANGES))
        return GroupSample(self._timed, self._meeting, self._is_hidden)


@dataclass(frozen=True)
class LinkSample:
    """The timed exchanges of a step. On an accelerator, times are read once the device has finished the step."""

    groups: Sequence[tuple[str, GroupSample]]
    """(axis, sample) for each process group."""
    across: Transfer
    """The exchange between replica groups."""
    held_back_bytes: Mapping[str, int]
    """Bytes sent by this rank along each axis in exchanges that overlap with other work in unsampled steps."""

    def transfer(self, axis: str) -> Transfer:
        """Return the measurements of `axis`."""
        if axis == GROUPS:
            return self.across
        return transfer_of([one for of_axis, group in self.groups if of_axis == axis for one in group.exchanges()])

    @cached_property
    def cost_s(self) -> float:
        held_back_s = self.across.seconds
        for axis, held_back_bytes in self.held_back_bytes.items():
            if (one := self.transfer(axis)).sent_bytes:
                held_back_s += one.seconds * held_back_bytes / one.sent_bytes
        return sum(group.cost_s for _, group in self.groups) + held_back_s


class LinkTimers:
    """The timers of a train state, by axis.

    Each process group has a separate timer, even if two groups have the same axis, because ranks must enter its barrier
    from the same thread and in the same order as the group's exchanges.
    """

    def __init__(self, clock: StepClock):
        self._clock = clock
        self._timers: dict[tuple[str, str], LinkTimer] = {}
        self._across = Transfer()
        self._held_back_bytes = Counter[str]()
        self.is_due: Callable[[int], bool] = lambda _step: False
        """Given the number of updates, returns True if the next step is sampled. Called before that step, to notify
        other replica groups."""

    def of(self, axis: str, group: dist.ProcessGroup, *, is_hidden: bool = False) -> TimeCollective:
        """Return the timer for the exchanges of `group`, one of this rank's groups along `axis`; always the same
        object."""
        if group.size() == 1:
            return self._clock.collective
        key = axis, group.group_name
        return self._timers.setdefault(key, LinkTimer(self._clock, group, is_hidden=is_hidden))

    def of_held_back(self, axis: str, group: dist.ProcessGroup) -> TimeCollective:
        """Return the timer for exchanges that overlap with other work, except in sampled steps: the lost overlap is the
        cost of a sampled step."""
        time_exchange = self.of(axis, group)

        @contextmanager
        def timed(sent_bytes: float | None = None) -> Iterator[bool]:
            self._held_back_bytes[axis] += round(sent_bytes or 0)
            with time_exchange(sent_bytes) as has_to_end:
                yield has_to_end

        return timed

    def begin(self, is_sampled: bool) -> None:
        """Begin a step, which is sampled on every rank or on none."""
        self._across = Transfer()
        self._held_back_bytes = Counter()
        for timer in self._timers.values():
            timer.begin(is_sampled)

    def end(self) -> LinkSample:
        groups = [(axis, timer.end()) for (axis, _), timer in self._timers.items()]
        return LinkSample(groups, self._across, self._held_back_bytes)

    def note_across(self, sent_bytes: float, seconds: float, waited_s: float) -> None:
        """Record an exchange between replica groups. It was held back until all groups were ready, which took
        `waited_s`."""
        self._across = Transfer(sent_bytes, seconds, waited_s)
