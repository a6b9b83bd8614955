"""Record what the streams of the emulated device do in virtual time, and the memory in use, for a trace of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from trainspec_cli.core.printable import format_seconds
from trainspec_cli.reporter.page.svg import thin
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog, find_origin
from trainspec_cli.wings.emulated.engine.device import MEMORY
from trainspec_cli.wings.emulated.engine.exchanges import stream_names
from trainspec_cli.wings.emulated.engine.streams import DEFAULT, QueuedWork, Stream
from trainspec_cli.wings.emulated.rehearsal import COMPUTE, Slice, StepPart, Timeline

STRETCHES = 500
"""A curve of the memory keeps the lowest and the highest value of this many stretches, so that a page and `--json` stay
small. The peak is one of these values."""


@dataclass
class _Merged:
    """Work of a stream that follows without a pause, has the same origin, and belongs to the same part of the step."""

    part: str
    name: str
    begin_s: float
    end_s: float
    operations: int
    longest_s: float
    longest: QueuedWork
    origin: str
    waits_for: Stream | None = None


class StepTimeline:
    """The work of all streams since `begin`, and the memory at each allocation and release.

    The memory is recorded at the compute stream's time, because a rehearsal's host queues work in no time: by the
    host's own time, a whole step would happen at once.
    """

    def __init__(self, log: AllocationLog, *, with_slices: bool):
        self._log = log
        self._with_slices = with_slices
        self.begin(0)

    def begin(self, micro_batches: int) -> None:
        """Forget everything so far. Times count from now on, the start of a step with this many micro-batches."""
        self._micro_batches = micro_batches
        self._begin_s = DEFAULT.now_s
        self._merged: dict[Stream, list[_Merged]] = {DEFAULT: []}
        self._memory: list[tuple[float, int, int]] = []
        self._waited: dict[Stream, tuple[float, Stream]] = {}
        """The end of each stream's last wait, and the stream that it was for."""
        self.note_memory(MEMORY.allocated_bytes, MEMORY.reserved_bytes)

    def note_memory(self, allocated_bytes: int, reserved_bytes: int) -> None:
        self._memory.append((DEFAULT.now_s - self._begin_s, allocated_bytes, reserved_bytes))

    def note_work(self, stream: Stream, work: QueuedWork, before_s: float, began_s: float) -> None:
        """Called by the scheduler: see `on_work`."""
        merged = self._merged.setdefault(stream, [])
        part = self._log.part
        if work.after is not None and began_s > before_s:
            source = work.after.stream
            # FSDP2's streams wait for an exchange, and the compute stream for them: name the exchange.
            while self._waited.get(source, (0.0, source))[0] == began_s:
                source = self._waited[source][1]
            self._waited[stream] = began_s, source
            # Another stream is idle until it has work, which is no wait.
            if stream is DEFAULT:
                merged.append(_Merged(part, "wait", before_s, began_s, 0, 0.0, work, "", source))
        if not work.duration_s or not (self._with_slices or stream is DEFAULT):
            return
        origin = find_origin() if self._with_slices else ""
        # An exchange keeps its own name, since most of them come from a few lines of the engine.
        name = work.name if work.is_exchange else origin
        last = merged[-1] if merged else None
        can_join = last is not None and not work.is_exchange and last.end_s == began_s and last.waits_for is None
        if last is None or not can_join or (last.part, last.name) != (part, name):
            merged.append(_Merged(part, name, began_s, stream.now_s, 1, work.duration_s, work, origin))
            return
        last.end_s = stream.now_s
        last.operations += 1
        if work.duration_s > last.longest_s:
            last.longest_s = work.duration_s
            last.longest = work

    def result(self) -> Timeline:
        names = {**stream_names(), DEFAULT: COMPUTE}
        slices = []
        if self._with_slices:
            slices = [self._slice(one, names[stream], names) for stream, found in self._merged.items() for one in found]
        allocated, reserved = (
            [(at_s, int(size)) for at_s, size in thin([(point[0], point[column]) for point in self._memory], STRETCHES)]
            for column in (1, 2)
        )
        parts = tuple(self._parts())
        return Timeline(self._micro_batches, parts, tuple(allocated), tuple(reserved), tuple(slices))

    def _slice(self, one: _Merged, stream: str, names: dict[Stream, str]) -> Slice:
        longest = f"{one.longest.name}, {one.longest.about}, {format_seconds(one.longest_s)}" if one.operations else ""
        if one.longest.is_exchange:
            longest = f"{one.longest.about}, from {one.origin}"
        waits_for = "" if one.waits_for is None else names[one.waits_for]
        times_s = (one.begin_s - self._begin_s, one.end_s - self._begin_s)
        return Slice(stream, one.part, one.name, *times_s, one.operations, longest, waits_for)

    def _parts(self) -> Iterator[StepPart]:
        """Yield the compute stream's time by part of the step, in order."""
        for part, found in groupby(self._merged[DEFAULT], key=lambda one: one.part):
            of_part = list(found)
            waited_s = sum(one.end_s - one.begin_s for one in of_part if one.waits_for is not None)
            yield StepPart(part, of_part[0].begin_s - self._begin_s, of_part[-1].end_s - self._begin_s, waited_s)
