"""The step of a rehearsed pipeline: the times of single ranks' passes, put together by the schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from trainspec_cli.planner.hardware.cluster import describe_fabric, efficiency_of, group_of_ranks, send_s
from trainspec_cli.planner.pipeline import actions
from trainspec_cli.wings.emulated.planned import PlanToRehearse, plan_to_rehearse, time_step
from trainspec_cli.wings.emulated.rehearsal import (
    ActionSeconds,
    MemoryMoment,
    PipelineSeconds,
    RankRehearsal,
    read_ranks,
)

SECONDS = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
BYTES = 2**25


@cache
def planned(schedule: str = "1f1b", pp: int = 4, samples: int = 16, fabric: str = "") -> PlanToRehearse:
    virtual = 2 if schedule == "interleaved" else 1
    layout = [f"layout.pp={pp}", f"layout.pipeline_schedule={schedule}", f"layout.virtual_stages={virtual}"]
    layout += [
        f"layout.stage_layers={[8 // (pp * virtual)] * pp * virtual}",
        "layout.tp=1",
        "layout.dp_shard=8",
        f"cluster.num_nodes={pp}",
        "model.num_layers=8",
        "data.seq_len=512",
    ]
    batch = [f"batching.global_batch_size={8 * samples}", "batching.micro_batch_size=1"]
    network = [f"fabric={fabric}"] if fabric else []
    return plan_to_rehearse(["recipe=llama3_8b", *layout, *batch, *network], None)


def rehearsed(one: PlanToRehearse, rank: int, slowness: float = 1.0, rest_s: float = 0.0) -> RankRehearsal:
    """A rank that was rehearsed with eight micro-batches, or with all of them."""
    layout = one.plan.layout
    micro_batches = min(8, one.plan.grad_accum_steps)
    passes = tuple(
        ActionSeconds(*action, SECONDS[action.kind] * slowness, 0.0) for action in actions(layout, micro_batches)[rank]
    )
    seconds = PipelineSeconds(passes, micro_batches, {"optimizer": rest_s}, rest_s, BYTES)
    return RankRehearsal(rank * 8, 0, 0, 0, 0, 0, MemoryMoment("", ()), pipeline=seconds)


def step_of(one: PlanToRehearse, slowness: dict[int, float] | None = None, rest_s: float = 0.0) -> tuple[float, ...]:
    ranks = [rehearsed(one, rank, (slowness or {}).get(rank, 1.0), rest_s) for rank in range(one.plan.layout.pp)]
    found = time_step(one, ranks)
    assert found is not None
    assert found.step_s == pytest.approx(sum(found.parts_s.values()))
    return found.rank // 8, found.parts_s["compute"], found.parts_s["bubble"], found.parts_s["hand_over"], found.step_s


@pytest.mark.parametrize(("schedule", "bubble_s"), [("1f1b", 9.0), ("gpipe", 9.0), ("interleaved", 9.0)])
def test_equal_stages_take_the_time_of_the_closed_form(schedule: str, bubble_s: float) -> None:
    """Interleaved: twice the stages, each as long as one of the others."""
    one = planned(schedule)
    _, compute_s, found_s, _, _ = step_of(one)
    assert compute_s == pytest.approx(16 * 3.0 * one.plan.layout.virtual_stages)
    assert found_s == pytest.approx(bubble_s)


def test_every_message_that_fills_and_drains_the_pipeline_is_waited_for() -> None:
    one = planned()
    cluster = one.plan.spec.cluster
    eff = efficiency_of(cluster)
    message_s = send_s(group_of_ranks(describe_fabric(cluster, None), (0, 8), eff), BYTES, eff)
    assert message_s > 0.0005
    *_, hand_over_s, step_s = step_of(one)
    assert hand_over_s >= 6 * message_s
    assert step_s == pytest.approx(16 * 3.0 + 9.0 + hand_over_s)


def test_a_slow_last_stage_sets_the_pace() -> None:
    rank, compute_s, bubble_s, _, _ = step_of(planned(), {3: 1.5})
    assert rank == 3
    assert compute_s == pytest.approx(16 * 4.5)
    assert bubble_s == pytest.approx(9.0), "one forward and backward of each of the others"


def test_the_optimizer_is_part_of_the_step() -> None:
    *_, usual_s = step_of(planned())
    *_, step_s = step_of(planned(), rest_s=2.0)
    assert step_s == pytest.approx(usual_s + 2.0)


def test_a_step_needs_each_kind_of_stage() -> None:
    one = planned()
    assert one.kinds == (0, 1, 1, 3)
    assert read_ranks("ends", one.plan, one.kinds) == [0, 8, 24]
    assert read_ranks("distinct", one.plan, one.kinds) == read_ranks("all", one.plan, one.kinds) == [0, 8, 16, 24]
    every = [rehearsed(one, rank) for rank in (0, 1, 3)]
    whole = time_step(one, every)
    assert whole is not None
    assert whole.step_s == pytest.approx(step_of(one)[-1])
    assert time_step(one, every[:2]) is None
    assert time_step(one, [*every[:2], replace(every[2], pipeline=None)]) is None


def test_all_has_each_part_of_the_sequences() -> None:
    one = planned()
    layout = replace(one.plan.layout, dp_shard=2, cp=2, tp=2)
    plan = replace(one.plan, layout=layout)
    assert read_ranks("all", plan, one.kinds) == [0, 2, 8, 10, 16, 18, 24, 26]
