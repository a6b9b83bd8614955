"""Events: what happened in a run, one dataclass per type. Each is one JSON object on a line of its rank's file.

A field that is `Absent` has no key on disk. Where a field of a later version is unknown here, it is passed over; an
event of an unknown type becomes an `UnknownEvent`.

The leading replica group writes rank 0's file, the run's log; each process of a group has a file of its own below
`groupNNNNN/`. The supervisor's marks (launch, failure, ended) are in a file of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.recipe.records import Rank, Seconds

PARTS = ("data_wait", "forward", "backward", "exposed_comm", "optimizer", "checkpoint", "other")
"""The parts of a step's time, which sum to `step_time_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The fields that every event has. The writer stamps `time` and `rank`."""

    type: str
    time: Seconds = 0.0
    """Unix seconds."""
    rank: Rank = -1

    def describe(self) -> str:
        """Describe an event of a wing in a line; empty for those that need none. `report.text` describes the others."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownEvent(Event):
    """An event of a type that a later version writes."""
