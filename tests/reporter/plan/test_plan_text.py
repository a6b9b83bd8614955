"""The plan in the terminal."""

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from lab.recorded import Recorded
from rich.console import Console, RenderableType
from rich.text import Text

from trainspec_cli.core.printable import GIB
from trainspec_cli.recipe.results.forecast import Assumption, BatchForecast
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.recipe.results.tools import TraceResult
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.reporter.plan.text import _memory_cell, bar, render_plan, render_sweep, run_rows
from trainspec_cli.reporter.plan.trace import compare_trace, render_trace


@pytest.mark.parametrize(("peak_gib", "filled"), [(40, 5), (80, 10), (200, 10)])
def test_the_bar_of_memory_ends_with_its_cells(plan: PlanReport, peak_gib: int, filled: int) -> None:
    candidate = plan.capacity.candidates[0]
    cell = _memory_cell(replace(candidate, peak_memory_bytes=peak_gib * GIB, memory_limit_bytes=80 * GIB))
    assert isinstance(cell, Text)
    drawn = cell.plain.partition(" ")[0]
    assert (drawn.count("█"), len(cell.plain[: cell.plain.index(f" {peak_gib}")])) == (filled, 10)


def text_of(renderable: RenderableType, width: int = 150) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def line_with(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_the_safest_of_those_about_as_fast_is_named(plan: PlanReport, recorded: Recorded) -> None:
    first, second = plan.capacity.candidates
    others = (first, replace(second, fit_probability=0.98, step_time_s=4.1))
    shown = (replace(plan, capacity=replace(plan.capacity, safest=safest)) for safest in others)
    recorded(*(line_with(text_of(render_plan(one, verbose=True)), "Safest").rstrip() for one in shown))


def with_run(plan: PlanReport, **changes: Any) -> PlanReport:
    assert plan.run is not None
    return replace(plan, run=replace(plan.run, **changes))


def with_recovery(plan: PlanReport, **changes: Any) -> PlanReport:
    assert plan.run is not None
    return with_run(plan, goodput=replace(plan.run.goodput, **changes))


def growing(plan: PlanReport, sizes: int) -> PlanReport:
    """The plan with a batch of 128, 256, ... samples, of 100, 99, ... steps each."""
    batches = tuple(BatchForecast(128 * 2**n, 100 - n, 4.0 + n) for n in range(sizes))
    return with_run(plan, batches=batches, steps=sum(batch.steps for batch in batches))


def rows_of(plan: PlanReport, name: str) -> list[tuple[str, str, str, str]]:
    assert plan.run is not None
    return [row for row in run_rows(plan.spec, plan.run) if row[0] == name]


def test_a_batch_that_grows_is_told_by_its_sizes(plan: PlanReport, recorded: Recorded) -> None:
    text = text_of(render_plan(growing(plan, 2), verbose=True))
    recorded(*(line_with(text, start).rstrip() for start in ("run", "steps")))


def test_of_many_sizes_the_first_and_the_last_are_told(plan: PlanReport, recorded: Recorded) -> None:
    (row,) = rows_of(growing(plan, 9), "steps")
    recorded(" | ".join(row))


def test_a_cut_that_is_not_even_is_told(plan: PlanReport, uneven: PlanReport) -> None:
    assert "pipeline stages" not in text_of(render_plan(plan, verbose=True))
    assert (
        line_with(text_of(render_plan(uneven, verbose=True)), "Layers of").rstrip().endswith("pipeline stages  17, 15")
    )


def test_a_step_has_the_bounds_that_it_is_known_within(plan: PlanReport) -> None:
    step = Assumption("step_time_s", 8.0, 1.25, "predicted")
    rows = rows_of(with_run(plan, assumptions=(step,)), "step")
    assert [row[1:3] for row in rows] == [("8.0 s", "6.4 s to 10.0 s")]
    assert rows_of(with_run(plan, assumptions=()), "step") == []


def test_what_money_and_energy_miss_is_named(plan: PlanReport) -> None:
    assert plan.run is not None
    power, price = "set cluster.accelerator.tdp_w=<watts>", "set cluster.cost.price_usd_per_device_hour=<dollars>"
    without = with_run(plan, energy_joules=None)
    assert power in rows_of(without, "energy")[0][3]
    assert price in rows_of(without, "money")[0][3]
    owned = (*plan.run.assumptions, Assumption("cluster.cost.device_price_usd", 30000.0))
    assert power in rows_of(with_run(without, assumptions=owned), "money")[0][3]


def test_bars_grow_by_eighths() -> None:
    assert bar(0.0, 4) == "    "
    assert bar(0.5, 4) == "██  "
    assert bar(1 / 32, 4) == "▏   "
    assert bar(1.0, 4) == "████"


@pytest.mark.parametrize(
    ("which", "width"),
    [("plan", 160), ("plan", 100), ("infeasible", 160), ("infeasible", 100), ("sweep", 180), ("brief", 100)],
)
def test_the_whole_text(which: str, width: int, request: pytest.FixtureRequest, recorded: Recorded) -> None:
    """Each figure follows from those of conftest.py."""
    drawn = request.getfixturevalue("plan" if which == "brief" else which)
    plan = render_sweep(drawn) if which == "sweep" else render_plan(drawn, width, verbose=which != "brief")
    text = text_of(plan, width)
    shown = "\n".join(line.rstrip() for line in text.splitlines())
    recorded.screen(f"{which}_{width}.txt", shown + "\n")


@pytest.mark.parametrize("optimal_s", [390.0, 320.0, 330.0, 500.0, math.inf])
def test_an_interval_far_from_the_best_says_so(plan: PlanReport, optimal_s: float, recorded: Recorded) -> None:
    (row,) = rows_of(with_recovery(plan, optimal_interval_s=optimal_s), "checkpoints")
    recorded(row[3])


def test_one_step_is_not_several(plan: PlanReport) -> None:
    each_step = with_recovery(plan, checkpoint_interval_steps=1)
    assert "every 1 step; 89.41 GiB" in text_of(render_plan(each_step, verbose=True))


def test_many_reasons_are_summed(plan: PlanReport) -> None:
    rejected = {f"reason {number}": 1000 - number for number in range(10)}
    capacity = replace(plan.capacity, rejected=rejected)
    text = text_of(render_plan(replace(plan, capacity=capacity), verbose=True))
    assert "1,000  reason 0" in text and "993  reason 7" in text and "reason 8" not in text
    assert "1,983  for other reasons" in text


def test_the_best_that_fits_is_bold_and_full_memory_red(plan: PlanReport, infeasible: PlanReport) -> None:
    def coloured(drawn: PlanReport) -> list[str]:
        console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard", no_color=False)
        console.print(render_plan(drawn, 160))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return [line for line in lines if " · zero " in line and "█" in line]

    first, second = coloured(plan)
    assert first.startswith("\x1b[1m1") and not second.startswith("\x1b[1m")
    assert "\x1b[1;32m" in first and "\x1b[33m" in second, "green, and yellow from 95% on"
    (only,) = coloured(infeasible)
    assert "\x1b[31m" in only and not only.startswith("\x1b[1m")


def test_a_trace_beside_the_estimate(found: tuple[Candidate, CapacityPlan]) -> None:
    half = GIB / 2
    traced = TraceResult(
        rank=3,
        state_bytes=GIB,
        peak_memory_bytes=2 * GIB,
        peak_by_cause={"parameters": half, "gathered": half, "activations": half, "temporaries": half},
        flops=2e15,
        comm_bytes={"reduce_scatter": GIB, "all_gather": 0},
        seconds=2.0,
    )
    counted = {"parameters": 1.5 * half, "gathered": half / 2, "activations": 4 * half}
    trace = compare_trace(*found, traced, counted)
    assert trace.estimated.peak_memory_bytes == 3 * GIB
    assert trace.estimated.flops == pytest.approx(5.1e10 * 128 * 8192 / 16 * 0.55 / 0.5)
    title, _, rows = text_of(render_trace(trace)).partition("traced   ")
    assert title.startswith("traced in 2.0 s: rank 3 of ")
    assert [row.split() for row in rows.splitlines()] == [
        ["planned"],
        ["peak", "of", "tensors", "2.00", "GiB", "3.00", "GiB", "+50.0%"],
        ["parameters", "1.00", "GiB", "1.00", "GiB", "+0.0%"],
        ["gradients", "0", "B", "0", "B"],
        ["optimizer", "0", "B", "0", "B"],
        ["activations", "1.00", "GiB", "2.00", "GiB", "+100.0%"],
        ["logits", "0", "B", "0", "B"],
        ["collectives", "0", "B", "0", "B"],
        ["executed", "2", "PFLOP", "3.68", "PFLOP", "+83.8%"],
        ["all-gather", "0", "B"],
        ["reduce-scatter", "1.00", "GiB"],
    ]
    assert compare_trace(*found, traced, None).estimated.peak_by_cause == {
        "parameters": 10 * GIB,
        "gradients": 0,
        "optimizer": 0,
        "activations": 30 * GIB,
        "logits": 0,
        "collectives": 0,
    }


def test_a_trace_tells_what_was_traced(found: tuple[Candidate, CapacityPlan]) -> None:
    candidate, capacity = found
    first, last = candidate.memory
    last = replace(last, activations_bytes=32 * GIB)
    traced = TraceResult(rank=3, state_bytes=1.0, peak_memory_bytes=0, peak_by_cause={}, flops=0, comm_bytes={})
    unused = replace(candidate, memory=(first, last), mfu=0.0)
    trace = compare_trace(unused, capacity, traced, None)
    plain = trace.as_json()
    assert (plain["micro_batch_size"], plain["recompute"], plain["layout"]) == (
        candidate.micro_batch_size, candidate.recompute, candidate.layout.describe(),
    )  # fmt: skip
    assert (plain["rank"], plain["state_bytes"]) == (3, 1.0) and "traced" not in plain
    by_cause = trace.estimated.peak_by_cause
    assert by_cause["activations"] + by_cause["logits"] == 34 * GIB, "of the fullest stage"
    assert trace.estimated.flops == 5.1e10 * 128 * 8192 / 16, "without recomputation where it is not known"
    rows = [row.split() for row in text_of(render_trace(trace)).splitlines()]
    assert ["a", "step", "of", "one", "device", "traced", "planned"] in rows
    assert ["peak", "of", "tensors", "0", "B", "44.00", "GiB"] in rows, "no ratio to nothing"
