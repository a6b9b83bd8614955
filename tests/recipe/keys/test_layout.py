"""What a layout shards, exchanges and cuts into stages: the one place that the engine and the planner ask."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.keys.layout import Layout


@pytest.mark.parametrize(
    ("layout", "every_backward"),
    [
        (Layout(dp_shard=4, zero_stage=1), False),
        (Layout(dp_shard=4, zero_stage=2), True),
        (Layout(dp_shard=4, zero_stage=3), True),
        (Layout(dp_shard=1, zero_stage=3), False),
        (Layout(dp_shard=4, dp_replicate=2, zero_stage=3), False),
        (Layout(dp_shard=4, pp=2, zero_stage=3), True),
        (Layout(dp_shard=4, pp=2, zero_stage=3, pipeline_schedule="zero_bubble"), False),
        (Layout(dp_shard=4, pp=2, zero_stage=2, pipeline_schedule="zbv"), False),
        (Layout(dp_shard=4, pp=1, zero_stage=2, pipeline_schedule="zero_bubble"), True),
        (Layout(dp_shard=4, pp=1, zero_stage=3, pipeline_schedule="zbv"), True),
    ],
    ids=str,
)
def test_gradients_that_stay_sharded_are_exchanged_after_every_backward(layout: Layout, every_backward: bool) -> None:
    assert layout.exchanges_every_backward is every_backward


def test_one_stage_splits_no_backward_whatever_its_schedule() -> None:
    assert not Layout(pipeline_schedule="zero_bubble").splits_backward
    assert Layout(pp=2, pipeline_schedule="zero_bubble").splits_backward
    assert Layout(pp=2, pipeline_schedule="zbv").splits_backward
    assert not Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2).splits_backward


@pytest.mark.parametrize(
    ("layout", "by_rank"),
    [
        (Layout(pp=1, pipeline_schedule="zbv"), [(0,)]),
        (Layout(pp=3), [(0,), (1,), (2,)]),
        (Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=3), [(0, 2, 4), (1, 3, 5)]),
        (Layout(pp=3, pipeline_schedule="zbv"), [(0, 5), (1, 4), (2, 3)]),
    ],
    ids=str,
)
def test_stages_of_every_rank(layout: Layout, by_rank: list[tuple[int, ...]]) -> None:
    assert [layout.stages_of_rank(rank) for rank in range(layout.pp)] == by_rank
    assert layout.num_stages == sum(map(len, by_rank)) == layout.pp * layout.chunks_per_rank
    assert [layout.rank_of_stage(stage) for rank in by_rank for stage in rank] == [
        rank for rank, held in enumerate(by_rank) for _ in held
    ]


def test_ranks_that_share_parameters_and_experts() -> None:
    layout = Layout(dp_replicate=2, dp_shard=4, cp=2, tp=2, pp=3, ep=4, etp=2)
    assert (layout.world_size, layout.shards, layout.expert_ranks, layout.expert_shards) == (96, 8, 16, 2)
    assert Layout(ep=8).expert_shards == 1


def test_zero_3_lets_go_of_parameters_where_there_are_others_to_hold_them() -> None:
    assert Layout(dp_shard=2, zero_stage=3).shards_parameters
    assert not Layout(dp_shard=2, zero_stage=2).shards_parameters
    assert not Layout(dp_shard=1, zero_stage=3).shards_parameters


@pytest.mark.parametrize(
    ("layout", "keeps"),
    [
        (Layout(dp_shard=2, zero_stage=1), True),
        (Layout(dp_shard=2, zero_stage=2, pp=2), True),
        (Layout(dp_shard=2), False),
        (Layout(cp=2), False),
        (Layout(dp_replicate=2, tp=2), True),
        (Layout(dp_shard=2, tp=2, ep=4), False),
        (Layout(tp=4, ep=2), False),
        (Layout(tp=4, ep=4), True),
    ],
)
def test_parameters_are_kept_over_micro_batches_unless_zero_3_cuts_some(layout: Layout, keeps: bool) -> None:
    assert layout.keeps_parameters == keeps
