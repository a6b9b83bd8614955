"""What a resumed run follows of the directives before it: layouts that lead on from its own, shares of each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.engine_runs import KeptEvents, run_of

from trainspec_cli.core.errors import MachineError
from trainspec_cli.engine.run.scheduling.directives import Directives, follows_earlier, planned_by, read_directives
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.recipe.results.plan import PlannedLayout
from trainspec_cli.run.folder.event_types.events import DirectiveEvent
from trainspec_cli.run.folder.events import EventWriter, read_events
from trainspec_cli.run.folder.paths import RunDir

pytestmark = pytest.mark.usefixtures("one_process")

DATA, PIPELINE, MOVED = Layout(dp_shard=4), Layout(pp=2, dp_shard=2), Layout(pp=2, dp_shard=2, stage_layers=(3, 1))


def shares(number: int, step: int, *counts: int) -> DirectiveEvent:
    return DirectiveEvent(
        step=step,
        number=number,
        applied=True,
        counts=counts,
        micro_batch_size=8,
        micro_batches=2,
        reason="one is slow",
        before_s=2.0,
        expected_s=1.0,
    )


def change(number: int, step: int, before: Layout, after: Layout, *, applied: bool = True) -> DirectiveEvent:
    return DirectiveEvent(
        step=step,
        number=number,
        kind="layout",
        applied=applied,
        counts=(16, 16),
        micro_batch_size=4,
        micro_batches=4,
        reason="the recipe plans it",
        before_s=0.0,
        expected_s=0.0,
        before=before,
        layout=after,
    )


def reopened(folder: Path, layout: Layout, *written: DirectiveEvent, recalls: bool = True) -> Directives:
    run_dir = RunDir(folder)
    writer = EventWriter(run_dir.directives, 0)
    for event in written:
        writer.write(event)
    writer.close()
    return Directives(run_of(SimpleNamespace(layout=layout), None, run_dir, KeptEvents()), recalls=recalls)


def numbers(found: list[DirectiveEvent]) -> list[int]:
    return [one.number for one in found]


HISTORY = (
    shares(1, 5, 9, 9, 5, 9),
    change(2, 10, DATA, PIPELINE),
    shares(3, 14, 20, 12),
    change(4, 20, PIPELINE, MOVED, applied=False),
    change(5, 30, PIPELINE, MOVED),
    shares(6, 33, 18, 14),
)


@pytest.mark.clause("SCHED-3")
def test_a_run_that_is_resumed_goes_through_the_same_layouts_and_shares(tmp_path: Path) -> None:
    run = reopened(tmp_path, DATA, *HISTORY)
    assert numbers(run.shares_of_layout(4, applied=True)) == [1]
    assert run.due_layout(9) is None
    assert run.layouts_ahead
    first = run.due_layout(10)
    assert first is not None and first.number == 2
    known = PlannedLayout(8, PIPELINE, 4, 4, 7, 3)
    plan: Any = SimpleNamespace(layout=DATA, changes=(known,))
    assert planned_by(first, plan) == replace(known, step=10)
    unknown = SimpleNamespace(layout=DATA, changes=())
    assert planned_by(first, unknown) == PlannedLayout(10, PIPELINE, 4, 4)  # type: ignore[arg-type]
    run.layout_number = first.number
    assert numbers(run.shares_of_layout(2, applied=True)) == [3]
    assert run.due_layout(29) is None  # the change that failed is passed over
    second = run.due_layout(30)
    assert second is not None and second.number == 5
    run.layout_number = second.number
    assert numbers(run.shares_of_layout(2, applied=True)) == [6]
    assert not run.layouts_ahead


def test_from_a_later_checkpoint_it_goes_to_the_newest_layout_at_once(tmp_path: Path) -> None:
    run = reopened(tmp_path, DATA, *HISTORY)
    newest = run.due_layout(40)
    assert newest is not None and newest.number == 5


def test_in_another_layout_than_before_it_follows_none(tmp_path: Path) -> None:
    run = reopened(tmp_path, Layout(tp=4), *HISTORY)
    assert run.due_layout(40) is None
    assert not run.has_changed_layout(0)
    assert run.shares_of_layout(2, applied=True) == []


def test_what_was_tried_is_not_planned_again(tmp_path: Path) -> None:
    run = reopened(tmp_path, DATA, *HISTORY[:4])
    assert run.has_changed_layout(10)
    assert run.has_changed_layout(20)
    assert not run.has_changed_layout(21)


@pytest.mark.clause("SCHED-2")
def test_new_directives_go_on_in_number_and_void_the_shares_of_other_layouts(tmp_path: Path) -> None:
    run = reopened(tmp_path, DATA, HISTORY[0])
    assert run.write(change(0, 12, DATA, PIPELINE, applied=False)).number == 2
    assert numbers(run.shares_of_layout(4, applied=True)) == [1]
    assert run.write(change(0, 13, DATA, PIPELINE)).number == 3
    assert run.shares_of_layout(4, applied=True) == []
    run.close()
    assert [line["number"] for line in read_events(RunDir(tmp_path).directives)] == [1, 2, 3]


def test_nothing_is_recalled_where_nothing_is_followed(tmp_path: Path) -> None:
    run = reopened(tmp_path, DATA, *HISTORY, recalls=False)
    assert run.due_layout(40) is None
    assert run.shares_of_layout(4, applied=True) == []


@pytest.mark.parametrize("plain", [ABSENT, {"pp": "two"}, {"stages": 2}])
def test_a_change_without_a_layout_is_refused(tmp_path: Path, plain: Any) -> None:
    broken = change(1, 10, DATA, PIPELINE)
    object.__setattr__(broken, "layout", plain)
    with pytest.raises(MachineError, match=r"without a layout \(number 1\)|`layout` is "):
        reopened(tmp_path, DATA, broken)
    assert read_directives(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("mode", "layout", "changes", "group", "follows"),
    [
        ("auto", DATA, (), None, True),
        ("auto", Layout(tp=4), (), None, True),
        ("auto", Layout(), (), None, False),
        ("auto", Layout(pp=2), (), None, True),
        ("off", DATA, (), None, False),
        ("off", Layout(tp=4), ("a change",), None, True),
        ("auto", DATA, ("a change",), 1, False),
    ],
)
def test_which_runs_follow_directives(
    mode: str, layout: Layout, changes: Any, group: int | None, follows: bool
) -> None:
    scheduler = SchedulerSpec(mode=mode, max_stage_layers=3)  # type: ignore[arg-type]
    spec, flops = SimpleNamespace(scheduler=scheduler), (1.0,) * 4
    plan: Any = SimpleNamespace(
        spec=spec,
        layout=layout,
        changes=changes,
        layer_flops=flops,
        largest_stage_layers=None,
        group_size=layout.world_size,
        num_nodes=1,
    )
    assert follows_earlier(plan, group) == follows
