"""Compare runs: the recipe values that differ, how each run ended, and all losses in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from trainspec_cli.core.json_value import JsonObject, flatten
from trainspec_cli.core.printable import aligned, format_bytes, format_count, format_duration
from trainspec_cli.reporter.chart import render_overlay
from trainspec_cli.reporter.collect import Curve, Report
from trainspec_cli.reporter.runs import differing, show_value
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan_outline

MOST_RUNS = len(ascii_uppercase)
"""Maximum number of runs, because each run is labelled with one letter."""


def comparison_as_json(reports: Sequence[Report]) -> list[JsonObject]:
    """Return the comparison as JSON. `values`: the recipe values that differ. Metrics that are missing from a run are
    null."""
    found: list[JsonObject] = []
    for report, values in zip(reports, _differing_values(reports), strict=True):
        heldout = _heldout(report)
        best_step, best_loss = min(heldout, key=lambda point: point[1], default=(None, None))
        found.append({
            "path": report.path,
            "status": report.status,
            "steps": report.steps,
            "max_steps": report.max_steps,
            "loss": report.final_loss,
            "best_heldout_loss": best_loss,
            "best_heldout_step": best_step,
            "tokens_per_s": report.speed.tokens_per_s if report.speed else None,
            "mfu": report.speed.mfu if report.speed else None,
            "goodput": report.goodput,
            "elapsed_s": report.elapsed_s,
            "peak_memory_bytes": report.peak_memory_bytes,
            "values": values,
            "loss_curve": [[step, loss] for step, loss in _known(report.loss)],
            "heldout_curve": [[step, loss] for step, loss in heldout],
        })  # fmt: skip
    return found


def render_comparison(reports: Sequence[Report], width: int) -> str:
    """Draw the comparison. In the table and the charts, each run is represented by a letter."""
    letters = ascii_uppercase[: len(reports)]
    values = _differing_values(reports)
    # Run paths are long and similar, so the table and the charts use letters.
    rows = [["", *letters]]
    for key in dict.fromkeys(key for of_run in values for key in of_run):
        rows.append([key, *(show_value(of_run[key]) if key in of_run else "-" for of_run in values)])
    figures: list[dict[str, str]] = []
    for report in reports:
        best = min(_heldout(report), key=lambda point: point[1], default=None)
        of_steps = f"/{report.max_steps}" if report.max_steps is not None else ""
        figures.append({
            "status": report.status,
            "steps": f"{report.steps}{of_steps}",
            "loss": "-" if report.final_loss is None else f"{report.final_loss:.4f}",
            "best held-out": f"{best[1]:.4f} at {best[0]}" if best else "-",
            "per second": format_count(report.speed.tokens_per_s) if report.speed else "-",
            "MFU": f"{report.speed.mfu:.1%}" if report.speed else "-",
            "goodput": "-" if report.goodput is None else f"{report.goodput:.1%}",
            "time": format_duration(report.elapsed_s),
            "peak memory": format_bytes(report.peak_memory_bytes) if report.peak_memory_bytes else "-",
        })  # fmt: skip
    rows += [[name, *(of_run[name] for of_run in figures)] for name in figures[0]]
    losses = {letter: _known(report.loss) for letter, report in zip(letters, reports, strict=True)}
    heldout = {letter: _heldout(report) for letter, report in zip(letters, reports, strict=True)}
    paths = [f"{letter}  {report.path}" for letter, report in zip(letters, reports, strict=True)]
    cells = max(20, min(72, width - 12))
    drawn = [
        render_overlay(curves, width=cells, title=name)
        for name, curves in (("loss", losses), ("held-out loss", heldout))
    ]
    return "\n\n".join(filter(None, ["\n".join(paths), "\n".join(aligned(rows)), *drawn]))


def _differing_values(reports: Sequence[Report]) -> list[JsonObject]:
    return differing([flatten(read_plan_outline(RunDir(report.path)).spec) for report in reports])


def _heldout(report: Report) -> list[tuple[int, float]]:
    return _known([(event.step, event.heldout_loss) for event in report.evaluations])


def _known(curve: Curve) -> list[tuple[int, float]]:
    return [(step, value) for step, value in curve if value is not None]
