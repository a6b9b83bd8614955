"""A discovered fabric for people: what was found and where, and the tiers that it makes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.reporter.rich_text import Text
from trainspec_cli.wings.doctor.found_fabric import FoundFabric, FoundTier


def render_fabric(found: FoundFabric) -> RenderableType:
    facts = _table(found.host, "found", "source")
    for fact in found.facts:
        facts.add_row(Text(fact.about), Text(fact.found), Text(fact.source))
    tiers = _table("tier", "devices", "Gbit/s", "latency us", "kind", "source")
    for place, tier in enumerate(found.tiers):
        tiers.add_row(*map(Text, _row(tier, place, len(found.tiers))))
    parts: list[RenderableType] = [facts, Text(), tiers]
    return Group(*parts, *(Text(line) for line in _notes(found)))


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(Text(name), overflow="fold")
    return table


def _row(tier: FoundTier, place: int, tiers: int) -> tuple[str, ...]:
    spec = tier.spec
    size = "all" if place == tiers - 1 else "a node's" if place == 0 else "?"
    return (
        spec.name,
        str(spec.devices or size),
        "?" if spec.gbit_per_s is None else f"{spec.gbit_per_s:g}",
        "?" if spec.latency_us is None else f"{spec.latency_us:g}",
        spec.kind or "",
        tier.source,
    )


def _notes(found: FoundFabric) -> Iterator[str]:
    not_found: dict[tuple[str, str], list[str]] = {}
    for tier in found.tiers:
        for key, advice in tier.left_out.items():
            not_found.setdefault((key, advice), []).append(tier.spec.name)
    for (key, advice), names in not_found.items():
        yield f"not found: {key} of {', '.join(names)}; {advice}"
    yield from (f"note: {remark}" for remark in found.remarks)
