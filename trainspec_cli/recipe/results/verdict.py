"""Verdicts: what slows a run, and where. `diagnose --json` prints them, and `verdicts.jsonl` holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.records import Count, Seconds, number

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
