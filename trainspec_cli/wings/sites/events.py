"""The event for an exchange between distant sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.records import Count, Seconds
from trainspec_cli.run.folder.event_types.events import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeEvent(Event):
    """Records that the site has applied the decision of a round."""

    type: Literal["exchange"] = "exchange"
    step: Count
    """Number of updates that the run had completed before the exchange."""
    round: Count
    sites: tuple[Count, ...]
    """Sites whose outer gradients were merged."""
    members: tuple[Count, ...]
    """Sites that train until the next round."""
    waited_s: Seconds
    """Time that training waited for the exchange."""
    sent_bytes: Count
    """Bytes that this rank has sent to the meeting point and other sites since it started, before encryption."""
    received_bytes: Count
    """Bytes of other sites' outer gradients that this rank has received since it started."""


EVENT_TYPES = {"exchange": ExchangeEvent}
