"""Published parameter counts, and work that adds up to them."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.hardware.catalogue import find_accelerator, find_model, models
from trainspec_cli.planner.workload import (
    count_active_params,
    count_params,
    embedding_work,
    flops_per_token,
    head_work,
    layer_kinds,
    mixing_flops_per_token,
)
from trainspec_cli.planner.workload.moe import active_expert_params, expert_layer_params
from trainspec_cli.planner.workload.ssm import mamba_params
from trainspec_cli.planner.workload.work import Work
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.recipe.model import HybridModel
from trainspec_cli.spec.recipe.model_parts import ExpertSpec

PUBLISHED = {
    "llama3_8b": (8.03e9, 8.03e9),
    "llama3_70b": (70.55e9, 70.55e9),
    "llama3_405b": (405.85e9, 405.85e9),
    "mixtral_8x7b": (46.7e9, 12.88e9),
    "qwen3_30b_a3b": (30.5e9, 3.35e9),
    "mamba2_1b": (1.34e9, 1.34e9),
    "nemotron_h_8b": (8.1e9, 8.1e9),
    "resnet50": (25.56e6, 25.56e6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    total, active = PUBLISHED[name]
    assert count_params(models()[name]) == pytest.approx(total, rel=0.01)
    assert count_active_params(models()[name]) == pytest.approx(active, rel=0.01)


def test_deepseek_v3_has_671b_and_its_prediction_layer() -> None:
    assert count_params(models()["deepseek_v3"]) == pytest.approx(671e9 + 11.5e9, rel=0.005)


def gemm_flops(work: Work) -> float:
    return sum(gemm.flops for gemm in work.gemms)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=2, cp=2)])
@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "nemotron_h_8b"])
def test_work_of_all_ranks_adds_up_to_the_model_flops(name: str, layout: Layout) -> None:
    """Forward work times three is what `flops_per_token` counts, but for the router and the scan's slowness."""
    model, seq_len = models()[name], 4096
    tokens = seq_len / layout.cp
    kinds = layer_kinds(model, tokens, seq_len, layout)
    work = sum(count * (gemm_flops(part) + part.attention_flops) for count, parts in kinds for part in parts)
    head = head_work(model, tokens, layout)
    assert head is not None
    total = 3 * (work + gemm_flops(head)) * layout.tp * layout.cp
    assert total == pytest.approx(seq_len * flops_per_token(model, seq_len), rel=0.03)


@pytest.mark.parametrize("name", ["llama3_70b", "deepseek_v3", "nemotron_h_8b"])
def test_parts_hold_every_parameter_once(name: str) -> None:
    model = models()[name]
    parts = sum(n * w.all_params for n, ws in layer_kinds(model, 1.0, 4096, Layout()) for w in ws)
    ends = [embedding_work(model, 1.0, Layout()), head_work(model, 1.0, Layout())]
    parts += sum(end.params for end in ends if end)
    extra = 11.7e9 if name == "deepseek_v3" else 0.0
    assert parts + extra == pytest.approx(count_params(model), rel=0.01)


def test_expert_parallelism_splits_the_experts_alone() -> None:
    model = models()["mixtral_8x7b"]
    for ep in (1, 8):
        ((_, (attention, experts)),) = layer_kinds(model, 4096.0, 4096, Layout(dp_shard=8, ep=ep))
        assert experts.expert_params == pytest.approx(8 * 3 * 4096 * 14336 / ep)
        assert attention.params == pytest.approx(4096 * 128 * 2 * 40, rel=0.01)


def test_a_window_bounds_attention() -> None:
    windowed, seq_len = models()["mistral_7b"], 32768
    per_token = flops_per_token(windowed, seq_len) - flops_per_token(windowed, 1)
    assert per_token < 12 * 32 * 4096 * 4096


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("A100-SXM-40GB", "A100-SXM-40GB"),
        ("H100-96GB-HBM2e-500W", "H100-96GB-HBM2e-500W"),
        ("GB300", "GB300"),
        ("MI325X", "MI325X"),
        ("RTX Pro 6000", "RTX Pro 6000"),
        ("NVIDIA RTX A5000", "NVIDIA RTX A5000"),
        ("L4", "L4"),
        ("V100-SXM2-16GB", "V100-SXM2-16GB"),
    ],
)
def test_labels_find_their_chip(label: str, name: str) -> None:
    chip = find_accelerator(label)
    assert chip is not None and chip.name == name


def test_labels_find_their_model() -> None:
    found = find_model("resnet50-v1.5")
    assert found is not None and found.name == "resnet50"
    assert find_model("no-such-net") is None


def test_frozen_weights_take_four_flops_a_token_and_adapters_six() -> None:
    model, lora = models()["llama3_8b"], LoraSpec(rank=8, targets=("q", "v"))
    adapters = 8 * 32 * ((4096 + 4096) + (4096 + 1024))
    mixing = mixing_flops_per_token(model, 4096)
    frozen = flops_per_token(model, 4096) - mixing
    assert flops_per_token(model, 4096, lora) == pytest.approx(4 / 6 * frozen + 6 * adapters + mixing, rel=1e-12)
    assert 0 < 6 * adapters < 0.01 * frozen


@pytest.mark.parametrize(("gated", "matrices"), [(True, 3), (False, 2)])
def test_shared_experts_have_a_gate_matrix_only_where_the_model_gates(gated: bool, matrices: int) -> None:
    experts = ExpertSpec(num_experts=4, top_k=2, expert_ffn_size=10, shared_experts=2)
    router = 4 * 8
    assert active_expert_params(experts, 8, gated) == (2 + 2) * matrices * 8 * 10 + router
    assert expert_layer_params(experts, 8, gated) == (4 + 2) * matrices * 8 * 10 + router


def test_a_mamba_layer_has_projections_convolutions_with_biases_and_a_norm() -> None:
    model = HybridModel(
        hidden_size=8, vocab_size=16, mamba_layers=1, mamba_head_dim=4, mamba_state_size=3, mamba_groups=2
    )
    inner, heads, convolved = 16, 4, 16 + 2 * 2 * 3
    projections = 8 * (inner + convolved + heads) + inner * 8
    assert mamba_params(model) == projections + convolved * (4 + 1) + 3 * heads + inner
