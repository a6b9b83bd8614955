"""Layouts of a run that is to survive failures by shrinking."""

from dataclasses import replace
from typing import Any

from trainspec_cli.planner.search.space import Space
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.layout import Layout, LayoutSpec
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.resilience import ResilienceSpec
from trainspec_cli.spec.recipe.run import RunSpec, TrainSection

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


def test_an_elastic_run_has_two_groups_or_more_and_several_numbers_of_them() -> None:
    found, space = layouts("elastic")
    assert {layout.dp_replicate for layout in found} == {2, 4, 8, 16, 32}
    assert space.refused["resilience=elastic needs two replica groups"] > 0


def test_a_restarting_run_may_be_one_group() -> None:
    found, space = layouts("restart")
    assert (1, 32) in {(layout.dp_replicate, layout.dp_shard) for layout in found}
    assert "resilience=elastic needs two replica groups" not in space.refused


def test_a_pinned_number_of_groups_is_kept_whatever_the_nodes() -> None:
    found, _ = layouts("restart", dp_replicate=2)
    assert {(layout.dp_replicate, layout.dp_shard) for layout in found} == {(2, 16)}
