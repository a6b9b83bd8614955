"""Verdicts: what slows a run, and where. `diagnose --json` prints them, and `verdicts.jsonl` holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.records import Count, Rate, Seconds, number, to_plain

Cause = Literal[
    "slow_device",
    "stolen_cores",
    "slow_node",
    "narrow_link",
    "lossy_link",
    "delayed_link",
    "unbalanced_stage",
    "uneven_lengths",
    "slow_loader",
    "garbage_collection",
    "host_bound",
    "recompilation",
    "checkpoint_writing",
    "evaluation",
    "slow_steps",
    "memory_leak",
    "memory_pressure",
    "hang",
    "network_timeouts",
    "noise",
    "as_planned",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Their names are stable: programs read them."""


@dataclass(frozen=True)
class WhatIf:
    """A step as it would be with one thing changed."""

    change: str
    step_s: Seconds
    saved_s: Seconds
    """So much shorter than it is."""


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """One cause, its place, its price and its proof. Without a rank, node or link it is of the whole run."""

    cause: Cause
    rank: Count | None = None
    node: Count | None = None
    link: tuple[Count, ...] | None = None
    """The ranks at its ends."""
    since_step: Count = 0
    until_step: Count | None = None
    """The last step that shows it; None where the newest one does."""
    cost_s: Seconds = 0.0
    """A step is longer by so much while it lasts."""
    confidence: Annotated[float, number(0, 1)] = 0.0
    evidence: tuple[str, ...] = ()
    code: str | None = None
    """The line of code that a deeper look has found, `FILE:LINE (FUNCTION)`."""
    advice: str = ""
    """A command or a key of the recipe."""
    full_step: Count | None = None
    """The step at which memory runs out, for a leak."""
    what_if: tuple[WhatIf, ...] = ()
    """Changes that would help a run that goes as planned, most first."""

    @property
    def place(self) -> tuple[object, ...]:
        return self.cause, self.rank, self.node, self.link

    def as_json(self) -> JsonObject:
        return to_plain(self)


def heaviest_first(verdicts: list[RunVerdict]) -> tuple[RunVerdict, ...]:
    """Return the verdicts, those that cost most first; what will end the run costs most."""
    ends = ("hang", "memory_leak")
    return tuple(sorted(verdicts, key=lambda one: (one.cause != ends[0], -one.cost_s, CAUSES.index(one.cause))))


# A deeper look at one rank for a few steps: what the supervisor asks for, and what the rank finds.


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


# Links between ranks as a run has measured them: what the workers report, and what decisions are made of.


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Ranks that exchange along an axis; of a pipeline (`pp`), two neighbours."""

    axis: str
    ranks: tuple[Count, ...]
    bytes_per_s: Rate
    """Rate at which each of them sends, waiting left out."""
    noise: Rate
    """The samples' standard deviation, as a fraction."""
    sent_bytes: Rate
    """Bytes that a rank sends in one exchange."""
