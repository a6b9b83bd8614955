"""The streams of an emulated device: queues of work, ordered within a stream, and between streams only by events and
waits.

In order mode work runs late: when something waits for it, or when a seeded random scheduler picks it. A wait missing
from the program then shows up as stale or overwritten memory. Otherwise work runs as soon as possible.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainspec_cli.wings.emulated import KIND

counts: Counter[str] = Counter()
"""What this process has done on the device: operations, copies by direction, synchronisations."""

LOCK = threading.RLock()
"""Held while work is queued or run: the main thread, autograd's and the loader's all use the device."""

PICKED = 0.3
"""In order mode: the probability of running a piece of queued work after another one is queued."""
POLL_S = 2e-5


@dataclass
class QueuedWork:
    """A piece of work in a stream."""

    start: Callable[[], object | None] | None = None
    """Runs the work. An exchange returns a handle with `is_completed` and is in progress until that is true."""
    after: tuple[Stream, int] | None = None
    """The work may start once that stream has completed this many pieces of work."""
    handle: Any = None


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.priority = priority
        self._queue: deque[QueuedWork] = deque()
        self.queued = 0
        self.done = 0
        self._outer: list[Stream] = []
        with LOCK:
            STREAMS.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device(KIND, 0)

    def add(self, work: QueuedWork) -> None:
        with LOCK:
            self._queue.append(work)
            self.queued += 1
            SCHEDULER.progress()

    def run(self, start: Callable[[], object | None]) -> None:
        self.add(QueuedWork(start))

    def has_done(self, number: int) -> bool:
        with LOCK:
            SCHEDULER.poll()
            return self.done >= number

    def step(self) -> bool:
        """Run the first piece of work if it may start. Return whether anything changed."""
        if not self._queue:
            return False
        work = self._queue[0]
        if work.handle is not None:
            if not work.handle.is_completed():
                return False
            work.handle.wait()  # raises the error of an exchange that failed
        elif work.after is not None and work.after[0].done < work.after[1]:
            return False
        elif work.start is not None:
            work.handle = work.start()
            if work.handle is not None and not work.handle.is_completed():
                return True
        self._queue.popleft()
        self.done += 1
        return True

    # What torch calls

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
        SCHEDULER.finish(self, self.queued)

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
        self.at: tuple[Stream, int] | None = None
        """The stream where the event was recorded, and the number of pieces of work queued in it until then."""
        self._reached_s = math.nan

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with LOCK:
            stream.run(self._note_time)
            self.at = stream, stream.queued

    def _note_time(self) -> None:
        self._reached_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        counts["synchronisations"] += 1
        if self.at is not None:
            SCHEDULER.finish(*self.at)

    def query(self) -> bool:
        return self.at is None or self.at[0].has_done(self.at[1])

    def elapsed_time(self, end: StreamEvent) -> float:
        """Return the host time in milliseconds between two events that the streams have reached."""
        if not (self.query() and end.query()) or math.isnan(self._reached_s) or math.isnan(end._reached_s):
            raise RuntimeError("elapsed_time needs two recorded events that the device has reached")
        return (end._reached_s - self._reached_s) * 1e3


class Scheduler:
    """Decides which work runs when."""

    def __init__(self) -> None:
        self.random: random.Random | None = None
        """The random generator of order mode."""

    def progress(self) -> None:
        """Run what may run now: everything that can start or, in order mode, a random selection."""
        if self.random is None:
            self.poll()
            return
        while self.random.random() < PICKED:
            self._pick()

    def poll(self) -> None:
        """Outside order mode, run all work that can start."""
        if self.random is None:
            while self._step_all():
                pass

    def _step_all(self) -> bool:
        """Run the first piece of work in every stream, if it may start. Return whether anything changed."""
        changed = False
        for stream in STREAMS:
            changed |= stream.step()
        return changed

    def _pick(self) -> bool:
        assert self.random is not None
        waiting = [stream for stream in STREAMS if stream._queue]
        self.random.shuffle(waiting)
        return any(stream.step() for stream in waiting)

    def finish(self, stream: Stream, number: int) -> None:
        """Wait until a stream has completed this many pieces of work."""
        while True:
            with LOCK:
                while stream.done < number:
                    if self.random is None:
                        changed = self._step_all()
                    else:
                        changed = self._pick()
                    if not changed:
                        break
                if stream.done >= number:
                    return
            time.sleep(POLL_S)  # an exchange is in progress

    def finish_all(self) -> None:
        for stream in list(STREAMS):
            self.finish(stream, stream.queued)


STREAMS: list[Stream] = []
SCHEDULER = Scheduler()
DEFAULT = Stream()
_here = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Return this thread's current stream, initially the default one."""
    found: Stream = getattr(_here, "stream", DEFAULT)
    return found
