"""Schedules as data: every order can be run, in the time and with the memory that the papers state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.pipeline import (
    Action,
    actions,
    alike_ranks,
    cut_layers,
    ends_of_ranks_s,
    layers_per_rank,
    replay,
)
from trainspec_cli.recipe.keys.layout import Layout

TICKS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


def layout_of(schedule: str, pp: int) -> Layout:
    return Layout(pp=pp, pipeline_schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)


def simulate(layout: Layout, micro_batches: int) -> tuple[float, list[int]]:
    """-> (ticks until all is done, each rank's most chunks of micro-batches under way)."""
    timeline = replay(layout, micro_batches, lambda action: TICKS[action.kind])
    most = []
    for passes in timeline:
        held = [0]
        done = set()
        for action, _, _ in passes:
            kind, stage, index = action
            assert kind == "forward" or ("forward", stage, index) in done
            assert kind != "backward_weight" or ("backward_input", stage, index) in done
            done.add((kind, stage, index))
            held.append(held[-1] + {"forward": 1, "backward": -1, "backward_weight": -1}.get(kind, 0))
        most.append(max(held))
    return max(passes[-1].end_s for passes in timeline), most


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
SIZES = ((2, 2), (2, 8), (4, 4), (4, 16), (8, 8), (8, 32), (3, 1), (4, 2))


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches"),
    [
        (schedule, pp, micro_batches)
        for schedule in SCHEDULES
        for pp, micro_batches in SIZES
        if schedule != "interleaved" or micro_batches % pp == 0  # it takes turns of pp micro-batches
    ],
)
def test_every_action_is_done_once_and_in_time(schedule, pp, micro_batches):
    layout = layout_of(schedule, pp)
    orders = actions(layout, micro_batches)
    assert all(action.stage in layout.stages_of_rank(rank) for rank, order in enumerate(orders) for action in order)
    flat = [action for order in orders for action in order]
    kinds = (
        ("forward", "backward_input", "backward_weight")
        if schedule in ("zero_bubble", "zbv")
        else ("forward", "backward")
    )
    wanted = {Action(k, s, m) for k in kinds for s in range(layout.num_stages) for m in range(micro_batches)}
    assert len(flat) == len(wanted)
    assert set(flat) == wanted
    simulate(layout, micro_batches)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (4, 16), (8, 32)])
def test_waiting_is_what_the_papers_state(pp, micro_batches):
    """Forward 1, backward 2: gpipe and 1f1b wait 3 (pp - 1), interleaved half of that; zero bubble fills much of it."""
    waits = {}
    for schedule in SCHEDULES:
        layout = layout_of(schedule, pp)
        waits[schedule] = (
            simulate(layout, micro_batches)[0] - 3 * micro_batches * layout.chunks_per_rank
        ) / layout.chunks_per_rank
    assert waits["gpipe"] == waits["1f1b"] == 3 * (pp - 1)
    assert waits["interleaved"] == waits["1f1b"] / 2
    assert waits["zero_bubble"] <= 0.6 * waits["1f1b"]
    assert waits["zbv"] <= waits["1f1b"] / 4


@pytest.mark.parametrize(("schedule", "messages"), [("1f1b", 6), ("gpipe", 6), ("interleaved", 14), ("zbv", 12)])
def test_one_micro_batch_waits_for_each_message_between_ranks(schedule: str, messages: int) -> None:
    """It goes through all stages and back; the middle of a V is on one rank, which sends itself nothing."""
    layout = layout_of(schedule, 4)
    micro_batches = 4 if schedule == "interleaved" else 1

    def last_s(hand_over_s: float) -> float:
        timeline = replay(layout, micro_batches, lambda _: 1e-9, lambda *_: hand_over_s)
        return max(end_s for passes in timeline for action, _, end_s in passes if action.micro_batch == 0)

    assert last_s(1.0) == pytest.approx(messages)
    assert last_s(0.0) == pytest.approx(0.0, abs=1e-6)


def test_a_rank_that_begins_late_delays_the_others() -> None:
    timeline = replay(Layout(pp=2), 1, lambda _: 1.0, begin_s=[0.0, 5.0])
    assert [[begin_s for _, begin_s, _ in passes] for passes in timeline] == [[0.0, 7.0], [5.0, 6.0]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_the_ends_alone_are_those_of_the_replayed_passes(schedule: str) -> None:
    layout = replace(layout_of(schedule, 4), dp_shard=2, tp=2)
    arguments = (layout, 8, lambda action: TICKS[action.kind] + 0.1 * action.stage, lambda *_: 0.3)
    assert ends_of_ranks_s(*arguments) == [passes[-1].end_s for passes in replay(*arguments)]


def test_layouts_that_differ_outside_of_the_pipeline_share_its_schedule() -> None:
    assert actions(Layout(pp=4), 8) is actions(Layout(pp=4, dp_shard=2, tp=2, zero_stage=1), 8)
    assert alike_ranks(Layout(pp=4, pipeline_schedule="gpipe"), 8) == (0, 0, 0, 0)
    assert alike_ranks(Layout(pp=4), 8) == (0, 1, 2, 3)


def test_memory_is_what_the_papers_state():
    assert simulate(layout_of("gpipe", 4), 16)[1] == [16] * 4
    assert simulate(layout_of("1f1b", 4), 16)[1] == [4, 3, 2, 1]
    assert max(simulate(layout_of("zero_bubble", 4), 16)[1]) == 4
    assert max(simulate(layout_of("zbv", 4), 16)[1]) <= 8, "chunks of half a stage"


def test_one_stage_goes_forward_and_back():
    assert actions(Layout(), 2) == ((
        Action("forward", 0, 0), Action("backward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 1),
    ),)  # fmt: skip


def test_a_v_brings_the_last_stage_to_the_first_rank():
    layout = layout_of("zbv", 4)
    assert [layout.rank_of_stage(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert layout.stages_of_rank(0) == (0, 7)


def test_layers_are_cut_evenly_or_as_asked():
    assert cut_layers(8, Layout(pp=4)) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert [len(layers) for layers in cut_layers(10, Layout(pp=4))] == [3, 3, 2, 2]
    assert cut_layers(5, Layout(pp=2, stage_layers=(4, 1))) == (range(4), range(4, 5))


def test_a_rank_holds_the_layers_of_all_its_stages() -> None:
    assert layers_per_rank(10, Layout(pp=4)) == (3, 3, 2, 2)
    interleaved = Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    assert layers_per_rank(10, interleaved) == (5, 5)
    assert layers_per_rank(10, replace(interleaved, stage_layers=(4, 3, 2, 1))) == (6, 4)
    assert layers_per_rank(10, Layout(pp=2, pipeline_schedule="zbv")) == (5, 5)


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), [(4, 2, 8), (2, 3, 6), (4, 4, 16)])
def test_the_interleaved_schedule_starts_as_many_forwards_as_the_paper_says(
    pp: int, chunks: int, micro_batches: int
) -> None:
    """Megatron's warm-up is 2 (pp - rank - 1) + (chunks - 1) pp forwards (arXiv:2104.04473, figure 4); then each
    forward is followed by a backward."""
    layout = Layout(pp=pp, pipeline_schedule="interleaved", virtual_stages=chunks)
    for rank, order in enumerate(actions(layout, micro_batches)):
        warmup = 2 * (pp - rank - 1) + (chunks - 1) * pp
        kinds = [action.kind for action in order]
        steady = chunks * micro_batches - warmup
        assert kinds == ["forward"] * warmup + ["forward", "backward"] * steady + ["backward"] * warmup


def test_an_interleaved_rank_takes_its_chunks_in_turns_of_the_pipelines_length() -> None:
    first, *_ = actions(Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2), 4)
    forwards = [(action.stage, action.micro_batch) for action in first if action.kind == "forward"]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    backwards = [(action.stage, action.micro_batch) for action in first if action.kind == "backward"]
    assert backwards == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]


@pytest.mark.parametrize("micro_batches", [3, 8])
def test_1f1b_starts_a_forward_for_each_stage_behind(micro_batches: int) -> None:
    for rank, order in enumerate(actions(Layout(pp=4), micro_batches)):
        warmup = min(3 - rank, micro_batches)
        kinds = [action.kind for action in order]
        steady = micro_batches - warmup
        assert kinds == ["forward"] * warmup + ["forward", "backward"] * steady + ["backward"] * warmup


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (4, 16)])
def test_zero_bubble_has_at_most_as_many_micro_batches_under_way_as_stages(pp: int, micro_batches: int) -> None:
    """One is under way from its forward to its weight pass; the first rank has as many as 1F1B's (pp) under way."""
    under_way, most = 0, 0
    for action in actions(layout_of("zero_bubble", pp), micro_batches)[0]:
        under_way += {"forward": 1, "backward_weight": -1}.get(action.kind, 0)
        most = max(most, under_way)
    assert most == pp
