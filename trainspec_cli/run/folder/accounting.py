"""Metrics computed from a run's events: its speed, the cost of its failures, and how its wall time was spent.

The wall time of all attempts is accounted for by rank 0's events and the supervisor's marks; time that neither explains
is `other`. An attempt starts with a launch and ends with its last event. Steps that a later attempt repeats were lost,
so the time first spent on them counts as `recomputed`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

from trainspec_cli.core.reading.files import unreadable
from trainspec_cli.recipe.keys.run import Offload, Recompute
from trainspec_cli.recipe.records import Absent
from trainspec_cli.recipe.results.doctor import NodeFault
from trainspec_cli.recipe.results.tables import MemorySetting, Relief
from trainspec_cli.run.folder.event_types.events import (
    CheckpointEvent,
    EndedMark,
    EndEvent,
    EvalEvent,
    Event,
    FailureMark,
    LaunchMark,
    MemoryEvent,
    NodeCheckedEvent,
    NodeFaultEvent,
    RecoveryEvent,
    StartEvent,
    StepEvent,
)
from trainspec_cli.run.folder.events import read_log, read_sound
from trainspec_cli.run.folder.files import StepColumns
from trainspec_cli.run.folder.paths import RunDir

WARMUP_STEPS = 3
"""Number of steps after each start that are excluded from the speed if there are later ones, because they include
compilation and allocation."""


@dataclass(frozen=True)
class Throughput:
    tokens_per_s: float
    """If steps do not count tokens: samples per second."""
    mfu: float
    """Model FLOPs per second as a fraction of all devices' peak, excluding recomputation."""
    steps: int
    """Number of steps that the speed is averaged over."""
    left_out: int
    """Number of earlier steps that were excluded."""


def measure_throughput(
    steps: Sequence[StepEvent], *, flops_per_token: float, peak_flops: float, world_size: int
) -> Throughput:
    """Return the speed over the steps since a start, in order. This is the only definition, used for result.json, the
    report and the live view. `peak_flops` is the peak of one device."""
    times_s = [step.step_time_s for step in steps]
    units = [step.units for step in steps]
    return throughput_of(times_s, units, flops_per_token=flops_per_token, peak_flops=peak_flops, world_size=world_size)


def throughput_of(
    times_s: Sequence[float], units: Sequence[float], *, flops_per_token: float, peak_flops: float, world_size: int
) -> Throughput:
    """Return the speed over steps whose times and units are passed as columns."""
    left_out = WARMUP_STEPS if len(times_s) > WARMUP_STEPS else 0
    seconds = sum(times_s[left_out:])
    tokens_per_s = sum(units[left_out:]) / seconds if seconds else 0.0
    mfu = tokens_per_s * flops_per_token / (world_size * peak_flops) if peak_flops else 0.0
    return Throughput(tokens_per_s, mfu, len(times_s) - left_out, left_out)


@dataclass(frozen=True)
class Recovery:
    """The cost of one failure."""

    kind: str
    """left, joined, retried or restart."""
    group: int | None
    step: int
    stall_s: float | None
    lost_steps: int | None


def read_recoveries(events: Iterable[Event]) -> list[Recovery]:
    """Return the cost of each failure of a run. A restart's stall lasts from the failure to the first new work. For a
    user-defined command, the number of lost steps is only known once the next start is running, and only if the
    optimizer counts its updates."""
    log = RecoveryLog()
    for event in events:
        log.take(event)
    return log.recoveries


class RecoveryLog:
    """Reads rank 0's events one by one, and accumulates the cost of each failure."""

    def __init__(self) -> None:
        self.recoveries: list[Recovery] = []
        self._open_restart: tuple[int, float] | None = None
        self._last_time = 0.0
        """The last time when the run was known to be making progress: the end of a step, or the start of the run."""

    def take(self, event: Event) -> None:
        if isinstance(event, RecoveryEvent):
            if event.change == "restart":
                self._open_restart = len(self.recoveries), self._last_time
            self.recoveries.append(recovery_of(event))
        elif isinstance(event, StartEvent):
            self._last_time = event.time
            if self._open_restart is not None:
                failed = self.recoveries[self._open_restart[0]]
                if failed.lost_steps is None and event.step < failed.step:
                    self.recoveries[self._open_restart[0]] = replace(failed, lost_steps=failed.step - event.step)
        elif isinstance(event, StepEvent):
            if self._open_restart is not None:
                place, failed_at = self._open_restart
                stall_s = event.time - event.step_time_s - failed_at
                self.recoveries[place] = replace(self.recoveries[place], stall_s=stall_s)
                self._open_restart = None
            self._last_time = event.time


def recovery_of(event: RecoveryEvent) -> Recovery:
    return Recovery(event.change, event.group, event.step, event.stall_s, event.lost_steps)


@dataclass
class WallTime:
    """Time in seconds by purpose. The parts add up to the time from the first launch to the last event."""

    productive: float = 0.0
    """Time in steps that were kept, excluding the parts below."""
    data_wait: float = 0.0
    """Time that steps spent waiting for data."""
    checkpoint: float = 0.0
    """Time that training spent waiting for checkpoints."""
    evaluation: float = 0.0
    start_up: float = 0.0
    """Time from a launch to its first step."""
    detection: float = 0.0
    """Time from a failure until the supervisor detected it."""
    recovery: float = 0.0
    """Time from the detection of a failure until training continued."""
    recomputed: float = 0.0
    """Time in steps that were lost and had to be repeated."""
    idle: float = 0.0
    """Time between a stop and the next launch."""
    other: float = 0.0

    @property
    def total_s(self) -> float:
        return math.fsum(getattr(self, bucket) for bucket in BUCKETS)

    @property
    def goodput(self) -> float | None:
        """Return the productive fraction of the time; None if no time has passed."""
        return self.productive / self.total_s if self.total_s else None

    def put(self, bucket: str, seconds: float) -> None:
        setattr(self, bucket, getattr(self, bucket) + seconds)

    def add(self, spent: WallTime) -> None:
        for bucket in BUCKETS:
            self.put(bucket, getattr(spent, bucket))


BUCKETS = tuple(bucket.name for bucket in fields(WallTime))


class Attempt:
    """Collects the times between two launches: the steps individually, and everything else as sums."""

    def __init__(self, launched: float, begin: StartEvent, *, restarted: bool):
        self.launched, self.begin = launched, begin
        """`launched` is a Unix time in seconds, like all times here."""
        self.restarted = restarted
        """True if the supervisor restarted the run after a failure."""
        self.last_time = begin.time
        self.has_ended = False
        self._steps = StepColumns("step_time_s", "data_wait_s", "checkpoint_s")
        self._others = WallTime()

    def take(self, event: Event) -> None:
        self.last_time = event.time
        if isinstance(event, StepEvent):
            parts_s = event.time_s
            own_s = parts_s.get("data_wait", 0.0), parts_s.get("checkpoint", 0.0)
            self._steps.add(event.step, event.step_time_s, *own_s)
        elif isinstance(event, EvalEvent):
            self._others.evaluation += event.seconds
        elif isinstance(event, CheckpointEvent) and not isinstance(event.waited_s, Absent):
            self._others.checkpoint += event.waited_s or 0.0
        elif isinstance(event, RecoveryEvent):
            # the stall is part of a step, whereas a restart's stall lies between attempts
            self._others.recovery += event.stall_s or 0.0
            self._others.productive -= event.stall_s or 0.0
        elif isinstance(event, EndEvent):
            self.has_ended = True

    def spent(self, kept_until: float) -> WallTime:
        """Account for the time from the `start` event to the last event, treating the steps after `kept_until` as lost.
        Time between events is `other`."""
        spent = replace(self._others)
        steps = self._steps
        columns = (steps["step_time_s"], steps["data_wait_s"], steps["checkpoint_s"])
        for step, step_time_s, data_wait_s, checkpoint_s in zip(steps.steps, *columns, strict=True):
            if step > kept_until:
                spent.recomputed += step_time_s
                continue
            spent.data_wait += data_wait_s
            spent.checkpoint += checkpoint_s
            spent.productive += step_time_s - data_wait_s - checkpoint_s
        whole_s = max(0.0, self.last_time - self.begin.time)
        spent.other = whole_s - spent.total_s
        if spent.other < 0:  # the two clocks that measured the times differ slightly
            spent.productive += spent.other
            spent.other = 0.0
        if spent.productive < 0:  # a clock was set back, so only the parts' proportions are kept
            spent.productive = 0.0
            scale = whole_s / spent.total_s if spent.total_s else 0.0
            spent = WallTime(*(getattr(spent, bucket) * scale for bucket in BUCKETS))
        return spent


def account_run(run: RunDir, now: float | None = None) -> WallTime:
    """Account for the wall time of a run folder. `now`: the end of the accounted time if the run is still alive."""
    return account(read_sound(run.events(0)), list(read_sound(run.supervisor_events)), now)


def account(events: Iterable[Event], marks: Sequence[Event], now: float | None = None) -> WallTime:
    """Account for the time from the first launch to the last event (or `now`)."""
    accounts = RunAccount(marks)
    for event in events:
        accounts.take(event)
    return accounts.spent(now)


class RunAccount:
    """Reads rank 0's events one by one, and keeps only the numbers."""

    def __init__(self, marks: Sequence[Event]):
        """`marks`: the supervisor's marks, in order."""
        self._marks = marks
        self._launches = [mark.time for mark in marks if isinstance(mark, LaunchMark)]
        self._attempts: list[Attempt] = []
        self._restarted = False

    def take(self, event: Event) -> None:
        if isinstance(event, StartEvent):
            self._begin(event)
        elif isinstance(event, RecoveryEvent) and event.change == "restart":
            self._restarted = True
        elif self._attempts:
            self._attempts[-1].take(event)

    def _begin(self, event: StartEvent) -> None:
        since = self._attempts[-1].last_time if self._attempts else 0.0
        launched = [time for time in self._launches if since <= time <= event.time]
        if self._attempts and self._marks and not launched:
            return  # from now on, another replica group leads
        self._attempts.append(Attempt(launched[-1] if launched else event.time, event, restarted=self._restarted))
        self._restarted = False

    def spent(self, now: float | None = None) -> WallTime:
        """Return the accounts up to the last event, or up to `now`."""
        whole = WallTime()
        attempts = self._attempts
        for index, attempt in enumerate(attempts):
            until_begin_s = attempt.begin.time - attempt.launched
            if index > 0 and not attempts[index - 1].has_ended:
                whole.recovery += until_begin_s
            else:
                whole.start_up += until_begin_s
            kept_until = min((later.begin.step for later in attempts[index + 1 :]), default=math.inf)
            whole.add(attempt.spent(kept_until))
            following = attempts[index + 1] if index + 1 < len(attempts) else None
            whole.add(_spent_after(attempt, following, self._marks, now))
        return whole


def _spent_after(attempt: Attempt, following: Attempt | None, marks: Sequence[Event], now: float | None) -> WallTime:
    """Account for the time from an attempt's last event to the next launch whose workers started, or to the last event.

    The marks divide this time into intervals, each of which counts once. Launches whose workers never started are
    included, because the time until their failure was noticed must not be charged to the previous attempt."""
    spent = WallTime()
    until = following.launched if following else math.inf
    is_restarted = following is not None and following.restarted
    place = attempt.last_time
    came_from = "work"
    for mark in marks:
        if not attempt.last_time < mark.time < until:
            continue
        seconds = mark.time - place
        if isinstance(mark, LaunchMark):
            spent.put(_before_launch(came_from, is_restarted=is_restarted), seconds)
            came_from = "launch"
        elif isinstance(mark, FailureMark):
            spent.put({"work": "detection", "launch": "start_up"}.get(came_from, "other"), seconds)
            came_from = "failure"
        elif isinstance(mark, EndedMark):
            spent.put({"failure": "recovery", "launch": "start_up"}.get(came_from, "other"), seconds)
            came_from = "end"
        else:
            continue
        place = mark.time
    if following is not None:
        spent.put(_before_launch(came_from, is_restarted=is_restarted), following.launched - place)
    elif now is not None and came_from != "end":
        spent.put("start_up" if came_from == "launch" else "other", max(0.0, now - place))
    return spent


def _before_launch(came_from: str, *, is_restarted: bool) -> str:
    """Return the purpose of the time before a launch. If the workers of the previous launch never started, it counts as
    start-up."""
    if came_from == "launch":
        return "start_up"
    return "recovery" if is_restarted else "idle"


# The settings that a run has adopted after out-of-memory failures, and that its next start uses.


def read_reliefs(run: RunDir, layout: str) -> list[Relief]:
    """Return the settings that a run in `layout` has adopted because it ran out of memory, in order. Raises
    UnreadableFileError if a line is damaged or was written by a later version."""
    found = [event for event in read_log(run.directives) if isinstance(event, MemoryEvent)]
    for event in found:
        if not (_is_known(event.failed) and _is_known(event.taken)):
            hint = f"to continue as the recipe says, remove {run.directives.name} from the run's folder"
            raise unreadable(
                run.directives, f"has a memory directive (step {event.step}) that this version cannot follow", hint
            )
    return [Relief(event.failed, event.taken) for event in found if event.layout == layout]


def read_sound_reliefs(run: RunDir, layout: str) -> list[Relief]:
    """Return the same settings, ignoring lines that this version cannot follow. (Such lines make the workers' next
    start fail.)"""
    found = [event for event in read_sound(run.directives) if isinstance(event, MemoryEvent) and event.layout == layout]
    return [Relief(one.failed, one.taken) for one in found if _is_known(one.failed) and _is_known(one.taken)]


def _is_known(setting: MemorySetting) -> bool:
    kinds = setting.recompute in get_args(Recompute) and setting.offload in get_args(Offload)
    return kinds and setting.micro_batch_size >= 1


# The held-out losses that a run has measured.


def read_heldout_losses(run: RunDir) -> dict[int, float | None]:
    """Return step -> held-out loss, ordered by step. If a step was evaluated more than once, the newest loss counts."""
    evaluations = (event for event in read_sound(run.events(0)) if isinstance(event, EvalEvent))
    losses = {event.step: event.heldout_loss for event in evaluations}
    return {step: losses[step] for step in sorted(losses)}


def best_checkpoint(run: RunDir) -> int | None:
    """Return the step of the complete checkpoint with the lowest held-out loss; None if none was evaluated."""
    losses = read_heldout_losses(run)
    evaluated = {step: loss for step in run.checkpoint_steps() if (loss := losses.get(step)) is not None}
    finite = {step: loss for step, loss in evaluated.items() if math.isfinite(loss)}
    return min(finite, key=finite.__getitem__, default=None)


def read_node_failures(run: RunDir) -> list[tuple[str, NodeFault | None]]:
    """Return the hostnames and faults of the nodes that have failed in this run, in order; None instead of a fault if
    the node was examined and nothing was found."""
    failures: list[tuple[str, NodeFault | None]] = []
    for event in read_sound(run.supervisor_events):
        if isinstance(event, NodeFaultEvent):
            failures.append((event.host, event.fault))
        elif isinstance(event, NodeCheckedEvent):
            failures.append((event.host, None))
    return failures
