"""The streams of an emulated device: queues of work. Work is ordered within a stream. Between streams, only events and
waits impose an order.

In order mode, work runs late: when something waits for it, or when a seeded random scheduler selects it. A wait that is
missing in the program then shows up as stale or overwritten memory. Otherwise work runs as soon as possible. The
scheduler gives streams random priorities and changes them at random moments (Burckhardt et al. 2010, "A randomized
scheduler with probabilistic guarantees of finding bugs"), so that a stream may fall far behind the others.

With virtual time, each stream and the host have a clock. Work starts when the host has queued it and the stream has
finished the work before it. The host's clock advances when it queues something or waits. None of this depends on real
time, or on when the work actually runs.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from trainspec_cli.wings.emulated import KIND

counts: Counter[str] = Counter()
"""This process's counts of operations, copies by direction, and synchronisations with the device."""

LOCK = threading.RLock()
"""Held while work is queued or run, because the main thread, autograd's threads and the loader's thread all use the
device."""

PICKED = (0.0, 0.1, 0.5)
"""In order mode: candidate probabilities for running some queued work whenever more is queued. Each schedule uses one
of them."""
NEEDED = (0.0, 0.8, 1.0)
"""In order mode: candidate probabilities for running only the work that a wait needs, and no other work of higher
priority."""
CHANGED = 0.05
"""In order mode: the probability that a stream's priority changes after an item of its work."""
QUERIED = 0.1
"""In order mode: the probability that a query for completion also runs some work, so that polling eventually ends."""
IDLE_S = 0.03
"""In order mode: after this real time without queued or running work, exchanges run, together with the work that they
need, because another rank may be waiting for them."""
POLL_S = 2e-5
"""First pause of a thread that waits for an exchange. Every further pause is twice as long."""
BACKGROUND_S = 5e-4
"""Longest pause. Also the interval between attempts to advance exchanges that no thread is waiting for."""


class HostClock:
    """The host's virtual time, by thread.

    The main thread and autograd's threads, which work in turn, share a clock. Every other Python thread has a separate
    clock that starts at 0, because the order of their calls relative to the main thread's depends on real time."""

    def __init__(self) -> None:
        self.is_virtual = False
        self.launch_s = 0.0
        """Host time to queue one operation."""
        self.duration_s: Callable[..., float] = lambda _at_s, seconds, _work: seconds
        """Maps the current time, the usual duration and the name of host work to its actual duration."""
        self._shared = [0.0]
        self._own = threading.local()

    def _clock(self) -> list[float]:
        clock: list[float] | None = getattr(self._own, "clock", None)
        if clock is None:
            thread = threading.current_thread()
            # Threads that torch started in C++ appear in Python as dummies with this name.
            is_shared = thread is threading.main_thread() or thread.name.startswith("Dummy-")
            clock = self._own.clock = self._shared if is_shared else [0.0]
        return clock

    @property
    def now_s(self) -> float:
        return self._clock()[0] if self.is_virtual else 0.0

    @property
    def is_shared(self) -> bool:
        """Whether this thread uses the clock shared by the main thread and autograd's threads."""
        return self._clock() is self._shared

    def launch(self) -> None:
        if self.launch_s:
            self.work(self.launch_s)

    def work(self, seconds: float, name: str = "") -> None:
        """Advance this thread's clock by some virtual time, or by the duration of the named work."""
        if self.is_virtual:
            clock = self._clock()
            clock[0] += self.duration_s(clock[0], seconds, name)

    def wait_until(self, moment_s: float) -> None:
        if self.is_virtual:
            clock = self._clock()
            clock[0] = max(clock[0], moment_s)


HOST = HostClock()


@dataclass
class Moment:
    """The point in a stream at which an event was recorded."""

    stream: Stream
    number: int = 0
    """Number of work items queued in the stream before this point."""
    host_s: float = math.nan
    """Real time when the stream reached this point; NaN until then."""
    device_s: float = 0.0
    """Virtual time when the stream reached this point."""
    queued_s: float = 0.0
    """Virtual time when a host thread recorded the event."""

    @property
    def is_reached(self) -> bool:
        return self.stream.done >= self.number


@dataclass
class QueuedWork:
    """An item of work in a stream."""

    start: Callable[[], object] | None = None
    """Function that runs the work."""
    exchange: Callable[[float], Any] | None = None
    """Function that starts an exchange at a virtual time. It returns a handle with `is_completed`, `wait`, and the
    virtual end time `end_s`, which is known once the exchange is completed."""
    after: Moment | None = None
    """A moment that its own stream must reach before the work may start."""
    moment: Moment | None = None
    """The event that this work records, if any."""
    duration_s: float = 0.0
    """Duration in virtual time."""
    queued_s: float = 0.0
    """Virtual time when the host queued the work."""
    handle: Any = None
    name: str = ""
    """Name of the operation or exchange, shown in a trace."""
    about: str = ""
    """Sizes of the operation or exchange, shown in a trace."""
    is_exchange: bool = False


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.priority = priority
        self._queue: deque[QueuedWork] = deque()
        self._exchanges = 0
        """The number of exchanges in the queue."""
        self.queued = 0
        self.done = 0
        self.now_s = 0.0
        """Virtual end time of the last completed work."""
        self._outer: list[Stream] = []
        with LOCK:
            self.number = len(STREAMS)
            STREAMS.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device(KIND, 0)

    def add(self, work: QueuedWork) -> None:
        with LOCK:
            work.queued_s = HOST.now_s
            if not self._queue:
                SCHEDULER.busy.append(self)
            self._queue.append(work)
            self._exchanges += work.exchange is not None
            SCHEDULER.active_s = time.monotonic()
            self.queued += 1
            if work.moment is not None:
                work.moment.number = self.queued
                work.moment.queued_s = work.queued_s
            SCHEDULER.progress()
            if work.exchange is not None:
                SCHEDULER.progress_exchanges()

    def run(self, start: Callable[[], object], duration_s: float = 0.0) -> None:
        self.add(QueuedWork(start, duration_s=duration_s))

    def spend(
        self,
        duration_s: float,
        name: str = "",
        about: Callable[[], str] = str,
        share: Callable[[], float] | None = None,
    ) -> None:
        """Queue the time that an operation takes on the device. `about` describes its sizes, for a trace. `share`:
        returns the fraction of the time that the operation's values actually require. The values are known once the
        stream has reached the operation."""
        sizes = "" if SCHEDULER.on_work is None else about()
        work = QueuedWork(duration_s=duration_s, name=name, about=sizes)
        if share is not None:

            def measure() -> None:
                work.duration_s *= share()

            work.start = measure
        self.add(work)

    def has_done(self, number: int) -> bool:
        with LOCK:
            SCHEDULER.poll()
            return self.done >= number

    @property
    def has_exchange(self) -> bool:
        return self._exchanges > 0

    @property
    def needed(self) -> Stream:
        """The stream whose work has to run first: this stream, or the stream that it is waiting for."""
        after = self._queue[0].after
        return self if after is None or after.is_reached else after.stream.needed

    def step(self) -> bool:
        """Run the first item of work if it may start. Return whether anything changed."""
        if not self._queue or SCHEDULER.is_running:
            return False  # Freeing tensors may queue more work, which must not run inside this work.
        SCHEDULER.is_running = True
        try:
            return self._step()
        finally:
            SCHEDULER.is_running = False

    def _step(self) -> bool:
        work = self._queue[0]
        before_s = self.now_s
        if work.handle is None:
            if work.after is not None:
                if not work.after.is_reached:
                    return False
                self.now_s = max(self.now_s, work.after.device_s)
            self.now_s = max(self.now_s, work.queued_s)
            if work.exchange is not None:
                work.handle = work.exchange(self.now_s)
                if not work.handle.is_completed():
                    return True
            elif work.start is not None:
                work.start()
        if work.handle is not None:
            if not work.handle.is_completed():
                return False
            work.handle.wait()  # raises the error of a failed exchange
            self.now_s = max(self.now_s, work.handle.end_s)
        began_s = self.now_s
        self.now_s += work.duration_s
        if SCHEDULER.on_work is not None:
            SCHEDULER.on_work(self, work, before_s, began_s)
        if work.moment is not None:
            work.moment.host_s = time.perf_counter()
            work.moment.device_s = self.now_s
        self._queue.popleft()
        self._exchanges -= work.exchange is not None
        if not self._queue:
            SCHEDULER.busy.remove(self)
        self.done += 1
        return True

    # Methods that torch calls

    def wait_event(self, event: StreamEvent) -> None:
        if event.at is not None:
            self.add(QueuedWork(after=event.at))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:
        event = event or StreamEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        counts["synchronisations"] += 1
        self.finish()

    def finish(self) -> None:
        """Make the host wait for all work queued in this stream so far."""
        end = Moment(self)
        self.add(QueuedWork(moment=end))
        SCHEDULER.finish(self, end.number)
        HOST.wait_until(end.device_s)

    def query(self) -> bool:
        return self.has_done(self.queued)

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        _here.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.stream = self._outer.pop()


class StreamEvent:
    def __init__(self, *_: Any, **__: Any):
        self.at: Moment | None = None
        """The moment when the event was last recorded."""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        moment = Moment(stream)
        stream.add(QueuedWork(moment=moment))
        self.at = moment

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for this event. If another thread recorded the event, this thread's clock advances at
        least to the time of the recording."""
        if self.at is not None:
            HOST.wait_until(self.at.queued_s)
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        counts["synchronisations"] += 1
        if self.at is not None:
            SCHEDULER.finish(self.at.stream, self.at.number)
            HOST.wait_until(self.at.device_s)

    @property
    def is_reached(self) -> bool:
        return self.at is None or self.at.is_reached

    def query(self) -> bool:
        return self.at is None or self.at.stream.has_done(self.at.number)

    def elapsed_time(self, end: StreamEvent) -> float:
        """Return the milliseconds between two events that their streams have reached: in virtual time if there is any,
        otherwise in the host's real time."""
        begun = self.at
        ended = end.at
        if begun is None or ended is None or not (self.query() and end.query()):
            raise RuntimeError("elapsed_time needs two recorded events that the device has reached")
        if HOST.is_virtual:
            return (ended.device_s - begun.device_s) * 1e3
        return (ended.host_s - begun.host_s) * 1e3


class Scheduler:
    """Decides when queued work runs, and in which order."""

    def __init__(self) -> None:
        self.busy: list[Stream] = []
        """The streams with queued work."""
        self.is_running = False
        """True while an item of work is running."""
        self.random: random.Random | None = None
        """The random generator of order mode."""
        self._priorities: dict[Stream, float] = {}
        self._picked = 0.0
        self._needed = 0.0
        self.active_s = 0.0
        """In order mode: real time when work was last queued or run."""
        self._has_exchanges = threading.Event()
        self._background: threading.Thread | None = None
        self.on_work: Callable[[Stream, QueuedWork, float, float], None] | None = None
        """Called after an item of work, with the stream's times before that work and the work's start time."""

    def start_order(self, seed: int | None) -> None:
        """Start random order with this seed. None ends order mode: from then on, work runs as soon as possible."""
        self.finish_all()
        with LOCK:
            self._priorities.clear()
            self.random = None if seed is None else random.Random(seed)
            if self.random is not None:
                self._picked = self.random.choice(PICKED)
                self._needed = self.random.choice(NEEDED)

    def progress(self) -> None:
        """Run all work that can start or, in order mode, a random selection of it."""
        if self.random is None:
            self.poll()
            return
        while self.random.random() < self._picked and self._pick():
            pass

    def poll(self) -> None:
        """Run all work that can start. In order mode, sometimes run only one item."""
        if self.random is None:
            while self._step_all():
                pass
        elif self.random.random() < QUERIED:
            self._pick()

    def _step_all(self) -> bool:
        """Run the first item of work in every stream that may start it. Return whether anything changed."""
        changed = False
        for stream in tuple(self.busy):
            changed |= stream.step()
        return changed

    def _pick(self) -> bool:
        """Run an item of work from the stream with the highest priority among those that can continue. Return whether
        there was one."""
        assert self.random is not None
        for stream in self.busy:
            if stream not in self._priorities:
                self._priorities[stream] = self.random.random()
        for stream in sorted(self.busy, key=self._priorities.__getitem__):
            if stream.step():
                self.active_s = time.monotonic()
                if self.random.random() < CHANGED:
                    self._priorities[stream] = self.random.random()
                return True
        return False

    def _continue(self, stream: Stream) -> bool:
        """In order mode, let an exchange in progress continue. If nothing else happens, start another one. Return
        whether anything changed."""
        if stream._queue and stream._queue[0].handle is not None:
            return stream.step()
        is_idle = time.monotonic() - self.active_s > IDLE_S
        return is_idle and stream.has_exchange and stream.needed.step()

    def progress_exchanges(self) -> None:
        """Let exchanges advance while the host does something else, such as waiting for other ranks."""
        if self._background is None:
            self._background = threading.Thread(target=self._progress_exchanges, daemon=True)
            self._background.start()
        self._has_exchanges.set()

    def _progress_exchanges(self) -> None:
        while True:
            self._has_exchanges.wait()
            with LOCK:
                for stream in tuple(self.busy):
                    with suppress(Exception):  # the thread that waits for the exchange will get the same error
                        if self.random is None:
                            stream.step()
                        else:
                            self._continue(stream)
                if not any(stream.has_exchange for stream in self.busy):
                    self._has_exchanges.clear()
            time.sleep(BACKGROUND_S)

    def finish(self, stream: Stream, number: int) -> None:
        """Wait until a stream has completed this number of work items."""
        pause_s = POLL_S
        while True:
            with LOCK:
                while stream.done < number:
                    if self.random is None:
                        changed = self._step_all()
                    elif self.random.random() < self._needed:
                        changed = stream.needed.step() or any(map(self._continue, tuple(self.busy)))
                    else:
                        changed = self._pick()
                    if not changed:
                        break
                    self.active_s = time.monotonic()
                    pause_s = POLL_S
                if stream.done >= number:
                    return
            # An exchange is in progress, and the rank that it waits for may need this processor.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKGROUND_S)

    def finish_all(self) -> None:
        for stream in list(STREAMS):
            stream.finish()


STREAMS: list[Stream] = []
SCHEDULER = Scheduler()
DEFAULT = Stream()
_here = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Return this thread's current stream, initially the default one."""
    found: Stream = getattr(_here, "stream", DEFAULT)
    return found
