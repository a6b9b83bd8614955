"""The page of a plan: its layouts with their memory and time, and the run's forecast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from trainspec_cli.core.printable import format_bytes, format_count, format_duration
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import Assumption, Goodput, RunForecast
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.reporter.page.parts import (
    PageOrigin,
    bar_rows,
    cell,
    heading,
    note,
    origin_line,
    plain_list,
    plain_table,
    render_page,
    section,
    table,
    text_table,
    tiles,
)
from trainspec_cli.reporter.page.svg import LineSeries, Segment, render_bar, render_legend, render_lines
from trainspec_cli.reporter.plan import labels
from trainspec_cli.reporter.plan.labels import PlanReport, SweepPoint, SweepReport, percent
from trainspec_cli.reporter.plan.sections import (
    DECISION_HEADINGS,
    EVENT_HEADINGS,
    HEADINGS,
    NO_PACKETS,
    PACE_HEADINGS,
    PART_HEADINGS,
    WHERE,
    choice_headings,
    choice_rows,
    decision_rows,
    describe_dips,
    describe_order,
    describe_won_back,
    draw_tiers,
    event_lines,
    event_rows,
    exchange_rows,
    figure_headings,
    figure_rows,
    pace_rows,
    part_rows,
    sentence,
    setting_lines,
)
from trainspec_cli.reporter.plan.text import assumption_row, run_rows

CHARTED_CANDIDATES = 8
TABLED_CANDIDATES = 20
FOOTER = (
    "Planned by trainspec. MFU counts model FLOPs (for attention, only the causal half), relative to the peak "
    "of the matrix products' format; HFU counts all executed FLOPs, including recomputation. A GiB is "
    "2<sup>30</sup> bytes. Ranges are 90% intervals."
)


def render_plan_page(plan: PlanReport, origin: PageOrigin | None = None) -> str:
    return render_page(title_of(plan), "".join([heading_of(plan), origin_line(origin), *body_of(plan)]), FOOTER)


def title_of(plan: PlanReport) -> str:
    model = plan.spec.model
    return f"{model.name or model.family} on {labels.devices_label(plan)}"


def heading_of(plan: PlanReport) -> str:
    run = plan.run
    unit = plan.spec.model.unit
    length = f"; {format_count(run.tokens)} {unit} in {run.steps:,} steps" if run else ""
    text = f"{labels.model_label(plan)}; {labels.batch_label(plan)} samples per step{length}"
    return heading(title_of(plan), text) + note(labels.defaults_label(plan) if plan.defaults else "")


def body_of(plan: PlanReport) -> Iterator[str]:
    best = plan.best
    run = plan.run
    if not best:
        yield (
            '<section class="refusal"><h2>No layout fits</h2><p>Each layout needs more memory than a device has, or '
            f"breaks a rule. What would fit:</p>{plain_list(plan.capacity.advice)}</section>"
        )
    if best and run:
        figures = [
            (name, show(figure.value), labels.format_range(figure, show))
            for name, figure, show in (
                ("time to train", run.wall_time_s, format_duration),
                ("goodput", run.goodput.goodput, labels.goodput_percent),
                ("energy", run.energy_joules, labels.format_energy),
                ("carbon (CO2e)", run.carbon_kg, labels.format_mass),
                ("money", run.cost_usd, labels.format_money),
            )
            if figure is not None
        ]
        rate = f"MFU {percent(best.mfu, 1)}, HFU {percent(best.hfu, 1)}"
        figures.insert(2, (f"{plan.spec.model.unit}/s/device", labels.format_rate(best.tokens_per_s_per_gpu), rate))
        yield tiles(figures)
    yield _candidates(plan)
    if best:
        yield _memory(best)
    if plan.capacity.candidates:
        yield _step_times(plan.capacity.candidates)
    if plan.pools:
        parts = plain_table(PART_HEADINGS, part_rows(best)) if best else ""
        choices = plain_table(choice_headings(plan.spec.model.unit), choice_rows(plan.pools))
        text = "Each pool's part of a step in the best layout, and the best plans with fewer pools."
        yield section("Pools", f"{text} {sentence(plan.pools.verdict)}", parts + choices)
    if blueprint := plan.blueprint:
        order = "; ".join(" ".join(line.split()) for line in describe_order(blueprint))
        text = f"Fabric {blueprint.fabric}, and the axes whose exchanges reach each tier. {sentence(order)}"
        drawn = draw_tiers(blueprint) + text_table(HEADINGS, exchange_rows(blueprint))
        yield section("Communication", text, drawn + "".join(map(note, setting_lines(blueprint))))
    if plan.planes:
        tables = text_table(figure_headings(plan.planes), figure_rows(plan.planes))
        tables += text_table(EVENT_HEADINGS, event_rows(plan.planes))
        yield section("Planes of the network", f"{describe_dips(plan.planes)} {NO_PACKETS}", tables)
    for part in plan.sections:
        about = f"{part.about}. {part.text} {part.known}."
        yield section(part.title, about, plain_table(part.headings, part.rows))
    if simulation := plan.simulation:
        tables = plain_table(PACE_HEADINGS, pace_rows(simulation))
        tables += plain_table(DECISION_HEADINGS, decision_rows(simulation))
        text = f"{'; '.join(event_lines(simulation))}. {describe_won_back(simulation)}. {WHERE}"
        yield section(f"Disturbance {simulation.name}, simulated", text, tables)
    if run:
        yield _goodput(run)
    if plan.rejected:
        most = max(plan.rejected.values())
        rows = [
            (reason, render_bar([Segment("c-refused", reason, count, f"{count:,}")], most), f"{count:,}")
            for reason, count in plan.rejected.items()
        ]
        yield section("Refused", "Layouts that were rejected, by reason.", bar_rows(rows))
    if run:
        yield _run(plan.spec, run)
        yield _assumptions(run.assumptions, plan.capacity.assumptions)


def _candidates(plan: PlanReport) -> str:
    unit = plan.spec.model.unit
    capacity = plan.capacity
    headings = ("", "layout", "micro-batch", "recompute", "#step", f"#{unit}/s/device", "#MFU", "#HFU", "memory")
    kinds = ("name", "", "", "number", "number", "number", "number")
    rows = []
    for rank, candidate in enumerate(capacity.candidates[:TABLED_CANDIDATES], 1):
        part = candidate.peak_memory_bytes / candidate.memory_limit_bytes
        used = Segment("c-used" if part <= 1 else "c-full", "peak", min(part, 1.0), percent(part))
        limit = f"{labels.gib(candidate.peak_memory_bytes)} of {labels.gib(candidate.memory_limit_bytes)} GiB"
        chance = f", <span>fits at {escape(labels.chance(candidate))}</span>" if candidate.fits else ""
        cells = [cell(str(rank)), *map(cell, labels.candidate_cells(candidate), kinds)]
        cells.append(f'<td class="meter">{render_bar([used], 1.0)}<small>{limit}{chance}</small></td>')
        rows.append(f"<tr{' class=best' if rank == 1 and candidate.fits else ''}>{''.join(cells)}</tr>")
    considered = f"{capacity.considered:,} layouts were considered; " if capacity.considered else ""
    listed = f"the {len(rows)} best are listed." if plan.best else "none fits; these come closest."
    safest = capacity.safest and plan.best and labels.safest_label(plan.best, capacity.safest)
    said = "".join(f" {heading}: {text}." for heading, text in labels.choice_lines(capacity))
    said += f" Safest within 10%: {safest}." if safest else ""
    return section("Layouts", f"{considered}{listed}{said}", table(headings, rows))


def _memory(best: Candidate) -> str:
    stages = best.memory
    limit = best.memory_limit_bytes
    scale = max(limit, *(stage.total_bytes for stage in stages)) * 1.02
    names = [f"stage {number}" for number in range(1, len(stages) + 1)] if len(stages) > 1 else ["each device"]
    bars = [render_bar(_segments(vars(stage), labels.MEMORY_PARTS, format_bytes), scale, limit) for stage in stages]
    rows = list(zip(names, bars, (format_bytes(stage.total_bytes) for stage in stages), strict=True))
    legend = render_legend(_segments(vars(best.fullest_memory), labels.MEMORY_PARTS, format_bytes))
    text = f"Peak of the best layout, by cause; the dashed line marks a device's limit, {format_bytes(limit)}."
    if cut := labels.cut_label(best.layout):
        text += f" Layers of its pipeline stages: {cut}."
    return section("Memory", text, bar_rows(rows) + legend)


def _step_times(candidates: Sequence[Candidate]) -> str:
    shown = candidates[:CHARTED_CANDIDATES]
    scale = max(candidate.step_time_s for candidate in shown)
    rows = []
    others: dict[str, Segment] = {}
    for rank, candidate in enumerate(shown, 1):
        phases = _segments(vars(candidate.time), labels.TIME_PARTS, format_duration)
        others |= {segment.kind: segment for segment in phases}
        name = f"{rank}  {labels.placed_label(candidate)}"
        rows.append((name, render_bar(phases, scale), format_duration(candidate.step_time_s)))
    text = (
        "By phase: work is blue, communication that is not hidden behind it is orange, waiting is grey. "
        "Values are those of the first layout."
    )
    first = _segments(vars(shown[0].time), labels.TIME_PARTS, format_duration)
    # Phases that occur only in other layouts have a legend entry without a value.
    absent = [segment for kind, segment in others.items() if kind not in {segment.kind for segment in first}]
    legend = render_legend(first) + (render_legend(absent, False) if absent else "")
    return section("Step time", text, bar_rows(rows) + legend)


def _goodput(run: RunForecast) -> str:
    recovery = run.goodput
    modes = [run.goodput, *run.alternatives]
    scale = max(max(1 - mode.goodput.value for mode in modes), 1e-9) * 1.02
    rows = [
        (labels.MODES[mode.mode], render_bar(_losses(mode), scale), f"{percent(1 - mode.goodput.value, 2)} lost")
        for mode in modes
    ]
    seen = {segment.kind: segment for mode in reversed(modes) for segment in _losses(mode)}
    text = (
        f"Wall time without progress. A failure every {format_duration(recovery.mtbf_s)} is expected, "
        f"{recovery.failures:.3g} over the run; a checkpoint every "
        f"{format_duration(recovery.checkpoint_interval_s)} ({recovery.checkpoint_interval_steps:,} steps)."
    )
    return section("Time lost", text, bar_rows(rows) + render_legend(list(seen.values()), False))


def _losses(mode: Goodput) -> list[Segment]:
    return [
        Segment(f"c-{key}", name, mode.lost[key], percent(mode.lost[key], 2))
        for key, name in labels.LOST_PARTS.items()
        if mode.lost.get(key, 0.0) > 0
    ]


def _run(spec: RunSpec, run: RunForecast) -> str:
    rows = [
        f"<tr>{cell(name)}{cell(expected, 'name')}{cell(bounds, 'name')}{cell(detail)}</tr>"
        for name, expected, bounds, detail in run_rows(spec, run)
    ]
    notes = "".join(map(note, run.notes))
    return section("The run", "", table(("", "expected", "bounds", ""), rows) + notes)


def _assumptions(of_run: Sequence[Assumption], of_layouts: Sequence[str]) -> str:
    rows = []
    for assumption in of_run:
        key, value, within, _ = assumption_row(assumption)
        flag = "" if assumption.verified else ' <span class="flag">unchecked</span>'
        source = f"<td>{escape(assumption.source)}{flag}</td>"
        rows.append(
            f"<tr><td><code>{escape(key)}</code></td>{cell(value, 'number')}{cell(within, 'number')}{source}</tr>"
        )
    rows += [f"<tr><td>layouts</td><td></td><td></td>{cell(text)}</tr>" for text in of_layouts]
    text = "Inputs of the predictions, each with the key that changes it; x2 means between half and twice the value."
    return section("Assumptions", text, table(("key", "#value", "#within", "source"), rows))


def _segments(breakdown: Mapping[str, float], names: dict[str, str], say: labels.Formatter) -> list[Segment]:
    return [Segment(f"c-{key}", name, value, say(value)) for key, name, value in labels.present(breakdown, names)]


# The page of a sweep: scaling, time and cost of every point, and one plan in detail.


def render_sweep_page(sweep: SweepReport, origin: PageOrigin | None = None) -> str:
    """Render the page of a sweep: the scaling, then the plan for the last point that fits (or for the last point, if
    none fits)."""
    points = sweep.points
    # The purpose of a sweep is usually to find the largest value that fits.
    shown = next((point for point in reversed(points) if point.plan.best), points[-1])
    chosen = f'<p class="soft below">In detail: <code>{escape(_setting(shown))}</code></p>'
    # Draw the time and cost of each point as bars, because the values of a swept key need not be numbers.
    outcomes = []
    runs = [(point.value, point.plan.run) for point in sweep.points if point.plan.run]
    times = [(value, run.wall_time_s) for value, run in runs]
    costs = [(value, run.cost_usd) for value, run in runs if run.cost_usd]
    for title, figures, show in (("Time", times, format_duration), ("Money", costs, labels.format_money)):
        if len(figures) > 1:
            most = max(figure.value for _, figure in figures)
            drawn = [(value, show(figure.value), figure.value) for value, figure in figures]
            rows = [
                (value, render_bar([Segment("c-used", title, size, text)], most), text) for value, text, size in drawn
            ]
            outcomes.append(
                section(f"{title} over {sweep.key}", "For the entire run in the best layout.", bar_rows(rows))
            )
    above = [heading_of(shown.plan), origin_line(origin), _scaling(sweep), *outcomes, chosen]
    return render_page(title_of(shown.plan), "".join([*above, *body_of(shown.plan)]), FOOTER)


def _setting(point: SweepPoint) -> str:
    return " ".join(f"{key}={value}" for key, value in point.values.items())


def _scaling(sweep: SweepReport) -> str:
    fitting = [(point.plan.capacity.world_size, best) for point in sweep.points if (best := point.plan.best)]
    unit = sweep.points[0].plan.spec.model.unit
    chart = _scaling_chart(fitting, f"{unit} per second") if len(fitting) > 1 else ""
    found = [
        labels.sweep_figures(plan.best, plan.run, fitting[0][1], unit) if plan.best and plan.run else {}
        for plan in (point.plan for point in sweep.points)
    ]
    headings = next(filter(None, found), {})
    rows = []
    for point, figures in zip(sweep.points, found, strict=True):
        plan = point.plan
        start = cell(point.value) + cell(f"{plan.capacity.world_size:,}", "number")
        if plan.best:
            start += cell(labels.layout_label(plan.best.layout))
            start += "".join(cell(text, "number") for text in figures.values())
        else:
            advice = escape("; ".join(plan.capacity.advice[:1]))
            start += f'<td colspan="{1 + len(headings)}">nothing fits: {advice}</td>'
        rows.append(f"<tr>{start}</tr>")
    text = (
        "Throughput of the best layout at each point. Scaling: throughput per device relative to the first that fits."
    )
    names = (sweep.key, "#devices", "best layout", *(f"#{name}" for name in headings))
    return section(sweep.title, text, chart + table(names, rows))


def _scaling_chart(fitting: Sequence[tuple[int, Candidate]], rate: str) -> str:
    """Plot the throughput of the best layouts against the number of devices; empty if two points have the same
    number."""
    points = sorted((devices, best.tokens_per_s) for devices, best in fitting)
    # A line cannot connect two points with the same number of devices.
    if len({devices for devices, _ in points}) < len(points):
        return ""
    (first_x, first_y), (last_x, _) = points[0], points[-1]
    lines = [
        LineSeries("c-ideal", "even scaling", [(first_x, first_y), (last_x, first_y * last_x / first_x)], marked=False),
        LineSeries("c-measure", rate, points),
    ]
    ticks = [(x, f"{x:,}") for x, _ in points]
    legend = render_legend([Segment(line.kind, line.label, 0, "") for line in reversed(lines)])
    return render_lines(lines, "devices", rate, ticks) + legend
