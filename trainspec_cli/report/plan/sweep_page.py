"""The page of a sweep: how it scales, what each point takes and costs, and one of its plans in detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from trainspec_cli.core.units import format_duration
from trainspec_cli.recipe.results.prediction import Candidate
from trainspec_cli.report.page.parts import PageOrigin, bar_rows, cell, origin_line, render_page, section, table
from trainspec_cli.report.plan import labels
from trainspec_cli.report.plan.page import FOOTER, body_of, heading_of, title_of
from trainspec_cli.report.plan.report import SweepPoint, SweepReport
from trainspec_cli.report.svg import LineSeries, Segment, render_bar, render_legend, render_lines


def render_sweep_page(sweep: SweepReport, origin: PageOrigin | None = None) -> str:
    """The page of a sweep: how it scales, then the plan of the last point that fits (else of the last)."""
    points = sweep.points
    shown = next((point for point in reversed(points) if point.plan.best), points[-1])
    chosen = f'<p class="soft below">In detail: <code>{escape(_setting(shown))}</code></p>'
    above = [heading_of(shown.plan), origin_line(origin), _scaling(sweep), *_outcomes(sweep), chosen]
    return render_page(title_of(shown.plan), "".join([*above, *body_of(shown.plan)]), FOOTER)


def _setting(point: SweepPoint) -> str:
    return " ".join(f"{key}={value}" for key, value in point.values.items())


def _scaling(sweep: SweepReport) -> str:
    fitting = [(point.plan.capacity.world_size, best) for point in sweep.points if (best := point.plan.best)]
    unit = sweep.points[0].plan.spec.model.unit
    chart = _scaling_chart(fitting, f"{unit} a second") if len(fitting) > 1 else ""
    figures = ("step", f"{unit}/s", "scaling", "MFU", "goodput", "time", "energy", "money")
    headings = (sweep.key, "#devices", "best layout", *(f"#{name}" for name in figures))
    rows = [_scaling_row(point, fitting[0][1] if fitting else None) for point in sweep.points]
    text = "Throughput of the best layout at each point. Scaling: throughput a device over that of the first that fits."
    return section(f"Scaling over {sweep.key}", text, chart + table(headings, rows))


def _outcomes(sweep: SweepReport) -> Iterator[str]:
    """Draw what each point takes in time, and costs, as bars: values of a swept key need be no numbers."""
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
            yield section(f"{title} over {sweep.key}", "Of the best layout's whole run.", bar_rows(rows))


def _scaling_chart(fitting: Sequence[tuple[int, Candidate]], rate: str) -> str:
    """Draw the throughput of the best layouts, each with its number of devices; nothing where two have the same."""
    points = sorted((devices, best.tokens_per_s) for devices, best in fitting)
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


def _scaling_row(point: SweepPoint, first: Candidate | None) -> str:
    plan, best, run = point.plan, point.plan.best, point.plan.run
    start = cell(point.value) + cell(f"{plan.capacity.world_size:,}", "number")
    if not best or not run or not first:
        return f'<tr>{start}<td colspan="9">nothing fits: {escape("; ".join(plan.capacity.advice[:1]))}</td></tr>'
    figures = "".join(cell(text, "number") for text in labels.sweep_figures(best, run, first))
    return f"<tr>{start}{cell(labels.layout_label(best.layout))}{figures}</tr>"
