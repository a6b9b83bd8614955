"""The plan in the terminal."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from trainspec_cli.report.plan.text import bar, render_plan, render_sweep

EXPECTED = Path(__file__).parent / "expected"
"""Whole texts, read through once by a person; each figure follows from those of conftest.py."""


def text_of(renderable: RenderableType, width: int = 150) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def line_with(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_the_layouts_are_ranked_with_their_figures(plan: dict[str, Any]) -> None:
    text = text_of(render_plan(plan))
    first = line_with(text, "1 ")
    for figure in ("replicate 2 · shard 2 · tp 2 · pp 2", "1 x 32", "selective", "4.0 s", "16,384"):
        assert figure in first
    for figure in ("50.0%", "55.0%", "40.0 GiB 54%"):
        assert figure in first
    assert "shard 16" in line_with(text, "2 ")


def test_memory_and_time_are_taken_apart(plan: dict[str, Any]) -> None:
    text = text_of(render_plan(plan))
    assert "stage 1 of 2" in text
    assert "30.00 GiB" in line_with(text, "activations") and "75%" in line_with(text, "activations")
    assert "2.0 s" in line_with(text, "matrix products") and "50%" in line_with(text, "matrix products")
    assert "logits" not in text


def test_the_run_has_values_bounds_and_causes(plan: dict[str, Any]) -> None:
    text = text_of(render_plan(plan))
    assert "90.0%" in line_with(text, "goodput") and "85.0% to 95.0%" in line_with(text, "goodput")
    assert "work undone by failures 3.00%" in line_with(text, "goodput")
    assert "20 MWh" in line_with(text, "energy") and "accelerators 75%" in line_with(text, "energy")
    assert "Iceland" in line_with(text, "carbon")
    assert "unknown" in line_with(text, "money")
    assert "97.0%" in text and "resilience=elastic" in text


def test_what_was_not_checked_is_marked(plan: dict[str, Any]) -> None:
    text = text_of(render_plan(plan))
    assert "unchecked: a survey" in line_with(text, "cluster.site.pue")
    assert "unchecked" not in line_with(text, "cluster.accelerator.tdp_w")


def test_refusals_are_counted(plan: dict[str, Any]) -> None:
    assert "tp leaves the node" in line_with(text_of(render_plan(plan)), "400")


def test_an_infeasible_plan_says_what_would_fit(infeasible: dict[str, Any]) -> None:
    text = text_of(render_plan(infeasible))
    assert "What would fit" in text and "recompute=full" in text
    assert "122%" in line_with(text, "1 ")
    assert "goodput" not in text


def test_a_sweep_is_a_table(sweep: dict[str, Any]) -> None:
    text = text_of(render_sweep(sweep), width=180)
    assert "nothing fits" in line_with(text, "1 ")
    assert "100%" in line_with(text, "2 ") and "90%" in line_with(text, "4 ")


def test_bars_grow_by_eighths() -> None:
    assert bar(0.0, 4) == "    "
    assert bar(0.5, 4) == "██  "
    assert bar(1 / 32, 4) == "▏   "
    assert bar(1.0, 4) == "████"


@pytest.mark.parametrize(
    ("which", "width"), [("plan", 160), ("plan", 100), ("infeasible", 160), ("infeasible", 100), ("sweep", 180)]
)
def test_the_whole_text(which: str, width: int, request: pytest.FixtureRequest) -> None:
    drawn = request.getfixturevalue(which)
    text = text_of(render_sweep(drawn) if which == "sweep" else render_plan(drawn, width), width)
    shown = "\n".join(line.rstrip() for line in text.splitlines())
    assert shown + "\n" == (EXPECTED / f"{which}_{width}.txt").read_text()
