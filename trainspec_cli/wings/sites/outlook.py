"""Predict training at distant sites: exchange times, intervals that hide the exchange, and bytes per day. The result is
shown as a section of `trainspec plan`.

If all sites can reach each other, each link receives the others' outer gradients while it sends its own to them.
Otherwise, all outer gradients pass through the meeting point at one site. That site's link receives every outer
gradient once, and sends it to each of the other sites as soon as it has arrived. Nothing else is assumed to use the
links."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.recipe.keys.resilience import SitesSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.reporter.plan.labels import PlanSection, percent

VALUE_BYTES = {"int4": 0.5 + 1 / 64, "int8": 1 + 2 / 128, "bf16": 2.0}
"""Bytes per transmitted value as encoded by `engine.comm.codec`, including the block's scale. In int4, each tensor
needs four extra bytes."""
ROUND_MULTIPLES = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True)
class SiteLinks:
    """The links of the sites, all of which have the same connection."""

    sites: int
    bytes_per_s: float
    """Bandwidth of each site's link in each direction."""
    delay_s: float
    """One-way latency between two sites."""
    direct: bool = False
    """True if each site can reach every other one."""

    def exchange_s(self, sent_bytes: float) -> float:
        """Return the time of an exchange, given the number of bytes that each site sends. It includes one latency for
        the outer gradient and one for the decision. Both directions of a link are used at the same time. The busiest
        link sends more than it receives."""
        return 2 * self.delay_s + self._copies_out * sent_bytes / self.bytes_per_s

    def carried_bytes(self, sent_bytes: float) -> float:
        """Return the number of bytes that the busiest link carries in an exchange, in both directions together, given
        the number of bytes that each site sends."""
        return (self.sites - 1 + self._copies_out) * sent_bytes

    @property
    def _copies_out(self) -> int:
        """Number of outer gradients sent over the busiest link."""
        others = self.sites - 1
        return others if self.direct else others * others

    def all_reduce_s(self, tensor_bytes: float) -> float:
        """Return the time for a ring all-reduce of a tensor across the sites. Data parallelism would need this time in
        every step."""
        others = self.sites - 1
        return 2 * others * (tensor_bytes / self.sites / self.bytes_per_s + self.delay_s)


def utilisation(between_steps: int, delay_steps: int, step_s: float, exchange_s: float) -> float:
    """Return the fraction of its time that a site spends training. An exchange starts every `between_steps` steps.
    Training waits if the exchange takes longer than `delay_steps` steps."""
    busy_s = between_steps * step_s
    return busy_s / (busy_s + max(0.0, exchange_s - delay_steps * step_s))


def hiding_interval(fragments: int, step_s: float, exchange_s: float, wanted: float) -> int | None:
    """Return the shortest interval H (from a fixed list) that lets a site spend at least the fraction `wanted` of its
    time training, if each sum is applied when the next one is sent. None if even the longest interval is too short."""
    for multiple in ROUND_MULTIPLES:
        if utilisation(multiple, multiple, step_s, exchange_s) >= wanted:
            return multiple * fragments
    return None


@dataclass(frozen=True)
class SitesFigures:
    """The prediction for one configuration of the exchange."""

    format: str
    interval_steps: int
    fragments: int
    delay_steps: int
    exchange_s: float
    utilisation: float
    """Fraction of its time that a site spends training."""
    bytes_per_day: float
    """Bytes per day over the busiest link, in both directions together."""


@dataclass(frozen=True)
class SitesOutlook:
    """The prediction for the sites of a recipe."""

    sites: int
    link_gbit_per_s: float
    link_delay_s: float
    step_time_s: float
    """Step time of a site that trains alone."""
    direct: bool
    """True if each site can reach every other one. Otherwise all sites use the meeting point."""
    direct_exchange_s: float
    """The time that the recipe's exchange would take if the sites were connected directly."""
    wanted: SitesFigures
    """The prediction for the recipe's configuration."""
    hidden: tuple[SitesFigures, ...]
    """The shortest intervals that hide the exchange, by format. Formats without such an interval are omitted."""
    data_parallel_utilisation: float
    """Fraction of its time that a site would spend training if it summed fp32 gradients over these links in every
    step."""
    fewer_bytes: float
    """Bytes that data parallelism would send, divided by those that the recipe sends in the same number of steps."""
    loss_penalty: str
    """The known effect on the loss, with its source."""


DAY_S = 86_400.0
WANTED = 0.95
"""An exchange is treated as hidden if it leaves at least this fraction of the time for training."""
KEPT_BYTES = 4 + 4.0
"""Bytes that a site keeps per trained parameter, for shared weights and outer momentum in fp32."""
LOSS_PENALTY = (
    "Streaming DiLoCo reports the same loss as data parallelism at 4 bits (arXiv:2501.18512); the effect of a longer "
    "interval is not predicted here, so use the shortest interval that hides the exchange"
)


def plan_sites(spec: RunSpec, capacity: CapacityPlan, best: Candidate) -> PlanSection | None:
    """Return the section; None if the recipe does not describe the links between sites."""
    if spec.resilience.sites.link_gbit_s is None:
        return None
    sites = outlook(spec.resilience.sites, float(capacity.params), best.step_time_s)
    way = "directly connected" if sites.direct else "connected through one of them"
    compared = (
        "With data parallelism over these links, sites would spend "
        f"{percent(sites.data_parallel_utilisation, 2)} of their time training and "
        f"send {sites.fewer_bytes:,.0f} times as many bytes in fp32."
    )
    if not sites.direct and sites.sites > 2:
        direct_s = format_duration(sites.direct_exchange_s)
        compared = f"If every site listens (resilience.sites.listen), an exchange takes {direct_s}. {compared}"
    rows = [_row("the recipe", sites.wanted), *(_row("hidden", one) for one in sites.hidden)]
    return PlanSection(
        "sites",
        to_plain(sites),
        "Far-apart sites",
        f"{sites.sites} sites {way}, {sites.link_gbit_per_s:g} Gbit/s and {1e3 * sites.link_delay_s:g} ms each",
        ("", "format", "interval_steps", "fragments", "delay_steps", "an exchange", "trains", "busiest link"),
        tuple(rows),
        compared,
        sites.loss_penalty,
    )


def outlook(sites: SitesSpec, values: float, step_s: float) -> SitesOutlook:
    """Return the prediction. `values`: number of trained parameters. `step_s`: step time of a site that trains
    alone."""
    assert sites.link_gbit_s is not None, "the recipe describes the links"
    through = SiteLinks(sites.count, sites.link_gbit_s * 1e9 / 8, sites.link_delay_s)
    direct = replace(through, direct=True)
    links = direct if sites.listen else through
    wanted = _figures(links, sites.format, sites.interval_steps, sites.fragments, sites.delay_steps, values, step_s)
    hidden = []
    for name, value_bytes in VALUE_BYTES.items():
        exchange_s = links.exchange_s(value_bytes * values / sites.fragments)
        interval = hiding_interval(sites.fragments, step_s, exchange_s, WANTED)
        if interval is not None:
            delay_steps = interval // sites.fragments
            hidden.append(_figures(links, name, interval, sites.fragments, delay_steps, values, step_s))
    summed_s = links.all_reduce_s(4 * values)
    sent_bytes = 2 * (sites.count - 1) / sites.count * 4 * values * sites.interval_steps * sites.count
    return SitesOutlook(
        sites=sites.count,
        link_gbit_per_s=sites.link_gbit_s,
        link_delay_s=sites.link_delay_s,
        step_time_s=step_s,
        direct=sites.listen is not None,
        direct_exchange_s=direct.exchange_s(VALUE_BYTES[sites.format] * values / sites.fragments),
        wanted=wanted,
        hidden=tuple(hidden),
        data_parallel_utilisation=step_s / (step_s + summed_s),
        fewer_bytes=sent_bytes / links.carried_bytes(VALUE_BYTES[sites.format] * values),
        loss_penalty=LOSS_PENALTY,
    )


def _figures(
    links: SiteLinks, name: str, interval: int, fragments: int, delay_steps: int, values: float, step_s: float
) -> SitesFigures:
    sent_bytes = VALUE_BYTES[name] * values / fragments
    exchange_s = links.exchange_s(sent_bytes)
    between = interval // fragments
    part = utilisation(between, delay_steps, step_s, exchange_s)
    window_s = between * step_s / part
    return SitesFigures(
        format=name,
        interval_steps=interval,
        fragments=fragments,
        delay_steps=delay_steps,
        exchange_s=exchange_s,
        utilisation=part,
        bytes_per_day=links.carried_bytes(sent_bytes) * DAY_S / window_s,
    )


def _row(name: str, one: SitesFigures) -> tuple[str, ...]:
    numbers = (one.interval_steps, one.fragments, one.delay_steps)
    traffic = f"{format_bytes(one.bytes_per_day)} per day"
    figures = (format_duration(one.exchange_s), percent(one.utilisation, 1), traffic)
    return (name, one.format, *map(str, numbers), *figures)
