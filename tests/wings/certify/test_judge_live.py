"""The live clauses: runs of the trainer that go through changes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.certificate import Finding
from trainspec_cli.recipe.results.tools import CertifyRunResult, LiveSteps, TrainedSteps
from trainspec_cli.wings.certify.cases import Case, build_plan, cases
from trainspec_cli.wings.certify.judge import ClauseCheck, judge, planned_layouts
from trainspec_cli.wings.certify.runs import Run

STEPS = 14
LOSSES = tuple(5.0 - step / 10 for step in range(STEPS))
IN_ORDER = tuple(tuple(range(8 * step, 8 * step + 8)) for step in range(STEPS))


def check_of(clause: str, layout: Layout) -> ClauseCheck:
    (found,) = [case for case in cases(2)[clause] if (case.family, case.layout) == ("dense", layout)]
    return ClauseCheck(clause, Run(found))


MOVED, CHANGED = check_of("LIVE-1", Layout(pp=2)), check_of("LIVE-2", Layout(dp_shard=2))
KILLED, FAILED = check_of("LIVE-3", Layout(dp_shard=2)), check_of("LIVE-4", Layout(pp=2))
SHORT, IN_PLACE = check_of("LIVE-5", Layout(dp_shard=2)), check_of("LIVE-5", Layout())


def sound(case: Case, **live: Any) -> Any:
    """Return what a run that keeps every clause measures; `live`: overrides."""
    steps = LiveSteps((0,), planned_layouts(case), (4,) * STEPS, 0)
    return SimpleNamespace(
        losses=list(LOSSES),
        gradients={"a": np.array([3.0, 4.0])},
        weights={"a": np.array([1.0, 1.0])},
        result=CertifyRunResult(TrainedSteps(LOSSES, None, "ab", IN_ORDER), None, replace(steps, **live)),
    )


def judged(check: ClauseCheck, found: Any) -> Finding:
    run, other = check.runs
    return judge(check, {run: found, other: sound(other.case)})


def otherwise(found: Any, **trained: Any) -> Any:
    """Return `found` with other trained steps."""
    found.result = replace(found.result, trained=replace(found.result.trained, **trained))
    if "losses" in trained:
        found.losses = list(trained["losses"])
    return found


def kept_layouts(check: ClauseCheck) -> Any:
    """Return what a run measures whose change fails: all steps are in the first layout."""
    return {"layouts": (build_plan(check.run.case, "cpu").layout,) * STEPS}


LEGAL: dict[str, tuple[ClauseCheck, dict[str, Any]]] = {
    "LIVE-1": (MOVED, {}),
    "LIVE-2": (CHANGED, {}),
    "LIVE-3": (KILLED, {"starts": (0, 3)}),
    "LIVE-4": (FAILED, kept_layouts(FAILED)),
    "LIVE-5": (SHORT, {"starts": (0, 5), "largest_micro_batches": (4,) * 5 + (2,) * 9}),
    "in place": (IN_PLACE, {"starts": (0,), "largest_micro_batches": (4,) * 5 + (2,) * 9}),
}


@pytest.mark.clause("LIVE-1", "LIVE-2", "LIVE-3", "LIVE-4", "LIVE-5")
@pytest.mark.parametrize("name", LEGAL)
def test_a_sound_run_keeps_its_clause(name: str) -> None:
    check, live = LEGAL[name]
    finding = judged(check, sound(check.run.case, **live))
    assert finding.passed, finding.figures
    assert (finding.clause, finding.case, finding.measured) == (check.clause, check.run.name, 0.0)


@pytest.mark.parametrize("name", ["LIVE-1", "LIVE-2", "LIVE-5", "in place"])
@pytest.mark.parametrize(("error", "passed"), [(0.9e-6, True), (1.1e-6, False), (math.nan, False)])
@pytest.mark.parametrize("where", ["loss", "gradient", "weight"])
def test_errors_are_bounded_by_a_millionth(name: str, where: str, error: float, passed: bool) -> None:
    check, live = LEGAL[name]
    found = sound(check.run.case, **live)
    if where == "loss":
        found.losses[7] *= 1 + error
    elif where == "gradient":
        found.gradients = {"a": np.array([3.0, 4.0 + 5 * error])}
    else:
        found.weights = {"a": np.array([1.0, 1.0 + math.sqrt(2) * error])}
    finding = judged(check, found)
    assert (finding.passed, finding.bound) == (passed, 1e-6)
    expected = math.inf if math.isnan(error) else pytest.approx(error, rel=1e-3)
    assert finding.measured == expected


@pytest.mark.parametrize("name", ["LIVE-3", "LIVE-4"])
@pytest.mark.parametrize(
    "change", [{"weights_sha256": "cd"}, {"losses": (*LOSSES[:-1], math.nextafter(LOSSES[-1], 9))}]
)
def test_one_bit_breaks_a_clause_without_tolerance(name: str, change: dict[str, Any]) -> None:
    check, live = LEGAL[name]
    finding = judged(check, otherwise(sound(check.run.case, **live), **change))
    assert (finding.passed, finding.bound, finding.measured) == (False, None, 1.0)


TWICE = (*IN_ORDER[:5], IN_ORDER[4], *IN_ORDER[6:])
LATER = tuple(tuple(position + 8 * (step >= 5) for position in own) for step, own in enumerate(IN_ORDER))


@pytest.mark.parametrize("name", ["LIVE-1", "LIVE-2", "LIVE-3", "LIVE-5", "in place"])
@pytest.mark.parametrize("taken", [TWICE, LATER, IN_ORDER[:-1]])
def test_each_sample_is_taken_once(name: str, taken: Any) -> None:
    check, live = LEGAL[name]
    finding = judged(check, otherwise(sound(check.run.case, **live), taken=taken))
    assert (finding.passed, finding.figures["samples"]) == (False, "not as required")


@pytest.mark.parametrize("name", ["LIVE-1", "LIVE-2", "LIVE-3", "LIVE-4", "LIVE-5"])
def test_a_run_of_fewer_steps_breaks_its_clause(name: str) -> None:
    check, live = LEGAL[name]
    run, other = check.runs
    short = otherwise(sound(run.case, **live), losses=LOSSES[:-1])
    reference = otherwise(sound(other.case), losses=LOSSES[:-1])
    assert not judge(check, {run: short, other: reference}).passed


@pytest.mark.parametrize(
    ("name", "live", "fact"),
    [
        ("LIVE-1", kept_layouts(MOVED), "layouts"),
        ("LIVE-2", kept_layouts(CHANGED), "layouts"),
        ("LIVE-2", {"written_bytes": 1}, "disk"),
        ("LIVE-3", {"starts": (0,)}, "starts"),
        ("LIVE-3", {"starts": (0, 0)}, "starts"),
        ("LIVE-3", {"starts": (0, 3), **kept_layouts(KILLED)}, "layouts"),
        ("LIVE-4", {"layouts": planned_layouts(FAILED.run.case)}, "layouts"),
        ("LIVE-4", {**kept_layouts(FAILED), "starts": (0, 2)}, "starts"),
        ("LIVE-5", {**LEGAL["LIVE-5"][1], "starts": (0, 4)}, "starts"),
        ("LIVE-5", {**LEGAL["LIVE-5"][1], "starts": (0,)}, "starts"),
        ("in place", {**LEGAL["in place"][1], "starts": (0, 5)}, "starts"),
        ("LIVE-5", {"starts": (0, 5)}, "micro-batches"),
        ("LIVE-5", {"starts": (0, 5), "largest_micro_batches": (4,) * 5 + (1,) * 9}, "micro-batches"),
    ],
)
def test_equal_figures_count_only_if_the_disturbance_took_place(name: str, live: Any, fact: str) -> None:
    check, _ = LEGAL[name]
    finding = judged(check, sound(check.run.case, **live))
    assert not finding.passed
    assert [key for key, value in finding.figures.items() if value == "not as required"] == [fact]
