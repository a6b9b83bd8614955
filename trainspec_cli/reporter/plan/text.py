"""A plan in the terminal: the ranked layouts, the best one taken apart, and the run it would be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from trainspec_cli.core.printable import format_bytes, format_count, format_duration, format_si
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import Assumption, Interval, RunForecast
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.recipe.user_code import describe_code
from trainspec_cli.reporter.plan import labels
from trainspec_cli.reporter.plan.labels import PlanReport, PlanSection, SweepPoint, SweepReport, percent
from trainspec_cli.reporter.plan.sections import render_blueprint, render_planes, render_pools, render_simulation
from trainspec_cli.reporter.rich_text import Text, text_table

WIDE = 120
"""Columns that the whole table of layouts takes."""
SHOWN_CANDIDATES = 8
SHOWN_REASONS = 8
SHOWN_SIZES = 6
BAR_WIDTH = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"
COMPUTE = "cyan"
COMMUNICATION = "yellow"
WAITING = "bright_black"
TIME_COLOURS = {key: COMMUNICATION for key in labels.TIME_PARTS if "comm" in key} | dict.fromkeys(
    ("bubble_s", "data_s", "host_s"), WAITING
)


def render_plan(plan: PlanReport, width: int = WIDE) -> RenderableType:
    """Everything there is to say about one plan, on a terminal of `width` columns."""
    layouts = _candidates(plan) if width >= WIDE else _candidates_narrow(plan)
    parts: list[RenderableType] = [_header(plan), layouts]
    if best := plan.best:
        parts += [*_stages(best), _memory(best), _time(best)]
    if plan.pools:
        parts.append(render_pools(plan.best, plan.pools, plan.spec.model.unit))
    if plan.blueprint:
        parts.append(render_blueprint(plan.blueprint))
    if plan.planes:
        parts.append(render_planes(plan.planes))
    parts += map(_section, plan.sections)
    if plan.simulation:
        parts.append(render_simulation(plan.simulation, min(width, WIDE)))
    if plan.trace:
        from trainspec_cli.reporter.plan.trace import render_trace  # loads tables of results

        parts.append(render_trace(plan.trace))
    parts += _refusals(plan)
    if plan.run:
        parts += [_run(plan, plan.run), _assumptions(plan, plan.run)]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _section(section: PlanSection) -> RenderableType:
    headings = [*section.headings[:2], *(f"#{heading}" for heading in section.headings[2:])]
    table = text_table(headings, section.rows)
    title = Text(f"{section.title}  {section.about}", style="bold")
    return Group(title, table, Text(section.text), Text(f"{section.known}.", style="bright_black"))


def render_sweep(sweep: SweepReport) -> RenderableType:
    """One line for each value of the swept key."""
    unit = sweep.points[0].plan.spec.model.unit
    first = next((point.plan.best for point in sweep.points if point.plan.best), None)
    figures = ("step", f"{unit}/s", "scaling", "MFU", "goodput", "time", "energy", "money", "memory")
    headings = (f"#{sweep.key}", "#devices", "best layout", *(f"#{figure}" for figure in figures))
    table = text_table(headings, (list(_sweep_row(point, first)) for point in sweep.points))
    return Group(Text(f"Scaling over {sweep.key}", style="bold"), table)


def _header(plan: PlanReport) -> RenderableType:
    unit = plan.spec.model.unit
    flops = f"{format_si(plan.capacity.flops_per_token, 'FLOP')} a {unit[:-1]} (attention counted causal)"
    lines = [("model", f"{labels.model_label(plan)}; {flops}"), ("cluster", labels.devices_label(plan))]
    if run := plan.run:
        step = f"{labels.batch_label(plan)} samples a step"
        lines.append(("run", f"{format_count(run.tokens)} {unit} in {run.steps:,} steps, {step}"))
    if code := list(describe_code(plan.spec)):
        lines.append(("code", "\n".join(code)))
    if plan.profile:
        lines.append(("profile", plan.profile))
    if plan.defaults:
        lines.append(("assumed", labels.defaults_label(plan)))
    return _pairs(lines, bold=True)


def _candidates(plan: PlanReport) -> RenderableType:
    shown = plan.capacity.candidates[:SHOWN_CANDIDATES]
    limit = format_bytes(shown[0].memory_limit_bytes) if shown else ""
    unit = plan.spec.model.unit
    table = text_table(("", "layout", "#micro-batch", "#recompute", "#step", f"#{unit}/s/device", "#MFU", "#HFU"))
    table.add_column(f"memory of {limit}, fits" if limit else "memory", no_wrap=True)
    for rank, candidate in enumerate(shown, 1):
        table.add_row(
            str(rank),
            *labels.candidate_cells(candidate),
            _memory_cell(candidate),
            style="bold" if rank == 1 and candidate.fits else "",
        )
    return Group(_count(plan), table, *_choice(plan))


def _candidates_narrow(plan: PlanReport) -> RenderableType:
    """Two lines for each layout, and fewer columns."""
    table = text_table(("", "layout", "#step", f"#{plan.spec.model.unit}/s", "#MFU", "#memory"))
    for rank, candidate in enumerate(plan.capacity.candidates[:SHOWN_CANDIDATES], 1):
        how = f"{labels.micro_batch_label(candidate)} samples, recompute {labels.recompute_label(candidate)}"
        table.add_row(
            str(rank),
            Text.assemble(labels.placed_label(candidate), "\n", (how, "bright_black")),
            format_duration(candidate.step_time_s),
            labels.format_rate(candidate.tokens_per_s_per_gpu),
            percent(candidate.mfu, 1),
            _peak(candidate),
        )
    return Group(_count(plan), table, *_choice(plan))


def _choice(plan: PlanReport) -> Iterator[RenderableType]:
    for heading, text in labels.choice_lines(plan.capacity):
        yield Text.assemble((f"{heading}  ", "bold"), text)
    best = plan.best
    safest = plan.capacity.safest
    if best and safest:
        yield Text.assemble(("Safest within 10%  ", "bold"), labels.safest_label(best, safest))


def _count(plan: PlanReport) -> Text:
    kept = sum(candidate.fits for candidate in plan.capacity.candidates)
    shown = f", the first {SHOWN_CANDIDATES} shown" if len(plan.capacity.candidates) > SHOWN_CANDIDATES else ""
    return Text(f"Layouts  {kept} kept of {plan.capacity.considered:,} considered{shown}", style="bold")


def _memory_cell(candidate: Candidate) -> RenderableType:
    part = candidate.peak_memory_bytes / candidate.memory_limit_bytes
    colour = "red" if part > 1 else "yellow" if candidate.fit_probability < 0.99 else "green"
    return Text.assemble((bar(min(part, 1.0), 10), colour), f" {_peak(candidate)}")


def _peak(candidate: Candidate) -> str:
    """The peak, with the chance to fit, or how far it is over the limit."""
    over = percent(candidate.peak_memory_bytes / candidate.memory_limit_bytes)
    return f"{labels.gib(candidate.peak_memory_bytes)} GiB {labels.chance(candidate) if candidate.fits else over}"


def _stages(best: Candidate) -> Iterator[RenderableType]:
    """Show the layers of each stage, if they are not cut evenly."""
    if cut := labels.cut_label(best.layout):
        yield Text.assemble(("Layers of the best layout's pipeline stages", "bold"), f"  {cut}")


def _memory(best: Candidate) -> RenderableType:
    fullest = best.fullest_memory
    stages = best.memory
    where = f", stage {stages.index(fullest) + 1} of {len(stages)}" if len(stages) > 1 else ""
    title = f"Memory of the best layout  {format_bytes(best.peak_memory_bytes)} on the fullest device{where}"
    parts = labels.present(vars(fullest), labels.MEMORY_PARTS)
    rows = [(name, value, format_bytes(value), "cyan") for _, name, value in parts]
    return _bars(title, rows, fullest.total_bytes)


def _time(best: Candidate) -> RenderableType:
    """The phases of a step, as planner/time/step.py adds them up (`StepTime`)."""
    title = f"Step of the best layout  {format_duration(best.step_time_s)}, communication where it is not hidden"
    parts = labels.present(vars(best.time), labels.TIME_PARTS)
    rows = [(name, value, format_duration(value), TIME_COLOURS.get(key, COMPUTE)) for key, name, value in parts]
    return _bars(title, rows, best.time.total_s)


def _refusals(plan: PlanReport) -> list[RenderableType]:
    """Why other layouts are not there, and what would make the plan fit when none is."""
    parts: list[RenderableType] = []
    if plan.rejected:
        reasons = list(plan.rejected.items())
        lines = [(f"{count:,}", reason) for reason, count in reasons[:SHOWN_REASONS]]
        if len(reasons) > SHOWN_REASONS:
            lines.append((f"{sum(count for _, count in reasons[SHOWN_REASONS:]):,}", "for other reasons"))
        parts.append(Group(Text("Refused", style="bold"), _pairs(lines, justify="right")))
    if plan.capacity.advice:
        lines = [("→", advice) for advice in plan.capacity.advice]
        parts.append(Group(Text("What would fit", style="bold green"), _pairs(lines)))
    return parts


def _run(plan: PlanReport, run: RunForecast) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for style, no_wrap in (("bright_black", True), ("bold", True), ("", True), ("bright_black", False)):
        table.add_column(style=style, no_wrap=no_wrap)
    for row in run_rows(plan.spec, run):
        table.add_row(*row)
    for note in run.notes:
        table.add_row("note", "", "", note)
    return Group(Text("The run  (expected, and the bounds that hold nine times in ten)", style="bold"), table)


def run_rows(spec: RunSpec, run: RunForecast) -> Iterator[tuple[str, str, str, str]]:
    """(what, expected value, bounds, where it goes) for each figure of the run."""
    recovery = run.goodput
    kept = run.goodput.goodput
    losses = labels.present(recovery.lost | {"kept": kept.value}, labels.LOST_PARTS, 5e-5)
    lost = ", ".join(f"{name} {percent(value, 2)}" for _, name, value in losses)
    if run.batches:
        # `12,000 of 1,024 samples (4.2 s), 9,000 of 2,048 (8.1 s)`; of many sizes the first and the last ones.
        details = []
        for place, batch in enumerate(run.batches):
            size = f"{batch.step_samples:,}{' samples' * (place == 0)}"
            details.append(f"{batch.steps:,} of {size} ({format_duration(batch.step_time_s)})")
        if len(details) > SHOWN_SIZES:
            half = SHOWN_SIZES // 2
            details[half:-half] = [f"{len(details) - 2 * half} more sizes"]
        yield "steps", f"{run.steps:,}", "", ", ".join(details)
    for step in (assumption for assumption in run.assumptions if assumption.key == "step_time_s"):
        bounds = Interval(step.value, step.value / step.known_within, step.value * step.known_within)
        yield _figure_row("step", bounds, format_duration, "")
    yield _figure_row("time", run.wall_time_s, format_duration, "")
    yield _figure_row("goodput", kept, labels.goodput_percent, lost)
    for other in run.alternatives:
        yield _figure_row("", other.goodput, labels.goodput_percent, labels.alternative_label(other))
    yield "failures", f"{recovery.failures:.3g}", "", f"one every {format_duration(recovery.mtbf_s)}"
    steps = recovery.checkpoint_interval_steps
    written = format_bytes(recovery.checkpoint_bytes)
    held = format_duration(recovery.checkpoint_s)
    detail = f"every {steps:,} step{'s' * (steps != 1)}; {written}, holds training up for {held}"
    best_s = recovery.optimal_interval_s
    # Near the optimum the loss is flat: a quarter more or less costs next to nothing.
    if math.isfinite(best_s) and not 0.8 < recovery.checkpoint_interval_s / best_s < 1.25:
        detail += f"; least is lost at one every {format_duration(best_s)}"
    yield "checkpoints", format_duration(recovery.checkpoint_interval_s), "", detail
    # A figure that is missing names the key that brings it.
    power = "the accelerator's power is not known: type cluster.accelerator.tdp_w=<watts>"
    if spec.cluster.pools:
        power = "the power of a pool's accelerator is not known: its accelerator.tdp_w"
    owned = any(assumption.key == "cluster.cost.device_price_usd" for assumption in run.assumptions)
    price = power if owned else "type cluster.cost.price_usd_per_device_hour=<dollars>"
    if spec.cluster.pools:
        price = "a pool's price is not known: its price_usd_per_device_hour"
    grid = f"CO2e; grid: {spec.cluster.site.name}"
    yield _cost_row("energy", run.energy_joules, labels.format_energy, _shares(run.energy_parts_joules), power)
    yield _cost_row("carbon", run.carbon_kg, labels.format_mass, grid, power)
    yield _cost_row("money", run.cost_usd, labels.format_money, _shares(run.cost_parts_usd), price)


def _cost_row(
    name: str, cost: Interval | None, say: labels.Formatter, detail: str, needs: str
) -> tuple[str, str, str, str]:
    """`needs`: what to type where the cost is not known."""
    return _figure_row(name, cost, say, detail) if cost else (name, "unknown", "", needs)


def _figure_row(name: str, figure: Interval, say: labels.Formatter, detail: str) -> tuple[str, str, str, str]:
    return name, say(figure.value), labels.format_range(figure, say), detail


def _shares(parts: Mapping[str, float]) -> str:
    whole = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {percent(value / whole)}" for name, value in parts.items())


def _assumptions(plan: PlanReport, run: RunForecast) -> RenderableType:
    rows = [assumption_row(assumption) for assumption in run.assumptions]
    rows += [("layouts", "", "", text) for text in plan.capacity.assumptions]
    return text_table(("assumed", "#value", "#within", "source"), rows)


def assumption_row(assumption: Assumption) -> tuple[str, str, str, str]:
    """A source that was not checked says so."""
    within = f"x{assumption.known_within:.3g}" if assumption.known_within > 1 else ""
    unchecked = "" if assumption.verified else "unchecked: "
    return assumption.key, labels.format_grouped(assumption.value), within, unchecked + assumption.source


def _sweep_row(point: SweepPoint, first: Candidate | None) -> Iterator[RenderableType]:
    plan = point.plan
    best = point.plan.best
    run = point.plan.run
    yield point.value
    yield f"{plan.capacity.world_size:,}"
    if not best or not run or not first:
        yield Text("nothing fits: " + "; ".join(plan.capacity.advice[:1]), style="red")
        return
    yield labels.layout_label(best.layout)
    yield from labels.sweep_figures(best, run, first)
    yield _peak(best)


def bar(part: float, width: int) -> str:
    """`part` of `width` cells, to an eighth of a cell."""
    eighths = round(part * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def _bars(title: str, rows: Sequence[tuple[str, float, str, str]], whole: float) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bright_black")
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right")
    longest = max((value for _, value, _, _ in rows), default=1.0)
    for name, value, text, colour in rows:
        table.add_row(name, Text(bar(value / longest, BAR_WIDTH), style=colour), text, percent(value / whole))
    return Group(Text(title, style="bold"), table)


def _pairs(
    lines: Sequence[tuple[str, str]], *, bold: bool = False, justify: Literal["left", "right"] = "left"
) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bright_black", justify=justify)
    table.add_column(style="bold" if bold else "")
    for name, text in lines:
        table.add_row(name, text)
    return table
