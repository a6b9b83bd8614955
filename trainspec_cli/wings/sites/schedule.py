"""When sites exchange which fragment of the model, how long an exchange takes over their links, and which interval
hides that (arXiv:2501.18512, section 2).

A fragment is a set of layers, strided so that each has early and late ones. Steps are counted in updates that are made:
an exchange that is sent at step 50 sends the weights after update 50. Each exchange follows from the one before it, so
that it is the same at every site.

Links: where all sites reach one another, each link carries the others' outer gradients in while its own goes out to
them. Else all go through the meeting point at one of them, whose link carries every site's outer gradient once in and
to all others once out; each is passed on as soon as it has come. Nothing else uses the links.
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


VALUE_BYTES = {"int4": 0.5 + 1 / 64, "int8": 1 + 2 / 128, "bf16": 2.0}
"""Bytes of a value on the wire with its part of its block's scale, as `engine.comm.codec` encodes it; a tensor has four
bytes more in int4."""
ROUND_MULTIPLES = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True)
class SiteLinks:
    """The links of sites that are joined alike."""

    sites: int
    bytes_per_s: float
    """Of each site's own link, each way."""
    delay_s: float
    """From one site to another, one way."""
    direct: bool = False
    """Each site reaches every other one."""

    def exchange_s(self, sent_bytes: float) -> float:
        """Return how long an exchange takes in which each site sends so many bytes: an outer gradient goes one way, and
        the decision another; both directions of a link are used at once, and more goes out of the busiest than in."""
        return 2 * self.delay_s + self._copies_out * sent_bytes / self.bytes_per_s

    def carried_bytes(self, sent_bytes: float) -> float:
        """Return what the busiest link carries in such an exchange, both ways together."""
        return (self.sites - 1 + self._copies_out) * sent_bytes

    @property
    def _copies_out(self) -> int:
        """Return how many outer gradients leave the busiest link."""
        others = self.sites - 1
        return others if self.direct else others * others

    def all_reduce_s(self, tensor_bytes: float) -> float:
        """Return how long a ring over the sites sums a tensor: what data parallelism does every step."""
        others = self.sites - 1
        return 2 * others * (tensor_bytes / self.sites / self.bytes_per_s + self.delay_s)


def utilisation(between_steps: int, delay_steps: int, step_s: float, exchange_s: float) -> float:
    """Return the part of the time in which a site trains: an exchange is sent every `between_steps` steps, and what it
    takes beyond `delay_steps` of them is waited for."""
    busy_s = between_steps * step_s
    return busy_s / (busy_s + max(0.0, exchange_s - delay_steps * step_s))


def hiding_interval(fragments: int, step_s: float, exchange_s: float, wanted: float) -> int | None:
    """Return the shortest of some intervals H at which a site trains `wanted` of the time, where each sum is applied
    when the next one is sent; None where even the longest is too short."""
    for multiple in ROUND_MULTIPLES:
        if utilisation(multiple, multiple, step_s, exchange_s) >= wanted:
            return multiple * fragments
    return None
