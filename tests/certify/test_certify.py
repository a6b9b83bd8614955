"""Clauses measured by real torchrun jobs, sound and with faults planted in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli.certify.cases import Case
from trainspec_cli.certify.judge import Check, Finding, Heard, judge
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
    *(Check("NUM-1", Run(case)) for case in (REPLICATED, SHARDED, TIED, CUT, SPREAD)),
    *(Check("NUM-2", Run(case)) for case in (CUT, SPREAD)),
]


@pytest.fixture(scope="module")
def heard(tmp_path_factory) -> Heard:
    """One torchrun for one process and one for two, sound runs and faulty ones in turn."""
    sound = [run for check in SOUND for run in check.runs]
    worker = (FAULTY, json.dumps({run.name: fault for fault, run in PLANTED.items()}))
    folder = tmp_path_factory.mktemp("certify")
    return hear([*PLANTED.values(), *sound], folder, detect(look_for_gpus=False), lambda done: None, worker)


@pytest.mark.parametrize("check", SOUND, ids=lambda check: f"{check.clause} {check.run.case.name}")
def test_sound_layouts_keep_the_clauses(heard: Heard, check: Check) -> None:
    finding = judge(check, heard)
    assert finding.passed, finding.figures
    assert 0 <= finding.measured <= 1e-5


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(heard: Heard, fault: str) -> None:
    finding = judge(Check("NUM-1", PLANTED[fault]), heard)
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
    worker = (FAULTY, json.dumps({run.name: "forgotten_moments"}))
    faulty = measure(tmp_path / "faulty", [check], worker=worker)
    assert not faulty["CKPT-1", run.case.name].passed
