"""Events of failures and recoveries, and the supervisor's marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.records import Count, Seconds
from trainspec_cli.run.folder.event_types.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryEvent(Event):
    """An exchange between replica groups failed, and the step is made again."""

    type: Literal["retry"] = "retry"
    step: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryEvent(Event):
    type: Literal["recovery"] = "recovery"
    step: Count
    change: str
    """left, joined or retried (replica groups), NOUN_left or NOUN_joined (what else takes part, such as site_left), or
    restart (the whole run)."""
    group: Count | None
    """The number of the replica group, or of what NOUN names."""
    stall_s: Seconds | None
    lost_steps: Count | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchMark(Event):
    """The supervisor starts the processes."""

    type: Literal["launch"] = "launch"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureMark(Event):
    """The supervisor has learned of a failure."""

    type: Literal["failure"] = "failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedMark(Event):
    """All processes have ended."""

    type: Literal["ended"] = "ended"
    exit_code: int | None = None
