"""The optional parts of a plan: communication, network planes, pools, and a simulated disturbance. The terminal output
(here) and the page (`page.py`) share rows and sentences. A heading that starts with # marks a column of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.console import Group, RenderableType

from trainspec_cli.core.printable import format_bytes, format_duration, format_si
from trainspec_cli.recipe.results.blueprint import Blueprint, Part, PlanesPlan, PoolsPlan
from trainspec_cli.recipe.results.forecast import Simulation
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.reporter.chart import render_chart
from trainspec_cli.reporter.console import Text, text_table
from trainspec_cli.reporter.plan import labels
from trainspec_cli.reporter.plan.labels import percent

# The communication blueprint: the tier that each exchange crosses, and its algorithm.


HEADINGS = ("axis", "#ranks", "widest tier", "exchange", "#message", "#per step", "by", "#takes", "#flat ring")
DRAWN_ELEMENTS = 32
"""Maximum number of elements drawn per tier."""
PICTURE_WIDTH = 760
ROW_HEIGHT = 58
BOX_HEIGHT = 24
LEFT = 150
RIGHT = 230


def render_blueprint(blueprint: Blueprint) -> RenderableType:
    title = Text.assemble(("Communication of the best layout", "bold"), f"  fabric {blueprint.fabric}")
    lines = [Text(line) for line in (describe_tiers(blueprint), *describe_order(blueprint))]
    settings = [Text(line, style="bright_black") for line in setting_lines(blueprint)]
    return Group(title, *lines, text_table(HEADINGS, exchange_rows(blueprint)), *settings)


def describe_tiers(blueprint: Blueprint) -> str:
    """`scale-up domain 4 x 8 at 3.6 Tbit/s, leaf 2 x 16 at 400 Gbit/s, ...`: the bandwidth is per device and
    direction."""
    tiers = (
        f"{tier.name} {tier.elements:,} x {tier.devices:,} at {format_si(tier.gbit_per_s * 1e9, 'bit/s')}"
        for tier in blueprint.tiers
    )
    return f"tiers   {', '.join(tiers)} per device"


def describe_order(blueprint: Blueprint) -> Iterator[str]:
    """Yield the order of the axes across the nodes, and the time saved by placing the nodes in another order."""
    yield f"order   {' > '.join(blueprint.order) or 'one rank'}, outermost first"
    if blueprint.node_places:
        usual_s = blueprint.unplaced_step_s
        step_s = blueprint.step_s
        gain = percent(1 - step_s / usual_s, 1)
        step = f"a step of {format_duration(step_s)}, {gain} less than in numerical order"
        yield f"nodes   placed in this order: {step}"
    elif blueprint.sorts_nodes:
        yield "nodes   in numerical order, which already follows the switches"


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
    """Format with three digits; `format_duration` would round to whole milliseconds."""
    return f"{1e3 * time_s:.3g} ms" if time_s < 0.1 else format_duration(time_s)


def setting_lines(blueprint: Blueprint) -> Iterator[str]:
    """Yield the workers' environment variables, each with its reason and source."""
    for setting in blueprint.settings:
        yield f"sets    {setting.name}={setting.value}: {setting.reason} ({setting.source})"
    if blueprint.tuner:
        yield "writes  nccl_tuner.csv, for use with NCCL's example tuner (cluster.fabric.nccl_tuner)"


def draw_tiers(blueprint: Blueprint) -> str:
    """Draw each tier as a row of elements, with the full cluster at the top. Next to each tier, list the axes whose
    widest tier it is."""
    rows = []
    for number, tier in enumerate(reversed(blueprint.tiers)):
        top = number * ROW_HEIGHT
        drawn = min(tier.elements, DRAWN_ELEMENTS)
        pitch = (PICTURE_WIDTH - LEFT - RIGHT) / drawn
        boxes = "".join(
            f'<rect class="tier" x="{LEFT + pitch * place:.1f}" y="{top + 8}" width="{pitch * 0.9:.1f}" '
            f'height="{BOX_HEIGHT}" rx="3"><title>{escape(tier.name)}: {tier.devices:,} devices</title></rect>'
            for place in range(drawn)
        )
        axes = ", ".join(dict.fromkeys(one.axis for one in blueprint.exchanges if one.tier == tier.name))
        count = f"{tier.elements:,} x {tier.devices:,}, {format_si(tier.gbit_per_s * 1e9, 'bit/s')}"
        rows.append(
            f'<text class="title" x="{LEFT - 10}" y="{top + 20}" text-anchor="end">{escape(tier.name)}</text>'
            f'<text class="tick" x="{LEFT - 10}" y="{top + 35}" text-anchor="end">{escape(count)}</text>{boxes}'
            f'<text class="title" x="{PICTURE_WIDTH - RIGHT + 10}" y="{top + 24}">{escape(axes)}</text>'
        )
    box = f'viewBox="0 0 {PICTURE_WIDTH} {ROW_HEIGHT * len(rows)}"'
    label = escape(describe_tiers(blueprint))
    return f'<svg class="chart" {box} role="img" aria-label="{label}">{"".join(rows)}</svg>'


# A multi-plane fabric in comparison with a single-plane one, and the cost of component failures.


NO_PACKETS = (
    "Failures are simulated by counting paths, not packets: no queues, no congestion, no RDMA, and every NIC sends to "
    "one other NIC."
)
LOSSES: dict[Part, str] = {
    "link": "lost with a link between T0 and T1",
    "port": "lost with a NIC's port",
    "t1_switch": "lost with a T1 switch",
    "t0_switch": "lost with a T0 switch",
    "plane": "lost with a plane",
    "transceiver": "lost with a NIC's transceiver",
}
EVENT_HEADINGS = (
    *("failure", "#lowest speed", "#slower for", "#time lost"),
    *("#queue pairs touched", "#paths unused at most"),
)


def render_planes(planes: PlanesPlan) -> RenderableType:
    figures = text_table(figure_headings(planes), figure_rows(planes))
    events = text_table(EVENT_HEADINGS, event_rows(planes))
    title = Text(f"Planes of the network  {planes.nics:,} NICs", style="bold")
    return Group(title, figures, Text(), events, Text(describe_dips(planes)), Text(NO_PACKETS, style="bright_black"))


def figure_headings(planes: PlanesPlan) -> tuple[str, str, str]:
    return "", f"#{planes.figures.planes} planes", f"#one plane, {planes.single.switch_tiers} tiers"


def figure_rows(planes: PlanesPlan) -> Iterator[tuple[str, ...]]:
    both = planes.figures, planes.single
    yield ("switch tiers", *(str(one.switch_tiers) for one in both))
    yield ("ports of a switch", *(f"{one.radix:,} x {one.port_gbit_per_s:g}G" for one in both))
    yield ("most NICs", *(f"{one.most_nics:,}" for one in both))
    yield ("NICs one hop apart", *(f"{one.one_hop_nics:,}" for one in both))
    yield ("switches per NIC", *(f"{one.switches_per_nic:.4f}" for one in both))
    yield ("optics per NIC", *(f"{one.optics_per_nic:g}" for one in both))
    for part, name in LOSSES.items():
        yield (name, *(_loss(one.lost_speed[part]) for one in both))


def _loss(part: float) -> str:
    return "the job" if part >= 1 else f"{percent(part, 1)} of the speed"


def event_rows(planes: PlanesPlan) -> Iterator[tuple[str, ...]]:
    for event in planes.events:
        touched = f"{100 * event.touched:.3g}%"
        bad = f"{event.most_bad_paths:,}"
        if event.ends_job:
            yield event.name, "the job ends", "", "", touched, ""
            continue
        times = (format_duration(event.slow_s), format_duration(event.lost_s))
        yield event.name, percent(event.lowest_speed, 1), *times, touched, bad


def describe_dips(planes: PlanesPlan) -> str:
    """Describe how the forecast accounts for network failures."""
    return (
        f"The forecast counts {planes.dips_per_day:.3g} network failures per day as dips (which cost "
        f"{percent(planes.dip_share, 3)} of the time) rather than as job failures."
    )


# For a cluster with several pools: each pool's part of a step in the best layout, and the plans on fewer pools.


PART_HEADINGS = (
    *("pool", "#devices", "#stages", "#layers", "#samples", "#micro-batch"),
    *("#waits for others", "#memory", "#of"),
)
WORDS = {"samples": "shares of the samples", "layers": "shares of the layers", "alone": ""}
JOULES_PER_KWH = 3.6e6


def render_pools(best: Candidate | None, plan: PoolsPlan, unit: str) -> RenderableType:
    parts: list[RenderableType] = []
    if best:
        title = Text("Pools in a step of the best layout", style="bold")
        parts += [title, text_table(PART_HEADINGS, part_rows(best)), Text()]
    parts += [
        Text("Plans on all pools and on fewer", style="bold"),
        text_table(choice_headings(unit), choice_rows(plan)),
    ]
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
    figures = ("devices", "step", f"{unit}/s", "of all", "the run", f"$ a 1B {unit}", "kWh")
    return ("pools", "by", "layout", *(f"#{figure}" for figure in figures))


def choice_rows(plan: PoolsPlan) -> Iterator[tuple[str, ...]]:
    """Yield (pools, what is divided among them, layout, devices, step, units/s, relative speed, duration, price,
    energy)."""
    whole = plan.choices[0].tokens_per_s
    for choice in plan.choices:
        names = " + ".join(choice.pools) + (" alone" if len(choice.pools) == 1 else "")
        how = (
            names,
            WORDS[choice.division],
            labels.layout_label(choice.layout) if choice.layout else "nothing fits",
            f"{choice.devices:,}",
        )
        if choice.step_time_s is None or choice.tokens_per_s is None or choice.wall_time_s is None:
            figures = ("",) * 6
        else:
            price = choice.usd_per_token
            energy = choice.joules_per_token
            figures = (
                format_duration(choice.step_time_s),
                labels.format_rate(choice.tokens_per_s),
                percent(choice.tokens_per_s / whole) if whole else "",
                format_duration(choice.wall_time_s),
                "unknown" if price is None else labels.format_money(1e9 * price),
                "unknown" if energy is None else labels.format_grouped(1e9 * energy / JOULES_PER_KWH),
            )
        yield *how, *figures


# A simulated disturbance: the decisions, and the speed without the scheduler, with it, and in the ideal case.


KINDS = {
    "shares": "other shares",
    "group_shares": "shares of the replica groups",
    "layers": "other layers in the stages",
    "layout": "another layout",
    "nodes": "other nodes",
}
WHERE = (
    "The live scheduler uses the same functions for its decisions. It has run on CPUs and on an emulated accelerator, "
    "but never on GPUs."
)
PACE_HEADINGS = ("", "#samples/s", "#of undisturbed", "#time")
DECISION_HEADINGS = ("#step", "decision", "reason", "computing in a step")
SHOWN_EVENTS = 8
SHOWN_DECISIONS = 20
CHART_ROWS = 8
MARGIN = 12
"""Number of columns reserved for the chart's labels."""


def render_simulation(simulation: Simulation, width: int, *, verbose: bool = True) -> RenderableType:
    """Render the speeds and, if `verbose` is set, the events, the speed by step and each decision."""
    ranks = simulation.data_parallel_ranks
    batch = simulation.global_batch_size
    what = f"{simulation.steps:,} steps of {batch:,} samples over {ranks:,} data-parallel ranks"
    title = Text(f"Disturbance {simulation.name}, simulated  {what}", style="bold")
    pace = text_table(PACE_HEADINGS, pace_rows(simulation))
    if not verbose:
        return Group(title, pace, Text(describe_won_back(simulation)))
    rows = list(decision_rows(simulation))
    table = text_table(DECISION_HEADINGS, rows[:SHOWN_DECISIONS])
    if len(rows) > SHOWN_DECISIONS:
        table.add_row("", f"and {len(rows) - SHOWN_DECISIONS:,} more", "", "")
    points = list(enumerate(simulation.on.by_step, 1))
    chart = "samples/s by step, scheduler on"
    parts: list[RenderableType] = [
        title,
        *map(Text, event_lines(simulation)),
        pace,
        Text(f"{describe_won_back(simulation)}\n{WHERE}"),
        Text(render_chart(points, width=max(20, width - MARGIN), height=CHART_ROWS, title=chart)),
        Text("Decisions", style="bold"),
        table if rows else Text("none"),
    ]
    return Group(*parts)


def event_lines(simulation: Simulation) -> Iterator[str]:
    events = simulation.events
    yield from events[:SHOWN_EVENTS]
    if len(events) > SHOWN_EVENTS:
        yield f"and {len(events) - SHOWN_EVENTS:,} more"


def pace_rows(simulation: Simulation) -> Iterator[tuple[str, str, str, str]]:
    """Yield (how the samples are divided, samples per second, speed relative to an undisturbed run, duration of the
    full run)."""
    undisturbed = simulation.global_batch_size / simulation.step_s
    yield (
        "undisturbed",
        f"{undisturbed:,.4g}",
        percent(1.0),
        format_duration(simulation.steps * simulation.step_s),
    )
    for name, pace in (
        ("scheduler off", simulation.off),
        ("scheduler on", simulation.on),
        ("ideal, whole samples", simulation.ideal),
        ("ideal, any share", simulation.ideal_real),
    ):
        rate = pace.samples_per_s
        yield name, f"{rate:,.4g}", percent(rate / undisturbed, 1), format_duration(pace.wall_s)


def describe_won_back(simulation: Simulation) -> str:
    """`94% of the loss recoverable with whole samples is recovered (92% with fractional samples)`"""
    won = simulation.won_back
    of_real = simulation.won_back_of_real
    if of_real is None:
        return "other shares would not recover any loss"
    if won is None:
        return "with whole samples, nothing can be recovered; a larger batch allows finer shares"
    return (
        f"{percent(won)} of the loss recoverable with whole samples is recovered "
        f"({percent(of_real)} with fractional samples)"
    )


def decision_rows(simulation: Simulation) -> Iterator[tuple[str, str, str, str]]:
    """Yield (step, decision, reason, compute time before, expected compute time, achieved compute time)."""
    for decision in simulation.decisions:
        group = "" if decision.group is None else f" in replica group {decision.group}"
        what = KINDS[decision.kind] + group
        if decision.micro_batches is not None:
            what += f", {decision.micro_batch_size} x {decision.micro_batches} at most"
        gain = f"{format_duration(decision.before_s)} -> {format_duration(decision.expected_s)}"
        yield (
            f"{decision.step:,}",
            what,
            decision.reason,
            f"{gain}, was {format_duration(decision.achieved_s)}",
        )
