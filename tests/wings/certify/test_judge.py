from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import Finding
from trainspec_cli.recipe.results.tools import CertifyRunResult, TrainedSteps
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.wings.certify import judge as judge_module
from trainspec_cli.wings.certify.cases import CLIP_NORM, Case, build_plan, name_layout
from trainspec_cli.wings.certify.judge import ClauseCheck, checks, judge
from trainspec_cli.wings.certify.runs import Measured, Run, _batches, whole_error


def measured(folder: Path, least_clipped_norm: float | None) -> Measured:
    trained = TrainedSteps((2.0, 1.5), least_clipped_norm, "")
    write_json(folder / "result.json", to_plain(CertifyRunResult(trained, None)))
    return Measured(folder)


@pytest.mark.parametrize(
    ("least_clipped_norm", "passed"), [(2 * CLIP_NORM, True), (0.5 * CLIP_NORM, False), (None, False)]
)
def test_equal_losses_count_only_if_every_step_clipped(
    tmp_path: Path, least_clipped_norm: float | None, passed: bool
) -> None:
    run = Run(Case("dense", Layout(tp=2)))
    reference = Run(run.case.reference)
    results: dict[Run, Any] = {
        run: measured(tmp_path / "run", least_clipped_norm),
        reference: measured(tmp_path / "reference", 2 * CLIP_NORM),
    }
    assert judge(ClauseCheck("NUM-2", run), results).passed is passed


CASE = Case("dense", Layout(tp=2))
REFERENCE = Run(Case("dense"))


def measures(losses: tuple[float, ...] = (), sha256: str = "", resumed: Any = None, **gradients: list[float]) -> Any:
    """Return what a run measured; `resumed`: its digest and its losses from the middle on."""
    again = None if resumed is None else TrainedSteps(tuple(resumed[1]), None, resumed[0])
    return SimpleNamespace(
        losses=list(losses),
        resumed_losses=[] if resumed is None else list(resumed[1]),
        gradients={name: np.array(values) for name, values in gradients.items()},
        result=CertifyRunResult(TrainedSteps(losses, 2 * CLIP_NORM, sha256), again),
    )


@pytest.mark.clause("NUM-1", "NUM-4", "NUM-5")
@pytest.mark.parametrize(
    ("error", "passed"), [(0.0, True), (0.9e-5, True), (1.1e-5, False), (math.nan, False), (math.inf, False)]
)
@pytest.mark.parametrize("clause", ["NUM-1", "NUM-4", "NUM-5"])
def test_the_worst_gradient_is_compared_with_one_process(clause: str, error: float, passed: bool) -> None:
    run = Run(CASE)
    results: Any = {
        run: measures(a=[3.0, 4.0], b=[0.0, 2.0 + 2 * error]),
        REFERENCE: measures(a=[3.0, 4.0], b=[0.0, 2.0]),
    }
    finding = judge(ClauseCheck(clause, run), results)
    assert (finding.clause, finding.case, finding.bound, finding.passed) == (clause, run.name, 1e-5, passed)
    assert finding.figures["parameter"] == ("b" if error else "a")
    expected = math.inf if math.isnan(error) else error
    assert finding.measured == finding.figures["worst_gradient_error"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("error", "passed"), [(0.9e-5, True), (1.1e-5, False)])
def test_losses_are_compared_with_one_process(error: float, passed: bool) -> None:
    run = Run(CASE)
    results: Any = {run: measures((2.0, 4 * (1 - error))), REFERENCE: measures((2.0, 4.0))}
    finding = judge(ClauseCheck("NUM-2", run), results)
    assert (finding.passed, finding.bound) == (passed, 1e-5)
    assert finding.measured == pytest.approx(error, rel=1e-4)


@pytest.mark.clause("NUM-3")
@pytest.mark.parametrize(("ratio", "passed"), [(1.9, True), (2.1, False)])
@pytest.mark.parametrize(("parameter", "usual"), [("a", 0.01), ("c", 0.1)])
def test_an_error_may_be_twice_that_of_the_format(ratio: float, passed: bool, parameter: str, usual: float) -> None:
    """A parameter with a smaller format error than the median one may have twice the median's."""
    check = ClauseCheck("NUM-3", Run(Case("dense", Layout(tp=2), compute="bf16")))
    ours, own, exact = check.runs
    assert (own.case, own.losses) == (Case("dense", compute="bf16"), False)
    assert (exact.case, exact.losses) == (Case("dense", compute="fp64"), False)
    found = {"a": [1.001], "b": [1.01], "c": [1.1]} | {parameter: [1.0 + usual * ratio]}
    results: Any = {
        exact: measures(a=[1.0], b=[1.0], c=[1.0]),
        own: measures(a=[1.001], b=[1.01], c=[1.1]),
        ours: measures(**found),
    }
    finding = judge(check, results)
    assert (finding.passed, finding.bound, finding.figures["parameter"]) == (passed, 2.0, parameter)
    figures = [finding.figures[name] for name in ("worst_ratio", "error", "error_of_the_format")]
    assert figures == pytest.approx([ratio, usual * ratio, usual])


@pytest.mark.parametrize(("gradients", "bound"), [("bf16", 4e-3), ("int8", 2e-2), ("int4", 2e-1)])
@pytest.mark.parametrize(("part", "passed"), [(0.9, True), (1.1, False), (math.nan, False)])
@pytest.mark.parametrize(("clause", "exchanges"), [("COMM-1", 1), ("COMM-2", 64)])
def test_compression_may_cost_what_the_spec_states(
    gradients: Any, bound: float, part: float, passed: bool, clause: str, exchanges: int
) -> None:
    """8 of 64 exchanges may lose that much."""
    run = Run(Case("dense", Layout(dp_shard=2), gradients=gradients), losses=False, exchanges=exchanges)
    check = ClauseCheck(clause, run)
    assert check.runs == (run, REFERENCE)
    error = part * bound * (1 if exchanges == 1 else 8 / 64)
    results: Any = {run: measures(a=[3.0, 4.0 + 5 * error], b=[0.0]), REFERENCE: measures(a=[3.0, 4.0], b=[0.0])}
    finding = judge(check, results)
    assert (finding.passed, finding.bound) == (passed, 1.0)
    if passed:
        assert [finding.measured, finding.figures["gradient_error"]] == pytest.approx([part, error])


UNEQUAL = Run(Case("dense", Layout(dp_shard=2), unequal_shares=True))


@pytest.mark.parametrize(
    ("gradient", "loss", "weight", "passed"),
    [
        (0.9e-6, 0.9e-5, 0.9e-4, True),
        (1.1e-6, 0.0, 0.0, False),
        (0.0, 1.1e-5, 0.0, False),
        (0.0, 0.0, 1.1e-4, False),
        (math.nan, 0.0, 0.0, False),
        (0.0, math.nan, 0.0, False),
        (0.0, 0.0, math.nan, False),
    ],
)
def test_unequal_shares_change_neither_gradient_nor_losses_nor_weights(
    gradient: float, loss: float, weight: float, passed: bool
) -> None:
    reference, found = (
        measures((2.0, 4.0), a=[3.0], b=[4.0]),
        measures((2.0, 4 * (1 + loss)), a=[3.0], b=[4.0 + 5 * gradient]),
    )
    reference.weights, found.weights = {"a": np.array([2.0])}, {"a": np.array([2.0 * (1 + weight)])}
    finding = judge(ClauseCheck("NUM-7", UNEQUAL), {UNEQUAL: found, REFERENCE: reference})
    assert (finding.passed, finding.bound) == (passed, 1.0)
    assert finding.measured == pytest.approx(0.9, rel=1e-6) if passed else not finding.measured <= 1


GROWING = Run(Case("dense", Layout(dp_shard=2), ramp=True), gradients=False)
IN_ORDER = (range(4), range(4, 8), range(8, 12), range(12, 20), range(20, 28), range(28, 40), range(40, 52))
SIXTEEN = (range(4), range(4, 20), *IN_ORDER[4:])


@pytest.mark.parametrize(
    ("taken", "weight", "passed"),
    [
        (IN_ORDER, 0.0, True),
        (IN_ORDER, 1.1e-4, False),
        (IN_ORDER[:-1], 0.0, False),
        ((range(1, 5), *IN_ORDER[1:]), 0.0, False),
        (((0, 0, 1, 2, 3), *IN_ORDER[1:]), 0.0, False),
        (SIXTEEN, 0.0, False),
    ],
)
def test_a_growing_batch_takes_every_sample_once(taken: Any, weight: float, passed: bool) -> None:
    check = ClauseCheck("NUM-8", GROWING)
    alone = Run(Case("dense", ramp=True), gradients=False)
    assert check.runs == (GROWING, alone), "the reference's batch grows too"
    found, reference = measures((2.0,)), measures((2.0,))
    trained = replace(found.result.trained, taken=tuple(map(tuple, taken)))
    found.result = replace(found.result, trained=trained)
    reference.weights, found.weights = {"a": np.array([2.0])}, {"a": np.array([2.0 * (1 + weight)])}
    assert judge(check, {GROWING: found, alone: reference}).passed is passed


def test_missing_or_misshapen_weights_have_an_infinite_error() -> None:
    whole = {"a": np.ones(3), "b": np.ones(2)}
    assert whole_error({"a": np.ones(3), "b": np.full(2, 1.1)}, whole) == pytest.approx(0.1 * math.sqrt(2 / 5))
    assert (
        whole_error({"a": np.ones(3)}, whole) == whole_error({"a": np.ones(3), "b": np.ones((2, 1))}, whole) == math.inf
    )
    assert whole_error({}, whole) == whole_error(whole | {"b": np.array([1.0, math.inf])}, whole) == math.inf


@pytest.mark.clause("NUM-6")
@pytest.mark.parametrize(("again", "passed"), [("ab", True), ("cd", False)])
def test_a_repetition_has_the_same_weights(again: str, passed: bool) -> None:
    check = ClauseCheck("NUM-6", Run(CASE, gradients=False))
    first, second = check.runs
    assert (first.repetition, second.repetition, second.name) == (0, 1, "dense-fp32-tp2-again1")
    finding = judge(check, {first: measures(sha256="ab"), second: measures(sha256=again)})
    assert (finding.passed, finding.bound) == (passed, None)
    assert finding.figures == {"sha256": "ab", "again": again}
    assert finding.measured == float(not passed)


WHOLE = tuple(float(step) for step in range(1, 21))


@pytest.mark.parametrize(
    ("resumed", "passed"),
    [(("ab", WHOLE[10:]), True), (("cd", WHOLE[10:]), False), (("ab", (*WHOLE[10:19], 20.0001)), False), (None, False)],
)
def test_a_resumed_run_continues_bit_for_bit(resumed: Any, passed: bool) -> None:
    run = Run(CASE, gradients=False, resume=True)
    check = ClauseCheck("CKPT-1", run)
    assert check.runs == (run,)
    finding = judge(check, {run: measures(WHOLE, "ab", resumed)})
    assert (finding.passed, finding.bound) == (passed, None)


@pytest.mark.parametrize(("last", "passed"), [(20.0, True), (20.001, False)])
def test_a_run_continued_in_another_layout_has_the_losses_of_one_process(last: float, passed: bool) -> None:
    source = Run(Case("dense", Layout(pp=2)), gradients=False, resume=True)
    run = Run(CASE, gradients=False, continues=source)
    check = ClauseCheck("CKPT-2", run)
    assert check.runs == (run, source, REFERENCE)
    finding = judge(check, {run: measures((*WHOLE[10:19], last)), REFERENCE: measures(WHOLE)})
    assert (finding.passed, finding.bound) == (passed, 1e-5)


def test_a_clause_without_a_bound_measures_whether_it_was_kept() -> None:
    assert Finding("LEGAL-1", "x", True, {"reason": "r"}).measured == 0.0
    assert Finding("NUM-1", "x", False, {"parameter": "p"}, 1e-5).measured == 1.0


def test_checks_are_chosen_by_clause_case_or_family(monkeypatch: pytest.MonkeyPatch) -> None:
    every = checks(2)
    monkeypatch.setattr(judge_module, "_all_checks", lambda max_processes, features: iter(every))
    assert max(check.run.case.layout.world_size for check in every) == 2
    assert {check.clause for check in checks(2, ["NUM-6"])} == {"NUM-6"}
    assert {check.run.case.family for check in checks(2, ["moe"])} == {"moe"}
    assert {check.run.name for check in checks(2, ["dense-fp32-tp2"])} == {"dense-fp32-tp2"}
    assert len(checks(2, ["NUM-6", "CKPT-*"])) == sum(check.clause in ("NUM-6", "CKPT-1", "CKPT-2") for check in every)
    assert checks(2, ["nothing"]) == []


def test_names_state_what_differs_from_the_defaults() -> None:
    source = Run(CASE, resume=True)
    assert source.name == "dense-fp32-tp2-resumed"
    assert Run(Case("dense"), continues=source).name == "dense-fp32-one-from-dense-fp32-tp2"
    assert Run(CASE, losses=False, repetition=2).name == "dense-fp32-tp2-one-step-again2"
    full = Case("moe", compute="bf16", recompute="full", offload="optimizer", compile=True, optimizer="adamw")
    assert full.name == "moe-bf16-one-full-offload-compiled-adamw"
    assert (UNEQUAL.case.name, GROWING.case.name) == ("dense-fp32-dp_shard2-shares", "dense-fp32-dp_shard2-ramp")
    assert GROWING.case.reference == Case("dense", ramp=True)
    assert full.reference == Case("moe", compute="bf16", optimizer="adamw")
    layouts = {
        "dp_replicate2.dp_shard2.cp2.zero1.ring": Layout(dp_replicate=2, dp_shard=2, zero_stage=1, cp=2),
        "tp2.ep4.plain": Layout(tp=2, sequence_parallel=False, ep=4),
        "pp2.1f1b.uneven": Layout(pp=2, stage_layers=(3, 1)),
        "one": Layout(zero_stage=1, pipeline_schedule="zbv"),
    }
    assert {name_layout(layout): layout for layout in layouts.values()} == layouts


def test_one_job_serves_runs_of_a_size_after_the_runs_that_they_continue() -> None:
    source = Run(Case("dense", Layout(pp=2)), resume=True)
    after, alone, four = Run(Case("dense"), continues=source), Run(Case("dense")), Run(Case("dense", Layout(tp=4)))
    assert _batches([after, four, source, alone]) == [[four], [source], [alone, after]]
    grown = Run(Case("dense", Layout(tp=4)), continues=source)
    same = Run(Case("dense", Layout(tp=2)), continues=source)
    assert _batches([grown, same, source, four]) == [[four], [source, same], [grown]], "the source is there first"


def test_requests_of_runs() -> None:
    plain = Run(CASE).request("cpu")
    assert (plain.steps, plain.gradients, plain.clip_from, plain.clip_norm) == (20, True, 10, 0.1)
    assert (plain.save_at, plain.resume, plain.continues) == (None, False, None)
    source = Run(Case("dense", Layout(tp=2), optimizer="adamw"), gradients=False, resume=True)
    saved = source.request("cpu")
    assert (saved.clip_from, saved.save_at, saved.resume, saved.gradients) == (None, 10, True, False)
    moved = Run(CASE, losses=False, continues=source).request("cpu")
    assert (moved.steps, moved.clip_from, moved.continues) == (0, None, source.name)
    assert (plain.weights, UNEQUAL.request("cpu").weights) == ((), (7.0, 1.0))
    growing = GROWING.request("cpu")
    assert (growing.weights, growing.clip_from) == ((), None)


@pytest.mark.parametrize(
    ("case", "micro", "accumulated"),
    [
        (Case("dense"), 4, 2),
        (Case("dense", Layout(dp_shard=2)), 4, 1),
        (Case("dense", Layout(dp_shard=4)), 2, 1),
        (Case("dense", Layout(dp_replicate=2, dp_shard=4)), 1, 1),
        (Case("resnet"), 8, 1),
        (Case("dense", Layout(dp_shard=2), unequal_shares=True), 4, 2),
        (Case("dense", Layout(dp_replicate=2, dp_shard=2), unequal_shares=True), 4, 2),
        (Case("resnet", Layout(dp_shard=2), unequal_shares=True), 7, 1),
        (Case("dense", Layout(dp_shard=2), ramp=True), 4, 2),
        (Case("dense", Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2), ramp=True), 4, 4),
        (Case("resnet", Layout(dp_shard=2), ramp=True), 6, 1),
    ],
)
def test_eight_samples_are_divided_into_ranks_and_micro_batches(case: Case, micro: int, accumulated: int) -> None:
    plan = build_plan(case, "cpu")
    assert (plan.micro_batch_size, plan.grad_accum_steps) == (micro, accumulated)
    assert (plan.devices_per_node, plan.world_size) == (case.layout.world_size, case.layout.world_size)
    assert not plan.layout.sequence_parallel, "there is no tp"


def test_fp8_multiplies_with_bf16_for_the_rest() -> None:
    plan = build_plan(Case("dense", Layout(tp=2), compute="fp8"), "cpu")
    assert (plan.compute, plan.spec.precision.matmul, plan.layout.sequence_parallel) == ("bf16", "fp8", True)
    assert build_plan(Case("dense", compute="fp64"), "cpu").compute == "fp64"
