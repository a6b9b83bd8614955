"""Changes of layout that a recipe plans: each legal in itself, one after another, of one replica group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recipe.conftest import SPEC

from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec
from trainspec_cli.recipe.keys.training import LayoutChangeSpec, SchedulerSpec
from trainspec_cli.recipe.records import UNKNOWN
from trainspec_cli.recipe.rules.check import apply
from trainspec_cli.recipe.rules.layout import RELAYOUT_RULES, changed_specs
from trainspec_cli.wings.certify.families import FAMILIES


def with_changes(*changes: LayoutChangeSpec, **sections: Any) -> RunSpec:
    return replace(SPEC, scheduler=SchedulerSpec(changes=changes), **sections)


def found(spec: RunSpec) -> list[tuple[str, str, str]]:
    return [(problem.path, problem.message, problem.hint) for problem in apply(RELAYOUT_RULES, spec)]


def test_legal_changes_pass() -> None:
    changes = (LayoutChangeSpec(10, pp=2), LayoutChangeSpec(15, pp=2, stage_layers=(1, 1)), LayoutChangeSpec(19))
    assert found(with_changes(*changes)) == []


def test_what_a_change_leaves_out_is_as_in_the_recipe() -> None:
    layout = LayoutSpec(pp=2, zero_stage=1, stage_layers=(1, 1))
    changes = (LayoutChangeSpec(5, zero_stage=3), LayoutChangeSpec(6, pp=4), LayoutChangeSpec(7, dp_shard=2))
    kept, recut, last = (spec.layout for spec in changed_specs(with_changes(*changes, layout=layout)))
    assert kept == replace(layout, zero_stage=3)
    assert (recut.pp, recut.stage_layers, recut.zero_stage) == (4, None, 1)
    assert last == replace(layout, dp_shard=2)


def test_an_illegal_layout_is_named_by_its_change() -> None:
    ((path, message, hint),) = found(with_changes(LayoutChangeSpec(5), LayoutChangeSpec(10, pp=2, stage_layers=(9, 1))))
    assert path == "scheduler.changes.1.stage_layers"
    assert "from step 10: `layout.stage_layers` is [9, 1]: 2 stages with 10 layers" in message
    assert "scheduler.changes.1" in hint and "stage_layers=[1,1], or null" in hint


def test_a_network_of_convolutions_gets_no_pipeline() -> None:
    data = DataSpec(source="phantom", seq_len=1)
    spec = with_changes(LayoutChangeSpec(10, pp=2), model=FAMILIES["resnet"], data=data)
    ((path, message, _),) = found(spec)
    assert path == "scheduler.changes.0.pp"
    assert "`layout.pp`" in message


@pytest.mark.parametrize(("steps", "place"), [((10, 10), 1), ((10, 15, 12), 2), ((20,), 0), ((10, 200), 1)])
def test_changes_come_in_order_and_before_the_end(steps: tuple[int, ...], place: int) -> None:
    ((path, _, hint),) = found(with_changes(*map(LayoutChangeSpec, steps)))
    assert path == f"scheduler.changes.{place}.step"
    assert "or more" in hint or hint == "set 19 or less"


def test_replica_groups_keep_their_layout() -> None:
    ((path, _, _),) = found(with_changes(LayoutChangeSpec(10, pp=2), resilience=ResilienceSpec(mode="elastic")))
    assert path == "scheduler.changes"


def test_axes_that_the_planner_is_to_choose_cannot_be_built_on() -> None:
    layout = LayoutSpec(tp="auto")
    ((path, _, hint),) = found(with_changes(LayoutChangeSpec(10, pp=2), layout=layout))
    assert path == "scheduler.changes.0.tp"
    assert "scheduler.changes.0" in hint and "layout.tp=1" in hint
    assert found(with_changes(LayoutChangeSpec(10, pp=2, tp=1), layout=layout)) == []


def test_values_that_are_wrong_in_themselves_are_left_to_their_own_errors() -> None:
    assert found(with_changes(LayoutChangeSpec(10, pp=2), layout=UNKNOWN)) == []
    assert found(with_changes(LayoutChangeSpec(10, pp=UNKNOWN))) == []  # type: ignore[arg-type]
