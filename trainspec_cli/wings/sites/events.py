"""Events of a site among far-apart ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.records import Count, Seconds
from trainspec_cli.run.folder.event_types.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeEvent(Event):
    """The site has applied what a round has decided."""

    type: Literal["exchange"] = "exchange"
    step: Count
    """Updates made before it."""
    round: Count
    sites: tuple[Count, ...]
    """Those whose outer gradients were merged."""
    members: tuple[Count, ...]
    """Those that train until the next round."""
    waited_s: Seconds
    """Training waited for it."""
    sent_bytes: Count
    """Sent by this rank since its start, to the meeting point and to other sites, before encryption."""
    received_bytes: Count
    """Outer gradients of other sites that it has received since its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalEvent(Event):
    """A round has decided how often the sites exchange from then on, by what they have measured of their links."""

    type: Literal["interval"] = "interval"
    step: Count
    """Updates made before it."""
    round: Count
    """The exchange after this round is the first that is sent so."""
    interval_steps: Count
    """Steps between two exchanges of a fragment (H)."""
    delay_steps: Count
    """Steps from when a sum is sent until it is applied (tau)."""
    before_interval_steps: Count
    before_delay_steps: Count
    reason: str

    def describe(self) -> str:
        return (
            f"step {self.step}: from here sites exchange each fragment every {self.interval_steps:,} steps and apply "
            f"it {self.delay_steps:,} steps late, where it was {self.before_interval_steps:,} and "
            f"{self.before_delay_steps:,}: {self.reason}"
        )


EVENT_TYPES = {"exchange": ExchangeEvent, "interval": IntervalEvent}
