"""Record the work of the emulated device's streams in virtual time, and the memory in use, for a trace of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from trainspec_cli.core.printable import format_seconds
from trainspec_cli.reporter.page.svg import thin
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog, find_origin
from trainspec_cli.wings.emulated.engine.costs import TIME
from trainspec_cli.wings.emulated.engine.device import MEMORY
from trainspec_cli.wings.emulated.engine.exchanges import stream_names
from trainspec_cli.wings.emulated.engine.streams import DEFAULT, SCHEDULER, QueuedWork, Stream
from trainspec_cli.wings.emulated.timeline import COMPUTE, WAIT, Slice, StepPart, Timeline, keep_longest

STRETCHES = 500
"""The memory curve has the lowest and highest value in each of this many intervals, to keep the page and `--json`
small. The peak is always one of these values."""
REST = "rest of the step"
"""The remainder of a step, outside its named parts."""


@dataclass
class _Merged:
    """A slice whose recording is in progress."""

    part: str
    name: str
    begin_s: float
    end_s: float
    origin: str
    longest: QueuedWork
    operations: int = 1
    waits_for: Stream | None = None


class StepTimeline:
    """Records the work of all streams since `begin`, and the memory after each allocation and release.

    Memory is recorded at the compute stream's time. In host time, the entire step would appear at its start, because a
    rehearsal's host takes no time to queue work."""

    def __init__(self) -> None:
        self._log: AllocationLog | None = None
        self._micro_batches = 0
        self._begin_s = 0.0
        self._first_part = ""
        self._part = ""
        self._merged: dict[Stream, list[_Merged]] = {}
        self._memory: list[tuple[float, int, int]] = []
        self._waited: dict[Stream, tuple[float, Stream]] = {}
        """The end time of each stream's last wait, and the stream that it waited for."""

    def start(self, log: AllocationLog) -> None:
        """Start recording, if there is virtual time. `log` provides the current part of the step."""
        if TIME.costs is not None:
            self._log = log
            self.begin(0)
            self._listen(True)

    def begin(self, micro_batches: int) -> None:
        """Start a step with `micro_batches` micro-batches: discard earlier records, and count times from now on."""
        if self._log is None:
            return
        self._micro_batches = micro_batches
        self._begin_s = DEFAULT.now_s
        self._first_part = self._part = self._log.part
        self._merged = {DEFAULT: []}
        self._memory = []
        self._waited = {}
        self._note_memory(MEMORY.allocated_bytes, MEMORY.reserved_bytes)

    def end(self) -> None:
        self._listen(False)

    def _listen(self, on: bool) -> None:
        SCHEDULER.on_work = self._note_work if on else None
        MEMORY.on_change = self._note_memory if on else None

    def _note_memory(self, allocated_bytes: int, reserved_bytes: int) -> None:
        self._memory.append((DEFAULT.now_s - self._begin_s, allocated_bytes, reserved_bytes))

    def _note_work(self, stream: Stream, work: QueuedWork, before_s: float, began_s: float) -> None:
        """Receives finished work from the scheduler; see `on_work`."""
        merged = self._merged.setdefault(stream, [])
        part = self._current_part()
        if work.after is not None and began_s > before_s:
            source = work.after.stream
            # The compute stream waits for FSDP2's streams, which in turn wait for an exchange, so name the exchange.
            while self._waited.get(source, (0.0, source))[0] == began_s:
                source = self._waited[source][1]
            self._waited[stream] = began_s, source
            # A stream of any other kind is only idle until it gets work; it is not waiting.
            if stream is DEFAULT:
                merged.append(_Merged(part, WAIT, before_s, began_s, "", work, 0, source))
        if not work.duration_s:
            return
        origin = find_origin()
        # An exchange keeps its own name, because most exchanges start from the same few lines of the engine.
        name = work.name if work.is_exchange else origin
        last = merged[-1] if merged else None
        follows = last is not None and last.end_s == began_s and last.waits_for is None and not work.is_exchange
        if last is None or not follows or (last.part, last.name) != (part, name):
            merged.append(_Merged(part, name, began_s, stream.now_s, origin, work))
            return
        last.end_s = stream.now_s
        last.operations += 1
        if work.duration_s > last.longest.duration_s:
            last.longest = work

    def _current_part(self) -> str:
        """Return the current part of the step. Waits within a pass belong to the pass."""
        assert self._log is not None
        part = self._log.part
        if part == self._first_part and part != self._part:
            part = REST
        if part != "exposed_comm":
            self._part = part
        return self._part

    def result(self) -> Timeline | None:
        """Return the last step, or the part of it before memory ran out; None if there is no virtual time."""
        if self._log is None:
            return None
        names = {**stream_names(), DEFAULT: COMPUTE}
        found = [self._slice(one, names[stream], names) for stream, merged in self._merged.items() for one in merged]
        kept = keep_longest(found)
        allocated, reserved = (
            [(at_s, int(size)) for at_s, size in thin([(point[0], point[column]) for point in self._memory], STRETCHES)]
            for column in (1, 2)
        )
        return Timeline(
            self._micro_batches,
            tuple(self._parts()),
            tuple(allocated),
            tuple(reserved),
            tuple(kept),
            len(found) - len(kept),
        )

    def _slice(self, one: _Merged, stream: str, names: dict[Stream, str]) -> Slice:
        longest = f"{one.longest.name}, {one.longest.about}, {format_seconds(one.longest.duration_s)}"
        if one.longest.is_exchange:
            longest = f"{one.longest.about}, from {one.origin}"
        waits_for = ""
        if one.waits_for is not None:
            waits_for = names[one.waits_for]
            longest = ""
        times_s = (one.begin_s - self._begin_s, one.end_s - self._begin_s)
        return Slice(stream, one.part, one.name, *times_s, one.operations, longest, waits_for)

    def _parts(self) -> Iterator[StepPart]:
        """Yield the compute stream's time by part of the step, in order."""
        for part, found in groupby(self._merged[DEFAULT], key=lambda one: one.part):
            of_part = list(found)
            waited_s = sum(one.end_s - one.begin_s for one in of_part if one.waits_for is not None)
            yield StepPart(part, of_part[0].begin_s - self._begin_s, of_part[-1].end_s - self._begin_s, waited_s)


TIMELINE = StepTimeline()
