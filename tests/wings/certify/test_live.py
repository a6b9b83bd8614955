"""Live runs, which go through changes, as cases of the matrix and as plans."""

from __future__ import annotations

from functools import cache

import pytest

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import Fault, parse_faults
from trainspec_cli.wings.certify.cases import (
    KILLED_AT,
    LIVE_CLAUSES,
    SAVE_EVERY_STEPS,
    Case,
    Live,
    build_plan,
    cases,
    refusals,
)
from trainspec_cli.wings.certify.families import FAMILIES
from trainspec_cli.wings.certify.judge import planned_layouts, undisturbed
from trainspec_cli.wings.certify.runs import Run


@cache
def of_clause(clause: str) -> list[Case]:
    return cases(4)[clause]


def live(case: Case) -> Live:
    assert case.live is not None
    return case.live


def the(clause: str, family: str, layout: Layout) -> Case:
    (found,) = [case for case in of_clause(clause) if (case.family, case.layout) == (family, layout)]
    return found


def test_layers_move_in_every_family_that_a_pipeline_trains() -> None:
    trained = {family for family in FAMILIES if not refusals(Case(family, Layout(pp=2)))}
    assert {case.family for case in of_clause("LIVE-1")} == trained >= {"dense", "tied", "moe", "hybrid"}
    assert {case.layout.pipeline_schedule for case in of_clause("LIVE-1")} == {"1f1b", "zero_bubble"}
    cuts = [layout.stage_layers for layout in live(the("LIVE-1", "tied", Layout(pp=2))).changes]
    assert cuts == [(3, 1), (1, 3), None]
    assert {family for case in of_clause("LIVE-4") if case.layout.pp > 1 for family in [case.family]} == trained


@pytest.mark.parametrize("clause", ["LIVE-2", "LIVE-3", "LIVE-4"])
def test_every_family_changes_its_layout(clause: str) -> None:
    assert {case.family for case in of_clause(clause)} == set(FAMILIES)
    assert all(live(case).changes for case in of_clause(clause))


def test_changes_have_every_axis_and_every_layout_is_legal() -> None:
    had = [layout for case in of_clause("LIVE-2") for layout in (case.layout, *live(case).changes)]
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
        assert max(getattr(layout, axis) for layout in had) >= 2, axis
    assert {layout.zero_stage for layout in had} >= {1, 3}
    changed = [case for clause in LIVE_CLAUSES for case in of_clause(clause)]
    assert not [case.name for case in changed for layout in live(case).changes if refusals(Case(case.family, layout))]
    sizes = {layout.world_size for case in changed for layout in (case.layout, *live(case).changes[:1])}
    assert sizes == {1, 2, 4}
    assert all(layout.world_size == case.layout.world_size for case in changed for layout in live(case).changes)


def test_memory_runs_out_in_one_process_and_in_several_unless_samples_share_statistics() -> None:
    short = of_clause("LIVE-5")
    assert {case.family for case in short} == {name for name, model in FAMILIES.items() if model.unit == "tokens"}
    assert {case.layout.world_size for case in short} == {1, 2}
    assert {case.layout.pp for case in short} == {1, 2}


def test_every_run_has_a_unique_name() -> None:
    every = {case for clause in LIVE_CLAUSES for case in of_clause(clause)}
    every |= {undisturbed(case) for case in every}
    assert len({Run(case).name for case in every}) == len(every)
    assert the("LIVE-3", "dense", Layout(dp_shard=2)).name == "dense-fp32-dp_shard2-live-killed"
    assert undisturbed(the("LIVE-2", "dense", Layout(dp_shard=2))).name == "dense-fp32-dp_shard2-live-kept"


def test_a_run_is_compared_with_the_one_without_its_disturbance() -> None:
    changed, killed, failed = (the(clause, "dense", Layout(dp_shard=2)) for clause in ("LIVE-2", "LIVE-3", "LIVE-4"))
    assert undisturbed(killed) == changed
    assert live(undisturbed(changed)) == live(undisturbed(failed)) == Live()
    assert undisturbed(changed) == undisturbed(failed) == undisturbed(the("LIVE-5", "dense", Layout(dp_shard=2)))


def test_a_plan_changes_its_layout_every_second_step() -> None:
    case = the("LIVE-1", "dense", Layout(pp=2))
    plan = build_plan(case, "cpu")
    assert [(change.step, change.layout) for change in plan.changes] == [
        (2, Layout(pp=2, stage_layers=(3, 1), sequence_parallel=False)),
        (4, Layout(pp=2, stage_layers=(1, 3), sequence_parallel=False)),
        (6, Layout(pp=2, sequence_parallel=False)),
    ]
    assert plan.total_steps == 14
    cuts = [layout.stage_layers for layout in planned_layouts(case)]
    assert cuts == [None] * 2 + [(3, 1)] * 2 + [(1, 3)] * 2 + [None] * 8
    tour = build_plan(the("LIVE-2", "dense", Layout(dp_shard=2)), "cpu")
    assert [(change.micro_batch_size, change.grad_accum_steps) for change in tour.changes[:2]] == [(4, 2), (4, 2)]
    assert (tour.micro_batch_size, tour.grad_accum_steps, tour.spec.fault) == (4, 1, "")


def test_disturbances_are_the_recipes_faults() -> None:
    failed = build_plan(the("LIVE-4", "dense", Layout(dp_replicate=2, dp_shard=2)), "cpu")
    assert parse_faults(failed.spec.fault) == (Fault("move_oom", 2, rank=3),)
    assert [change.step for change in failed.changes] == [2]
    short = build_plan(the("LIVE-5", "dense", Layout(dp_shard=2)), "cpu")
    assert parse_faults(short.spec.fault) == tuple(Fault("oom", 5, rank=rank, above=2) for rank in range(2))
    assert [setting.micro_batch_size for setting in short.memory_ladder[:3]] == [4, 2, 1]
    assert short.changes == ()


def test_a_run_is_killed_in_a_later_change_than_its_checkpoint() -> None:
    case = the("LIVE-3", "dense", Layout(dp_shard=2))
    plan, asked = build_plan(case, "cpu"), Run(case).request("cpu")
    assert (asked.live, asked.killed_at) == (True, KILLED_AT)
    assert (plan.spec.checkpoint.interval_steps, plan.spec.checkpoint.mode) == (SAVE_EVERY_STEPS, "sync")
    assert planned_layouts(case)[SAVE_EVERY_STEPS] not in (plan.layout, planned_layouts(case)[KILLED_AT])
    kept = Run(undisturbed(case)).request("cpu")
    assert (kept.live, kept.killed_at) == (True, None)
    assert not Run(Case("dense")).request("cpu").live
