"""A plan as one page that needs nothing else: charts are inline, light and dark follow the reader's system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from trainspec_cli.printable import printable
from trainspec_cli.report.plan import labels
from trainspec_cli.report.plan.blueprint import (
    HEADINGS,
    NUMBERS,
    describe_order,
    draw_tiers,
    exchange_rows,
    setting_lines,
)
from trainspec_cli.report.plan.labels import Json, percent
from trainspec_cli.report.plan.planes import (
    EVENT_HEADINGS,
    NO_PACKETS,
    describe_dips,
    event_rows,
    figure_headings,
    figure_rows,
)
from trainspec_cli.report.plan.simulation import decision_rows, describe_won_back, event_lines, pace_rows
from trainspec_cli.report.plan.text import assumption_row, run_rows
from trainspec_cli.report.svg import LineSeries, Segment, render_bar, render_legend, render_lines
from trainspec_cli.units import format_bytes, format_count, format_duration

STYLE = Path(__file__).with_name("page.css")
CHARTED_CANDIDATES = 8
TABLED_CANDIDATES = 20
FOOTER = (
    "<footer>Planned by trainspec. MFU counts model FLOPs, attention over its causal half, over the peak of the "
    "format that the matrix products run in; HFU counts what is executed, recomputation included. A GiB is 2<sup>30"
    "</sup> bytes. Bounds hold nine times in ten.</footer>"
)


def render_plan_page(plan: Json) -> str:
    return _page(_title(plan), "".join([_heading(plan), *_body(plan)]))


def render_sweep_page(sweep: Json) -> str:
    """The page of a sweep: how it scales, then the plan of the last point that fits (else of the last)."""
    points = sweep["points"]
    shown = next((point for point in reversed(points) if point["plan"]["best"]), points[-1])
    chosen = f'<p class="soft below">In detail: <code>{escape(_setting(shown))}</code></p>'
    body = [_heading(shown["plan"]), _scaling(sweep), chosen, *_body(shown["plan"])]
    return _page(_title(shown["plan"]), "".join(body))


def _page(title: str, body: str) -> str:
    """Whatever the values hold, the page holds no invisible characters."""
    return printable(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>\n{STYLE.read_text()}</style></head>\n<body><main>{body}{FOOTER}</main></body></html>\n"
    )


def _title(plan: Json) -> str:
    return f"{plan['model']['name'] or plan['model']['family']} on {labels.devices_label(plan['cluster'])}"


def _heading(plan: Json) -> str:
    batching, unit = plan["batching"], labels.unit_of(plan["model"])
    run = plan["run"]
    length = f"; {format_count(run['tokens'])} {unit} in {run['steps']:,} steps" if run else ""
    text = f"{labels.model_label(plan['model'])}; {labels.batch_label(batching, run)} samples a step{length}"
    return f'<h1>{escape(_title(plan))}</h1><p class="soft">{escape(text)}</p>'


def _body(plan: Json) -> Iterator[str]:
    if not plan["best"]:
        yield _advice(plan)
    if plan["run"]:
        yield _tiles(plan)
    yield _candidates(plan)
    if plan["best"]:
        yield _memory(plan["best"])
    if plan["candidates"]:
        yield _step_times(plan)
    if plan.get("blueprint"):
        yield _blueprint(plan["blueprint"])
    if plan.get("planes"):
        yield _planes(plan["planes"])
    if plan.get("simulation"):
        yield _simulation(plan["simulation"])
    if plan["run"]:
        yield _goodput(plan["run"])
    if plan["rejected"]:
        yield _refusals(plan)
    if plan["run"]:
        yield _run(plan)
        yield _assumptions(plan)


def _advice(plan: Json) -> str:
    advice = "".join(f"<li>{escape(line)}</li>" for line in plan["advice"])
    return (
        '<section class="refusal"><h2>No layout fits</h2><p>Each needs more memory than a device has, or breaks a '
        f'rule. What would fit:</p><ul class="plain">{advice}</ul></section>'
    )


def _tiles(plan: Json) -> str:
    run, best, bounds = plan["run"], plan["best"], plan["run"]["intervals"]
    unit = labels.unit_of(plan["model"])
    tiles = [
        (name, show(run[key]), labels.format_range(bounds[key], show))
        for name, key, show in (
            ("time to train", "wall_time_s", format_duration),
            ("goodput", "goodput", labels.goodput_percent),
            ("energy", "energy_joules", labels.format_energy),
            ("carbon (CO2e)", "carbon_kg", labels.format_mass),
            ("money", "cost_usd", labels.format_money),
        )
        if run[key] is not None
    ]
    rate = f"MFU {percent(best['mfu'], 1)}, HFU {percent(best['hfu'], 1)}"
    tiles.insert(2, (f"{unit}/s/device", labels.format_rate(best["tokens_per_s_per_gpu"]), rate))
    drawn = (
        f"<div class=tile><span>{escape(n)}</span><b>{escape(v)}</b><span>{escape(b)}</span></div>" for n, v, b in tiles
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def _candidates(plan: Json) -> str:
    unit = labels.unit_of(plan["model"])
    headings = ("", "layout", "micro-batch", "recompute", "#step", f"#{unit}/s/device", "#MFU", "#HFU", "memory")
    rows = [_candidate_row(rank, one) for rank, one in enumerate(plan["candidates"][:TABLED_CANDIDATES], 1)]
    considered = f"{plan['considered']:,} layouts were considered; " if plan["considered"] else ""
    listed = f"the {len(rows)} best are listed." if plan["best"] else "none fits; these come nearest."
    return _section("Layouts", f"{considered}{listed}", _table(headings, rows))


def _candidate_row(rank: int, candidate: Json) -> str:
    part = candidate["peak_memory_bytes"] / candidate["memory_limit_bytes"]
    used = Segment("c-used" if part <= 1 else "c-full", "peak", min(part, 1.0), percent(part))
    peak, limit = labels.gib(candidate["peak_memory_bytes"]), labels.gib(candidate["memory_limit_bytes"])
    cells = [
        _cell(str(rank)),
        *map(_cell, labels.candidate_cells(candidate), ("name", "", "", "number", "number", "number", "number")),
        f'<td class="meter">{render_bar([used], 1.0)}<small>{peak} of {limit} GiB</small></td>',
    ]
    return f"<tr{' class=best' if rank == 1 and candidate['fits'] else ''}>{''.join(cells)}</tr>"


def _memory(best: Json) -> str:
    stages, limit = best["memory_by_stage"], best["memory_limit_bytes"]
    scale = max(limit, *(sum(stage.values()) for stage in stages)) * 1.02
    names = [f"stage {number}" for number in range(1, len(stages) + 1)] if len(stages) > 1 else ["each device"]
    bars = [render_bar(_segments(stage, labels.MEMORY_PARTS, format_bytes), scale, limit) for stage in stages]
    rows = list(zip(names, bars, (format_bytes(sum(stage.values())) for stage in stages), strict=True))
    legend = render_legend(_segments(best["memory"], labels.MEMORY_PARTS, format_bytes))
    text = f"Peak of the best layout, by cause; the dashed line is what a device has, {format_bytes(limit)}."
    if cut := labels.stages_label(best["layout"].get("stage_layers")):
        text += f" Layers of its pipeline stages: {cut}."
    return _section("Memory", text, _rows(rows) + legend)


def _step_times(plan: Json) -> str:
    shown = plan["candidates"][:CHARTED_CANDIDATES]
    scale = max(candidate["step_time_s"] for candidate in shown)
    rows = [
        (
            f"{rank}  {labels.layout_label(candidate)}",
            render_bar(_segments(candidate["time"], labels.TIME_PARTS, format_duration), scale),
            format_duration(candidate["step_time_s"]),
        )
        for rank, candidate in enumerate(shown, 1)
    ]
    text = "By phase: work is blue, communication that is not hidden behind it orange, waiting grey. Values: the first."
    legend = render_legend(_segments(shown[0]["time"], labels.TIME_PARTS, format_duration))
    others = _absent_from_first(shown)
    return _section("Step time", text, _rows(rows) + legend + (render_legend(others, False) if others else ""))


def _absent_from_first(candidates: Sequence[Json]) -> list[Segment]:
    """Phases that only other candidates have, for the legend."""
    seen = {segment.kind for segment in _segments(candidates[0]["time"], labels.TIME_PARTS, format_duration)}
    more = {}
    for candidate in candidates[1:]:
        for segment in _segments(candidate["time"], labels.TIME_PARTS, format_duration):
            if segment.kind not in seen:
                more[segment.kind] = segment
    return list(more.values())


def _goodput(run: Json) -> str:
    modes = [run["recovery"], *run["alternatives"]]
    scale = max(max(1 - mode["goodput"] for mode in modes), 1e-9) * 1.02
    rows = [
        (labels.MODES[mode["mode"]], render_bar(_losses(mode), scale), f"{percent(1 - mode['goodput'], 2)} lost")
        for mode in modes
    ]
    seen = {segment.kind: segment for mode in reversed(modes) for segment in _losses(mode)}
    recovery = run["recovery"]
    text = (
        f"Wall time that does not become progress. A failure every {format_duration(recovery['mtbf_s'])} is expected, "
        f"{recovery['failures']:.3g} over the run; a checkpoint every "
        f"{format_duration(recovery['checkpoint_interval_s'])} ({recovery['checkpoint_interval_steps']:,} steps)."
    )
    return _section("Time lost", text, _rows(rows) + render_legend(list(seen.values()), False))


def _losses(mode: Json) -> list[Segment]:
    return [
        Segment(f"c-{key}", name, mode["lost"][key], percent(mode["lost"][key], 2))
        for key, name in labels.LOST_PARTS.items()
        if mode["lost"].get(key, 0.0) > 0
    ]


def _simulation(simulation: Json) -> str:
    paces = _table(
        ("", "samples/s", "of undisturbed", "time"),
        [f"<tr>{''.join(map(_cell, row))}</tr>" for row in pace_rows(simulation)],
    )
    decisions = _table(
        ("step", "decision", "reason", "computing in a step"),
        [f"<tr>{''.join(map(_cell, row))}</tr>" for row in decision_rows(simulation)],
    )
    text = f"{'; '.join(event_lines(simulation))}. {describe_won_back(simulation)}."
    return _section(f"Disturbance {simulation['name']}, simulated", text, paces + decisions)


def _blueprint(blueprint: Json) -> str:
    headings = [f"#{heading}" if heading in NUMBERS else heading for heading in HEADINGS]
    kinds = ["number" if heading in NUMBERS else "" for heading in HEADINGS]
    rows = [f"<tr>{''.join(map(_cell, row, kinds))}</tr>" for row in exchange_rows(blueprint)]
    said = "; ".join(" ".join(line.split()) for line in describe_order(blueprint))
    notes = "".join(f'<p class="soft">{escape(line)}</p>' for line in setting_lines(blueprint))
    text = f"Fabric {blueprint['fabric']}, and the axes whose exchanges reach each tier. {said[0].upper()}{said[1:]}."
    return _section("Communication", text, draw_tiers(blueprint) + _table(headings, rows) + notes)


def _planes(planes: Json) -> str:
    first, *others = figure_headings(planes)
    name, *numbers = EVENT_HEADINGS
    tables = _table((first, *(f"#{other}" for other in others)), list(map(_number_row, figure_rows(planes))))
    tables += _table((name, *(f"#{number}" for number in numbers)), list(map(_number_row, event_rows(planes))))
    return _section("Planes of the network", f"{describe_dips(planes)} {NO_PACKETS}", tables)


def _number_row(row: Sequence[str]) -> str:
    """A name, and numbers."""
    return f"<tr>{_cell(row[0])}{''.join(_cell(text, 'number') for text in row[1:])}</tr>"


def _refusals(plan: Json) -> str:
    most = max(plan["rejected"].values())
    rows = [
        (reason, render_bar([Segment("c-refused", reason, count, f"{count:,}")], most), f"{count:,}")
        for reason, count in plan["rejected"].items()
    ]
    return _section("Refused", "Layouts that are not in the list, by reason.", _rows(rows))


def _run(plan: Json) -> str:
    rows = [
        f"<tr>{_cell(name)}{_cell(expected, 'name')}{_cell(bounds, 'name')}{_cell(detail)}</tr>"
        for name, expected, bounds, detail in run_rows(plan)
    ]
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in plan["run"]["notes"])
    return _section("The run", "", _table(("", "expected", "bounds", ""), rows) + notes)


def _assumptions(plan: Json) -> str:
    rows = []
    for assumption in plan["run"]["assumptions"]:
        key, value, within, _ = assumption_row(assumption)
        flag = "" if assumption["verified"] else ' <span class="flag">unchecked</span>'
        source = f"<td>{escape(assumption['source'])}{flag}</td>"
        rows.append(
            f"<tr><td><code>{escape(key)}</code></td>{_cell(value, 'number')}{_cell(within, 'number')}{source}</tr>"
        )
    rows += [f"<tr><td>layouts</td><td></td><td></td>{_cell(text)}</tr>" for text in plan["assumptions"]]
    text = "What the figures rest on, each with the key that changes it; x2 means between half and twice the value."
    return _section("Assumptions", text, _table(("key", "#value", "#within", "source"), rows))


def _setting(point: Json) -> str:
    return " ".join(f"{key}={value}" for key, value in point["values"].items())


def _scaling(sweep: Json) -> str:
    fitting = [point for point in sweep["points"] if point["plan"]["best"]]
    chart = _scaling_chart(fitting) if len(fitting) > 1 else ""
    unit = labels.unit_of(sweep["points"][0]["plan"]["model"])
    figures = ("step", f"{unit}/s", "scaling", "MFU", "goodput", "time", "energy", "money")
    headings = (sweep["key"], "#devices", "best layout", *(f"#{name}" for name in figures))
    rows = [_scaling_row(point, fitting) for point in sweep["points"]]
    text = "Throughput of the best layout at each point. Scaling: throughput a device over that of the first that fits."
    return _section(f"Scaling over {sweep['key']}", text, chart + _table(headings, rows))


def _scaling_chart(fitting: Sequence[Json]) -> str:
    plans = [point["plan"] for point in fitting]
    if len({plan["cluster"]["world_size"] for plan in plans}) < len(plans):
        return ""
    plans.sort(key=lambda plan: plan["cluster"]["world_size"])
    points = [(plan["cluster"]["world_size"], plan["best"]["tokens_per_s"]) for plan in plans]
    (first_x, first_y), (last_x, _) = points[0], points[-1]
    lines = [
        LineSeries("c-ideal", "even scaling", [(first_x, first_y), (last_x, first_y * last_x / first_x)], marked=False),
        LineSeries("c-measure", f"{labels.unit_of(plans[0]['model'])} a second", points),
    ]
    ticks = [(x, f"{x:,}") for x, _ in points]
    legend = render_legend([Segment(line.kind, line.label, 0, "") for line in reversed(lines)])
    return render_lines(lines, "devices", f"{labels.unit_of(plans[0]['model'])} a second", ticks) + legend


def _scaling_row(point: Json, fitting: Sequence[Json]) -> str:
    plan, best = point["plan"], point["plan"]["best"]
    start = _cell(point["value"]) + _cell(f"{plan['cluster']['world_size']:,}", "number")
    if not best:
        return f'<tr>{start}<td colspan="9">nothing fits: {escape("; ".join(plan["advice"][:1]))}</td></tr>'
    figures = labels.sweep_figures(plan, fitting[0]["plan"])
    return f"<tr>{start}{_cell(labels.layout_label(best))}{''.join(_cell(text, 'number') for text in figures)}</tr>"


def _segments(breakdown: Json, names: dict[str, str], say: labels.Formatter) -> list[Segment]:
    return [Segment(f"c-{key}", name, value, say(value)) for key, name, value in labels.present(breakdown, names)]


def _section(title: str, text: str, content: str) -> str:
    below = f'<p class="soft">{escape(text)}</p>' if text else ""
    return f"<section><h2>{escape(title)}</h2>{below}{content}</section>"


def _rows(rows: Sequence[tuple[str, str, str]]) -> str:
    drawn = (
        f'<div class="row"><span>{escape(name)}</span>{bar}<span class="number">{escape(value)}</span></div>'
        for name, bar, value in rows
    )
    return f'<div class="rows">{"".join(drawn)}</div>'


def _table(headings: Sequence[str], rows: Sequence[str]) -> str:
    """A heading that begins with # stands over numbers."""
    heads = "".join(f"<th{' class=number' if h.startswith('#') else ''}>{escape(h.lstrip('#'))}</th>" for h in headings)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cell(text: str, kind: str = "") -> str:
    return f"<td{f' class={kind}' if kind else ''}>{escape(text)}</td>"
