"""Events of a site among far-apart ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.records import Count, Seconds
from trainspec_cli.run.folder.event_types.events import Event


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


EVENT_TYPES = {"exchange": ExchangeEvent}
