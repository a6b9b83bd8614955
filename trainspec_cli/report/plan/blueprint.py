"""A plan's communication blueprint as a table and a picture: which exchange crosses which tier, by which algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.core.units import format_bytes, format_duration, format_si
from trainspec_cli.recipe.results.blueprint import Blueprint, BlueprintTier
from trainspec_cli.report.plan.labels import percent
from trainspec_cli.report.rich_text import Text

HEADINGS = ("axis", "ranks", "widest tier", "exchange", "message", "a step", "by", "takes", "flat ring")
NUMBERS = ("ranks", "message", "a step", "takes", "flat ring")
DRAWN_ELEMENTS = 32
"""The most elements of a tier that the picture shows."""
PICTURE_WIDTH, ROW_HEIGHT, BOX_HEIGHT, LEFT, RIGHT = 760, 58, 24, 150, 230


def render_blueprint(blueprint: Blueprint) -> RenderableType:
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left")
    for row in exchange_rows(blueprint):
        table.add_row(*row)
    title = Text.assemble(("Communication of the best layout", "bold"), f"  fabric {blueprint.fabric}")
    lines = [Text(line) for line in (describe_tiers(blueprint), *describe_order(blueprint))]
    settings = [Text(line, style="bright_black") for line in setting_lines(blueprint)]
    return Group(title, *lines, table, *settings)


def describe_tiers(blueprint: Blueprint) -> str:
    """`scale-up domain 4 x 8 at 3.6 Tbit/s, leaf 2 x 16 at 400 Gbit/s, ...`, a device's share each way."""
    tiers = (
        f"{tier.name} {tier.elements:,} x {tier.devices:,} at {format_si(tier.gbit_per_s * 1e9, 'bit/s')}"
        for tier in blueprint.tiers
    )
    return f"tiers   {', '.join(tiers)} a device"


def describe_order(blueprint: Blueprint) -> Iterator[str]:
    """The axes on the nodes, and what their order is worth."""
    yield f"order   {' > '.join(blueprint.order) or 'one rank'}, outermost first"
    if blueprint.node_places:
        usual_s, step_s = blueprint.unplaced_step_s, blueprint.step_s
        gain = percent(1 - step_s / usual_s, 1)
        yield f"nodes   placed so: a step of {format_duration(step_s)}, {gain} less than in the order of their numbers"
    elif blueprint.sorts_nodes:
        yield "nodes   in the order of their numbers, which follow the switches"


def exchange_rows(blueprint: Blueprint) -> Iterator[tuple[str, ...]]:
    for one in blueprint.exchanges:
        is_bucket = one.bucket_bytes is not None
        has_ring = one.algorithm != "direct"
        yield (
            one.axis,
            f"{one.ranks:,}",
            one.tier,
            one.operation.replace("_", "-") + (", in buckets" if is_bucket else ""),
            format_bytes(one.message_bytes),
            f"{one.per_step:,.0f}",
            one.algorithm,
            _milliseconds(one.time_s),
            _milliseconds(one.ring_s) if has_ring else "",
        )


def _milliseconds(time_s: float) -> str:
    """Three figures, where a duration would be rounded to whole milliseconds."""
    return f"{1e3 * time_s:.3g} ms" if time_s < 0.1 else format_duration(time_s)


def setting_lines(blueprint: Blueprint) -> Iterator[str]:
    """Variables of the workers, with why and who says so."""
    for setting in blueprint.settings:
        yield f"sets    {setting.name}={setting.value}: {setting.reason} ({setting.source})"
    if blueprint.tuner:
        yield "writes  nccl_tuner.csv, for those who load NCCL's example tuner (cluster.fabric.nccl_tuner)"


def draw_tiers(blueprint: Blueprint) -> str:
    """Draw each tier as a row of its elements, the whole cluster at the top, with the axes that go no further."""
    tiers = list(reversed(blueprint.tiers))
    height = ROW_HEIGHT * len(tiers)
    rows = "".join(_draw_tier(tier, number * ROW_HEIGHT, blueprint) for number, tier in enumerate(tiers))
    label = escape(describe_tiers(blueprint))
    return f'<svg class="chart" viewBox="0 0 {PICTURE_WIDTH} {height}" role="img" aria-label="{label}">{rows}</svg>'


def _draw_tier(tier: BlueprintTier, top: int, blueprint: Blueprint) -> str:
    drawn = min(tier.elements, DRAWN_ELEMENTS)
    pitch = (PICTURE_WIDTH - LEFT - RIGHT) / drawn
    boxes = "".join(
        f'<rect class="tier" x="{LEFT + pitch * place:.1f}" y="{top + 8}" width="{pitch * 0.9:.1f}" '
        f'height="{BOX_HEIGHT}" rx="3"><title>{escape(tier.name)}: {tier.devices:,} devices</title></rect>'
        for place in range(drawn)
    )
    axes = dict.fromkeys(one.axis for one in blueprint.exchanges if one.tier == tier.name)
    count = f"{tier.elements:,} x {tier.devices:,}, {format_si(tier.gbit_per_s * 1e9, 'bit/s')}"
    return (
        f'<text class="title" x="{LEFT - 10}" y="{top + 20}" text-anchor="end">{escape(tier.name)}</text>'
        f'<text class="tick" x="{LEFT - 10}" y="{top + 35}" text-anchor="end">{escape(count)}</text>{boxes}'
        f'<text class="title" x="{PICTURE_WIDTH - RIGHT + 10}" y="{top + 24}">{escape(", ".join(axes))}</text>'
    )
