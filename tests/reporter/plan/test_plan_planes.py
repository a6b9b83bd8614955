"""A multi-plane fabric in the terminal and on the page."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
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


def test_figures_stand_beside_those_of_one_plane(planes: PlanesPlan) -> None:
    rows = {name: values for name, *values in figure_rows(planes)}
    assert rows["ports of a switch"] == ["512 x 100G", "64 x 800G"]
    assert rows["most NICs"] == ["131,072", "65,536"]
    assert rows["switches per NIC"] == ["0.0469", "0.0781"]
    assert rows["lost with a NIC's port"] == ["12.5% of the speed", "the job"]


def test_each_failure_is_a_row(planes: PlanesPlan) -> None:
    rows = {name: values for name, *values in event_rows(planes)}
    assert rows["a NIC's port flaps"] == ["87.5%", "1 min 1 s", "7.6 s", "0.00407%", "64"]
    assert rows["a NIC's transceiver flaps"][:3] == ["the job ends", "", ""]


def test_both_reports_say_that_no_packet_is_simulated(plan: PlanReport, planes: PlanesPlan) -> None:
    console = Console(file=io.StringIO(), width=150)
    console.print(render_plan(replace(plan, planes=planes), verbose=True))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    page = render_plan_page(replace(plan, planes=planes))
    for shown in (text, page):
        assert NO_PACKETS in " ".join(shown.split()) and describe_dips(planes) in " ".join(shown.split())
    assert "<h2>Planes of the network</h2>" in page and "Planes of the network  49,152 NICs" in text
    assert "Planes of the network" not in render_plan_page(plan)
