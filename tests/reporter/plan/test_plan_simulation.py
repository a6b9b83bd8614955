"""A simulated disturbance as text and on the page: round figures, each in its place."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from lab.recorded import Recorded
from rich.console import Console

from trainspec_cli.recipe.results.forecast import SimulatedDecision, SimulatedPace, Simulation
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.reporter.plan.page import render_plan_page
from trainspec_cli.reporter.plan.sections import (
    SHOWN_DECISIONS,
    decision_rows,
    describe_won_back,
    event_lines,
    pace_rows,
    render_simulation,
)
from trainspec_cli.reporter.plan.text import render_plan

DECISION = SimulatedDecision(
    step=1200, kind="shares", group=None, reason="rank 3 is slow", micro_batches=None, micro_batch_size=None,
    before_s=8.0, expected_s=5.0, achieved_s=6.0,
)  # fmt: skip


@pytest.fixture
def simulation() -> Simulation:
    """Undisturbed, a step of 100 samples takes 4 s: 25 samples per second."""
    return Simulation(
        name="slow", description="", data_parallel_ranks=8, global_batch_size=100, steps=3, step_s=4.0,
        replica_groups=1, micro_batch_size=1, largest_micro_batch_size=4, report_interval=10,
        events=("device 3 takes 2 times as long to compute",),
        off=SimulatedPace(24.0, 12.5, ()),
        on=SimulatedPace(15.0, 20.0, (10.0, 20.0, 25.0)),
        ideal=SimulatedPace(13.0, 22.0, ()),
        ideal_real=SimulatedPace(12.5, 23.0, ()),
        won_back=0.94, won_back_of_real=0.75, decisions=(DECISION,),
    )  # fmt: skip


def as_text(shown: Any) -> str:
    output = io.StringIO()
    Console(file=output, width=100).print(shown)
    return output.getvalue()


def test_each_pace_is_against_the_undisturbed_one(simulation: Simulation) -> None:
    assert list(pace_rows(simulation)) == [
        ("undisturbed", "25", "100%", "12.0 s"),
        ("scheduler off", "12.5", "50.0%", "24.0 s"),
        ("scheduler on", "20", "80.0%", "15.0 s"),
        ("ideal, whole samples", "22", "88.0%", "13.0 s"),
        ("ideal, any share", "23", "92.0%", "12.5 s"),
    ]


def test_what_is_won_back(simulation: Simulation, recorded: Recorded) -> None:
    cases = ((0.94, 0.75), (None, 0.5), (None, None))
    recorded(*(describe_won_back(replace(simulation, won_back=won, won_back_of_real=real)) for won, real in cases))


def test_what_is_decided(simulation: Simulation, recorded: Recorded) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"group": 0},
        {"kind": "group_shares"},
        {"micro_batch_size": 2, "micro_batches": 7},
    ]
    decisions = tuple(replace(DECISION, **changed) for changed in changes)
    recorded(*map(" | ".join, decision_rows(replace(simulation, decisions=decisions))))


def test_few_of_many_events_and_decisions_are_shown(simulation: Simulation) -> None:
    events = tuple(f"event {number}" for number in range(8))
    assert tuple(event_lines(replace(simulation, events=events))) == events
    assert list(event_lines(replace(simulation, events=(*events, "one", "two"))))[7:] == ["event 7", "and 2 more"]
    decisions = tuple(replace(DECISION, step=step) for step in range(1, SHOWN_DECISIONS + 1))
    assert "more" not in as_text(render_simulation(replace(simulation, events=(), decisions=decisions), 100))
    decisions += tuple(replace(DECISION, step=step) for step in (777, 778, 779))
    shown = as_text(render_simulation(replace(simulation, events=(), decisions=decisions), 100))
    assert "and 3 more" in shown and "777" not in shown and shown.count("rank 3 is slow") == SHOWN_DECISIONS


def test_all_of_it_is_shown_with_the_plan(simulation: Simulation, plan: PlanReport, recorded: Recorded) -> None:
    shown = as_text(render_plan(replace(plan, simulation=simulation), 100, verbose=True))
    recorded(shown[shown.index("Disturbance") : shown.index("Refused")])
    assert "none" not in shown.splitlines()[-1]
    assert "none" in as_text(render_simulation(replace(simulation, decisions=()), 100)).splitlines()[-1]


def test_the_page_has_it_too(simulation: Simulation, plan: PlanReport) -> None:
    page = render_plan_page(replace(plan, simulation=simulation))
    assert "Disturbance slow, simulated" in page and "Disturbance" not in render_plan_page(plan)
    assert f"{simulation.events[0]}. 94% of the loss" in page
    for cells in (
        ("undisturbed", "25", "100%", "12.0 s"),
        ("scheduler off", "12.5", "50.0%", "24.0 s"),
        ("1,200", "other shares", "rank 3 is slow"),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
