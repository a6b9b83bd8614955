"""The matrix of the certification: the cases of each clause, and what each case trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.wings.certify.cases import (
    COMBINED,
    COMM_CLAUSES,
    COMPRESSED,
    Case,
    build_plan,
    build_spec,
    cases,
    layouts,
    legal_layouts,
    name_layout,
    refusals,
    refused,
)
from trainspec_cli.wings.certify.families import FAMILIES, SAMPLES, SEQ_LEN
from trainspec_cli.wings.certify.judge import KEPT, MOVES, ClauseCheck, checks, judge_refusals
from trainspec_cli.wings.certify.runs import Measured

TWO = 2


@cache
def matrix(processes: int) -> tuple[ClauseCheck, ...]:
    return tuple(checks(processes))


@cache
def cases_for(processes: int) -> dict[str, list[Case]]:
    return cases(processes)


def test_the_layouts_of_the_matrix_are_distinct_and_need_eight_processes_at_most() -> None:
    found = list(layouts(4))
    assert len(found) == len(set(found)) == len({name_layout(layout) for layout in found})
    assert {layout.world_size for layout in found} == {2, 4, 8}
    assert {layout.stage_layers for layout in found} == {None, (3, 1)}
    assert {layout.zero_stage for layout in found if layout.dp_shard > 1} == {1, 2, 3}
    assert set(COMBINED) <= set(found) and set(KEPT) <= set(found)


def test_the_matrix_covers_every_variant_and_family() -> None:
    found = [case for of_clause in cases_for(8).values() for case in of_clause]
    assert {case.family for case in found} == set(FAMILIES)
    assert {case.layout.pipeline_schedule for case in found} == {"gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"}
    assert {case.layout.ep for case in found} == {1, 2, 4, 8}
    assert {case.recompute for case in found} == {"none", "selective", "full"}
    assert {case.compute for case in found} == {"fp32", "bf16", "fp8"}
    assert {case.family for case in found if case.unequal_shares} == set(FAMILIES)
    assert {case.family for case in found if case.ramp} == set(FAMILIES)
    names = [check.clause + check.run.name for check in matrix(8)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("processes", [2, 4])
def test_no_case_needs_more_processes_than_allowed(processes: int) -> None:
    found = [case for of_clause in cases_for(processes).values() for case in of_clause]
    assert max(case.layout.world_size for case in found) == processes
    assert max(check.run.case.layout.world_size for check in matrix(processes)) == processes


def test_each_legal_layout_of_a_family_is_a_case_of_gradients_and_of_losses() -> None:
    spread = {(family, layout) for family in FAMILIES for layout in legal_layouts(family, TWO)}
    for clause in ("NUM-1", "NUM-2"):
        found = [check.run for check in matrix(TWO) if check.clause == clause]
        assert Counter((run.case.family, run.case.layout) for run in found) == Counter(spread)
        assert {run.losses for run in found} == {True} and {run.gradients for run in found} == {True}
    illegal = {case for family in FAMILIES for case in (Case(family, each) for each in layouts(4)) if refusals(case)}
    assert not illegal & {Case(family, layout) for family, layout in spread}
    named = {case.name for case in illegal if case.layout.world_size <= TWO}
    assert set(refused(TWO)) == named and len(judge_refusals(TWO)) == len(named)


def test_formats_recomputation_offload_and_compiling_are_combined_with_some_layouts() -> None:
    found = cases_for(TWO)
    assert {case.layout for case in found["NUM-3"]} <= set(COMBINED)
    dense = {clause: [case for case in of_clause if case.family == "dense"] for clause, of_clause in found.items()}
    assert {case.compute for case in dense["NUM-3"]} == {"bf16", "fp8"}
    assert {case.compute for case in found["NUM-3"] if case.family != "dense"} == {"bf16"}
    manners = Counter((case.recompute, case.offload) for case in dense["NUM-4"])
    assert set(manners) == {("selective", "none"), ("full", "none"), ("none", "optimizer")}
    assert len(set(manners.values())) == 1, "each with every layout"
    assert all(case.compile for case in found["NUM-5"]) and found["NUM-5"]
    assert {case.layout.pipeline_schedule for case in found["NUM-5"]} == {"1f1b", "zbv"}
    assert {case.layout.pp for case in found["NUM-5"]} == {1, 2}
    assert not any(case.compile for clause in ("NUM-1", "NUM-3", "NUM-4") for case in found[clause])


def test_without_torchao_no_case_uses_fp8() -> None:
    assert {case.compute for case in cases(TWO, with_fp8=False)["NUM-3"]} == {"bf16"}


def test_repeated_resumed_and_moved_runs_train_by_adamw() -> None:
    """A move starts from a saved run in a legal layout and ends in another one, or in one process."""
    legal = {family: set(legal_layouts(family, 4)) for family in FAMILIES}
    kept = Counter((family, layout) for family in FAMILIES for layout in KEPT if layout in legal[family])
    for clause, resumes in (("NUM-6", False), ("CKPT-1", True)):
        found = [check.run for check in matrix(4) if check.clause == clause]
        assert Counter((run.case.family, run.case.layout) for run in found) == kept
        assert {(run.case.optimizer, run.gradients, run.resume) for run in found} == {("adamw", False, resumes)}
    moves = [check.run for check in matrix(4) if check.clause == "CKPT-2"]
    assert Layout() in {run.case.layout for run in moves}
    for run in moves:
        source = run.continues
        assert source is not None and (source.case.layout, run.case.layout) in MOVES
        assert (source.case.family, source.case.optimizer) == (run.case.family, run.case.optimizer)
        assert (source.resume, run.resume, source.losses, run.losses) == (True, False, True, True)
        assert {source.case.layout, run.case.layout} <= legal[run.case.family] | {Layout()}


def test_each_format_is_measured_in_each_layout_with_its_exchanges() -> None:
    found = {clause: [check for check in matrix(4) if check.clause == clause] for clause in COMM_CLAUSES}
    runs = {clause: [check.run for check in found[clause]] for clause in COMM_CLAUSES}
    for clause, formats in (("COMM-1", ["bf16", "int8", "int4"]), ("COMM-2", ["int8", "int4"]), ("COMM-3", ["int4"])):
        formats_of: dict[tuple[str, Layout], list[str]] = {}
        for run in runs[clause]:
            formats_of.setdefault((run.case.family, run.case.layout), []).append(run.case.gradients)
        layouts_of_dense = {layout for family, layout in formats_of if family == "dense"}
        assert layouts_of_dense == {layout for layout in COMPRESSED if layout.ep == 1}
        assert {layout for family, layout in formats_of if family == "moe"} == set(COMPRESSED)
        assert all(sorted(each) == sorted(formats) for each in formats_of.values())
    assert {(run.exchanges, run.losses, run.resume) for run in runs["COMM-1"]} == {(1, False, False)}
    assert {(run.exchanges, run.losses, run.resume) for run in runs["COMM-2"]} == {(64, False, False)}
    resumed = {(run.case.optimizer, run.losses, run.resume) for run in runs["COMM-3"]}
    assert resumed == {("adamw", True, True)}
    plan = build_plan(runs["COMM-1"][0].case, "cpu")
    assert plan.comm.gradients == plan.comm.across_nodes == plan.spec.comm.gradients == "bf16"
    assert len({run.name for of_clause in runs.values() for run in of_clause}) == sum(map(len, runs.values()))


# What a case trains


def test_a_case_is_a_recipe_with_its_layout_pinned() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2, zero_stage=2, sequence_parallel=False)
    case = Case("dense", layout, recompute="full", offload="optimizer", compile=True)
    spec = build_spec(case)
    assert spec.model is FAMILIES["dense"]
    assert {name: getattr(spec.layout, name) for name in LayoutSpec.__dataclass_fields__} == {
        name: getattr(layout, name) for name in LayoutSpec.__dataclass_fields__
    }
    assert (spec.recompute, spec.offload, spec.compile) == ("full", "optimizer", True)
    assert (spec.precision.compute, spec.precision.matmul) == ("fp32", "compute")
    assert (spec.data.source, spec.data.seq_len) == ("python_stdlib", SEQ_LEN)
    assert (spec.batching.global_batch_size, spec.train.max_steps) == (SAMPLES, 20)
    images = build_spec(Case("resnet"))
    assert (images.data.source, images.data.seq_len) == ("phantom", 1)
    plan = build_plan(replace(case, micro_batch_size=2), "cuda")
    assert (plan.device, plan.num_nodes, plan.devices_per_node, plan.replica_groups) == ("cuda", 1, 8, 1)
    assert (plan.recompute, plan.offload, plan.compute, plan.spec) == ("full", "optimizer", "fp32", spec)
    assert (plan.micro_batch_size, plan.grad_accum_steps, plan.layout) == (2, 1, layout)


def test_plain_descent_neither_clips_nor_decays_and_adamw_has_its_defaults() -> None:
    """Plain descent shows a gradient that is wrong by a factor; the worker starts clipping later."""
    plain, adaptive = (build_spec(Case("dense", optimizer=name)).optim for name in ("sgd", "adamw"))  # type: ignore[arg-type]
    assert (plain.name, plain.lr, plain.weight_decay, plain.grad_clip_norm) == ("sgd", 0.1, 0.0, None)
    assert (adaptive.name, adaptive.lr, adaptive.grad_clip_norm) == ("adamw", 1e-3, 1.0)
    assert plain.schedule.kind == adaptive.schedule.kind == "constant"


def test_gradients_of_all_stages_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "gradients.stage0.npz", a=np.ones(2))
    np.savez(tmp_path / "gradients.stage1.npz", b=np.zeros(3))
    np.savez(tmp_path / "weights.npz", c=np.zeros(3))
    assert {name: len(values) for name, values in Measured(tmp_path).gradients.items()} == {"a": 2, "b": 3}
