"""One rank's events as what became of the run: where a resume went back, what it made again counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


@dataclass
class Start:
    """What a rank did from one start to the next."""

    begin: Event
    """The `start` event; empty where it was lost."""
    steps: list[Event] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)
    """Evaluations, checkpoints, samples."""

    def forget_beyond(self, step: int) -> None:
        self.steps = [event for event in self.steps if event["step"] <= step]
        self.others = [event for event in self.others if event["step"] <= step]


@dataclass
class History:
    starts: list[Start] = field(default_factory=list)
    warnings: list[Event] = field(default_factory=list)
    first_time: float = 0.0
    last_time: float = 0.0
    """Unix seconds of the first and the last event."""

    @property
    def steps(self) -> list[Event]:
        return [event for start in self.starts for event in start.steps]

    @property
    def last_working_start(self) -> Start | None:
        """The newest start that made a step."""
        return next((start for start in reversed(self.starts) if start.steps), None)

    @property
    def begin(self) -> Event:
        return self.starts[-1].begin if self.starts else {}

    def of_kind(self, kind: str) -> list[Event]:
        return [event for start in self.starts for event in start.others if event["type"] == kind]


def read_history(events: Iterable[Event]) -> History:
    """Events in the order they were written. A resume goes on from a checkpoint: what an earlier start made beyond
    it is made again, and forgotten here."""
    history = History()
    for event in events:
        history.last_time = event["time"]
        history.first_time = history.first_time or event["time"]
        if event["type"] == "start":
            for earlier in history.starts:
                earlier.forget_beyond(event["step"])
            history.starts.append(Start(event))
        elif event["type"] == "warning":
            history.warnings.append(event)
        else:
            _file(history, event)
    return history


def _file(history: History, event: Event) -> None:
    if not history.starts:
        history.starts.append(Start({}))
    current = history.starts[-1]
    (current.steps if event["type"] == "step" else current.others).append(event)
