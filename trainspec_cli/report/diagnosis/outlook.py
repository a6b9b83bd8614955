"""The planner's word on the steps of a run: what bounds them, and what they would be with one thing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WAITING = "waiting"
"""The part of exposed communication that waits for late ranks, where `exposed_comm` is the transfer alone."""


@dataclass(frozen=True)
class PlannedChange:
    change: str
    factors: Mapping[str, float]
    """How many times as long as now a part of a step would take; parts that are not named stay as they are."""


@dataclass(frozen=True)
class Outlook:
    basis: str
    """The name by which the planner knows the machine; where it does not know it, the reason."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of what passes and optimizer take, by what bounds them; empty where the planner does not know."""
    changes: tuple[PlannedChange, ...] = ()

    @property
    def is_known(self) -> bool:
        return bool(self.shares)
