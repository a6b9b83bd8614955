"""A sample of the certification, drawn by commit: all clauses, and a third of all pairs of a family and an axis.

A few commits draw every pair. Every sample has tied embeddings under the schedules that split the backward,
checkpoints that are read into pipelines with tied embeddings, ring and Ulysses attention, clipping (in every case of
NUM-2), and unequal shares in half of the data-parallel cases.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from lab.drawing import commit

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.run.job.machine import detect
from trainspec_cli.wings.certify import runs
from trainspec_cli.wings.certify.cases import COMM_CLAUSES, LIVE_CLAUSES, Case, name_layout
from trainspec_cli.wings.certify.clauses import LEVELS, SECURITY, read_clauses
from trainspec_cli.wings.certify.judge import ClauseCheck, checks, judge, judge_refusals
from trainspec_cli.wings.certify.runs import Run

PROCESSES = 4
ALONE = (
    *("NUM-3", "NUM-4", "NUM-5", "NUM-6", "NUM-8", "KERN-1", "KERN-2"),
    *(*COMM_CLAUSES, "CKPT-1", "CKPT-2", *LIVE_CLAUSES),
)
"""Clauses with separate runs; the sample has one case of each."""
ALWAYS = [
    Case("tied", Layout(pp=2, pipeline_schedule="zero_bubble")),
    Case("tied", Layout(pp=2, pipeline_schedule="zbv")),
    Case("dense", Layout(cp=2, context_method="ring")),
    Case("dense", Layout(cp=2, context_method="ulysses")),
]


@cache
def matrix() -> list[ClauseCheck]:
    return checks(PROCESSES)


def sample(seed: str) -> list[ClauseCheck]:
    """Draw checks that cover every clause, and a third of the pairs of a family and a part of a layout."""
    draw = random.Random(seed)
    chosen = [*(Run(case) for case in ALWAYS), *_reading_into_tied_pipelines()]
    chosen += [draw.choice([check for check in matrix() if check.clause == clause]).run for clause in ALONE]
    spread = [check.run for check in matrix() if check.clause == "NUM-2"]
    pairs = sorted({pair for run in spread for pair in parts(run)})
    missing = set(draw.sample(pairs, k=len(pairs) // 3)) - {
        pair for run in chosen[: len(ALWAYS)] for pair in parts(run)
    }
    while missing:
        some = draw.sample(spread, k=min(6, len(spread)))
        best = max(some, key=lambda run: len(parts(run) & missing))
        if parts(best) & missing:
            chosen.append(best)
            missing -= parts(best)
    divided = [run.case for run in chosen if run in spread and run.case.layout.data_parallel_size > 1]
    unequal = [Run(replace(case, unequal_shares=True)) for case in draw.sample(divided, k=-(-len(divided) // 2))]
    return [check for check in matrix() if check.run in {*chosen, *unequal}]


def parts(run: Run) -> set[tuple[str, str]]:
    """Return each axis of the run's layout with its family, and the variant of an axis (ring, zbv) with any family."""
    words = name_layout(run.case.layout).split(".")
    return {(run.case.family if word[-1].isdigit() and "zero" not in word else "", word) for word in words}


def _reading_into_tied_pipelines() -> list[Run]:
    """Return the runs that must fill a stage's copy of the embedding from the checkpoint."""
    tied = [check.run for check in matrix() if check.clause == "CKPT-2" and check.run.case.family == "tied"]
    return [run for run in tied if run.case.layout.pp > 1]


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_a_sample_has_every_clause_and_the_fixed_cases(seed: str) -> None:
    drawn = sample(seed)
    assert {check.clause for check in drawn} == set(read_clauses()) - {"LEGAL-1", *SECURITY, *LEVELS}
    spread = [check.run for check in drawn if check.clause == "NUM-2"]
    assert {check.run for check in drawn if check.clause == "NUM-1"} == set(spread)
    assert {run.case for run in spread} >= set(ALWAYS)
    divided = {run.case for run in spread if run.case.layout.data_parallel_size > 1}
    unequal = {replace(check.run.case, unequal_shares=False) for check in drawn if check.clause == "NUM-7"}
    assert unequal <= divided
    assert len(unequal) >= len(divided) / 2
    into = [check.run for check in drawn if check.clause == "CKPT-2" and check.run.case.family == "tied"]
    assert {run.case.layout.pipeline_schedule for run in into if run.case.layout.pp > 1} >= {"zbv", "1f1b"}
    assert len(drawn) < len(matrix()) / 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sample_of_the_matrix_keeps_every_clause(tmp_path: Path) -> None:
    seed = commit()
    drawn = sample(seed)
    names = [f"{check.clause} {check.run.name}" for check in drawn]
    print(f"seed {seed}: {len(drawn)} checks", *names, sep="\n")
    wanted = [run for check in drawn for run in check.runs]
    results = runs.measure(wanted, tmp_path, detect(look_for_gpus=False), lambda done: None)
    findings = [*(judge(check, results) for check in drawn), *judge_refusals(PROCESSES)]
    assert [finding for finding in findings if not finding.passed] == [], f"seed {seed}"
