"""Verdicts: what is slowing a run down, and where. `diagnose --json` prints them, and `verdicts.jsonl` stores them."""

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
"""The names are stable, because programs read them."""


@dataclass(frozen=True)
class WhatIf:
    """The predicted step after a single change."""

    change: str
    step_s: Seconds
    saved_s: Seconds
    """Time saved per step."""


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """One cause with its location, cost and evidence. Without a rank, node or link, it concerns the entire run."""

    cause: Cause
    rank: Count | None = None
    node: Count | None = None
    link: tuple[Count, ...] | None = None
    """The ranks at the two ends of the link."""
    since_step: Count = 0
    until_step: Count | None = None
    """The last step that shows it; None if the newest step still shows it."""
    cost_s: Seconds = 0.0
    """Additional time per step while it lasts."""
    confidence: Annotated[float, number(0, 1)] = 0.0
    evidence: tuple[str, ...] = ()
    code: str | None = None
    """The line of code found by profiling, `FILE:LINE (FUNCTION)`."""
    advice: str = ""
    """A command or a recipe key."""
    full_step: Count | None = None
    """For a leak, the step at which memory runs out."""
    what_if: tuple[WhatIf, ...] = ()
    """Changes that would speed up a run that is going as planned, most effective first."""

    @property
    def place(self) -> tuple[object, ...]:
        return self.cause, self.rank, self.node, self.link

    def as_json(self) -> JsonObject:
        return to_plain(self)


def heaviest_first(verdicts: list[RunVerdict]) -> tuple[RunVerdict, ...]:
    """Return the verdicts sorted by cost, highest first. A hang, which ends the run, comes before all others."""
    return tuple(sorted(verdicts, key=lambda one: (one.cause != "hang", -one.cost_s, CAUSES.index(one.cause))))


# The newest collectives of a rank, from the flight recorder of its backend.


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that a rank has called."""

    group: str
    """Its process group."""
    number: Count
    """Collectives of a group are numbered, and all of its ranks should call the same one under one number."""
    kind: str
    """For example `all_reduce`."""
    sizes: tuple[tuple[Count, ...], ...] = ()
    """The sizes of the tensors that the rank passed in."""
    dtypes: tuple[str, ...] = ()
    done: bool = False
    line: str = ""
    """The line of code that called it, `FILE:LINE in FUNCTION`; empty if unknown."""

    @property
    def text(self) -> str:
        sizes = ", ".join("x".join(map(str, size)) or "1" for size in self.sizes)
        return f"{self.kind}{f' of {sizes}' if sizes else ''}{f' at {self.line}' if self.line else ''}"


# Profiling one rank for a few steps: the supervisor's request, and the rank's findings.


Share = Annotated[float, number(0, 1)]


@dataclass(frozen=True, kw_only=True)
class LookOrder:
    """A request from the supervisor: the rank that should profile itself, and the verdict that caused the request."""

    number: Count
    """Requests in a run are numbered from 1, across restarts."""
    looker: Count
    """The rank that profiles itself; ranks are numbered consecutively across all replica groups."""
    cause: Cause
    rank: Count | None = None
    node: Count | None = None
    link: tuple[Count, ...] | None = None

    @property
    def place(self) -> tuple[object, ...]:
        """Return the location of the verdict, in the same form as `RunVerdict.place`."""
        return self.cause, self.rank, self.node, self.link


@dataclass(frozen=True, kw_only=True)
class OperationTime:
    """An operation in the profiled steps."""

    name: str
    self_s: Seconds
    """Its time per step, excluding the operations that it calls."""
    calls: Seconds
    """Calls per step, on average."""
    on_device: bool = False
    """True if it ran on the GPU, False if it ran on the host."""


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """A line of Python code at which a thread was sampled."""

    file: str
    line: Count
    function: str
    text: str
    share: Share
    """Fraction of the samples at this line, among those where the thread was not waiting for other ranks."""

    @property
    def position(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True, kw_only=True)
class Look:
    """A rank's findings in the steps that it profiled."""

    order: LookOrder
    first_step: Count
    last_step: Count
    """If the rank hung and completed no step, this is the step before `first_step`."""
    operations: tuple[OperationTime, ...] = ()
    """The operations that took the most time, in descending order."""
    operations_share: Share = 0.0
    """Fraction of the steps' time during which an operation ran on the host."""
    lines: tuple[CodeLine, ...] = ()
    """Code lines sampled outside operations, in descending order."""
    samples: Count = 0
    sampled_by: Literal["trainspec", "py-spy"] = "trainspec"
    cost_s: Seconds = 0.0
    """How long starting and stopping the profiler stalled the training thread."""
    file: str | None = None
    """The trace in the run folder; None if it could not be written."""
    notes: tuple[str, ...] = ()
    """Parts of the profiling that failed, with reasons."""


# Links between ranks as measured by a run: the workers' reports, on which decisions are based.


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Ranks that exchange data along an axis; for a pipeline (`pp`), two neighbours."""

    axis: str
    ranks: tuple[Count, ...]
    bytes_per_s: Rate
    """Rate at which each of them sends, excluding waiting."""
    noise: Rate
    """Standard deviation of the samples, as a fraction."""
    sent_bytes: Rate
    """Bytes that a rank sends in one exchange."""
