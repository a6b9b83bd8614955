"""What training at far-apart sites comes to over their links: intervals that hide the exchange, and bytes a day."""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.recipe.keys.resilience import SitesSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.prediction import Candidate, CapacityPlan
from trainspec_cli.recipe.results.sites import SitesFigures, SitesOutlook
from trainspec_cli.wings.sites.decisions.link import VALUE_BYTES, SiteLinks, hiding_interval, utilisation

DAY_S = 86_400.0
WANTED = 0.95
"""An exchange that leaves less of the time for training is not hidden."""
LOSS_PENALTY = (
    "Streaming DiLoCo reports the loss of data parallelism at 4 bits (arXiv:2501.18512); how a longer interval changes "
    "the loss is not predicted here, so take the shortest that hides the exchange"
)


def plan_sites(spec: RunSpec, capacity: CapacityPlan, best: Candidate) -> SitesOutlook | None:
    """Return None where the run is not one of several sites, or the recipe does not say how they are joined."""
    sites = spec.resilience.sites
    if spec.resilience.mode != "sites" or sites.link_gbit_s is None:
        return None
    return outlook(sites, float(capacity.params), best.step_time_s)


def outlook(sites: SitesSpec, values: float, step_s: float) -> SitesOutlook:
    """`values`: trained parameters. `step_s`: a step of a site by itself."""
    assert sites.link_gbit_s is not None, "the recipe says how the sites are joined"
    through = SiteLinks(sites.count, sites.link_gbit_s * 1e9 / 8, sites.link_delay_s)
    direct = replace(through, direct=True)
    links = direct if sites.listen else through
    wanted = _figures(links, sites.format, sites.interval_steps, sites.fragments, sites.delay_steps, values, step_s)
    found = (_shortest(links, name, sites.fragments, values, step_s) for name in VALUE_BYTES)
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
        hidden=tuple(one for one in found if one is not None),
        data_parallel_utilisation=step_s / (step_s + summed_s),
        fewer_bytes=sent_bytes / links.carried_bytes(VALUE_BYTES[sites.format] * values),
        loss_penalty=LOSS_PENALTY,
    )


def _shortest(links: SiteLinks, name: str, fragments: int, values: float, step_s: float) -> SitesFigures | None:
    exchange_s = links.exchange_s(VALUE_BYTES[name] * values / fragments)
    interval = hiding_interval(fragments, step_s, exchange_s, WANTED)
    if interval is None:
        return None
    return _figures(links, name, interval, fragments, interval // fragments, values, step_s)


def _figures(
    links: SiteLinks, name: str, interval: int, fragments: int, delay_steps: int, values: float, step_s: float
) -> SitesFigures:
    sent_bytes = VALUE_BYTES[name] * values / fragments
    exchange_s, between = links.exchange_s(sent_bytes), interval // fragments
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
