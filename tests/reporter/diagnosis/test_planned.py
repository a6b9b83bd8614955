"""What bounds a run that nothing slows, and what would help most."""

from __future__ import annotations

import pytest
from lab.telemetry import Telemetry

from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis.conclude import (
    ALWAYS,
    COMPUTING,
    EXCHANGES,
    UNPLANNED,
    Outlook,
    PlannedChange,
    as_planned,
    conclude,
)

NO_WAITING, NEVER_LATE = (one.change for one in ALWAYS)


def judge(telemetry: Telemetry, outlook: Outlook) -> RunVerdict:
    (verdict,) = as_planned(telemetry.evidence(), outlook)
    return verdict


def known(*changes: PlannedChange, **shares: float) -> Outlook:
    return Outlook("by the planner", shares or {"computing": 1.0}, changes)


def test_changes_scale_the_measured_parts_best_first_and_small_ones_are_left_out():
    halved = PlannedChange("half backward", {"backward": 0.5})
    exchanged = PlannedChange("no transfers", {"exposed_comm": 0.0})
    longer = PlannedChange("worse", {"forward": 2.0})
    small = PlannedChange("a bit", {"forward": 0.99})
    verdict = judge(Telemetry(noise=0.0), known(exchanged, small, longer, halved))
    found = [one.change for one in verdict.what_if if one.change != NEVER_LATE]
    assert found == ["half backward", "no transfers"]
    step_s = 0.2 * (1 + 1 / 20 + 1 / 50) + 0.05
    for one in verdict.what_if:
        assert one.step_s + one.saved_s == pytest.approx(step_s, rel=0.05)
    assert verdict.what_if[0].saved_s == pytest.approx(0.2 / 3, rel=0.05)
    assert verdict.advice.startswith("half backward ")


def test_the_planners_shares_say_what_the_passes_are_bound_by():
    verdict = judge(Telemetry(), known(computing=0.2, memory=0.8))
    assert "bound by memory" in verdict.evidence[0]
    assert "by the planner" in verdict.evidence


def test_a_pipeline_s_bubble_is_a_part_of_what_the_stages_wait():
    outlook = Outlook("by the planner", {COMPUTING: 1.0}, exposed={EXCHANGES: 0.25, "the bubble": 0.75})
    verdict = judge(Telemetry(transfer_s=1.0), outlook)
    assert "the bubble: " in verdict.evidence[0]


def test_a_rank_that_waits_for_data_holds_up_the_others():
    telemetry = Telemetry(noise=0.0)
    telemetry.parts_s["data_wait"][:, 2] += 0.03
    verdict = judge(telemetry, known())
    saved_s = {one.change: one.saved_s for one in verdict.what_if}
    assert saved_s[NO_WAITING] == pytest.approx(0.03, rel=0.05)
    assert saved_s.get(NEVER_LATE, 0.0) < 0.01


def test_without_the_planner_the_measured_parts_count():
    verdict = judge(Telemetry(transfer_s=0.1), Outlook("no probe"))
    assert verdict.evidence[1] == "no probe"
    assert [one.change for one in verdict.what_if][:2] == [one.change for one in UNPLANNED]


def test_the_planner_is_asked_for_a_run_that_goes_well_alone():
    asked = []

    def look_ahead() -> Outlook:
        asked.append(True)
        return known()

    conclude(Telemetry().slow(5, 1.5, cpu_s=0.1).evidence(), look_ahead)
    assert asked == []
    assert conclude(Telemetry().evidence(), look_ahead)[0].evidence[1] == "by the planner"
    assert asked == [True]


def test_where_no_change_helps_that_is_said():
    telemetry = Telemetry(noise=0.0, ranks=1)
    telemetry.transfers_s[:] = 0
    verdict = judge(telemetry, known(PlannedChange("half the links' latency", {"exposed_comm": 0.5})))
    assert verdict.what_if == () and verdict.advice.startswith("no change ")
