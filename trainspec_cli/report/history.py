"""A rank's events -> its starts, steps and what lies beside them, taken in one after another.

Steps are kept as columns of numbers, so that a long run takes some hundred bytes a step; the events themselves are
dropped as they are read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trainspec_cli.recipe.canonical import Absent
from trainspec_cli.run.folder.columns import StepColumns
from trainspec_cli.run.folder.event_types.event import PARTS, Event
from trainspec_cli.run.folder.event_types.training import (
    CheckpointEvent,
    EvalEvent,
    SampleEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)

BesideSteps = EvalEvent | CheckpointEvent | SampleEvent
Kind = TypeVar("Kind", EvalEvent, CheckpointEvent, SampleEvent)
FIGURES = ("loss", "grad_norm", "lr", "skipped", "step_time_s", "units", "exchange_s", "exposed_s", *PARTS)
"""The columns of a step. A loss that is not known, and an exchange that there was none of, are NaN."""


def _row(event: StepEvent) -> tuple[float, ...]:
    parts_s = event.time_s
    return (
        *(math.nan if one is None else one for one in (event.loss, event.grad_norm)),
        math.nan if event.lr is None or isinstance(event.lr, Absent) else event.lr,
        *(event.skipped, event.step_time_s, event.units),
        *(math.nan if isinstance(one, Absent) else one for one in (event.exchange_s, event.exposed_s)),
        *(parts_s.get(name, 0.0) for name in PARTS),
    )


@dataclass
class Start:
    """The events of a rank from one start to the next."""

    begin: StartEvent | None
    """None where it was lost."""
    steps: StepColumns = field(default_factory=lambda: StepColumns(*FIGURES))
    others: list[BesideSteps] = field(default_factory=list)

    def forget_beyond(self, step: int) -> None:
        self.steps.forget_beyond(step)
        self.others = [event for event in self.others if event.step <= step]

    def rows_of(self, wanted_steps: Container[int]) -> Sequence[int]:
        """Return the rows of the wanted steps."""
        return array("q", (row for row, step in enumerate(self.steps.steps) if step in wanted_steps))

    def mean_parts_s(self, rows: Sequence[int]) -> dict[str, float]:
        """Return the seconds a step by part, over some rows."""
        columns = {name: self.steps[name] for name in PARTS}
        # fsum: a million small parts would lose digits in a plain sum.
        return {name: math.fsum(column[row] for row in rows) / len(rows) for name, column in columns.items()}


@dataclass
class History:
    starts: list[Start] = field(default_factory=list)
    warnings: list[WarningEvent] = field(default_factory=list)
    first_time: float = 0.0
    last_time: float = 0.0
    """Unix seconds of the first and the last event."""

    def take(self, event: Event) -> None:
        """Sort an event, which follows those before it, into its start. A resume goes on from a checkpoint: what an
        earlier start made beyond it is made again, and forgotten here."""
        self.last_time = event.time
        self.first_time = self.first_time or event.time
        if isinstance(event, StartEvent):
            for earlier in self.starts:
                # The resumed run makes these steps again, and they would count twice.
                earlier.forget_beyond(event.step)
            self.starts.append(Start(event))
        elif isinstance(event, WarningEvent):
            self.warnings.append(event)
        else:
            self._file(event)

    def _file(self, event: Event) -> None:
        if not self.starts:
            self.starts.append(Start(None))
        if isinstance(event, StepEvent):
            self.starts[-1].steps.add(event.step, *_row(event))
        elif isinstance(event, BesideSteps):
            self.starts[-1].others.append(event)

    def column(self, name: str) -> tuple[array[int], array[float]]:
        """Return a figure of all steps: (steps, values)."""
        steps, values = array("q"), array("d")
        for start in self.starts:
            steps.extend(start.steps.steps)
            values.extend(start.steps[name])
        return steps, values

    @property
    def last_working_start(self) -> Start | None:
        """The newest start that made a step."""
        return next((start for start in reversed(self.starts) if len(start.steps)), None)

    @property
    def begin(self) -> StartEvent | None:
        return self.starts[-1].begin if self.starts else None

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [event for start in self.starts for event in start.others if isinstance(event, kind)]


def read_history(events: Iterable[Event]) -> History:
    """Return the history that events, in the order they were written, amount to."""
    history = History()
    for event in events:
        history.take(event)
    return history
