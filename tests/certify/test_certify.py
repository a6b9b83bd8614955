"""Clauses measured by real torchrun jobs, sound and with faults planted in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.certify import runs
from trainspec_cli.certify.cases import Case
from trainspec_cli.certify.judge import ClauseCheck, Finding, Results, judge
from trainspec_cli.certify.runs import Run
from trainspec_cli.launch.job.machine import detect
from trainspec_cli.launch.tools import CERTIFY, Tool
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.tools import CertifyRequest, CertifyResult

FAULTY = str(Path(__file__).with_name("faulty_worker.py"))
REPLICATED, SHARDED = Case("dense", Layout(dp_replicate=2)), Case("dense", Layout(dp_shard=2))
TIED = Case("tied", Layout(pp=2))
CUT = Case("moe", Layout(tp=2))
SPREAD = Case("moe", Layout(dp_shard=2, ep=2))


def faulty(planted: dict[str, str]) -> Tool[CertifyRequest, CertifyResult]:
    """The worker with faults in some runs, by their names."""
    return replace(CERTIFY, program=(FAULTY, json.dumps(planted)))


def measure(folder: Path, checks: list[ClauseCheck], tool=CERTIFY) -> dict[tuple[str, str], Finding]:
    wanted = [run for check in checks for run in check.runs]
    results = runs.measure(wanted, folder, detect(look_for_gpus=False), lambda done: None, tool)
    return {(check.clause, check.run.name): judge(check, results) for check in checks}


PLANTED = {
    fault: Run(case, losses=False, take=number)
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
"""The runs that a fault is planted in."""
SOUND = [
    *(ClauseCheck("NUM-1", Run(case)) for case in (REPLICATED, SHARDED, TIED, CUT, SPREAD)),
    *(ClauseCheck("NUM-2", Run(case)) for case in (CUT, SPREAD)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    """One torchrun for one process and one for two, sound runs and faulty ones in turn."""
    sound = [run for check in SOUND for run in check.runs]
    tool = faulty({run.name: fault for fault, run in PLANTED.items()})
    folder = tmp_path_factory.mktemp("certify")
    return runs.measure([*PLANTED.values(), *sound], folder, detect(look_for_gpus=False), lambda done: None, tool)


@pytest.mark.parametrize("check", SOUND, ids=lambda check: f"{check.clause} {check.run.case.name}")
def test_sound_layouts_keep_the_clauses(results: Results, check: ClauseCheck) -> None:
    finding = judge(check, results)
    assert finding.passed, finding.figures
    assert 0 <= finding.measured <= 1e-5


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(results: Results, fault: str) -> None:
    finding = judge(ClauseCheck("NUM-1", PLANTED[fault]), results)
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
    assert measure(tmp_path / "sound", [check])["CKPT-1", run.name].passed
    unsound = measure(tmp_path / "faulty", [check], faulty({run.name: "forgotten_moments"}))
    assert not unsound["CKPT-1", run.name].passed


RING, SPLIT = Case("dense", Layout(cp=2)), Case("tied", Layout(pp=2, pipeline_schedule="zero_bubble"))
SOURCE = Run(Case("tied", Layout(tp=2), optimizer="adamw"), gradients=False, resume=True)
INTO = Run(Case("tied", Layout(pp=2, pipeline_schedule="zbv"), optimizer="adamw"), gradients=False, continues=SOURCE)
MORE_PLANTED = [
    ("local_norm", ClauseCheck("NUM-2", Run(SHARDED))),
    ("local_norm", ClauseCheck("NUM-2", Run(CUT))),
    ("local_norm", ClauseCheck("NUM-2", Run(SPLIT))),
    ("wrong_ring_order", ClauseCheck("NUM-1", Run(RING))),
    ("no_copied_twins", ClauseCheck("CKPT-2", INTO)),
    ("no_shard_reduce", ClauseCheck("NUM-1", Run(SHARDED))),
    ("wrong_gradient_scale", ClauseCheck("NUM-2", Run(REPLICATED))),
    ("stale_embedding_gradient", ClauseCheck("NUM-1", Run(SPLIT))),
]


@pytest.mark.slow
def test_a_planted_fault_breaks_its_clause_and_no_sound_run_does(tmp_path):
    sound = [check for _, check in MORE_PLANTED]
    planted = {
        replace(check.run, take=number): (fault, check.clause) for number, (fault, check) in enumerate(MORE_PLANTED, 1)
    }
    unsound = [ClauseCheck(clause, run) for run, (_, clause) in planted.items()]
    tool = faulty({run.name: fault for run, (fault, _) in planted.items()})
    findings = measure(tmp_path, [*unsound, *sound], tool)
    assert [check.run.name for check in sound if not findings[check.clause, check.run.name].passed] == []
    assert [check.run.name for check in unsound if findings[check.clause, check.run.name].passed] == []
