"""Render a plan for the terminal: the answer, the ranked layouts, the best layout in detail, and the forecast for the
run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from trainspec_cli.core.printable import format_bytes, format_count, format_duration, format_si
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import Assumption, Interval, RunForecast
from trainspec_cli.recipe.results.plan import ALWAYS_ASSUMED, Candidate
from trainspec_cli.recipe.user_code import describe_code
from trainspec_cli.reporter.console import Text, text_table
from trainspec_cli.reporter.plan import labels
from trainspec_cli.reporter.plan.labels import UNKNOWN, PlanReport, SweepReport, percent
from trainspec_cli.reporter.plan.sections import (
    describe_dips,
    render_blueprint,
    render_planes,
    render_pools,
    render_simulation,
    sentence,
)

WIDE = 120
"""Terminal width, in columns, that the full table of layouts needs."""
SHOWN_CANDIDATES = 8
SHOWN_REASONS = 8
SHOWN_ADVICE = 4
SHOWN_CHECKS = 5
MORE = "memory and step time by part, communication, rejected layouts, goodput, failures and checkpoints"
SHOWN_SIZES = 6
BAR_WIDTH = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"
COMPUTE = "cyan"
COMMUNICATION = "yellow"
WAITING = "bright_black"
TIME_COLOURS = {key: COMMUNICATION for key in labels.TIME_PARTS if "comm" in key} | dict.fromkeys(
    ("bubble_s", "data_s", "host_s"), WAITING
)


def render_plan(plan: PlanReport, width: int = WIDE, *, verbose: bool = False) -> RenderableType:
    """Render one plan for a terminal of `width` columns: the answer, the best layouts, and the points that need the
    reader's attention, in at most 40 lines.

    `verbose` adds the rest: memory and step time by part, communication, rejected layouts, all results for the run, and
    every assumption with its source."""
    # The answer comes first, so that it is easy to find in long output and survives `| head -5`.
    parts: list[RenderableType] = [_pairs(answer_rows(plan), bold=True)]
    if plan.capacity.advice:
        advice = plan.capacity.advice if verbose else plan.capacity.advice[:SHOWN_ADVICE]
        parts.append(Group(Text("What would fit", style="bold green"), _pairs([("→", text) for text in advice])))
    unit = plan.spec.model.unit
    flops = f"{format_si(plan.capacity.flops_per_token, 'FLOP')} per {unit[:-1]} (causal attention)"
    lines = [("model", f"{labels.model_label(plan)}; {flops}"), ("cluster", labels.devices_label(plan))]
    lines.append(("engine", labels.engine_label(plan)))
    if run := plan.run:
        step = f"{labels.batch_label(plan)} samples per step"
        lines.append(("run", f"{format_count(run.tokens)} {unit} in {run.steps:,} steps, {step}"))
    if code := list(describe_code(plan.spec)):
        lines.append(("code", "\n".join(code)))
    if plan.profile:
        lines.append(("profile", plan.profile))
    if plan.defaults:
        lines.append(("assumed", labels.defaults_label(plan)))
    parts.append(_pairs(lines))
    asked = _asked_for(plan, width, verbose)
    # Show fewer layouts if the recipe or a flag requests other tables.
    shown = SHOWN_CANDIDATES if verbose else 1 if plan.trace else 3 if asked else 5
    parts.append(_candidates(plan, width, shown, verbose))
    if verbose and (best := plan.best):
        if cut := labels.cut_label(best.layout):
            parts.append(Text.assemble(("Layers of the best layout's pipeline stages", "bold"), f"  {cut}"))
        parts += [_memory(best), _time(best)]
        if plan.blueprint:
            parts.append(render_blueprint(plan.blueprint))
    parts += asked
    # The reasons for rejecting layouts matter to the reader only if none is left.
    if plan.rejected and (verbose or not plan.best):
        reasons = list(plan.rejected.items())
        lines = [(f"{count:,}", reason) for reason, count in reasons[:SHOWN_REASONS]]
        if len(reasons) > SHOWN_REASONS:
            lines.append((f"{sum(count for _, count in reasons[SHOWN_REASONS:]):,}", "for other reasons"))
        parts.append(Group(Text("Refused", style="bold"), _pairs(lines, justify="right")))
    if plan.run and verbose:
        rows = [assumption_row(assumption) for assumption in plan.run.assumptions]
        rows += [("layouts", "", "", text) for text in plan.capacity.assumptions]
        parts += [_run(plan, plan.run), text_table(("assumed", "#value", "#within", "source"), rows)]
    elif plan.run:
        if checks := _checks(plan, plan.run):
            parts.append(_pairs(checks))
        text = f"--verbose adds {MORE}, and all {len(plan.run.assumptions)} assumptions with their sources."
        parts.append(Text(text, style="bright_black"))
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts[:-1]), parts[-1])


def answer_rows(plan: PlanReport) -> list[tuple[str, str]]:
    """Return the (label, text) lines that answer the question: the layout, time, money, MFU and peak memory, each with
    its bounds if known, and the changes that would affect them most."""
    best = plan.best
    run = plan.run
    if best is None or run is None:
        considered = f"none of {plan.capacity.considered:,} fits {labels.devices_label(plan)}"
        if not plan.capacity.candidates:
            return [("layout", considered)]
        nearest = plan.capacity.candidates[0]
        needed = f"{labels.gib(nearest.peak_memory_bytes)} of {labels.gib(nearest.memory_limit_bytes)} GiB per device"
        return [("layout", considered), ("nearest", f"{labels.placed_label(nearest)}: {needed}")]
    # Use the texts of the run's table, so that the two agree.
    figures = {name: f"{value} ({bounds})" if bounds else value for name, value, bounds, _ in run_rows(plan.spec, run)}
    within = {assumption.key: assumption.known_within for assumption in run.assumptions}
    step = figures.get("step", format_duration(best.step_time_s))
    average = " on average" if run.batches else ""
    step_within = within.get("step_time_s", 1.0)
    # MFU is inversely proportional to the step time, so the step's uncertainty factor applies to it too.
    mfu = Interval(best.mfu, best.mfu / step_within, min(1.0, best.mfu * step_within))
    memory_within = within.get("peak_memory_bytes", 1.0)
    peak_bytes = best.peak_memory_bytes
    peak = Interval(peak_bytes, peak_bytes / memory_within, peak_bytes * memory_within)
    # List the least certain inputs, a faster way to recover, the largest overhead of a step, and the largest user of
    # memory.
    levers = [f"step time within x{step_within:g} (trainspec calibrate)"] if step_within > 1 else []
    # Costs are proportional to the price and to the step time; the other inputs matter less.
    prices = {key: factor for key, factor in within.items() if factor > 1 and "price" in key}
    if prices:
        key, factor = max(prices.items(), key=lambda item: item[1])
        levers.append(f"{key.rpartition('.')[2]} within x{factor:g}")
    faster = min(run.alternatives, key=lambda other: other.wall_time_s, default=None)
    if faster and faster.wall_time_s < run.wall_time_s.value:
        levers.append(f"resilience={faster.mode} ({format_duration(faster.wall_time_s)})")
    phases = labels.present({key: vars(best.time)[key] for key in labels.OVERHEADS}, labels.TIME_PARTS)
    if phases:
        _, name, seconds = max(phases, key=lambda phase: phase[2])
        levers.append(f"{name} {percent(seconds / best.time.total_s)} of the step")
    causes = labels.present(vars(best.fullest_memory), labels.MEMORY_PARTS)
    if causes:
        _, name, size = max(causes, key=lambda cause: cause[2])
        levers.append(f"{name} {percent(size / best.fullest_memory.total_bytes)} of the memory")
    return [
        ("layout", labels.placed_label(best)),
        ("time", f"{figures['time']}: {run.steps:,} steps of {step}{average}"),
        ("money", f"{figures['money']}; energy {figures['energy']}"),
        (
            "MFU",
            f"{_bounded(mfu, lambda part: percent(part, 1))}; peak memory {_bounded(peak, labels.gib)} of "
            f"{labels.gib(best.memory_limit_bytes)} GiB, fits at {labels.chance(best)}",
        ),
        ("levers", "; ".join(levers)),
    ]


def _bounded(figure: Interval, say: labels.Formatter) -> str:
    return (
        f"{say(figure.value)} ({labels.format_range(figure, say)})" if figure.low < figure.high else say(figure.value)
    )


def _asked_for(plan: PlanReport, width: int, verbose: bool) -> list[RenderableType]:
    """Render the parts that a recipe or a flag requests: pools, planes, plug-in sections, a disturbance, a trace."""
    parts: list[RenderableType] = []
    if plan.pools:
        verdict = Text.assemble(("Pools  ", "bold"), sentence(plan.pools.verdict))
        parts.append(render_pools(plan.best, plan.pools, plan.spec.model.unit) if verbose else verdict)
    if plan.planes:
        dips = Text.assemble(("Planes of the network  ", "bold"), describe_dips(plan.planes))
        parts.append(render_planes(plan.planes) if verbose else dips)
    for section in plan.sections:
        headings = [*section.headings[:2], *(f"#{heading}" for heading in section.headings[2:])]
        title = Text(f"{section.title}  {section.about}", style="bold")
        lines: list[RenderableType] = [title, text_table(headings, section.rows)]
        lines += [Text(section.text), Text(f"{section.known}.", style="bright_black")] if verbose else []
        parts.append(Group(*lines))
    if plan.simulation:
        parts.append(render_simulation(plan.simulation, min(width, WIDE), verbose=verbose))
    if plan.trace:
        from trainspec_cli.reporter.plan.trace import render_trace  # imported here because it loads tables of results

        parts.append(render_trace(plan.trace))
    return parts


def _checks(plan: PlanReport, run: RunForecast) -> list[tuple[str, str]]:
    """Return (label, text) lines for missing inputs, notes, and assumptions whose values differ from the defaults."""
    # If carbon is missing, the reason is the same as for energy.
    rows = [
        (name, f"{value}: {detail}")
        for name, value, _, detail in run_rows(plan.spec, run)
        if value == UNKNOWN and name != "carbon"
    ]
    rows += [("note", note) for note in run.notes]
    changed = [assumption for assumption in run.assumptions if _differs(assumption)]
    if changed:
        values = [f"{one.key}={labels.format_grouped(one.value)}" for one in changed[:SHOWN_CHECKS]]
        more = [f"{len(changed) - SHOWN_CHECKS} more"] if len(changed) > SHOWN_CHECKS else []
        rows.append(("set", ", ".join(values + more)))
    rows += [("assumed", text) for text in plan.capacity.assumptions if text not in ALWAYS_ASSUMED]
    if len(rows) > SHOWN_CHECKS:
        rows = [*rows[: SHOWN_CHECKS - 1], ("", f"{len(rows) - SHOWN_CHECKS + 1} more with --verbose")]
    return rows


def _differs(assumption: Assumption) -> bool:
    """Return whether a value differs from the package's default. The values of a selected accelerator, pool or fabric
    have no default, so they never differ."""
    default: object = ClusterSpec()
    root, *path = assumption.key.split(".")
    for name in path:
        if not hasattr(default, name):
            return False
        default = getattr(default, name)
    return root == "cluster" and default != assumption.value


LEAST_FIGURES = ("step", "MFU", "time", "money")
"""The figures of a sweep on a terminal with fewer than `WIDE_SWEEP` columns, besides the money per token."""
WIDE_SWEEP = 170


def render_sweep(sweep: SweepReport, width: int = WIDE_SWEEP) -> RenderableType:
    """Render one line for each point, with fewer figures on a narrow terminal."""
    points = sweep.points
    unit = points[0].plan.spec.model.unit
    first = next((point.plan.best for point in points if point.plan.best), None)
    rows = [(point, _sweep_figures(point.plan, first, unit, width)) for point in points]
    figures = next((found for _, found in rows if found), {})
    table = text_table((f"#{sweep.key}", "#devices", "best layout", *(f"#{name}" for name in figures)), ())
    for point, found in rows:
        devices = f"{point.plan.capacity.world_size:,}"
        if best := point.plan.best:
            table.add_row(point.value, devices, labels.layout_label(best.layout), *found.values())
        else:
            reason = Text("nothing fits: " + "; ".join(point.plan.capacity.advice[:1]), style="red")
            table.add_row(point.value, devices, reason)
    return Group(Text(sweep.title, style="bold"), table)


def _sweep_figures(plan: PlanReport, first: Candidate | None, unit: str, width: int) -> dict[str, RenderableType]:
    if not plan.best or not plan.run or not first:
        return {}
    figures = labels.sweep_figures(plan.best, plan.run, first, unit)
    kept = figures if width >= WIDE_SWEEP else (*LEAST_FIGURES, f"per M {unit}")
    return {**{name: figures[name] for name in kept}, "memory": _peak(plan.best)}


def _candidates(plan: PlanReport, width: int, most: int, verbose: bool) -> RenderableType:
    """Render the first `most` layouts (in two lines each on a narrow terminal), and why the first one was chosen."""
    capacity = plan.capacity
    shown = capacity.candidates[:most]
    kept = sum(candidate.fits for candidate in capacity.candidates)
    first = f", the first {most} shown" if 1 < most < len(capacity.candidates) else ""
    parts: list[RenderableType] = [
        Text(f"Layouts  {kept} kept of {capacity.considered:,} considered{first}", style="bold")
    ]
    unit = plan.spec.model.unit
    if width >= WIDE:
        limit = format_bytes(shown[0].memory_limit_bytes) if shown else ""
        table = text_table(("", "layout", "#micro-batch", "#recompute", "#step", f"#{unit}/s/device", "#MFU", "#HFU"))
        table.add_column(f"memory of {limit}, fits" if limit else "memory", no_wrap=True)
    else:
        table = text_table(("", "layout", "#step", f"#{unit}/s", "#MFU", "#memory"))
    for rank, candidate in enumerate(shown, 1):
        if width >= WIDE:
            style = "bold" if rank == 1 and candidate.fits else ""
            table.add_row(str(rank), *labels.candidate_cells(candidate), _memory_cell(candidate), style=style)
            continue
        how = f"{labels.micro_batch_label(candidate)} samples, recompute {labels.recompute_label(candidate)}"
        table.add_row(
            str(rank),
            Text.assemble(labels.placed_label(candidate), "\n", (how, "bright_black")),
            format_duration(candidate.step_time_s),
            labels.format_rate(candidate.tokens_per_s_per_gpu),
            percent(candidate.mfu, 1),
            _peak(candidate),
        )
    parts.append(table)
    choice = labels.choice_lines(capacity)
    # These lines are left out because they do not affect what to run: the usual starting point, and the safest layout
    # if it is already the first.
    for heading, text in choice if verbose else choice[:1]:
        parts.append(Text.assemble((f"{heading}  ", "bold"), text))
    best = plan.best
    safest = capacity.safest
    if best and safest and (verbose or safest != best):
        parts.append(Text.assemble(("Safest within 10%  ", "bold"), labels.safest_label(best, safest)))
    return Group(*parts)


def _memory_cell(candidate: Candidate) -> RenderableType:
    part = candidate.peak_memory_bytes / candidate.memory_limit_bytes
    colour = "red" if part > 1 else "yellow" if candidate.fit_probability < 0.99 else "green"
    return Text.assemble((bar(min(part, 1.0), 10), colour), f" {_peak(candidate)}")


def _peak(candidate: Candidate) -> str:
    """Format the peak memory, followed by the probability that it fits or, if it is above the limit, its ratio to the
    limit."""
    over = percent(candidate.peak_memory_bytes / candidate.memory_limit_bytes)
    return f"{labels.gib(candidate.peak_memory_bytes)} GiB {labels.chance(candidate) if candidate.fits else over}"


def _memory(best: Candidate) -> RenderableType:
    fullest = best.fullest_memory
    stages = best.memory
    where = f", stage {stages.index(fullest) + 1} of {len(stages)}" if len(stages) > 1 else ""
    title = f"Memory of the best layout  {format_bytes(best.peak_memory_bytes)} on the fullest device{where}"
    parts = labels.present(vars(fullest), labels.MEMORY_PARTS)
    rows = [(name, value, format_bytes(value), "cyan") for _, name, value in parts]
    return _bars(title, rows, fullest.total_bytes)


def _time(best: Candidate) -> RenderableType:
    """Render the phases of a step as computed by planner/time/step.py (`StepTime`)."""
    title = f"Step of the best layout  {format_duration(best.step_time_s)}, counting only exposed communication"
    parts = labels.present(vars(best.time), labels.TIME_PARTS)
    rows = [(name, value, format_duration(value), TIME_COLOURS.get(key, COMPUTE)) for key, name, value in parts]
    return _bars(title, rows, best.time.total_s)


def _run(plan: PlanReport, run: RunForecast) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for style, no_wrap in (("bright_black", True), ("bold", True), ("", True), ("bright_black", False)):
        table.add_column(style=style, no_wrap=no_wrap)
    for row in run_rows(plan.spec, run):
        table.add_row(*row)
    for note in run.notes:
        table.add_row("note", "", "", note)
    return Group(Text("The run  (expected, with 90% intervals)", style="bold"), table)


def run_rows(spec: RunSpec, run: RunForecast) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, expected value, bounds, details) for each result of the run."""
    recovery = run.goodput
    kept = run.goodput.goodput
    losses = labels.present(recovery.lost | {"kept": kept.value}, labels.LOST_PARTS, 5e-5)
    lost = ", ".join(f"{name} {percent(value, 2)}" for _, name, value in losses)
    if run.batches:
        # `12,000 of 1,024 samples (4.2 s), 9,000 of 2,048 (8.1 s)`; if there are many sizes, only the first and the
        # last ones.
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
    # The optimum is flat: an interval that is up to a quarter longer or shorter costs almost nothing more.
    if math.isfinite(best_s) and not 0.8 < recovery.checkpoint_interval_s / best_s < 1.25:
        detail += f"; the optimum is one every {format_duration(best_s)}"
    yield "checkpoints", format_duration(recovery.checkpoint_interval_s), "", detail
    # If a result is missing, its text names the key to set.
    power = "the accelerator's power is unknown: set cluster.accelerator.tdp_w=<watts>"
    if spec.cluster.pools:
        power = "the power of a pool's accelerator is unknown: set its accelerator.tdp_w"
    owned = any(assumption.key == "cluster.cost.device_price_usd" for assumption in run.assumptions)
    price = power if owned else "set cluster.cost.price_usd_per_device_hour=<dollars>"
    if spec.cluster.pools:
        price = "a pool's price is unknown: set its price_usd_per_device_hour"
    grid = f"CO2e; grid: {spec.cluster.site.name}"
    yield _figure_row("energy", run.energy_joules, labels.format_energy, _shares(run.energy_parts_joules), power)
    yield _figure_row("carbon", run.carbon_kg, labels.format_mass, grid, power)
    yield _figure_row("money", run.cost_usd, labels.format_money, _shares(run.cost_parts_usd), price)


def _figure_row(
    name: str, figure: Interval | None, say: labels.Formatter, detail: str, needs: str = ""
) -> tuple[str, str, str, str]:
    """`needs`: what to set if the value is unknown."""
    if figure is None:
        return name, UNKNOWN, "", needs
    return name, say(figure.value), labels.format_range(figure, say), detail


def _shares(parts: Mapping[str, float]) -> str:
    whole = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {percent(value / whole)}" for name, value in parts.items())


def assumption_row(assumption: Assumption) -> tuple[str, str, str, str]:
    """Return (key, value, within, source). Sources that have not been checked are marked."""
    within = f"x{assumption.known_within:.3g}" if assumption.known_within > 1 else ""
    unchecked = "" if assumption.verified else "unchecked: "
    return assumption.key, labels.format_grouped(assumption.value), within, unchecked + assumption.source


def bar(part: float, width: int) -> str:
    """Draw a bar over the fraction `part` of `width` cells, with a resolution of an eighth of a cell."""
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
