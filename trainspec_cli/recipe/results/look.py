"""A deeper look at one rank for a few steps: what the supervisor asks for, and what the rank finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trainspec_cli.recipe.records import Count, Seconds, number
from trainspec_cli.recipe.results.verdict import Cause

Share = Annotated[float, number(0, 1)]


@dataclass(frozen=True, kw_only=True)
class LookOrder:
    """A look that the supervisor asks for: the rank that looks at itself, and the verdict that gave rise to it."""

    number: Count
    """Looks of a run are numbered from 1, over all of its starts."""
    looker: Count
    """The rank that looks; ranks of replica groups are counted through."""
    cause: Cause
    rank: Count | None = None
    node: Count | None = None
    link: tuple[Count, ...] | None = None

    @property
    def place(self) -> tuple[object, ...]:
        """Return the place of the verdict, as `RunVerdict.place`."""
        return self.cause, self.rank, self.node, self.link


@dataclass(frozen=True, kw_only=True)
class OperationTime:
    """An operation in the steps that were looked at."""

    name: str
    self_s: Seconds
    """Its time in a step, without the operations that it calls."""
    calls: Seconds
    """In a step, on average."""
    on_device: bool = False
    """It ran on the GPU; else on the host."""


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """A line of Python at which samples of a thread stand."""

    file: str
    line: Count
    function: str
    text: str
    share: Share
    """The fraction of the samples in which the thread did not wait for other ranks."""

    @property
    def position(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True, kw_only=True)
class Look:
    """The findings of a rank in the steps that it looked at."""

    order: LookOrder
    first_step: Count
    last_step: Count
    """The step before the first one where no step was made: the rank hung."""
    operations: tuple[OperationTime, ...] = ()
    """Those that took most time, most first."""
    operations_share: Share = 0.0
    """The part of the steps' time in which some operation ran on the host."""
    lines: tuple[CodeLine, ...] = ()
    """Where samples stand outside of operations, most first."""
    samples: Count = 0
    sampled_by: Literal["trainspec", "py-spy"] = "trainspec"
    cost_s: Seconds = 0.0
    """The thread that trains was held up for so long by the profiler's start and end."""
    file: str | None = None
    """The trace, in the run folder; None where the disk did not take it."""
    notes: tuple[str, ...] = ()
    """Parts of the look that could not be done, and why."""
