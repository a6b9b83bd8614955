"""One rank's events as the run that came of them: a resume goes back, and the steps it makes again count once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from trainspec_cli.rundir.event_types import (
    CheckpointEvent,
    EvalEvent,
    Event,
    SampleEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)

BesideSteps = EvalEvent | CheckpointEvent | SampleEvent
Kind = TypeVar("Kind", EvalEvent, CheckpointEvent, SampleEvent)


@dataclass
class Start:
    """The events of a rank from one start to the next."""

    begin: StartEvent | None
    """None where it was lost."""
    steps: list[StepEvent] = field(default_factory=list)
    others: list[BesideSteps] = field(default_factory=list)

    def forget_beyond(self, step: int) -> None:
        self.steps = [event for event in self.steps if event.step <= step]
        self.others = [event for event in self.others if event.step <= step]


@dataclass
class History:
    starts: list[Start] = field(default_factory=list)
    warnings: list[WarningEvent] = field(default_factory=list)
    first_time: float = 0.0
    last_time: float = 0.0
    """Unix seconds of the first and the last event."""

    @property
    def steps(self) -> list[StepEvent]:
        return [event for start in self.starts for event in start.steps]

    @property
    def last_working_start(self) -> Start | None:
        """The newest start that made a step."""
        return next((start for start in reversed(self.starts) if start.steps), None)

    @property
    def begin(self) -> StartEvent | None:
        return self.starts[-1].begin if self.starts else None

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [event for start in self.starts for event in start.others if isinstance(event, kind)]


def read_history(events: Iterable[Event]) -> History:
    """Sort events, which are in the order they were written, by start. A resume goes on from a checkpoint: what an
    earlier start made beyond it is made again, and forgotten here."""
    history = History()
    for event in events:
        history.last_time = event.time
        history.first_time = history.first_time or event.time
        if isinstance(event, StartEvent):
            for earlier in history.starts:
                earlier.forget_beyond(event.step)
            history.starts.append(Start(event))
        elif isinstance(event, WarningEvent):
            history.warnings.append(event)
        else:
            _file(history, event)
    return history


def _file(history: History, event: Event) -> None:
    if not history.starts:
        history.starts.append(Start(None))
    if isinstance(event, StepEvent):
        history.starts[-1].steps.append(event)
    elif isinstance(event, BesideSteps):
        history.starts[-1].others.append(event)
