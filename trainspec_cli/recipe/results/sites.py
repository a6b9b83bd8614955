"""Results of planning training at far-apart sites."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SitesFigures:
    """One choice of what is exchanged."""

    format: str
    interval_steps: int
    fragments: int
    delay_steps: int
    exchange_s: float
    utilisation: float
    """The part of the time in which a site trains."""
    bytes_per_day: float
    """Over the busiest link, both ways together."""


@dataclass(frozen=True)
class SitesOutlook:
    sites: int
    link_gbit_per_s: float
    link_delay_s: float
    step_time_s: float
    """Of a site by itself."""
    direct: bool
    """Each site is reached by every other one; else all meet at one of them."""
    direct_exchange_s: float
    """An exchange of the recipe where it is so."""
    wanted: SitesFigures
    """As the recipe has it."""
    hidden: tuple[SitesFigures, ...]
    """The shortest intervals that hide the exchange, by format; a format is left out where none does."""
    data_parallel_utilisation: float
    """Of a run that sums gradients in fp32 over the same links every step."""
    fewer_bytes: float
    """Data parallelism sends so many times as many bytes in the same steps."""
    loss_penalty: str
    """What is known of the loss, and its source."""
