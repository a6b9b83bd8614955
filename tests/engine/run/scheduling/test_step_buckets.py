"""All ranks try the same sizes of buckets, however long each of them waits, and keep the best."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from lab.engine_runs import run_of

from trainspec_cli.balance.decisions.speeds import ONE_BY_ONE, ROUNDS, WARM_STEPS
from trainspec_cli.engine.run.scheduling.step_scheduler import StepBuckets
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.blueprint import Blueprint, Exchange
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.events import BucketsEvent
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.cases import Case, build_plan

RANKS, BLOCK = 2, 1000
PLAN = build_plan(Case("dense", Layout(dp_shard=2)), "cpu")


class Directives:
    def __init__(self, known: dict[str, int] | None = None):
        self.buckets, self.written = dict(known or {}), list[BucketsEvent]()

    def note(self, event: BucketsEvent) -> None:
        self.written.append(event)


class Run:
    """Two ranks; the second one has twice the gradients; `waits_s` is what a size takes."""

    def __init__(self, waits_s: Any, plan: Plan = PLAN, *, can_join: bool = True, known: dict[str, int] | None = None):
        self.waits_s, self.directives, self.samples = waits_s, Directives(known), set[int]()
        self.sums = [
            SimpleNamespace(
                bucket_bytes=0, holds_back=False, can_join=can_join, waited_s=0.0, sizes_bytes=[BLOCK] * 8 * (rank + 1)
            )
            for rank in range(RANKS)
        ]
        self.begin_with(plan)
        self.used: list[int] = []

    def begin_with(self, plan: Plan) -> None:
        runs = [run_of(plan, SimpleNamespace(sums=one), RunDir("unused")) for one in self.sums]
        self.ranks = [StepBuckets(run, self.directives) for run in runs]  # type: ignore[arg-type]

    def make(self, steps: int) -> None:
        for step in range(len(self.used), len(self.used) + steps):
            for rank, sums in zip(self.ranks, self.sums, strict=True):
                rank.begin()
                sums.holds_back = step in self.samples
            reported = [rank.report for rank in self.ranks if rank.report is not None]
            (size,) = {sums.bucket_bytes for sums in self.sums}
            self.used.append(size)
            for number, (rank, sums) in enumerate(zip(self.ranks, self.sums, strict=True)):
                sums.waited_s = 99.0 if sums.holds_back else self.waits_s(size) * (1 + number)
                rank.note_step(step + 1, 1.0, reported)


def quickest_at_4000(size: int) -> float:
    return 0.1 + abs(size - 4000) / 1e5


def test_the_best_size_is_found_written_down_and_kept() -> None:
    run = Run(quickest_at_4000)
    run.make(40)
    assert run.used[: WARM_STEPS + 1] == [ONE_BY_ONE] * (WARM_STEPS + 1)
    assert set(run.used[-10:]) == {4000}
    first, again = run.directives.written
    assert first == again, "rank 0 alone writes it"
    assert (first.bucket_bytes, first.layout) == (4000, PLAN.layout.describe())
    assert [one.bucket_bytes for one in first.tries] == [0, 4000, 16_000]
    waited_s = {one.bucket_bytes: one.waited_s for one in first.tries}
    assert waited_s == {size: pytest.approx(1.5 * quickest_at_4000(size)) for size in waited_s}
    assert all(rank.report is None for rank in run.ranks), "nothing more is exchanged"


def test_steps_that_show_the_links_do_not_count() -> None:
    run = Run(quickest_at_4000)
    run.samples = {step for step in range(60) if step % 3}
    run.make(60)
    assert run.used[-1] == 4000
    assert max(one.waited_s for one in run.directives.written[0].tries) < 1.0


@pytest.mark.parametrize("fixed", [0, 12_345])
def test_the_recipes_size_is_taken_as_it_is(fixed: int) -> None:
    spec = replace(PLAN.spec, comm=replace(PLAN.spec.comm, bucket_bytes=fixed))
    run = Run(quickest_at_4000, replace(PLAN, spec=spec))
    run.make(20)
    assert set(run.used) == {fixed} and not run.directives.written


def test_a_resumed_run_takes_what_was_found_in_its_layout() -> None:
    run = Run(quickest_at_4000, known={PLAN.layout.describe(): 777})
    run.make(20)
    assert set(run.used) == {777}
    other = Run(quickest_at_4000, known={"another layout": 777})
    other.make(20)
    assert 4000 in other.used


def test_nothing_is_tried_where_nothing_can_be_won() -> None:
    off = replace(PLAN, spec=replace(PLAN.spec, scheduler=replace(PLAN.spec.scheduler, mode="off")))
    for run in (Run(lambda size: 0.001), Run(quickest_at_4000, can_join=False), Run(quickest_at_4000, off)):
        run.make(40)
        assert set(run.used) == {ONE_BY_ONE} and not run.directives.written
        assert all(rank.report is None for rank in run.ranks)


def test_the_blueprints_size_is_tried_first() -> None:
    exchange = Exchange("dp", "reduce_scatter", 2, "network", 1.0, 1.0, "ring", 1.0, 1.0, bucket_bytes=5000.4)
    gathers = replace(exchange, operation="all_gather", bucket_bytes=3000.0)
    run = Run(lambda size: 0.5, replace(PLAN, blueprint=Blueprint("nodes", (), (), (), 1.0, 1.0, (gathers, exchange))))
    run.make(40)
    assert run.used[WARM_STEPS + 1] == run.used[-1] == 5000


def test_another_layout_is_learnt_anew() -> None:
    run = Run(quickest_at_4000)
    run.make(40)
    other = build_plan(Case("dense", Layout(dp_replicate=2)), "cpu")
    run.begin_with(other)
    assert {sums.bucket_bytes for sums in run.sums} == {0}
    run.make(4 * ROUNDS + WARM_STEPS + 4)
    assert [event.layout for event in run.directives.written[::2]] == [PLAN.layout.describe(), other.layout.describe()]
