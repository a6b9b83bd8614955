"""Collect evidence for verdicts from the events of all ranks, repeatedly while the run is in progress."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainspec_cli.core.reading.files import unreadable
from trainspec_cli.recipe.records import Absent
from trainspec_cli.recipe.results.verdict import Look
from trainspec_cli.reporter.diagnosis.evidence import (
    COUNTERS,
    READINGS,
    Connection,
    Figures,
    RunEvidence,
)
from trainspec_cli.run.folder.event_types.events import (
    PARTS,
    CountersEvent,
    DirectiveEvent,
    Event,
    HangEvent,
    LinkEvent,
    LookEvent,
    MemoryEvent,
    RecoveryEvent,
    StallEvent,
    StartEvent,
    StepEvent,
    UsageEvent,
)
from trainspec_cli.run.folder.events import EventTail, read_sound
from trainspec_cli.run.folder.files import StepColumns, read_versioned
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import has_plan
from trainspec_cli.run.recovery.collectives import find_mismatch
from trainspec_cli.run.recovery.watch import CHECKPOINT

SILENT_S = 1.5
"""A rank that has not reported a stall within this many seconds of the first report is considered silent."""
MOST_ROWS, LEAST_STEPS = 2**18, 2**12
"""Approximate maximum number of rows (steps times ranks) to keep. At least `LEAST_STEPS` steps are kept regardless."""
MOST_RANKS = 10**6
STEP_BYTES = 1024
"""Approximate number of bytes that a rank writes per step, including the counters."""


@dataclass(frozen=True)
class RunShape:
    """The arrangement of a run's ranks according to its plan."""

    ranks: int
    devices_per_node: int
    groups: int = 1
    stages: int = 1
    total_steps: int | None = None
    planned_s: Mapping[str, float] = field(default_factory=dict)
    has_plan: bool = True
    """False for a run without a plan: its ranks report their own numbers, and its steps have no known parts."""

    @property
    def group_ranks(self) -> int:
        return self.ranks // self.groups

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(rank // self.devices_per_node for rank in range(self.ranks))

    @property
    def kinds(self) -> tuple[int, ...]:
        """Return the pipeline stage of each rank: `pp` is the outermost axis of a group's mesh."""
        of_stage = max(1, self.group_ranks // self.stages)
        return tuple(rank % self.group_ranks // of_stage for rank in range(self.ranks))


def shape_of(run: RunDir) -> RunShape:
    """Return a run's shape from its plan.json (of any version that states nodes and layout) or, without a plan, from
    its processes.

    Raises UnreadableFileError."""
    if not has_plan(run):
        begun = [event for event in read_sound(run.events(0)) if isinstance(event, StartEvent)]
        ranks = min(begun[-1].world_size, MOST_RANKS) if begun else 1
        return RunShape(ranks=ranks, devices_per_node=ranks, has_plan=False)
    plan = read_versioned(run.plan_json)

    def whole(plain: object, name: str, otherwise: int) -> int:
        value = plain.get(name) if isinstance(plain, dict) else None
        return value if isinstance(value, int) and value > 0 else otherwise

    devices = whole(plan, "devices_per_node", 1)
    groups = whole(plan, "replica_groups", 1)
    ranks = whole(plan, "num_nodes", 1) * devices
    # The next lines allocate arrays for this many ranks, and the file may be damaged or untrusted.
    if ranks > MOST_RANKS or ranks % groups:
        raise unreadable(run.plan_json, f"has {ranks:,} ranks in {groups:,} replica groups")
    spec = plan.get("spec")
    train = spec.get("train") if isinstance(spec, dict) else None
    steps = whole(plan, "steps", 0) or whole(train, "max_steps", 0)
    prediction = plan.get("prediction")
    planned = prediction.get("time_s") if isinstance(prediction, dict) else None
    return RunShape(
        ranks=ranks,
        devices_per_node=devices,
        groups=groups,
        stages=whole(plan.get("layout"), "pp", 1),
        total_steps=steps or None,
        planned_s={name: float(one) for name, one in planned.items() if isinstance(one, int | float)}
        if isinstance(planned, dict)
        else {},
    )


@dataclass
class RankHistory:
    """The steps that one rank has written, without those that were undone."""

    steps: StepColumns = field(default_factory=lambda: StepColumns(*PARTS, "queued_s"))
    """The time in seconds of each part, and the time in seconds without a processor."""
    counters: list[CountersEvent] = field(default_factory=list)
    usage: list[UsageEvent] = field(default_factory=list)
    """Resource readings of a user command."""
    stall: StallEvent | None = None
    """The stall report for the step after the last one."""
    is_hung: bool = False
    """True if this start ended because of the stall."""
    ended_by: StallEvent | None = None
    """The stall report of a hang that ended an earlier start, if any."""
    most_samples: int = 0
    """The largest number of samples in any step of the rank's group so far. A repeated step does not count as a new
    change."""
    changed_steps: set[int] = field(default_factory=set)
    """See `RunEvidence.changed_steps`."""

    def add(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            queued_s = np.nan if isinstance(event.queued_s, Absent) else event.queued_s
            self.steps.put(event.step, *(event.time_s.get(name, 0.0) for name in PARTS), queued_s)
            # A completed step means that the rank is no longer stalled.
            self.stall = None
            self.is_hung = False
            samples = event.samples if isinstance(event.took, Absent) else event.took[1]
            # A larger batch changes the time and memory of later steps. A repeated step must not count as another
            # change.
            if not isinstance(samples, Absent) and samples > self.most_samples:
                self.most_samples = samples
                self.changed_steps.add(event.step - 1)
        elif isinstance(event, DirectiveEvent):
            if event.applied:
                self.changed_steps.add(event.step)
        elif isinstance(event, MemoryEvent):
            self.changed_steps.add(event.step)
        elif isinstance(event, CountersEvent):
            self.counters.append(event)
        elif isinstance(event, UsageEvent):
            self.usage.append(event)
        elif isinstance(event, StallEvent):
            # The other ranks have had time to report since the first report of the same kind.
            known = self.stall
            is_repeated = known is not None and (known.step, known.early) == (event.step, event.early)
            self.stall = replace(event, time=known.time) if known and is_repeated else event
            self.is_hung = False
        elif isinstance(event, HangEvent):
            self.stall = StallEvent(
                # The other ranks have had time to report since the stall, so the verdict on it holds.
                time=self.stall.time if self.stall else event.time,
                step=event.step,
                waited_s=event.waited_s,
                usual_s=self.stall.usual_s if self.stall else 0.0,  # the event does not state a usual step time
                host=event.host,
                waiting=event.waiting,
                waits_in=event.waits_in,
                collectives=event.collectives,
                stack=event.stack,
                entered=event.entered,
                late=event.late,
                why=event.why,
            )
            self.is_hung = True
        elif isinstance(event, StartEvent):
            # The new start continues from a checkpoint. Steps of an earlier start after that checkpoint are repeated.
            self.ended_by = self.stall if self.is_hung else self.ended_by
            self.stall = None
            self.is_hung = False
            self.steps.forget_beyond(event.step)
            self.changed_steps.add(event.step)
            self.counters = [one for one in self.counters if one.step <= event.step]
            self.usage = []  # they were written by a process that has ended

    @property
    def newest(self) -> int:
        """The newest step; 0 before the first one."""
        return max(self.steps.steps, default=0)

    def rows_of(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the rank's values for the given steps (in increasing order), with shape (values, steps)."""
        made = np.array(self.steps.steps)
        order = np.argsort(made, kind="stable")
        rows = order[np.searchsorted(made[order], steps)]
        return np.stack([np.array(self.steps[name])[rows] for name in (*PARTS, "queued_s")])

    def forget_before(self, step: int) -> None:
        self.steps.forget_before(step)
        self.counters = [event for event in self.counters if event.step >= step]
        self.usage = [event for event in self.usage if event.step >= step]


def event_paths(run: RunDir, shape: RunShape) -> Iterator[Path]:
    """Yield each rank's event file; ranks are numbered across replica groups."""
    for rank in range(shape.ranks):
        if shape.groups > 1:
            yield run.group_events(*divmod(rank, shape.group_ranks))
        else:
            yield run.events(rank)


class RunReader:
    """Reads a run's folder: `read` reads new events, `evidence` returns what is known so far.

    With `remembered_steps`, it starts about that many steps before the end of each file. Otherwise it reads everything,
    but keeps only the newest steps if the run has more than `MOST_ROWS` rows."""

    def __init__(self, run: RunDir, shape: RunShape, remembered_steps: int | None = None):
        self.shape, self._remembered = shape, remembered_steps or max(LEAST_STEPS, MOST_ROWS // shape.ranks)
        last_bytes = None if remembered_steps is None else remembered_steps * STEP_BYTES
        self.forgotten_until = 0
        """The newest of the steps that were dropped to save memory."""
        self.histories = [RankHistory() for _ in range(shape.ranks)]
        self._tails = [EventTail(path, last_bytes) for path in event_paths(run, shape)]
        self._links: list[LinkEvent] = []
        self.looks: list[Look] = []
        self._retried: set[int] = set()
        self.changed: DirectiveEvent | None = None
        """The step of the last layout change, because a new layout changes the ranks' work."""
        self.device_name = ""
        self.on_accelerator = False

    def read(self) -> int:
        """Read the new events of all ranks, and return the number of events."""
        count = 0
        for rank, tail in enumerate(self._tails):
            count += self._read_rank(rank, tail.new_events())
        return count

    def _read_rank(self, rank: int, events: Iterable[Event]) -> int:
        """Read a rank's new events, and return their number."""
        history = self.histories[rank]
        count = 0
        for count, event in enumerate(events, 1):  # noqa: B007 - the last one is their number
            history.add(event)
            if isinstance(event, LinkEvent):
                self._links.append(event)
            elif isinstance(event, LookEvent):
                self.looks.append(event.look)
            elif isinstance(event, RecoveryEvent) and event.change == "retried":
                # When a group leaves or joins, a step is repeated because of the group's node, not because of a failed
                # link.
                self._retried.add(event.step)
            elif isinstance(event, DirectiveEvent) and event.applied and event.kind in ("layers", "layout"):
                if self.changed is None or event.step >= self.changed.step:
                    self.changed = event
            elif isinstance(event, StartEvent):
                self.device_name = event.device_name
                self.on_accelerator = event.is_accelerator
            if len(history.steps) > 2 * self._remembered:
                # Drop half of the steps at once, because dropping them one at a time would copy the columns in every
                # step.
                oldest = history.newest - self._remembered
                history.forget_before(oldest)
                self.forgotten_until = max(self.forgotten_until, oldest - 1)
        return count

    @property
    def step(self) -> int:
        """Return the newest step that every rank has completed."""
        return min((history.newest for history in self.histories), default=0)

    def evidence(self, now: float | None = None) -> RunEvidence:
        """Return the evidence on the steps since the last layout change that all ranks have written. `now`:
        Unix time, while the run is in progress."""
        made = [np.array(history.steps.steps, dtype=np.int64) for history in self.histories]
        # Ranks write at different times. Only steps that all of them have written can be compared.
        common = reduce(np.intersect1d, made) if made else np.zeros(0, dtype=np.int64)
        steps = common[common > self.changed.step] if self.changed else common
        # A step where a rank profiled itself took longer and would look like a straggler.
        in_view = np.zeros(len(steps), dtype=np.bool_)
        for look in self.looks:
            in_view |= (steps >= look.first_step) & (steps <= look.last_step)
        steps = steps[~in_view]
        rows = np.stack([history.rows_of(steps) for history in self.histories], axis=-1)
        counters = {**self._counters(steps), "queued_s": rows[-1]}
        if self.on_accelerator:
            # While the host thread is computing or waiting for a processor, the device may still be working.
            counters["host_queued_s"] = counters.pop("queued_s")
            nothing = np.zeros_like(counters["host_queued_s"])
            counters |= {"queued_s": nothing, "exposed_queued_s": nothing}
            counters.pop("cpu_s", None)
        # Use the ranks' stall reports for the step after the newest completed one, but only once no more reports can be
        # expected. If no step hangs, use the reports for the hang that ended an earlier start.
        last = max((history.newest for history in self.histories), default=0)
        found = {
            rank: history.stall
            for rank, history in enumerate(self.histories)
            if history.stall is not None
            # Without a plan, each node determines the hanging step from its own ranks only.
            and (history.stall.step > last or (history.is_hung and not self.shape.has_plan))
        }
        # A checkpoint may take much longer than a step, unless the time limit of the step is over.
        is_saving = any(stall.waits_in == CHECKPOINT for stall in found.values())
        if (
            is_saving
            and not any(history.is_hung for history in self.histories)
            and not find_mismatch({rank: stall.entered for rank, stall in found.items()})
        ):
            found = {}
        if now is not None and any(now - stall.time < SILENT_S for stall in found.values()):
            stalls = {}
        elif not found and now is None:
            ended = {rank: history.ended_by for rank, history in enumerate(self.histories)}
            stalls = {rank: stall for rank, stall in ended.items() if stall is not None}
        else:
            stalls = found
        return RunEvidence(
            steps=steps,
            parts_s=dict(zip(PARTS, rows, strict=False)),
            counters=counters,
            nodes=self.shape.nodes,
            kinds=self.shape.kinds,
            connections=tuple(_connections(self.histories, steps)),
            stalls=stalls,
            link_changes=tuple(self._links),
            looks=tuple(self.looks),
            retried_steps=tuple(sorted(self._retried)),
            total_steps=self.shape.total_steps,
            changed_steps=tuple(sorted({step for one in self.histories for step in one.changed_steps})),
            planned_s=self.shape.planned_s,
            parts_are_known=self.shape.has_plan,
        )

    def _counters(self, steps: npt.NDArray[np.int64]) -> dict[str, Figures]:
        if not self.shape.has_plan:
            # A run without a plan has no counters other than memory readings.
            series = {name: np.full((len(steps), len(self.histories)), np.nan) for name in READINGS}
            for rank, history in enumerate(self.histories):
                for reading in history.usage:
                    place = np.searchsorted(steps, reading.step)
                    for name in READINGS if place < len(steps) else ():
                        series[name][place, rank] = getattr(reading, name)
            return series
        if not any(history.counters for history in self.histories):
            return {}
        series = {name: np.full((len(steps), len(self.histories)), np.nan) for name in COUNTERS if name != "queued_s"}
        for rank, history in enumerate(self.histories):
            for event in history.counters:
                where = _window(steps, event)
                for name in series:
                    value = getattr(event, "queued_s" if name == "exposed_queued_s" else name)
                    if isinstance(value, Absent):
                        continue
                    if name in READINGS:
                        series[name][where, rank][-1:] = value
                    else:
                        series[name][where, rank] = value if name == "agreed_s" else value / event.steps
        return series


def _window(steps: npt.NDArray[np.int64], event: CountersEvent) -> slice:
    """Return the indices of the steps in a counter window."""
    first, last = np.searchsorted(steps, [event.step - event.steps + 1, event.step + 1]).tolist()
    return slice(first, last)


CONNECTION_FIGURES = ("sent_bytes", "segments", "resent", "timeouts", "busy_s")


def _connections(histories: Sequence[RankHistory], steps: npt.NDArray[np.int64]) -> Iterator[Connection]:
    """Yield the connections between ranks, merging all connections from one rank to another."""
    # Find the rank at the other end of each connection, by its local and peer address.
    seen = {
        (one.local, one.peer): rank
        for rank, history in enumerate(histories)
        for event in history.counters
        for one in event.connections
    }
    hosts: dict[str, set[int]] = defaultdict(set)
    for (local, _), rank in seen.items():
        hosts[_host(local)].add(rank)
    other_ends = {}
    for (local, peer), rank in seen.items():
        there = hosts.get(_host(peer), set())
        if (peer, local) in seen:
            other_ends[local, peer] = seen[peer, local]
        elif there and rank not in there:
            # A rank reports only its busiest connections, so the other end may be missing. Then any rank of the right
            # node is used.
            other_ends[local, peer] = min(there)
    of_pair: dict[tuple[int, int], dict[str, Figures]] = defaultdict(lambda: _unknown(len(steps)))
    for rank, history in enumerate(histories):
        for event in history.counters:
            where = _window(steps, event)
            for one in event.connections:
                series = of_pair[rank, other_ends.get((one.local, one.peer), rank)]
                for name in CONNECTION_FIGURES:
                    series[name][where] = np.nan_to_num(series[name][where]) + getattr(one, name) / event.steps
                series["rtt_s"][where] = np.fmax(series["rtt_s"][where], one.rtt_s)
    for ranks, series in sorted(of_pair.items()):
        yield Connection(ranks, **series)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _unknown(steps: int) -> dict[str, Figures]:
    return {name: np.full(steps, np.nan) for name in (*CONNECTION_FIGURES, "rtt_s")}


def read_run(run: RunDir) -> RunReader:
    """Return a reader that has read all events of a run so far. Raises UnreadableFileError if the run's plan is
    damaged."""
    reader = RunReader(run, shape_of(run))
    reader.read()
    return reader
