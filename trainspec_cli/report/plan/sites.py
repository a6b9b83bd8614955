"""Far-apart sites: what their exchange comes to as the recipe has it, and the intervals that hide it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.core.units import format_bytes, format_duration
from trainspec_cli.recipe.results.sites import SitesFigures, SitesOutlook
from trainspec_cli.report.plan.labels import percent
from trainspec_cli.report.rich_text import Text

SITE_HEADINGS = ("", "format", "interval_steps", "fragments", "delay_steps", "an exchange", "trains", "busiest link")


def render_sites(sites: SitesOutlook) -> RenderableType:
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for place, heading in enumerate(SITE_HEADINGS):
        table.add_column(heading, justify="left" if place < 2 else "right")
    for row in site_rows(sites):
        table.add_row(*row)
    title = Text(f"Far-apart sites  {describe_links(sites)}", style="bold")
    return Group(title, table, Text(describe_beside(sites)), Text(f"{sites.loss_penalty}.", style="bright_black"))


def describe_links(sites: SitesOutlook) -> str:
    way = "directly joined" if sites.direct else "that meet at one"
    return f"{sites.sites} sites {way}, {sites.link_gbit_per_s:g} Gbit/s and {1e3 * sites.link_delay_s:g} ms each"


def site_rows(sites: SitesOutlook) -> Iterator[tuple[str, ...]]:
    yield _row("the recipe", sites.wanted)
    for one in sites.hidden:
        yield _row("hidden", one)


def _row(name: str, one: SitesFigures) -> tuple[str, ...]:
    numbers = (one.interval_steps, one.fragments, one.delay_steps)
    figures = (format_duration(one.exchange_s), percent(one.utilisation, 1), f"{format_bytes(one.bytes_per_day)} a day")
    return (name, one.format, *map(str, numbers), *figures)


def describe_beside(sites: SitesOutlook) -> str:
    """Set the exchange beside direct ways between the sites, and beside data parallelism over the same links."""
    listening = (
        f"Where every site listens (--site-listen) an exchange takes {format_duration(sites.direct_exchange_s)}. "
    )
    return (listening if not sites.direct and sites.sites > 2 else "") + (
        f"Data parallelism over these links would train {percent(sites.data_parallel_utilisation, 2)} of the time, and "
        f"sends {sites.fewer_bytes:,.0f} times as many bytes in fp32."
    )
