"""Runs side by side: the values that differ, how they ended, and their losses in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from trainspec_cli.core.json_value import JsonObject, JsonValue, flatten
from trainspec_cli.core.printable import format_bytes, format_count, format_duration
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.collect import Report
from trainspec_cli.reporter.runs import differing, show_value
from trainspec_cli.reporter.svg import Point, render_overlay
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan_outline

MOST_RUNS = len(ascii_uppercase)
"""Each run has a letter."""


@dataclass(frozen=True)
class Compared:
    """One of the runs that are compared. Figures are None where the run has none."""

    path: str
    status: str
    steps: int
    max_steps: int | None
    loss: float | None
    best_heldout_loss: float | None
    best_heldout_step: int | None
    tokens_per_s: float | None
    mfu: float | None
    goodput: float | None
    elapsed_s: float
    peak_memory_bytes: int | None
    values: JsonObject
    """The values of the recipe that differ between the runs, by key."""
    loss_curve: tuple[Point, ...]
    heldout_curve: tuple[Point, ...]


def compare(reports: Sequence[Report]) -> list[Compared]:
    specs = [flatten(read_plan_outline(RunDir(report.path)).spec) for report in reports]
    return [_compared(report, values) for report, values in zip(reports, differing(specs), strict=True)]


def _compared(report: Report, values: JsonObject) -> Compared:
    heldout = [(event.step, event.heldout_loss) for event in report.evaluations if event.heldout_loss is not None]
    best_step, best_loss = min(heldout, key=lambda point: point[1], default=(None, None))
    speed = report.speed
    return Compared(
        path=report.path,
        status=report.status,
        steps=report.steps,
        max_steps=report.max_steps,
        loss=report.final_loss,
        best_heldout_loss=best_loss,
        best_heldout_step=best_step,
        tokens_per_s=speed.tokens_per_s if speed else None,
        mfu=speed.mfu if speed else None,
        goodput=report.goodput,
        elapsed_s=report.elapsed_s,
        peak_memory_bytes=report.peak_memory_bytes,
        values=values,
        loss_curve=tuple((step, loss) for step, loss in report.loss if loss is not None),
        heldout_curve=tuple(heldout),
    )


def comparison_as_json(runs: Sequence[Compared]) -> list[JsonValue]:
    return [to_plain(run) for run in runs]


def render_comparison(runs: Sequence[Compared], width: int) -> str:
    """Draw the comparison; each run has a letter, which stands for it in the table and in the pictures."""
    letters = ascii_uppercase[: len(runs)]
    paths = [f"{letter}  {run.path}" for letter, run in zip(letters, runs, strict=True)]
    keys = dict.fromkeys(key for run in runs for key in run.values)
    rows = {
        "status": [run.status for run in runs],
        "steps": [f"{run.steps}/{run.max_steps}" if run.max_steps is not None else str(run.steps) for run in runs],
        "loss": [_loss(run.loss) for run in runs],
        "best held-out": [
            f"{_loss(run.best_heldout_loss)} at {run.best_heldout_step}" if run.best_heldout_step is not None else "-"
            for run in runs
        ],
        "per second": [format_count(run.tokens_per_s) if run.tokens_per_s is not None else "-" for run in runs],
        "MFU": [_percent(run.mfu) for run in runs],
        "goodput": [_percent(run.goodput) for run in runs],
        "time": [format_duration(run.elapsed_s) for run in runs],
        "peak memory": [format_bytes(run.peak_memory_bytes) if run.peak_memory_bytes else "-" for run in runs],
    }
    figures = [
        ("", *letters),
        *[(key, *(show_value(run.values[key]) if key in run.values else "-" for run in runs)) for key in keys],
        *[(name, *cells) for name, cells in rows.items()],
    ]
    curves = {
        "loss": {letter: run.loss_curve for letter, run in zip(letters, runs, strict=True)},
        "held-out loss": {letter: run.heldout_curve for letter, run in zip(letters, runs, strict=True)},
    }
    drawn = [render_overlay(series, width=max(20, min(72, width - 12)), title=name) for name, series in curves.items()]
    return "\n\n".join(filter(None, ["\n".join(paths), table(figures), *drawn]))


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Lay out rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
