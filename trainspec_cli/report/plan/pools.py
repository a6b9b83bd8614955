"""A cluster of several pools: what each does in a step of the best layout, and the plans on fewer of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.core.units import format_bytes, format_duration
from trainspec_cli.recipe.results.pools import PoolChoice, PoolsPlan
from trainspec_cli.recipe.results.prediction import Candidate
from trainspec_cli.report.plan import labels
from trainspec_cli.report.plan.labels import percent
from trainspec_cli.report.rich_text import Text

PART_HEADINGS = ("pool", "devices", "stages", "layers", "samples", "micro-batch", "waits for others", "memory", "of")
WORDS = {"samples": "shares of the samples", "layers": "shares of the layers", "alone": ""}
JOULES_PER_KWH = 3.6e6


def render_pools(best: Candidate | None, plan: PoolsPlan, unit: str) -> RenderableType:
    parts: list[RenderableType] = []
    if best:
        title = Text("Pools in a step of the best layout", style="bold")
        parts += [title, _table(PART_HEADINGS, part_rows(best)), Text()]
    parts += [Text("All pools, and fewer", style="bold"), _table(choice_headings(unit), choice_rows(plan))]
    return Group(*parts, Text(sentence(plan.verdict)))


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def part_rows(best: Candidate) -> Iterator[tuple[str, ...]]:
    for part in best.pools:
        yield (
            part.pool,
            f"{part.devices:,}",
            str(part.stages),
            str(part.layers),
            f"{part.samples:,}",
            str(part.micro_batch_size),
            f"{format_duration(part.waiting_s)} of {format_duration(part.time.total_s)}",
            f"{labels.gib(part.peak_memory_bytes)} GiB",
            format_bytes(part.memory_limit_bytes),
        )


def choice_headings(unit: str) -> tuple[str, ...]:
    return ("pools", "by", "layout", "devices", "step", f"{unit}/s", "of all", "the run", f"$ a 1B {unit}", "kWh")


def choice_rows(plan: PoolsPlan) -> Iterator[tuple[str, ...]]:
    """(pools, what they share, layout, devices, step, units/s, over those of all pools, duration, price, energy)"""
    whole = plan.choices[0].tokens_per_s
    for choice in plan.choices:
        names = " + ".join(choice.pools) + (" alone" if len(choice.pools) == 1 else "")
        how = (
            names,
            WORDS[choice.division],
            labels.layout_label(choice.layout) if choice.layout else "nothing fits",
            f"{choice.devices:,}",
        )
        yield *how, *_figures(choice, whole)


def _figures(choice: PoolChoice, whole: float | None) -> tuple[str, ...]:
    if choice.step_time_s is None or choice.tokens_per_s is None or choice.wall_time_s is None:
        return ("",) * 6
    price, energy = choice.usd_per_token, choice.joules_per_token
    return (
        format_duration(choice.step_time_s),
        labels.format_rate(choice.tokens_per_s),
        percent(choice.tokens_per_s / whole) if whole else "",
        format_duration(choice.wall_time_s),
        "unknown" if price is None else labels.format_money(1e9 * price),
        "unknown" if energy is None else labels.format_grouped(1e9 * energy / JOULES_PER_KWH),
    )


def _table(headings: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("pool", "pools", "by", "layout") else "right")
    for row in rows:
        table.add_row(*row)
    return table
