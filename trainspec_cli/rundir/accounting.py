"""Where a run's time went, over all its attempts: buckets that sum to its wall time.

Told from the events of rank 0 and the supervisor's marks; what neither speaks of is `other`. An attempt begins with a
launch and ends with its last event. What a later attempt made again was lost, so its first making is `recomputed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainspec_cli.rundir.events import read_sound
from trainspec_cli.rundir.paths import RunDir

Event = dict[str, Any]

BUCKETS = (
    "productive",
    "data_wait",
    "checkpoint",
    "evaluation",
    "start_up",
    "detection",
    "recovery",
    "recomputed",
    "idle",
    "other",
)
"""productive    steps that count, without what follows      data_wait   steps waiting for their data
checkpoint    training held up by saving                  evaluation  looks at what was held out
start_up      from a launch to the first step             detection   from a failure until it was known
recovery      from then until training went on            recomputed  steps made, lost and made again
idle          nobody ran it                               other       the rest
"""


@dataclass
class Attempt:
    """What happened between two launches."""

    launched: float
    """Unix seconds, as the others."""
    begin: Event
    restarted: bool = False
    """By the supervisor, after a failure."""
    events: list[Event] = field(default_factory=list)

    @property
    def last_time(self) -> float:
        return (self.events[-1] if self.events else self.begin)["time"]

    @property
    def ended_in_order(self) -> bool:
        return any(event["type"] == "end" for event in self.events)


def account_run(run: RunDir, now: float | None = None) -> dict[str, float]:
    """Of a run folder; `now` is the time of a run that is still going."""
    return account(list(read_sound(run.events(0))), list(read_sound(run.supervisor_events)), now)


def goodput(time_s: dict[str, float]) -> float | None:
    """The productive part; None where no time has passed."""
    wall_s = math.fsum(time_s.values())
    return time_s["productive"] / wall_s if wall_s else None


def account(events: Iterable[Event], marks: Sequence[Event], now: float | None = None) -> dict[str, float]:
    """-> seconds by bucket, from the first launch to the last sign of life (or `now`)."""
    time_s = dict.fromkeys(BUCKETS, 0.0)
    attempts = _split(events, marks)
    for index, attempt in enumerate(attempts):
        failed_before = index > 0 and not attempts[index - 1].ended_in_order
        time_s["recovery" if failed_before else "start_up"] += attempt.begin["time"] - attempt.launched
        kept_until = min((later.begin["step"] for later in attempts[index + 1 :]), default=math.inf)
        _add_attempt(time_s, attempt, kept_until)
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        _add_gap(time_s, attempt, following, marks, now)
    return time_s


def _split(events: Iterable[Event], marks: Sequence[Event]) -> list[Attempt]:
    attempts: list[Attempt] = []
    restarted = False
    for event in events:
        if event["type"] == "start":
            since = attempts[-1].last_time if attempts else 0.0
            launches = [mark for mark in marks if mark["type"] == "launch" and since <= mark["time"] <= event["time"]]
            if attempts and marks and not launches:
                continue  # another replica group tells the story from here on
            launched = launches[-1]["time"] if launches else event["time"]
            attempts.append(Attempt(launched, event, restarted))
            restarted = False
        elif event["type"] == "recovery" and event.get("change") == "restart":
            restarted = True
        elif attempts:
            attempts[-1].events.append(event)
    return attempts


def _add_attempt(time_s: dict[str, float], attempt: Attempt, kept_until: float) -> None:
    """From the `start` event to the last; what the events leave open is `other`."""
    spent = dict.fromkeys(BUCKETS, 0.0)
    for event in attempt.events:
        if event["type"] == "step":
            _add_step(spent, event, kept=event["step"] <= kept_until)
        elif event["type"] == "eval":
            spent["evaluation"] += event.get("seconds", 0.0)
        elif event["type"] == "checkpoint":
            spent["checkpoint"] += event.get("waited_s", 0.0)
        elif event["type"] == "recovery":
            spent["recovery"] += event["stall_s"] or 0.0  # it lies within a step; a restart's lies between attempts
            spent["productive"] -= event["stall_s"] or 0.0
    spent["other"] = attempt.last_time - attempt.begin["time"] - math.fsum(spent.values())
    if spent["other"] < 0:  # two clocks differ by their jitter
        spent["productive"] += spent["other"]
        spent["other"] = 0.0
    for bucket, seconds in spent.items():
        time_s[bucket] += seconds


def _add_step(spent: dict[str, float], event: Event, *, kept: bool) -> None:
    if not kept:
        spent["recomputed"] += event["step_time_s"]
        return
    parts = event["time_s"]
    data_wait_s, checkpoint_s = parts.get("data_wait", 0.0), parts.get("checkpoint", 0.0)
    spent["data_wait"] += data_wait_s
    spent["checkpoint"] += checkpoint_s
    spent["productive"] += event["step_time_s"] - data_wait_s - checkpoint_s


def _add_gap(
    time_s: dict[str, float],
    attempt: Attempt,
    following: Attempt | None,
    marks: Sequence[Event],
    now: float | None,
) -> None:
    """From an attempt's last event to the next launch, or to the last sign of life."""
    until = following.launched if following else math.inf
    between = [mark for mark in marks if attempt.last_time < mark["time"] < until]
    failed = next((mark["time"] for mark in between if mark["type"] == "failure"), None)
    ended = next((mark["time"] for mark in between if mark["type"] == "ended"), None)
    place = attempt.last_time
    if failed is not None:
        time_s["detection"] += failed - place
        place = failed
    if ended is not None:
        time_s["recovery" if failed is not None else "other"] += ended - place
        place = ended
    if following:
        time_s["recovery" if following.restarted else "idle"] += following.launched - place
    elif now is not None and ended is None:
        time_s["other"] += max(0.0, now - place)
