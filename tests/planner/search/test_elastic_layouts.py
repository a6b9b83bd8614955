"""The layouts that a recipe leaves open, and why the others are none."""

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.balance.batch.division import even_division
from trainspec_cli.planner.capacity import pin_layout
from trainspec_cli.planner.search.space import NOT_RUN, Space, schedules_of, splits_heads, stages_of
from trainspec_cli.planner.validation.table import frameworks
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, ExpertSpec, HybridModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.rules.check import check_built

SPEC = RunSpec(
    model=DecoderModel(8, 512, 8, 8, 64, 1024, 4096),
    data=DataSpec(seq_len=512, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=64),
    train=TrainSection(max_steps=10),
    layout=LayoutSpec(zero_stage=AUTO),
)


def layouts(mode: Any, **pinned: Any) -> tuple[set[Layout], Space]:
    spec = replace(SPEC, resilience=ResilienceSpec(mode=mode), layout=replace(SPEC.layout, **pinned))
    space = Space(spec, world_size=32, scaleup_devices=8)
    return {layout for layout, _, _ in space.layouts()}, space


def refused_for(space: Space, words: str) -> int:
    """Return the number of layouts refused for a reason with these words."""
    return sum(count for reason, count in space.refused.items() if words in reason)


def test_an_elastic_run_has_two_groups_or_more_and_several_numbers_of_them() -> None:
    found, space = layouts("elastic")
    assert {layout.dp_replicate for layout in found} == {2, 4, 8, 16, 32}
    assert refused_for(space, "resilience=elastic needs two ") > 0


def test_a_restarting_run_may_be_one_group() -> None:
    found, space = layouts("restart")
    assert (1, 32) in {(layout.dp_replicate, layout.dp_shard) for layout in found}
    assert refused_for(space, "resilience=elastic") == 0


def test_a_pinned_number_of_groups_is_kept_whatever_the_nodes() -> None:
    found, _ = layouts("restart", dp_replicate=2)
    assert {(layout.dp_replicate, layout.dp_shard) for layout in found} == {(2, 16)}


def test_a_number_of_groups_that_the_recipe_asks_for_is_tried_alone() -> None:
    """And replicas of every device, which then lie inside the groups."""
    spec = replace(SPEC, resilience=ResilienceSpec(mode="elastic", replica_groups=4))
    assert {layout.dp_replicate for layout, _, _ in Space(spec, 32, 8).layouts()} == {4, 32}


# All that is open, on few devices


def found_in(world_size: int, scaleup: int = 8, **changes: Any) -> tuple[list[tuple[Layout, int, int]], Space]:
    space = Space(replace(SPEC, **changes), world_size, scaleup)
    return list(space.layouts()), space


def test_every_layout_of_four_devices_and_no_other() -> None:
    """Two shards stay in a node of two. Of eight layers four may be a stage; a batch of 64 is cut by powers of two."""
    open_axes = LayoutSpec(tp="auto", pp="auto", cp="auto", zero_stage="auto", pipeline_schedule="gpipe")
    layouts, _ = found_in(4, scaleup=2, layout=open_axes, data=DataSpec(seq_len=1024, source="tokens"))
    described = {
        (each.dp_replicate, each.dp_shard, each.cp, each.tp, each.pp, each.zero_stage) for each, _, _ in layouts
    }
    assert described == {
        (4, 1, 1, 1, 1, 1), (2, 2, 1, 1, 1, 3), (1, 4, 1, 1, 1, 1), (1, 4, 1, 1, 1, 3),
        (2, 1, 1, 1, 2, 1), (1, 2, 1, 1, 2, 1), (1, 2, 1, 1, 2, 3), (1, 1, 1, 1, 4, 1),
        (2, 1, 2, 1, 1, 1), (1, 2, 2, 1, 1, 1), (1, 2, 2, 1, 1, 3), (1, 1, 2, 1, 2, 1),
        (2, 1, 1, 2, 1, 1), (1, 2, 1, 2, 1, 1), (1, 2, 1, 2, 1, 3), (1, 1, 1, 2, 2, 1),
        (1, 1, 2, 2, 1, 1),
    }  # fmt: skip
    assert all(each.world_size == 4 for each, _, _ in layouts)
    assert all(each.sequence_parallel == (each.tp > 1) for each, _, _ in layouts)
    assert all(micro * accum * each.data_parallel_size == 64 for each, micro, accum in layouts)
    assert all(each.pipeline_schedule == ("gpipe" if each.pp > 1 else "1f1b") for each, _, _ in layouts)
    assert len(layouts) == len(set(layouts))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": LayoutSpec(tp=3)}, " the heads"),
        ({"layout": LayoutSpec(cp=4), "data": DataSpec(seq_len=1022, source="tokens")},
         " by cp"),
        ({"layout": LayoutSpec(pp=3)}, "number of devices"),
        ({"batching": BatchingSpec(3), "layout": LayoutSpec(tp=AUTO)}, " no samples"),
        ({"layout": LayoutSpec(pp=16)}, "stages than layers"),
    ],
    ids=str,
)  # fmt: skip
def test_why_there_is_no_layout(changes: dict[str, Any], words: str) -> None:
    layouts, space = found_in(32, **changes)
    assert layouts == []
    assert len(space.refused) == 1 and refused_for(space, words) >= 1


def test_axes_keep_to_the_fast_links_and_to_sequences_of_512() -> None:
    wide = LayoutSpec(tp="auto", cp="auto", pp="auto")
    layouts, _ = found_in(32, layout=wide, data=DataSpec(seq_len=2048, source="tokens"))
    assert {each.tp for each, _, _ in layouts} == {1, 2, 4, 8}
    assert {each.cp for each, _, _ in layouts} == {1, 2, 4}
    assert {each.pp for each, _, _ in layouts} == {1, 2, 4, 8}
    narrow, _ = found_in(32, scaleup=4, layout=wide, data=DataSpec(seq_len=100, source="tokens"))
    assert {each.tp for each, _, _ in narrow} == {1, 2, 4} and {each.cp for each, _, _ in narrow} == {1}


@pytest.mark.parametrize(
    ("batch", "wanted", "sizes"),
    [(96, "auto", [1, 2, 4, 8, 16, 32, 96]), (64, "auto", [1, 2, 4, 8, 16, 32, 64]), (8, "auto", [1, 2, 4, 8]),
     (6, "auto", [1, 2, 3, 6]), (5, "auto", [1, 2, 3, 5]), (1, "auto", [1]), (96, 3, [3]), (96, 100, [96]),
     (64, 3, [3]), (9, 8, [5])],
)  # fmt: skip
def test_micro_batches_that_are_tried(batch: int, wanted: Any, sizes: list[int]) -> None:
    """The samples of the largest, where they are divided evenly over as few as it takes; none twice."""
    layouts, _ = found_in(1, batching=BatchingSpec(batch, micro_batch_size=wanted))
    assert [micro for _, micro, _ in layouts] == sizes
    assert [accum for _, _, accum in layouts] == [-(-batch // size) for size in sizes]


@pytest.mark.parametrize("batch", [33, 60, 63, 65])
def test_a_batch_that_divides_over_nothing_has_the_layouts_of_any_other(batch: int) -> None:
    wide = LayoutSpec(tp="auto", cp="auto", pp="auto", zero_stage=AUTO)
    whole, _ = found_in(32, layout=wide, batching=BatchingSpec(64))
    odd, _ = found_in(32, layout=wide, batching=BatchingSpec(batch))
    assert {layout for layout, _, _ in odd} == {layout for layout, _, _ in whole}
    assert len(odd) == len(set(odd))
    for layout, micro, accum in odd:
        division = even_division(layout, micro, keeps_micro_batches=False)
        assert division.count_micro_batches(batch) == accum, "as the engine divides it"
        assert max(max(division.of_rank(rank, 0, batch).sizes) for rank in (0, layout.data_parallel_size - 1)) == micro


def test_ranks_go_without_samples_only_where_every_axis_is_pinned() -> None:
    layouts, _ = found_in(32, batching=BatchingSpec(3))
    assert {(layout.data_parallel_size, micro, accum) for layout, micro, accum in layouts} == {(32, 1, 1)}


def test_fewer_samples_than_micro_batches_of_a_turn_are_interleaved_only_where_it_is_asked_for() -> None:
    wanted = LayoutSpec(pp=4, pipeline_schedule=AUTO, virtual_stages=AUTO)
    layouts, space = found_in(4, layout=wanted, batching=BatchingSpec(3))
    assert {layout.pipeline_schedule for layout, _, _ in layouts} == {"1f1b"}
    few = (
        "fewer samples per rank than micro-batches that the schedule needs",
        "a zero-bubble schedule needs one micro-batch per stage",
    )
    assert set(space.refused) == set(few)
    wanted = replace(wanted, pipeline_schedule="interleaved")
    layouts, _ = found_in(4, layout=wanted, batching=BatchingSpec(3))
    assert {(micro, accum) for _, micro, accum in layouts} == {(1, 4)}


def test_layouts_that_the_engine_refuses_are_left_out() -> None:
    """A compiled block has one backward, and 6 heads do not divide over 4 ranks; other frameworks have other rules."""
    wanted = LayoutSpec(pp=AUTO, tp=AUTO, pipeline_schedule=AUTO, virtual_stages=AUTO, zero_stage=AUTO)
    compiled, space = found_in(8, layout=wanted, compile=True)
    refused = compiled_zero_bubble_is_refused()
    assert ("zero_bubble" in {layout.pipeline_schedule for layout, _, _ in compiled}) is not refused
    assert (space.refused[NOT_RUN] > 0) is refused
    for layout, _, _ in compiled:
        assert check_built(pin_layout(replace(SPEC, layout=wanted, compile=True), layout)) == []
    elsewhere, _ = found_in(8, layout=wanted, compile=True, framework=frameworks()["megatron"])
    assert "interleaved" in {layout.pipeline_schedule for layout, _, _ in elsewhere}


def compiled_zero_bubble_is_refused() -> bool:
    layout = LayoutSpec(pp=2, pipeline_schedule="zero_bubble")
    return bool(check_built(replace(SPEC, layout=layout, compile=True)))


def test_chunks_of_interleaved_stages() -> None:
    model = replace(SPEC.model, num_layers=64)  # type: ignore[type-var]
    interleaved = LayoutSpec(pp=2, pipeline_schedule="interleaved", virtual_stages="auto")
    layouts, _ = found_in(2, model=model, layout=interleaved, batching=BatchingSpec(4, micro_batch_size=1))
    assert [each.virtual_stages for each, _, _ in layouts] == [2, 4, 8, 16]
    layouts, _ = found_in(2, layout=replace(interleaved, virtual_stages=3), batching=BatchingSpec(4, 1))
    assert [each.virtual_stages for each, _, _ in layouts] == [3]
    odd = replace(model, num_layers=61)  # type: ignore[type-var]
    layouts, space = found_in(2, model=odd, layout=interleaved, batching=BatchingSpec(4, micro_batch_size=1))
    assert layouts == [], "31 layers a rank divide by 31 alone, and 62 stages are more than there are layers"
    assert refused_for(space, "stages than layers") == 1
    uneven = replace(interleaved, pipeline_schedule="1f1b", virtual_stages=1, stage_layers=(5, 3))
    layouts, _ = found_in(2, layout=uneven, batching=BatchingSpec(4, 1))
    assert [(each.stage_layers, each.virtual_stages) for each, _, _ in layouts] == [((5, 3), 1)]


@pytest.mark.parametrize(
    ("schedule", "chunks", "tried"),
    [("auto", "auto", ("1f1b", "interleaved", "zero_bubble")), ("auto", 1, ("1f1b", "zero_bubble")),
     ("auto", 2, ("interleaved",)), ("zbv", "auto", ("zbv",))],
)  # fmt: skip
def test_schedules_that_are_tried(schedule: Any, chunks: Any, tried: tuple[str, ...]) -> None:
    assert schedules_of(LayoutSpec(pipeline_schedule=schedule, virtual_stages=chunks)) == tried


@pytest.mark.parametrize(
    ("wanted", "shard", "replicate", "stages"),
    [("auto", 1, 8, (1,)), ("auto", 8, 1, (1, 3)), ("auto", 4, 2, (3,)), (2, 8, 1, (2,)), (3, 1, 8, (3,))],
)
def test_zero_stages_that_are_tried(wanted: Any, shard: int, replicate: int, stages: tuple[int, ...]) -> None:
    assert stages_of(LayoutSpec(zero_stage=wanted), shard, replicate) == stages


def test_experts_are_spread_over_what_divides_them_and_the_ranks() -> None:
    experts = replace(SPEC.model, experts=ExpertSpec(12, 2, 64))  # type: ignore[type-var]
    layouts, space = found_in(8, model=experts, layout=LayoutSpec(dp_replicate=1, ep="auto"))
    assert {each.ep for each, _, _ in layouts} == {1, 2, 4}
    assert refused_for(space, "ep does not divide") == 3
    cut = LayoutSpec(dp_replicate=1, tp=2, ep=4, etp=2)
    layouts, _ = found_in(8, model=experts, layout=cut, framework=frameworks()["megatron"])
    assert {(each.ep, each.etp, each.dp_shard) for each, _, _ in layouts} == {(4, 2, 4)}


def test_replicas_hold_all_experts_each() -> None:
    experts = replace(SPEC.model, experts=ExpertSpec(16, 2, 64))  # type: ignore[type-var]
    layouts, _ = found_in(8, model=experts, layout=LayoutSpec(dp_replicate=2, ep="auto"))
    assert {each.ep for each, _, _ in layouts} == {1, 2, 4}


def test_shards_that_no_rule_would_try_are_kept_where_they_are_pinned() -> None:
    layouts, _ = found_in(32, scaleup=2, layout=LayoutSpec(dp_shard=8, zero_stage=2))
    assert {(each.dp_replicate, each.dp_shard, each.zero_stage) for each, _, _ in layouts} == {(4, 8, 2)}
    layouts, _ = found_in(32, layout=LayoutSpec(dp_shard=3))
    assert layouts == []


@pytest.mark.parametrize(
    ("heads", "kv", "ffn", "tp", "splits"),
    [(8, 8, 64, 4, True), (8, 2, 64, 4, True), (8, 4, 64, 2, True), (12, 3, 64, 2, False), (6, 6, 64, 4, False),
     (8, 8, 60, 8, False), (7, 7, 63, 1, True), (16, 6, 64, 4, False)],
)  # fmt: skip
def test_heads_are_cut_whole(heads: int, kv: int, ffn: int, tp: int, splits: bool) -> None:
    assert splits_heads(DecoderModel(8, 512, heads, kv, 64, ffn, 4096), tp) is splits


def test_convolutions_are_not_cut_and_scans_have_no_heads_to_cut() -> None:
    conv = ConvModel("resnet", (32, 32), (4, 8))
    assert (splits_heads(conv, 1), splits_heads(conv, 2)) == (True, False)
    assert splits_heads(HybridModel(64, 512, 4), 4), "no heads divide by anything"
