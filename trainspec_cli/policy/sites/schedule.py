"""Which fragment of the model is exchanged at which step, and when its sum is applied (arXiv:2501.18512, section 2).

A fragment is a set of layers, strided so that each has early and late ones. Steps are counted in updates that are made:
an exchange that is sent at step 50 sends the weights after update 50. All is a function of the step alone, the same at
every site.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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


@dataclass(frozen=True)
class SiteSchedule:
    """The exchanges of a run. The last one, after the last step, has all fragments and is applied at once, so that all
    sites end with the same weights."""

    total_steps: int
    interval_steps: int
    """Each fragment is exchanged every so many steps (H); a multiple of `fragments`."""
    fragments: int
    delay_steps: int
    """A sum is applied so many steps after it was sent (tau), at most `steps_between`: one exchange is on its way."""

    @property
    def steps_between(self) -> int:
        """Return the steps from one exchange to the next."""
        return self.interval_steps // self.fragments

    @cached_property
    def last_round(self) -> int:
        return (self.total_steps - 1) // self.steps_between + 1

    def exchange(self, number: int) -> SiteExchange:
        """Return the exchange of a round from 1 to `last_round`."""
        if number == self.last_round:
            return SiteExchange(number, tuple(range(self.fragments)), self.total_steps, self.total_steps)
        sent_at = number * self.steps_between
        applied_at = min(sent_at + self.delay_steps, self.total_steps)
        return SiteExchange(number, ((number - 1) % self.fragments,), sent_at, applied_at)

    def applied_at(self, number: int) -> int:
        """Return the step at which a round is applied, from round 0 on."""
        return self.exchange(number).applied_at if number else 0

    def window(self, number: int) -> range:
        """Return the steps between the application of a round and that of the next: those that its record plans."""
        if number == self.last_round:
            return range(self.total_steps, self.total_steps)
        return range(self.applied_at(number), self.applied_at(number + 1))

    def sent_at(self, step: int) -> SiteExchange | None:
        """Return the exchange that is sent after `step` updates; None where none is. At most one is."""
        number = self.last_round if step == self.total_steps else step // self.steps_between
        exchange = self.exchange(number) if number else None
        return exchange if exchange and exchange.sent_at == step else None

    def newest_applied(self, step: int) -> int:
        """Return the newest round that a site which has made `step` updates has applied; of a round that is applied at
        that very step it is not known, so the one before it."""
        number = min(step // self.steps_between, self.last_round)
        while number and self.applied_at(number) >= step:
            number -= 1
        return number
