"""Render kernel choices: the table of measurements, and the chosen kernels."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.recipe.keys.kernels import TORCH, KernelSpec, KernelTable
from trainspec_cli.reporter.console import Text

STYLES = {"chosen": "green", "wrong": "red", "failed": "red"}


def render_table(table: KernelTable) -> RenderableType:
    """Render each backend's time relative to torch's default, its error and its verdict, followed by the backends that
    were not tried and the reasons."""
    about = f"{table.device}, {table.compute}, torch {table.torch}; time: forward and backward, relative to the default"
    # Kernels are grouped by reason, because a single missing package rules out many of them.
    by_reason: dict[str, dict[str, list[str]]] = {}
    for op, figures in table.figures.items():
        for backend, figure in figures.items():
            if figure.verdict == "not tried":
                by_reason.setdefault(figure.reason, {}).setdefault(op, []).append(backend)
    untried = []
    for reason, ops in by_reason.items():
        names = "; ".join(f"{op} {', '.join(backends)}" for op, backends in ops.items())
        untried.append(Text(f"not tried, because {reason}:\n  {names}", style="dim"))
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("operation", no_wrap=True)
    grid.add_column("backend", no_wrap=True)
    for heading in ("time", "quartiles", "error"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("")
    for op, figures in table.figures.items():
        tried = {backend: figure for backend, figure in figures.items() if figure.verdict != "not tried"}
        for number, (backend, found) in enumerate(tried.items()):
            style = STYLES.get(found.verdict, "")
            name = Text(backend, style=style)
            if found.verdict == "not faster":
                text = "" if found.reason == TORCH else f"{found.reason} is faster"
            else:
                words = ("" if found.verdict == "default" else found.verdict, found.reason)
                text = ": ".join(filter(None, words))
            verdict = Text(text, style=style)
            ratio = f"{found.ratio:.3f}" if found.ratio is not None else ""
            quartiles = " - ".join(f"{quartile:.2f}" for quartile in found.quartiles)
            grid.add_row(
                "" if number else op,
                name,
                *(ratio, quartiles, f"{found.error:.1e}" if found.error is not None else ""),
                verdict,
            )
    return Group(Text(about), Text(), grid, *(part for line in untried for part in (Text(), line)))


def describe_choice(kernels: KernelSpec, table: KernelTable | None) -> str:
    """`rms_norm compiled (0.32 of the default's time), rope compiled (0.66)`; without a table, only the names."""
    chosen = []
    for op, backend in kernels.changed.items():
        figure = table.figures.get(op, {}).get(backend) if table is not None else None
        # A kernel that the recipe names need not have been measured.
        ratio = "" if figure is None or figure.ratio is None else f" ({figure.ratio:.2f} of the default's time)"
        chosen.append(f"{op} {backend}{ratio}")
    measured = "torch's defaults, because nothing was faster" if table is not None else "torch's defaults"
    return ", ".join(chosen) or measured
