"""The layout of a run, as decided by earlier starts, its recipe, its scheduler, and the supervisor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.engine_runs import KeptEvents, run_of

from trainspec_cli.balance.decisions.balance import LayerChange
from trainspec_cli.engine.run.scheduling.directives import Directives, planned_by, read_directives
from trainspec_cli.engine.run.scheduling.relayout import DueLayout, LayoutChanges
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.recipe.results.plan import LayoutProposal, PlannedLayout
from trainspec_cli.run.channel.messages import Proposal
from trainspec_cli.run.folder.event_types.events import DirectiveEvent
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.cases import Case, build_plan

pytestmark = pytest.mark.usefixtures("one_process")

PIPELINE, DATA, SHARDED = Layout(pp=2), Layout(dp_replicate=2), Layout(dp_shard=2)
PROPOSED = Proposal(1, PIPELINE, LayoutProposal(DATA, 4, 1, 7, None, 2.0, 1.5, "rank 1 is slow"))
MOVED = LayerChange((3, 1), 2.0, 1.6, "pipeline rank 1 is slow")


class Changes:
    def __init__(self, folder: Path, mode: str = "auto", **changes: Any):
        plan = build_plan(Case("dense"), "cpu")
        spec = replace(plan.spec, scheduler=SchedulerSpec(mode=mode))  # type: ignore[arg-type]
        self.plan = replace(plan, spec=spec, **{"layout": PIPELINE, "devices_per_node": 2, **changes})
        self.path = RunDir(folder).directives
        state = SimpleNamespace(mesh=SimpleNamespace(layout=PIPELINE))
        self.run = run_of(self.plan, state, RunDir(folder), KeptEvents())
        self.layouts = LayoutChanges(self.run, Directives(self.run, recalls=True))
        self.due = self.layouts.due

    @property
    def written(self) -> list[DirectiveEvent]:
        return read_directives(self.path)


def test_a_proposal_goes_the_way_of_a_planned_change(tmp_path: Path) -> None:
    run = Changes(tmp_path)
    due = run.due(9, None, PROPOSED)
    assert due == DueLayout(PlannedLayout(9, DATA, 4, 1, 7, None), "rank 1 is slow", None, 2.0, 1.5)
    assert run.written == []


@pytest.mark.clause("SCHED-4")
def test_advice_is_written_down_and_changes_nothing(tmp_path: Path) -> None:
    run = Changes(tmp_path, "advise")
    assert run.due(9, MOVED, PROPOSED) is None
    advice, moved = run.written
    assert (advice.kind, advice.applied, advice.before, advice.layout) == ("layout", False, PIPELINE, DATA)
    assert (advice.reason, advice.before_s, advice.expected_s) == ("advice: rank 1 is slow", 2.0, 1.5)
    assert (moved.kind, moved.applied, moved.reason) == ("layers", False, "advice: pipeline rank 1 is slow")


def test_a_proposal_for_another_layout_than_the_present_one_is_void(tmp_path: Path) -> None:
    run = Changes(tmp_path)
    void = replace(PROPOSED, before=SHARDED)
    assert run.due(9, None, void) is None
    due = run.due(9, MOVED, void)
    assert due is not None and due.planned.layout == replace(PIPELINE, stage_layers=(3, 1))
    run.run.plan = replace(run.plan, layout=SHARDED)  # the run has changed to it meanwhile
    assert run.due(10, None, void) == DueLayout(
        PlannedLayout(10, DATA, 4, 1, 7, None), "rank 1 is slow", None, 2.0, 1.5
    )
    assert run.due(10, None, PROPOSED) is None


def test_what_the_recipe_plans_comes_first(tmp_path: Path) -> None:
    run = Changes(tmp_path, changes=(PlannedLayout(9, SHARDED, 4, 1),))
    due = run.due(9, None, PROPOSED)
    assert due is not None and due.planned.layout == SHARDED and "recipe" in due.reason


def test_a_resumed_run_divides_its_samples_by_what_the_directive_says_of_memory(tmp_path: Path) -> None:
    """Shares are followed in micro-batches of the same sizes, so that the bits are the same."""
    run = Changes(tmp_path, "advise")
    run.due(9, None, PROPOSED)
    (written,) = run.written
    assert planned_by(written, run.plan) == PlannedLayout(9, DATA, 4, 1, 7, None)
