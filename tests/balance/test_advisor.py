"""The supervisor's advisor on a run folder that a made-up run writes: when it searches, what it proposes, and what it
learns of its proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.events import ACHIEVED, DIRECTIVE, started, stepped, write_event

from trainspec_cli.balance.advisor import LayoutAdvisor, decides_layouts
from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.other_layout import OtherLayouts
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec, SchedulerSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import LayoutProposal, Plan, PlannedLayout
from trainspec_cli.recipe.results.verdict import MeasuredLink
from trainspec_cli.run.channel.messages import Proposal, SpeedsReport
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder.event_types.events import Event
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

PIPELINE, DATA = Layout(pp=2), Layout(dp_replicate=2)
USUAL, SLOW = (1.0, 1.0), (1.0, 2.0)
STEP_S, SLOW_S = 10.0, 18.0
TO_DATA = LayoutProposal(DATA, 4, 1, 7, None, 2.0, 1.5, "rank 1 is slow")
"""A quarter is saved."""
COST_STEPS = 3
"""So many steps of 18 s lose what a change is taken to cost: 2 s and half a step."""


def a_plan(layout: Layout = PIPELINE, mode: str = "auto", steps: int = 1000, **changes: Any) -> Plan:
    spec = RunSpec(
        model=DecoderModel(2, 64, 4, 2, 16, 160, 512),
        data=DataSpec(seq_len=8, source="python_stdlib"),
        optim=OptimSpec(lr=0.1),
        batching=BatchingSpec(global_batch_size=8),
        train=TrainSection(max_steps=steps),
        scheduler=SchedulerSpec(mode=mode, may_change=changes.pop("may_change", ("layout",))),  # type: ignore[arg-type]
        resilience=changes.pop("resilience", ResilienceSpec()),
    )
    sizes = {"num_nodes": 1, "devices_per_node": 2, "micro_batch_size": 2, "grad_accum_steps": 4} | changes
    return Plan(
        spec, layout, "cpu", compute="fp32", recompute="none", offload="none", params=9, flops_per_token=9.0, **sizes
    )


class AtOnce(Executor):
    """Runs what is submitted when it is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


class Known:
    """What is known of other layouts: by the layout in force, and whether all ranks are equally fast."""

    def __init__(self, found: dict[tuple[Layout, bool], LayoutProposal], asked: list[tuple[Layout, int, Any]]):
        self._found, self._asked = found, asked
        self._in_force = (PIPELINE, 0)

    def after(self, layout: Layout, micro_batch_size: int) -> Known:
        other = Known(self._found, self._asked)
        other._in_force = layout, micro_batch_size
        return other

    def propose(self, paces: Sequence[float], links: LinkPaces) -> LayoutProposal | None:
        self._asked.append((*self._in_force, tuple(paces)))
        return self._found.get((self._in_force[0], len(set(paces)) == 1 and links.is_usual))


class World:
    def __init__(self, folder: Path, plan: Plan | None = None, **found: Any):
        self.run, self.plan = RunDir(folder), plan or a_plan()
        self.asked: list[tuple[Layout, int, Any]] = []
        self.homes: list[Layout] = []
        self.found = found.get("found", {(PIPELINE, False): TO_DATA})
        self.mail = WorkerMail()
        self.advisor = LayoutAdvisor(self.run, self.plan, self._make, self.mail, AtOnce())
        self.at, self.said = 0, list[str]()

    def _make(self, home: Plan) -> Known:
        self.homes.append(home.layout)
        return Known(self.found, self.asked)

    def happen(self, *events: Event) -> None:
        for event in events:
            write_event(self.run.events(0), event)

    def speeds(self, times_s: Sequence[float], layout: Layout = PIPELINE, link_pace: float = 1.0) -> None:
        axis = "pp" if layout.pp == 2 else "dp_replicate"
        samples = (8, 8) if layout.pp == 2 else (4, 4)
        micro_batches = 4 if layout.pp == 2 else 1
        report = SpeedsReport(
            step=self.at,
            step_s=max(times_s),
            layout=layout,
            micro_batches=micro_batches,
            samples=samples,
            fixed_s=(0.0, 0.0),
            per_sample_s=tuple(times_s),
            links=(MeasuredLink(axis=axis, ranks=(0, 1), bytes_per_s=1e9 / link_pace, noise=0.02, sent_bytes=1e6),),
        )
        self.mail.speeds = report
        self.look()

    def steps(self, number: int, step_s: float = STEP_S) -> list[Proposal]:
        """Make this many steps; return the proposals to rank 0 in them."""
        for _ in range(number):
            self.at += 1
            self.happen(replace(stepped(self.at), step_time_s=step_s + 5.0, time_s={"checkpoint": 5.0}))
            self.look()
        assert all(rank == 0 for _, rank in self.mail.unsent)
        proposed = [message for message, _ in self.mail.unsent]
        self.mail.unsent.clear()
        return proposed  # type: ignore[return-value]

    def slow_down(self) -> None:
        self.speeds(USUAL)
        assert self.steps(20) == []
        assert self.steps(3, SLOW_S) == []
        self.speeds(SLOW)

    def look(self) -> None:
        self.advisor.look(self.said.append)

    def apply(self, layout: Layout, before: Layout = PIPELINE, pause_s: float = 3.0, **changes: Any) -> None:
        fields: dict[str, Any] = {"kind": "layout", "before": before, "layout": layout, "pause_s": pause_s} | changes
        self.happen(replace(DIRECTIVE, step=self.at, **fields))
        self.look()


@pytest.fixture
def slowed(tmp_path: Path) -> World:
    """Usual for 20 steps; then one rank takes twice as long, which three steps confirm."""
    world = World(tmp_path)
    world.slow_down()
    return world


def test_all_is_well_and_nothing_is_searched_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.speeds(USUAL)
    assert world.steps(100) == []
    assert (world.asked, world.homes, world.said) == ([], [], [])


def test_a_slow_rank_leads_to_one_proposal_once_waiting_has_cost_enough(slowed: World) -> None:
    assert slowed.steps(COST_STEPS - 1, SLOW_S) == []
    (proposed,) = slowed.steps(20, SLOW_S)
    found = proposed.proposal
    assert (proposed.number, proposed.before, found.layout, found.reason) == (1, PIPELINE, DATA, "rank 1 is slow")
    assert (found.micro_batch_size, found.grad_accum_steps, found.largest_micro_batch_size) == (4, 1, 7)
    assert (found.before_s, found.expected_s) == pytest.approx((SLOW_S, SLOW_S * 0.75))
    assert slowed.asked == [(PIPELINE, 2, (1.0, 2.0))]
    assert slowed.homes == [PIPELINE]


def test_a_narrow_link_leads_to_a_proposal_and_back_when_it_is_wide_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.speeds(USUAL)
    assert world.steps(20) + world.steps(3, SLOW_S) == []
    world.speeds(USUAL, link_pace=4.0)
    (there,) = world.steps(COST_STEPS, SLOW_S)
    assert (there.proposal.layout, world.asked) == (DATA, [(PIPELINE, 2, USUAL)])
    world.apply(DATA, pause_s=0.5)
    world.speeds(USUAL, DATA)
    assert world.steps(30, 13.0) == [], "its way is taken to be as narrow as before"
    world.speeds(USUAL, DATA, link_pace=0.25)
    (back,) = world.steps(30, 11.0)
    assert back.proposal.layout == PIPELINE


def test_where_a_node_was_left_out_the_plan_of_the_others_is_followed(tmp_path: Path) -> None:
    world = World(tmp_path, a_plan(Layout(dp_replicate=3), devices_per_node=3))
    write_json(world.run.plan_json, to_plain(a_plan()))
    world.happen(started())
    world.slow_down()
    (found,) = world.steps(COST_STEPS, SLOW_S)
    assert (found.before, world.homes, world.said) == (PIPELINE, [PIPELINE], [])


def test_one_that_recovers_in_time_leads_to_none(slowed: World) -> None:
    assert slowed.steps(COST_STEPS - 1, SLOW_S) == []
    slowed.speeds(USUAL)
    assert slowed.steps(50) == []


def test_the_last_measured_pause_is_what_a_change_costs(slowed: World) -> None:
    moved = replace(PIPELINE, stage_layers=(3, 1))
    slowed.found[moved, False] = TO_DATA
    slowed.apply(moved, pause_s=20 * SLOW_S * 0.25, kind="layers")
    slowed.speeds(SLOW, moved)
    assert slowed.steps(19, SLOW_S) == []
    assert len(slowed.steps(1, SLOW_S)) == 1


def test_when_the_rank_recovers_the_planned_layout_is_gone_back_to_by_what_was_measured(slowed: World) -> None:
    (there,) = slowed.steps(COST_STEPS, SLOW_S)
    slowed.apply(there.proposal.layout, pause_s=0.5)
    assert slowed.steps(12, 13.0) == []  # speeds are learnt anew
    slowed.speeds(SLOW, DATA)
    assert slowed.steps(30, 13.0) == []
    assert slowed.steps(3, 11.0) == []
    slowed.speeds(USUAL, DATA)
    (second,) = slowed.steps(30, 11.0)
    back = second.proposal
    assert (second.number, second.before, back.layout) == (2, DATA, PIPELINE)
    assert (back.micro_batch_size, back.grad_accum_steps) == (2, 4)
    assert (back.before_s, back.expected_s) == pytest.approx((11.0, STEP_S))
    assert "usual speed again" in back.reason and back.reason.endswith(" pp=2")
    slowed.apply(PIPELINE, DATA)
    slowed.speeds(USUAL)
    assert slowed.steps(50) == []


def test_speeds_that_were_written_before_a_change_are_not_those_after_it(slowed: World) -> None:
    (there,) = slowed.steps(COST_STEPS, SLOW_S)
    slowed.happen(replace(stepped(slowed.at), step_time_s=SLOW_S))
    slowed.apply(there.proposal.layout, pause_s=0.5)
    slowed.speeds(SLOW, PIPELINE)
    assert slowed.steps(50, 13.0) == []
    assert slowed.said == []
    assert len(slowed.asked) == 1


def test_it_stays_where_the_planned_layout_was_measured_to_be_slower(slowed: World) -> None:
    (there,) = slowed.steps(COST_STEPS, SLOW_S)
    slowed.apply(there.proposal.layout, pause_s=0.5)
    slowed.speeds(USUAL, DATA)
    assert slowed.steps(50, 9.0) == []


def test_where_the_planned_layout_was_never_measured_the_planner_says_which_is_faster(tmp_path: Path) -> None:
    """A resume is such a case: it begins in the last layout of the run."""
    home = replace(TO_DATA, layout=PIPELINE, reason="planned so")
    world = World(tmp_path, found={(DATA, True): home})
    world.speeds(USUAL, DATA)
    (back,) = world.steps(COST_STEPS + 5)
    assert (back.before, back.proposal.layout) == (DATA, PIPELINE)


def test_advice_is_not_repeated_while_nothing_changes(tmp_path: Path) -> None:
    world = World(tmp_path, a_plan(mode="advise"))
    world.slow_down()
    assert len(world.steps(COST_STEPS, SLOW_S)) == 1
    world.apply(DATA, applied=False, reason="advice: rank 1 is slow")
    assert world.steps(50, SLOW_S) == []
    world.speeds((1.0, 2.1))
    assert world.steps(50, SLOW_S) == []
    world.speeds(USUAL)
    world.speeds(SLOW)
    assert len(world.steps(COST_STEPS, SLOW_S)) == 1


def test_a_change_that_failed_is_not_proposed_again(slowed: World) -> None:
    slowed.steps(COST_STEPS, SLOW_S)
    slowed.apply(DATA, applied=False, reason="the layout is unchanged: no memory")
    for speeds in (SLOW, USUAL, SLOW):
        slowed.speeds(speeds)
        assert slowed.steps(50, SLOW_S) == []


def test_a_change_that_was_no_gain_is_taken_back_and_not_proposed_again(slowed: World) -> None:
    (there,) = slowed.steps(COST_STEPS, SLOW_S)
    slowed.apply(there.proposal.layout, pause_s=0.5)
    slowed.speeds(SLOW, DATA)
    slowed.steps(5, 20.0)
    slowed.happen(replace(ACHIEVED, step=slowed.at, before_s=SLOW_S, expected_s=13.5, achieved_s=20.0))
    (proposed,) = slowed.steps(20, 20.0)
    back = proposed.proposal
    assert (back.layout, back.before_s, back.expected_s) == (PIPELINE, 20.0, SLOW_S)
    assert all(part in back.reason for part in (" 20.0 s in dp_replicate=2", " 18.0 s"))
    slowed.apply(PIPELINE, DATA, number=2)
    slowed.speeds(SLOW)
    assert slowed.steps(50, SLOW_S) == []


def test_a_change_that_was_a_gain_stays(slowed: World) -> None:
    (there,) = slowed.steps(COST_STEPS, SLOW_S)
    slowed.apply(there.proposal.layout, pause_s=0.5)
    slowed.speeds(SLOW, DATA)
    slowed.happen(replace(ACHIEVED, step=slowed.at, before_s=SLOW_S, expected_s=13.5, achieved_s=17.0))
    assert slowed.steps(50, 17.0) == []


def test_what_the_recipe_has_changed_to_is_gone_back_to(tmp_path: Path) -> None:
    tensor = Layout(tp=2)
    plan = a_plan(changes=(PlannedLayout(5, DATA, 4, 1),))
    world = World(tmp_path, plan, found={(DATA, False): replace(TO_DATA, layout=tensor)})
    world.speeds(USUAL)
    world.steps(5)
    world.apply(DATA)
    world.speeds(USUAL, DATA)
    world.steps(20)
    world.speeds(SLOW, DATA)
    (there,) = world.steps(COST_STEPS, SLOW_S)
    assert (there.before, there.proposal.layout) == (DATA, tensor)
    assert world.homes == [DATA]


def test_a_new_start_of_the_workers_is_another_run(slowed: World) -> None:
    slowed.steps(COST_STEPS - 1, SLOW_S)
    slowed.happen(started(slowed.at))
    assert slowed.steps(20, SLOW_S) == []
    slowed.speeds(USUAL)
    assert slowed.steps(20, SLOW_S) == []
    slowed.speeds(SLOW)
    assert len(slowed.steps(COST_STEPS, SLOW_S)) == 1


def test_the_steps_that_are_left_must_win_the_pause_back(tmp_path: Path) -> None:
    world = World(tmp_path, a_plan(steps=23 + 2 * COST_STEPS - 1))
    world.slow_down()
    assert world.steps(2 * COST_STEPS - 1, SLOW_S) == []


def test_a_search_that_fails_ends_the_advice_and_not_the_run(tmp_path: Path) -> None:
    def fails(home: Plan) -> Known:
        raise RecipeError(Problem("unknown", "nobody knows"))

    world = World(tmp_path)
    world.advisor = LayoutAdvisor(world.run, world.plan, fails, world.mail, AtOnce())
    world.slow_down()
    assert world.steps(50, SLOW_S) == []
    (said,) = world.said
    assert said.endswith("RecipeError: nobody knows")


@pytest.mark.parametrize(
    ("changes", "decides"),
    [
        ({}, True),
        ({"mode": "advise"}, True),
        ({"mode": "off"}, False),
        ({"may_change": ("shares", "layers")}, False),
        ({"resilience": ResilienceSpec(mode="elastic")}, False),
        ({"replica_groups": 2}, False),
        ({"layout": Layout(), "devices_per_node": 1}, False),
    ],
)
def test_which_runs_may_have_another_layout(changes: dict[str, Any], decides: bool) -> None:
    assert decides_layouts(a_plan(**changes)) == decides


def test_on_a_cpu_what_another_layout_is_expected_to_save_rests_on_the_paces_alone() -> None:
    """Two stages of a layer each, one of them twice as slow: with the samples shared, a step takes 4/3 and not 2."""
    found = OtherLayouts.of_plan(a_plan(), Machine("here", 2, 2**34)).propose(SLOW)
    assert found is not None and (found.layout.pp, found.layout.data_parallel_size) == (1, 2)
    assert found.expected_s / found.before_s == pytest.approx(2 / 3, rel=0.15)
