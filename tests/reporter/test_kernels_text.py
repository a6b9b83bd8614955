"""The table of kernels as people read it, in 80 columns."""

from __future__ import annotations

from lab.recorded import Recorded
from rich.console import Console

from trainspec_cli.recipe.keys.kernels import TORCH, KernelFigure, KernelSpec, KernelTable
from trainspec_cli.reporter.kernels_text import describe_choice, render_table

UNTRIED = KernelFigure("not tried", "it runs only on CUDA")
TABLE = KernelTable(
    "A chip",
    "bf16",
    "2.13.0",
    figures={
        "rope": {
            TORCH: KernelFigure("default", ratio=1.0, quartiles=(1.0, 1.0), error=2.8e-3, allowed_error=7.8e-3),
            "halves": KernelFigure("not faster", "compiled", 0.87, (0.83, 0.93), 2.6e-3, 7.8e-3),
            "compiled": KernelFigure("chosen", "", 0.66, (0.61, 0.73), 2.6e-3, 7.8e-3),
            "liger": UNTRIED,
        },
        "rms_norm": {
            TORCH: KernelFigure("default", ratio=1.0),
            "frugal": KernelFigure("wrong", "its error against fp64 is 0.5; 0.0078 is allowed for the format"),
            "compiled": KernelFigure("not faster", TORCH, 1.02, (0.99, 1.1), 2.4e-3, 7.8e-3),
            "liger": UNTRIED,
        },
    },
)


def lines(width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(render_table(TABLE))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_each_backend_has_a_line_and_what_was_not_tried_one_together(recorded: Recorded) -> None:
    recorded(*lines(120))


def test_an_operation_is_named_once_beside_the_first_of_its_backends() -> None:
    rows = [line.split() for line in lines(120)]
    first = rows.index(["operation", "backend", "time", "quartiles", "error"]) + 1
    named = [row[:2] if row[0] in TABLE.figures else ["", row[0]] for row in rows[first : first + 6]]
    assert named == [
        *(["rope", TORCH], ["", "halves"], ["", "compiled"]),
        *(["rms_norm", TORCH], ["", "frugal"], ["", "compiled"]),
    ]


def test_names_and_figures_are_whole_in_80_columns() -> None:
    assert max(map(len, lines())) <= 80
    assert any(line.startswith("rms_norm") for line in lines())


def test_the_choice_with_its_figures(recorded: Recorded) -> None:
    chosen = KernelSpec(rope="compiled", swiglu="frugal")
    recorded(describe_choice(chosen, TABLE), describe_choice(KernelSpec(), TABLE))
    assert describe_choice(KernelSpec(), None) == "torch's defaults"
