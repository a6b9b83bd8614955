"""Clauses measured by real torchrun jobs, sound and with faults planted in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.certify.cases import Case
from trainspec_cli.certify.judge import Check, Finding, judge
from trainspec_cli.certify.runs import WITNESS, Run, hear
from trainspec_cli.launch.job.machine import detect
from trainspec_cli.spec.recipe.layout import Layout

FAULTY = str(Path(__file__).with_name("faulty_witness.py"))
REPLICATED, SHARDED = Case("dense", Layout(dp_replicate=2)), Case("dense", Layout(dp_shard=2))
TIED = Case("tied", Layout(pp=2))
CUT = Case("moe", Layout(tp=2))
SPREAD = Case("moe", Layout(dp_shard=2, ep=2))


def measure(folder: Path, checks: list[Check], worker=WITNESS) -> dict[tuple[str, str], Finding]:
    runs = [run for check in checks for run in check.runs]
    heard = hear(runs, folder, detect(look_for_gpus=False), lambda done: None, worker)
    return {(check.clause, check.run.case.name): judge(check, heard) for check in checks}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """What one process computes, of the families that faults are planted in."""
    runs = [Run(Case("dense")), Run(Case("tied"))]
    return hear(runs, tmp_path_factory.mktemp("references"), detect(look_for_gpus=False), lambda done: None)


def test_sound_layouts_keep_the_clauses(tmp_path):
    gradients = [Check("NUM-1", Run(case)) for case in (REPLICATED, TIED, CUT, SPREAD)]
    findings = measure(tmp_path, [*gradients, Check("NUM-2", Run(CUT)), Check("NUM-2", Run(SPREAD))])
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
    check = Check("NUM-1", Run(case, losses=False))
    faulty = hear([check.run], tmp_path, detect(look_for_gpus=False), lambda done: None, worker=(FAULTY, fault))
    finding = judge(check, references | faulty)
    assert not finding.passed
    assert finding.measured > 0.1, "far beyond the bound, not a matter of rounding"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(tp=2)])
def test_fp8_costs_what_fp8_costs_one_process(tmp_path, layout):
    check = Check("NUM-3", Run(Case("dense", layout, compute="fp8"), losses=False))
    (finding,) = measure(tmp_path, [check]).values()
    assert finding.passed, finding.figures
    error = finding.figures["error_of_the_format"]
    assert isinstance(error, float)
    assert error > 0.03, "bf16 alone costs a tenth of this"


@pytest.mark.slow
def test_forgotten_moments_are_caught_and_sound_ones_resume(tmp_path):
    run = Run(Case("dense", Layout(dp_shard=2), optimizer="adamw"), gradients=False, resume=True)
    check = Check("CKPT-1", run)
    assert measure(tmp_path / "sound", [check])["CKPT-1", run.case.name].passed
    faulty = measure(tmp_path / "faulty", [check], worker=(FAULTY, "forgotten_moments"))
    assert not faulty["CKPT-1", run.case.name].passed
