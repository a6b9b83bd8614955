"""Clauses measured by real torchrun jobs, sound and with faults planted in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.certificate import Finding
from trainspec_cli.recipe.results.tools import CertifyRequest, CertifyResult
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.tools import CERTIFY, Tool
from trainspec_cli.wings.certify import runs
from trainspec_cli.wings.certify.cases import Case, cases
from trainspec_cli.wings.certify.judge import ClauseCheck, Results, checks, judge
from trainspec_cli.wings.certify.runs import Run

FAULTY = str(Path(__file__).with_name("faulty_worker.py"))
REPLICATED, SHARDED = Case("dense", Layout(dp_replicate=2)), Case("dense", Layout(dp_shard=2))
TIED = Case("tied", Layout(pp=2))
CUT = Case("moe", Layout(tp=2))
SPREAD = Case("moe", Layout(dp_shard=2, ep=2))


def faulty(planted: dict[str, str]) -> Tool[CertifyRequest, CertifyResult]:
    """Return the worker with faults in the runs of these names."""
    return replace(CERTIFY, program=(FAULTY, json.dumps(planted)))


def measure(folder: Path, checks: list[ClauseCheck], tool=CERTIFY) -> dict[tuple[str, str], Finding]:
    wanted = [run for check in checks for run in check.runs]
    results = runs.measure(wanted, folder, detect(look_for_gpus=False), lambda done: None, tool)
    return {(check.clause, check.run.name): judge(check, results) for check in checks}


PLANTED = {
    fault: Run(case, losses=False, repetition=number)
    for number, (fault, case) in enumerate(
        (
            ("wrong_gradient_scale", SHARDED),
            ("skipped_all_reduce", REPLICATED),
            ("stale_embedding_gradient", TIED),
            ("lost_last_backward", SHARDED),
        ),
        1,
    )
}
"""The runs with a planted fault."""
SOUND = [
    *(ClauseCheck("NUM-1", Run(case)) for case in (REPLICATED, SHARDED, TIED, CUT, SPREAD)),
    *(ClauseCheck("NUM-2", Run(case)) for case in (CUT, SPREAD)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    """Measure sound and faulty runs in turn, with one torchrun for one process and one for two."""
    sound = [run for check in SOUND for run in check.runs]
    tool = faulty({run.name: fault for fault, run in PLANTED.items()})
    folder = tmp_path_factory.mktemp("certify")
    return runs.measure([*PLANTED.values(), *sound], folder, detect(look_for_gpus=False), lambda done: None, tool)


@pytest.mark.clause("NUM-1", "NUM-2")
@pytest.mark.parametrize("check", SOUND, ids=lambda check: f"{check.clause} {check.run.case.name}")
@pytest.mark.slow
def test_sound_layouts_keep_the_clauses(results: Results, check: ClauseCheck) -> None:
    finding = judge(check, results)
    assert finding.passed, finding.figures
    assert 0 <= finding.measured <= 1e-5


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.slow
def test_a_planted_fault_is_caught(results: Results, fault: str) -> None:
    finding = judge(ClauseCheck("NUM-1", PLANTED[fault]), results)
    assert not finding.passed
    assert finding.measured > 0.1, "far beyond the bound, not rounding"


RING, SPLIT = Case("dense", Layout(cp=2)), Case("tied", Layout(pp=2, pipeline_schedule="zero_bubble"))
SOURCE = Run(Case("tied", Layout(tp=2), optimizer="adamw"), gradients=False, resume=True)
INTO = Run(Case("tied", Layout(pp=2, pipeline_schedule="zbv"), optimizer="adamw"), gradients=False, continues=SOURCE)
RESUMED = Run(Case("dense", Layout(dp_shard=2), optimizer="adamw"), gradients=False, resume=True)
UNEQUAL = ClauseCheck("NUM-7", Run(Case("dense", Layout(dp_shard=2), unequal_shares=True)))
GROWING = ClauseCheck("NUM-8", Run(Case("dense", Layout(dp_shard=2), ramp=True), gradients=False))
FEWER_BITS = {
    (check.clause, check.run.case.layout): check
    for check in checks(2, ["COMM-*"])
    if (check.run.case.family, check.run.case.gradients) == ("dense", "int4")
}
"""The checks of the matrix, by clause and layout."""
PIPELINE = Layout(pp=2)
FUSED = ClauseCheck("KERN-1", Run(Case("dense", Layout(tp=2), kernel=("swiglu", "frugal")), losses=False))


def live_check(clause: str, family: str, layout: Layout) -> ClauseCheck:
    """Return the check of the matrix."""
    (found,) = [case for case in cases(2)[clause] if (case.family, case.layout) == (family, layout)]
    return ClauseCheck(clause, Run(found))


MOVED, FAILING = (live_check(clause, "tied", PIPELINE) for clause in ("LIVE-1", "LIVE-4"))
CHANGED, KILLED, SHORT = (live_check(clause, "dense", SHARDED.layout) for clause in ("LIVE-2", "LIVE-3", "LIVE-5"))
IN_PLACE = live_check("LIVE-5", "dense", Layout())
BREAKING = [
    ("local_norm", ClauseCheck("NUM-2", Run(SHARDED))),
    ("local_norm", ClauseCheck("NUM-2", Run(CUT))),
    ("local_norm", ClauseCheck("NUM-2", Run(SPLIT))),
    ("wrong_ring_order", ClauseCheck("NUM-1", Run(RING))),
    ("no_copied_twins", ClauseCheck("CKPT-2", INTO)),
    ("no_shard_reduce", ClauseCheck("NUM-1", Run(SHARDED))),
    ("wrong_gradient_scale", ClauseCheck("NUM-2", Run(REPLICATED))),
    ("stale_embedding_gradient", ClauseCheck("NUM-1", Run(SPLIT))),
    ("forgotten_moments", ClauseCheck("CKPT-1", RESUMED)),
    ("mean_of_ranks", UNEQUAL),
    ("first_batch_size", GROWING),
    ("steps_of_one_size", GROWING),
    ("own_row_left_out", FEWER_BITS["COMM-1", SHARDED.layout]),
    ("lost_is_lost", FEWER_BITS["COMM-2", SHARDED.layout]),
    ("sums_give_nothing_back", FEWER_BITS["COMM-2", REPLICATED.layout]),
    ("feedback_not_saved", FEWER_BITS["COMM-3", SHARDED.layout]),
    ("moments_left_behind", MOVED),
    ("state_on_disk", CHANGED),
    ("forgotten_layouts", KILLED),
    ("not_moved_back", FAILING),
    ("moments_not_saved", SHORT),
    ("lost_batch", SHORT),
    ("wrong_silu", FUSED),
]
SPARED = [
    *(("mean_of_ranks", check) for check in (ClauseCheck("NUM-1", Run(SHARDED)), GROWING)),
    *(("first_batch_size", check) for check in (ClauseCheck("NUM-2", Run(SHARDED)), UNEQUAL)),
    *(("steps_of_one_size", check) for check in (ClauseCheck("NUM-2", Run(SHARDED)), UNEQUAL)),
    ("lost_is_lost", FEWER_BITS["COMM-1", SHARDED.layout]),
    ("sums_give_nothing_back", FEWER_BITS["COMM-1", REPLICATED.layout]),
    ("feedback_not_saved", FEWER_BITS["COMM-2", SHARDED.layout]),
    ("moments_left_behind", FAILING),
    ("state_on_disk", SHORT),
    ("not_moved_back", MOVED),
    ("moments_not_saved", IN_PLACE),
]
"""Faults in the division of a batch and in changes, and clauses that they do not affect."""
IN_FP8 = [
    ClauseCheck("NUM-3", Run(Case("dense", layout, compute="fp8"), losses=False))
    for layout in (SHARDED.layout, CUT.layout)
]


EVERY_FAULT = [*BREAKING, *SPARED]


def planted_in(check: ClauseCheck, number: int) -> ClauseCheck:
    """Return the check on its own run with at most the steps that its clause needs."""
    run = replace(check.run, repetition=number, losses=check.run.losses and check.clause != "NUM-1")
    return replace(check, run=run)


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[tuple[str, str], Finding]:
    """Measure all checks with one torchrun for one process and one for two."""
    planted = {planted_in(check, number): fault for number, (fault, check) in enumerate(EVERY_FAULT, 1)}
    checks = [*IN_FP8, *(check for _, check in BREAKING), *planted]
    tool = faulty({check.run.name: fault for check, fault in planted.items()})
    return measure(tmp_path_factory.mktemp("planted"), checks, tool)


@pytest.mark.slow
def test_every_clause_is_kept_by_sound_runs(findings):
    checks = [check for _, check in BREAKING]
    assert [check.run.name for check in checks if not findings[check.clause, check.run.name].passed] == []


@pytest.mark.clause("NUM-1", "NUM-2", "NUM-7", "NUM-8", "COMM-1", "COMM-2", "COMM-3", "CKPT-1", "CKPT-2")
@pytest.mark.clause("LIVE-1", "LIVE-2", "LIVE-3", "LIVE-4", "LIVE-5")
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    range(1, 1 + len(EVERY_FAULT)),
    ids=lambda number: "-".join([EVERY_FAULT[number - 1][0], EVERY_FAULT[number - 1][1].clause]),
)
def test_a_planted_fault_breaks_its_clause_and_no_other(findings, number):
    _, check = EVERY_FAULT[number - 1]
    faulty_check = planted_in(check, number)
    finding = findings[faulty_check.clause, faulty_check.run.name]
    assert finding.passed is (number > len(BREAKING)), finding.figures


@pytest.mark.clause("NUM-3")
@pytest.mark.slow
@pytest.mark.parametrize("check", IN_FP8, ids=lambda check: check.run.name)
def test_fp8_costs_no_more_than_the_format_costs_one_process(findings, check):
    finding = findings[check.clause, check.run.name]
    assert finding.passed, finding.figures
    error = finding.figures["error_of_the_format"]
    assert isinstance(error, float)
    assert error > 0.03, "bf16 alone costs a tenth of this"
