"""Which fragment of the model is exchanged at which step, and when its sum is applied (arXiv:2501.18512, section 2).

A fragment is a set of layers, strided so that each has early and late ones. Steps are counted in updates that are made:
an exchange that is sent at step 50 sends the weights after update 50. Each exchange follows from the one before it, so
that it is the same at every site.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def fragment_of(layer: int | None, fragments: int, *, is_input: bool = False) -> int:
    """Return the fragment of a layer. What stands outside of the layers (None) goes with the first fragment where it is
    the model's input, else with the last."""
    if layer is None:
        return 0 if is_input else fragments - 1
    return layer % fragments


@dataclass(frozen=True)
class SiteExchange:
    """One exchange between the sites."""

    round: int
    """1, 2, ... Round 0 exchanges nothing: with it the sites begin."""
    fragments: tuple[int, ...]
    sent_at: int
    """Updates made when it is sent."""
    applied_at: int
    """Updates made when its sum is applied."""


BEGINNING = SiteExchange(0, (), 0, 0)


@dataclass(frozen=True)
class SiteSchedule:
    """The exchanges of a run. The last one, after the last step, has all fragments and is applied at once, so that all
    sites end with the same weights."""

    total_steps: int
    interval_steps: int
    """Steps between two exchanges of a fragment (H); a multiple of the fragments."""
    fragments: int
    delay_steps: int
    """Steps from sending to applying a sum (tau), at most those between two exchanges."""

    def after(self, exchange: SiteExchange) -> SiteExchange | None:
        """Return the exchange that follows another, not before that is applied; None where it was the last one."""
        if exchange.sent_at == self.total_steps:
            return None
        number = exchange.round + 1
        sent_at = max(exchange.sent_at + self.interval_steps // self.fragments, exchange.applied_at)
        if sent_at >= self.total_steps:
            return SiteExchange(number, tuple(range(self.fragments)), self.total_steps, self.total_steps)
        applied_at = min(sent_at + self.delay_steps, self.total_steps)
        return SiteExchange(number, (exchange.round % self.fragments,), sent_at, applied_at)


def newest_applied(applied: Iterable[SiteExchange], step: int) -> int:
    """Return the newest round of those applied that a checkpoint of `step` has; of a round that is applied at that very
    step it is not known, so the one before it."""
    return max((exchange.round for exchange in applied if exchange.applied_at < step), default=0)
