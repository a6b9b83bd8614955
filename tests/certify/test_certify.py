"""Clauses measured by real torchrun jobs, sound and with faults planted in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.certify import runs
from trainspec_cli.certify.cases import Case
from trainspec_cli.certify.judge import ClauseCheck, Finding, judge
from trainspec_cli.certify.runs import Run
from trainspec_cli.launch.job.machine import detect
from trainspec_cli.launch.tools import CERTIFY, Tool
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.tools import CertifyRequest, CertifyResult

FAULTY = str(Path(__file__).with_name("faulty_worker.py"))
HERE = detect(look_for_gpus=False)
REPLICATED, SHARDED = Case("dense", Layout(dp_replicate=2)), Case("dense", Layout(dp_shard=2))
TIED = Case("tied", Layout(pp=2))
CUT = Case("moe", Layout(tp=2))
SPREAD = Case("moe", Layout(dp_shard=2, ep=2))


def faulty(fault: str) -> Tool[CertifyRequest, CertifyResult]:
    return replace(CERTIFY, program=(FAULTY, fault))


def measure(folder: Path, checks: list[ClauseCheck], tool=CERTIFY) -> dict[tuple[str, str], Finding]:
    results = runs.measure([run for check in checks for run in check.runs], folder, HERE, lambda done: None, tool)
    return {(check.clause, check.run.case.name): judge(check, results) for check in checks}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """What one process computes, of the families that faults are planted in."""
    wanted = [Run(Case("dense")), Run(Case("tied")), Run(Case("tied", optimizer="adamw"))]
    return runs.measure(wanted, tmp_path_factory.mktemp("references"), HERE, lambda done: None)


def test_sound_layouts_keep_the_clauses(tmp_path):
    gradients = [ClauseCheck("NUM-1", Run(case)) for case in (REPLICATED, TIED, CUT, SPREAD)]
    findings = measure(tmp_path, [*gradients, ClauseCheck("NUM-2", Run(CUT)), ClauseCheck("NUM-2", Run(SPREAD))])
    for place, finding in findings.items():
        assert finding.passed, (place, finding.figures)
        assert 0 <= finding.measured <= 1e-5


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("wrong_gradient_scale", SHARDED),
        ("skipped_all_reduce", REPLICATED),
        ("stale_embedding_gradient", TIED),
        ("lost_last_backward", SHARDED),
    ],
)
def test_a_planted_fault_is_caught(tmp_path, references, fault, case):
    check = ClauseCheck("NUM-1", Run(case, losses=False))
    found = runs.measure([check.run], tmp_path, HERE, lambda done: None, faulty(fault))
    finding = judge(check, references | found)
    assert not finding.passed
    assert finding.measured > 0.1, "far beyond the bound, not a matter of rounding"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(tp=2)])
def test_fp8_costs_what_fp8_costs_one_process(tmp_path, layout):
    check = ClauseCheck("NUM-3", Run(Case("dense", layout, compute="fp8"), losses=False))
    (finding,) = measure(tmp_path, [check]).values()
    assert finding.passed, finding.figures
    error = finding.figures["error_of_the_format"]
    assert isinstance(error, float)
    assert error > 0.03, "bf16 alone costs a tenth of this"


@pytest.mark.slow
def test_forgotten_moments_are_caught_and_sound_ones_resume(tmp_path):
    run = Run(Case("dense", Layout(dp_shard=2), optimizer="adamw"), gradients=False, resume=True)
    check = ClauseCheck("CKPT-1", run)
    assert measure(tmp_path / "sound", [check])["CKPT-1", run.case.name].passed
    unsound = measure(tmp_path / "faulty", [check], faulty("forgotten_moments"))
    assert not unsound["CKPT-1", run.case.name].passed


RING, SPLIT = Case("dense", Layout(cp=2)), Case("tied", Layout(pp=2, pipeline_schedule="zero_bubble"))
SOURCE = Run(Case("tied", Layout(tp=2), optimizer="adamw"), gradients=False, resume=True)
TO_PIPELINE = Case("tied", Layout(pp=2, pipeline_schedule="zbv"), optimizer="adamw")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("local_norm", ClauseCheck("NUM-2", Run(SHARDED))),
        ("local_norm", ClauseCheck("NUM-2", Run(CUT))),
        ("local_norm", ClauseCheck("NUM-2", Run(SPLIT))),
        ("wrong_ring_order", ClauseCheck("NUM-1", Run(RING))),
        ("no_copied_twins", ClauseCheck("CKPT-2", Run(TO_PIPELINE, gradients=False, continues=SOURCE))),
        ("no_shard_reduce", ClauseCheck("NUM-1", Run(SHARDED))),
        ("stale_embedding_gradient", ClauseCheck("NUM-1", Run(SPLIT))),
    ],
    ids=lambda value: value if isinstance(value, str) else value.run.name,
)
def test_a_planted_fault_breaks_its_clause(tmp_path, fault, check):
    assert measure(tmp_path / "sound", [check])[check.clause, check.run.case.name].passed
    assert not measure(tmp_path / "faulty", [check], faulty(fault))[check.clause, check.run.case.name].passed
