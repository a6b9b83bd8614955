"""Settings that an optimizer does not support are refused, with the correction."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import (
    ConvModel,
    DecoderModel,
    ExpertSpec,
    HybridModel,
    LatentAttentionSpec,
    TracedPart,
    TransformersModel,
)
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import (
    BLOCK,
    BatchingSpec,
    LayoutChangeSpec,
    LoraSpec,
    OptimSpec,
    ParameterGroup,
    SchedulerSpec,
)
from trainspec_cli.recipe.rules.check import check
from trainspec_cli.recipe.rules.run import describe_other_blocks, trained_parts

SPEC = RunSpec(
    model=DecoderModel(2, 64, 2, 2, 32, 160, 4096),
    data=DataSpec(seq_len=64, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3, name="muon"),
    batching=BatchingSpec(global_batch_size=8),
    train=TrainSection(max_steps=8),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
    layout=LayoutSpec(dp_replicate=1),
)
QUANTISED = {"optim": OptimSpec(lr=1e-3, name="adamw8bit")}
CHANGED = {"scheduler": SchedulerSpec(changes=(LayoutChangeSpec(step=4, dp_shard=1, tp=2),))}
ALIGNED = {"model": DecoderModel(2, 512, 8, 8, 64, 1024, 4096)}
RESNET = ConvModel("resnet", (32, 32), (8,), (1,), num_classes=10)


@pytest.mark.parametrize(
    ("changes", "path", "hint"),
    [
        ({"lora": LoraSpec(rank=4)}, "optim.name", "set optim.name=adamw, or lora.rank=0"),
        ({"model": RESNET}, "optim.name", "set optim.name=adamw or optim.name=sgd"),
        ({"offload": "optimizer"}, "offload", "set offload=none, or optim.name=adamw"),
        (QUANTISED | {"offload": "optimizer"}, "offload", "set offload=none, or optim.name=adamw"),
        (QUANTISED | CHANGED, "scheduler.changes.0.tp", "type ~scheduler.changes.0.tp, or optim.name=adamw"),
    ],
    ids=["adapters", "convolutions", "offloaded muon", "offloaded moments", "another tp"],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], path: str, hint: str) -> None:
    found = [(problem.path, problem.hint) for problem in check(replace(SPEC, **changes))]
    assert (path, hint) in found


@pytest.mark.parametrize("changes", [{}, QUANTISED, CHANGED, QUANTISED | CHANGED | ALIGNED, {"offload": "auto"}])
def test_what_goes_together_is_not(changes: dict[str, Any]) -> None:
    assert check(replace(SPEC, **changes)) == []


def block_starts(row: int, tp: int) -> set[int]:
    part = row // tp
    return {rank * part + start for rank in range(tp) for start in range(0, part, BLOCK)}


@pytest.mark.parametrize("row", [160, 512, 768, 1024, 1408, 1536, 3072])
def test_a_tp_is_refused_exactly_where_its_blocks_are_others(row: int) -> None:
    """1408 has six blocks under tp 1 and tp 2, with other borders: no count of blocks tells them apart."""
    spec = replace(SPEC, **QUANTISED, model=DecoderModel(2, 3072, 24, 24, 128, row, 4096))  # type: ignore[arg-type]
    sizes = [size for size in (1, 2, 3, 4, 6, 8) if row % size == 0]
    for tp, other in product(sizes, sizes):
        others = block_starts(row, tp) != block_starts(row, other)
        # the rows of attention, of 3072 values, have the same blocks under each of these
        assert bool(describe_other_blocks(spec, tp, other)) == others, (tp, other)


def test_every_kind_of_row_that_tp_cuts_counts_and_only_where_it_is_quantised() -> None:
    decoder = DecoderModel(2, 512, 8, 8, 64, 1024, 4096)
    mla = LatentAttentionSpec(kv_lora_rank=64, v_head_dim=40)
    shared = ExpertSpec(num_experts=4, top_k=1, expert_ffn_size=96, shared_experts=2)
    hybrid = HybridModel(512, 4096, mamba_layers=2, mamba_expand=1, mamba_head_dim=48)
    models = {
        "num_heads x head_dim (320)": replace(decoder, head_dim=40),
        "num_heads x mla.v_head_dim (320)": replace(decoder, mla=mla),
        "ffn_size (1000)": replace(decoder, ffn_size=1000),
        "experts.shared_experts x their width (192)": replace(decoder, experts=shared, ffn_size=1000),
        "mamba_num_heads x mamba_head_dim (480)": hybrid,
    }
    for key, model in models.items():
        message = describe_other_blocks(replace(SPEC, **QUANTISED, model=model), 1, 2)  # type: ignore[arg-type]
        assert all(part in message for part in ("layout.tp 1 and 2 ", f" model.{key} ", " blocks of 256"))
    small = replace(SPEC, **QUANTISED, model=DecoderModel(2, 24, 2, 2, 12, 160, 4096))  # type: ignore[arg-type]
    assert describe_other_blocks(small, 1, 2) == "", "tensors of less than 4096 values have moments of fp32"
    adapted = replace(SPEC, **QUANTISED, lora=LoraSpec(rank=4))  # type: ignore[arg-type]
    assert describe_other_blocks(adapted, 1, 2) == "", "so have small adapters"
    assert describe_other_blocks(SPEC, 1, 2) == "", "and those of muon are another thing"


FIRST = ParameterGroup("blocks.0.*", frozen=True)
DENSE_FIRST = ExpertSpec(num_experts=4, top_k=2, expert_ffn_size=32, first_dense_layers=1)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"optim": OptimSpec(lr=1e-3, groups=(FIRST,)), "layout": LayoutSpec(pp=2)}, "optim.groups"),
        ({"optim": OptimSpec(lr=1e-3, groups=(FIRST,)), "layout": LayoutSpec(pp=1)}, None),
        ({"optim": OptimSpec(lr=1e-3), "lora": LoraSpec(rank=8, targets=())}, "lora.targets"),
        ({"optim": OptimSpec(lr=1e-3), "lora": LoraSpec(rank=8, targets=("zzz",))}, "lora.targets"),
        ({"optim": OptimSpec(lr=1e-3), "lora": LoraSpec(rank=8, targets=("experts.up",))}, "lora.targets"),
        (
            {
                "model": replace(SPEC.model, experts=DENSE_FIRST),
                "optim": OptimSpec(lr=1e-3),
                "lora": LoraSpec(rank=8, targets=("experts.up",)),
                "layout": LayoutSpec(pp=2),
            },
            "lora.targets",
        ),
        ({"optim": OptimSpec(lr=1e-3), "lora": LoraSpec(rank=8, targets=("q",)), "layout": LayoutSpec(pp=2)}, None),
    ],
)
def test_every_pipeline_stage_trains_something(changes: dict[str, Any], path: str | None) -> None:
    """Also in a plan, which would otherwise be that of a full training."""
    found = [problem.path for problem in check(replace(SPEC, **changes)) if problem.path != "layout"]
    assert found == ([path] if path else [])


@pytest.mark.parametrize(
    ("linears", "targets", "allowed"),
    [
        (("q_proj 8x8", "fc 16x8"), LoraSpec().targets, None),
        (("q_proj 8x8", "fc 16x8"), ("fc",), None),
        (("q_proj 8x8", "fc 16x8"), (), "[q_proj,fc]"),
        (("q_proj 8x8", "fc 16x8"), ("fc", "q"), "[q_proj,fc]"),
        ((), LoraSpec().targets, "lora.rank=0"),
    ],
)
def test_adapters_of_a_transformers_module_are_on_its_linear_layers(
    linears: tuple[str, ...], targets: tuple[str, ...], allowed: str | None
) -> None:
    part = TracedPart(("8x8",), linears=linears)
    model = TransformersModel("{}", 1, 8, 16, "layers", "", (part,), part, 8, 4)
    found = list(trained_parts(replace(SPEC, model=model, lora=LoraSpec(rank=2, targets=targets))))
    assert [(problem.code, problem.path) for problem in found] == [("wrong_choice", "lora.targets")] * bool(allowed)
    assert all(allowed in problem.hint for problem in found if allowed)
