"""A multi-plane fabric in the terminal and on the page."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from lab.recorded import Recorded
from rich.console import Console

from trainspec_cli.planner.planes import plan_planes
from trainspec_cli.recipe.keys.cluster import ClusterSpec, FabricSpec, PlanesSpec
from trainspec_cli.recipe.results.blueprint import PlanesPlan
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.reporter.plan.page import render_plan_page
from trainspec_cli.reporter.plan.sections import NO_PACKETS, describe_dips, event_rows, figure_rows
from trainspec_cli.reporter.plan.text import render_plan


@pytest.fixture
def planes() -> PlanesPlan:
    found = plan_planes(ClusterSpec(fabric=FabricSpec(planes=PlanesSpec(8, 800, 51.2))), 49_152)
    assert found is not None
    return found


def test_figures_stand_beside_those_of_one_plane(planes: PlanesPlan, recorded: Recorded) -> None:
    recorded(*map(" | ".join, figure_rows(planes)))


def test_each_failure_is_a_row(planes: PlanesPlan, recorded: Recorded) -> None:
    recorded(*map(" | ".join, event_rows(planes)))


def test_both_reports_say_that_no_packet_is_simulated(plan: PlanReport, planes: PlanesPlan) -> None:
    console = Console(file=io.StringIO(), width=150)
    console.print(render_plan(replace(plan, planes=planes), verbose=True))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    page = render_plan_page(replace(plan, planes=planes))
    for shown in (text, page):
        assert NO_PACKETS in " ".join(shown.split()) and describe_dips(planes) in " ".join(shown.split())
    assert "<h2>Planes" in page and "network  49,152 NICs" in text
    assert "<h2>Planes" not in render_plan_page(plan)
