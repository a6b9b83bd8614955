"""A multi-plane fabric: its figures beside an ordinary one's, and what failures of its parts cost the job."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.core.units import format_duration
from trainspec_cli.recipe.results.planes import Part, PlanesPlan
from trainspec_cli.report.plan.labels import percent
from trainspec_cli.report.rich_text import Text

NO_PACKETS = (
    "Failures are simulated by counts of paths, not packets: no queues, no congestion, no RDMA, and every NIC sends to "
    "one other."
)
LOSSES: dict[Part, str] = {
    "link": "lost with a link between T0 and T1",
    "port": "lost with a NIC's port",
    "t1_switch": "lost with a T1 switch",
    "t0_switch": "lost with a T0 switch",
    "plane": "lost with a plane",
    "transceiver": "lost with a NIC's transceiver",
}
EVENT_HEADINGS = ("failure", "lowest speed", "slower for", "time lost", "queue pairs touched", "paths unused at most")


def render_planes(planes: PlanesPlan) -> RenderableType:
    figures = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for place, heading in enumerate(figure_headings(planes)):
        figures.add_column(heading, justify="right" if place else "left")
    for row in figure_rows(planes):
        figures.add_row(*row)
    events = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for place, heading in enumerate(EVENT_HEADINGS):
        events.add_column(heading, justify="right" if place else "left")
    for row in event_rows(planes):
        events.add_row(*row)
    title = Text(f"Planes of the network  {planes.nics:,} NICs", style="bold")
    return Group(title, figures, Text(), events, Text(describe_dips(planes)), Text(NO_PACKETS, style="bright_black"))


def figure_headings(planes: PlanesPlan) -> tuple[str, str, str]:
    figures, single = planes.figures, planes.single
    return "", f"{figures.planes} planes", f"one plane, {single.switch_tiers} tiers"


def figure_rows(planes: PlanesPlan) -> Iterator[tuple[str, ...]]:
    both = planes.figures, planes.single
    yield ("switch tiers", *(str(one.switch_tiers) for one in both))
    yield ("ports of a switch", *(f"{one.radix:,} x {one.port_gbit_per_s:g}G" for one in both))
    yield ("most NICs", *(f"{one.most_nics:,}" for one in both))
    yield ("NICs one hop apart", *(f"{one.one_hop_nics:,}" for one in both))
    yield ("switches a NIC", *(f"{one.switches_per_nic:.4f}" for one in both))
    yield ("optics a NIC", *(f"{one.optics_per_nic:g}" for one in both))
    for part, name in LOSSES.items():
        yield (name, *(_loss(one.lost_speed[part]) for one in both))


def _loss(part: float) -> str:
    return "the job" if part >= 1 else f"{percent(part, 1)} of the speed"


def event_rows(planes: PlanesPlan) -> Iterator[tuple[str, ...]]:
    for event in planes.events:
        touched, bad = f"{100 * event.touched:.3g}%", f"{event.most_bad_paths:,}"
        if event.ends_job:
            yield event.name, "the job ends", "", "", touched, ""
            continue
        times = (format_duration(event.slow_s), format_duration(event.lost_s))
        yield event.name, percent(event.lowest_speed, 1), *times, touched, bad


def describe_dips(planes: PlanesPlan) -> str:
    """How the forecast counts failures of the network."""
    return (
        f"The forecast counts {planes.dips_per_day:.3g} failures of the network a day as dips, which cost "
        f"{percent(planes.dip_share, 3)} of the time, instead of ends of the job."
    )
