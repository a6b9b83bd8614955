"""Kernels for people: the table that was measured, and what was chosen by it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainspec_cli.spec.kernels import KernelFigure, KernelSpec, KernelTable

STYLES = {"chosen": "green", "wrong": "red", "failed": "red", "not tried": "dim"}


def render_table(table: KernelTable) -> RenderableType:
    """Each backend's time over torch's default, its error, and what became of it."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("operation")
    grid.add_column("backend")
    for name in ("time", "quartiles", "error", "allowed"):
        grid.add_column(name, justify="right")
    grid.add_column("")
    for op, figures in table.figures.items():
        for number, (backend, figure) in enumerate(figures.items()):
            style = STYLES.get(figure.verdict, "")
            grid.add_row("" if number else op, Text(backend, style=style), *_numbers(figure), _verdict(figure, style))
    about = (
        f"{table.device}, {table.compute}, torch {table.torch}; times are of forward and backward, over the default's"
    )
    return Group(Text(about), "", grid)


def _numbers(figure: KernelFigure) -> tuple[str, ...]:
    ratio = f"{figure.ratio:.3f}" if figure.ratio is not None else ""
    quartiles = " - ".join(f"{quartile:.2f}" for quartile in figure.quartiles)
    error, allowed = (f"{value:.1e}" if value is not None else "" for value in (figure.error, figure.allowed_error))
    return ratio, quartiles, error, allowed


def _verdict(figure: KernelFigure, style: str) -> Text:
    words = {"not faster": f"not faster {figure.reason}", "default": ""}
    return Text(words.get(figure.verdict, ": ".join(filter(None, (figure.verdict, figure.reason)))), style=style)


def describe_choice(kernels: KernelSpec, table: KernelTable | None) -> str:
    """`rms_norm compiled (0.32 of the default's time), rope compiled (0.66)`; without a table the names alone."""
    chosen = [_describe_one(op, backend, table) for op, backend in kernels.changed.items()]
    measured = "torch's defaults, which nothing beat" if table is not None else "torch's defaults"
    return ", ".join(chosen) or measured


def _describe_one(op: str, backend: str, table: KernelTable | None) -> str:
    figure = table.figures.get(op, {}).get(backend) if table is not None else None
    if figure is None or figure.ratio is None:
        return f"{op} {backend}"
    return f"{op} {backend} ({figure.ratio:.2f} of the default's time)"
