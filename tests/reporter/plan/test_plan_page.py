"""The page: whole, well-formed, self-contained, and true to the numbers."""

from dataclasses import replace
from html import escape

import pytest
from lab.pages import assert_alone, assert_harmless, assert_whole, seen, widths, with_one_text_replaced
from lab.recorded import Recorded

from trainspec_cli.reporter.page.parts import STYLE, PageOrigin
from trainspec_cli.reporter.plan.labels import LOST_PARTS, MEMORY_PARTS, TIME_PARTS, PlanReport, SweepPoint, SweepReport
from trainspec_cli.reporter.plan.page import render_plan_page, render_sweep_page


@pytest.mark.parametrize("which", ["plan", "infeasible", "sweep"])
def test_the_page_is_whole_and_needs_no_network(which: str, request: pytest.FixtureRequest) -> None:
    drawn = request.getfixturevalue(which)
    page = render_sweep_page(drawn) if which == "sweep" else render_plan_page(drawn)
    assert_alone(page)


def test_a_page_says_where_it_comes_from(plan: PlanReport, sweep: SweepReport) -> None:
    origin = PageOrigin("2026-11-23", "0.4", "trainspec plan recipe=a 'cluster.name=<b>'")
    for page in (render_plan_page(plan, origin), render_sweep_page(sweep, origin)):
        assert_whole(page)
        assert "2026-11-23, trainspec 0.4:" in page
        assert f"<code>{escape(origin.command)}</code>" in page
    assert "trainspec 0.4" not in render_plan_page(plan)


def test_a_sweep_draws_time_and_money(sweep: SweepReport) -> None:
    """Bars in proportion to the points' runs; none of what is not known."""
    first, second = (point for point in sweep.points if point.plan.run)
    run = first.plan.run
    assert run is not None
    twice = replace(run, wall_time_s=replace(run.wall_time_s, value=2 * run.wall_time_s.value))
    doubled = replace(second, plan=replace(second.plan, run=twice))
    page = render_sweep_page(SweepReport((sweep.points[0], first, doubled)))
    assert "Time over" in page and "Money over" not in page
    part = page[page.index("Time over") : page.index("In detail")]
    short, long = widths(part, "c-used")
    assert long == pytest.approx(2 * short, rel=0.01)


def test_a_cut_that_is_not_even_is_told(plan: PlanReport, uneven: PlanReport) -> None:
    assert "pipeline stages" not in render_plan_page(plan)
    assert "stages: 17, 15." in render_plan_page(uneven)


def named(plan: PlanReport, name: str) -> PlanReport:
    return replace(plan, spec=replace(plan.spec, model=replace(plan.spec.model, name=name)))


def test_text_from_a_recipe_is_escaped(plan: PlanReport) -> None:
    page = render_plan_page(named(plan, "<b>llama</b>"))
    assert "<b>llama</b>" not in page and "&lt;b&gt;llama&lt;/b&gt;" in page
    assert "a survey &lt;2024&gt;" in page


@pytest.mark.parametrize("which", ["plan", "infeasible", "sweep"])
def test_no_text_of_a_plan_is_more_than_text(which: str, request: pytest.FixtureRequest) -> None:
    """Every text by itself, but for words that the page looks up."""
    drawn, shown = request.getfixturevalue(which), 0
    for hostile in with_one_text_replaced(drawn):
        try:
            page = render_sweep_page(hostile) if which == "sweep" else render_plan_page(hostile)
        except (KeyError, StopIteration):  # a word that is looked up
            continue
        assert_harmless(page)
        shown += "&lt;script&gt;" in page
    assert shown > 5


def test_a_sweep_of_which_nothing_fits_shows_the_last_point(sweep: SweepReport) -> None:
    points = tuple(SweepPoint({"cluster.num_nodes": nodes}, sweep.points[0].plan) for nodes in ("1", "2", "8"))
    assert "detail: <code>cluster.num_nodes=8</code>" in render_sweep_page(SweepReport(points))


def test_a_sweep_shows_the_last_point_that_fits(sweep: SweepReport) -> None:
    backwards = SweepReport(tuple(reversed(sweep.points)))
    assert "detail: <code>cluster.num_nodes=2</code>" in render_sweep_page(backwards)


def test_a_model_without_a_name_is_called_by_its_family(plan: PlanReport) -> None:
    assert "<title>decoder on " in render_plan_page(named(plan, ""))


def test_every_part_has_a_colour() -> None:
    style = STYLE.read_text()
    missing = [key for key in (*MEMORY_PARTS, *TIME_PARTS, *LOST_PARTS) if f".c-{key}" not in style]
    assert missing == []


@pytest.mark.parametrize("which", ["plan", "infeasible", "sweep"])
def test_a_page_shows_each_figure_in_its_place(which: str, request: pytest.FixtureRequest, recorded: Recorded) -> None:
    """Each figure follows from those of conftest.py."""
    drawn = request.getfixturevalue(which)
    page = render_sweep_page(drawn) if which == "sweep" else render_plan_page(drawn)
    recorded.screen(f"{which}_page.txt", seen(page))
