"""The blueprint of a plan, in the terminal and on the page."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from lab.recorded import Recorded
from rich.console import Console

from trainspec_cli.recipe.results.blueprint import Blueprint, BlueprintTier, Exchange, Setting, TunerRow
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.reporter.plan.page import render_plan_page
from trainspec_cli.reporter.plan.sections import (
    describe_order,
    describe_tiers,
    draw_tiers,
    exchange_rows,
    render_blueprint,
    setting_lines,
)
from trainspec_cli.reporter.plan.text import render_plan

RING = Exchange("dp", "reduce_scatter", 64, "spine", 2.0**25, 12.0, "hierarchical", 0.002, 0.003, bucket_bytes=2.0**25)
SEND = Exchange("pp", "send", 4, "leaf", 2.0**20, 64.0, "direct", 0.001, 0.001)
TIERS = (
    BlueprintTier("scale-up domain", 32, 8, 3600.0),
    BlueprintTier("leaf", 4, 64, 400.0),
    BlueprintTier("spine", 1, 256, 100.0),
)


@pytest.fixture
def blueprint() -> Blueprint:
    settings = (Setting("NCCL_CROSS_NIC", "0", "rails <own>", "user guide"),)
    tuner = (TunerRow("allreduce", 0, 9, "tree", 4, 32, "planned"),)
    return Blueprint("rails", TIERS, ("dp_shard", "pp", "tp"), (0, 2, 1, 3), 1.9, 2.0, (RING, SEND), settings, tuner)


def text_of(blueprint: Blueprint) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(render_blueprint(blueprint))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_each_exchange_is_a_row(blueprint: Blueprint, recorded: Recorded) -> None:
    recorded(*map(" | ".join, exchange_rows(blueprint)))


def test_tiers_and_order_are_told(blueprint: Blueprint, recorded: Recorded) -> None:
    order, nodes = describe_order(blueprint)
    switches = describe_order(replace(blueprint, node_places=(), sorts_nodes=True))
    recorded(describe_tiers(blueprint), order, nodes, *switches)
    assert list(describe_order(replace(blueprint, node_places=()))) == [order]


def test_settings_come_with_their_reason_and_source(blueprint: Blueprint, recorded: Recorded) -> None:
    recorded(*setting_lines(blueprint))
    assert list(setting_lines(replace(blueprint, settings=(), tuner=()))) == []


def test_the_picture_has_every_element_and_names_the_axes_that_reach_a_tier(blueprint: Blueprint) -> None:
    picture = draw_tiers(blueprint)
    assert picture.count("<rect") == 32 + 4 + 1
    assert [picture.index(name) for name in (">spine<", ">leaf<", ">scale-up domain<")] == sorted(
        picture.index(name) for name in (">spine<", ">leaf<", ">scale-up domain<")
    )
    assert re.search(r">dp</text>.*>leaf<.*>pp</text>", picture)
    many = draw_tiers(replace(blueprint, tiers=(replace(TIERS[0], elements=5000),)))
    assert many.count("<rect") == 32


def test_both_reports_of_a_plan_show_it(plan: PlanReport, blueprint: Blueprint) -> None:
    page = render_plan_page(replace(plan, blueprint=blueprint))
    assert "<h2>Communication</h2>" in page and "rails &lt;own&gt;" in page
    assert "<h2>Communication</h2>" not in render_plan_page(plan)
    console = Console(file=io.StringIO(), width=150)
    console.print(render_plan(replace(plan, blueprint=blueprint), verbose=True))
    assert "best layout  fabric rails" in console.file.getvalue()  # type: ignore[attr-defined]
    assert text_of(blueprint).count("\n") == 4 + 3 + 2
