"""Published parameter counts, and work that adds up to them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.workload import (
    Core,
    Gemm,
    Work,
    adapted_matrices,
    adapter_params,
    count_active_params,
    count_params,
    embedding_work,
    flops_per_token,
    head_work,
    layer_kinds,
    layer_works,
    mixing_flops_per_token,
)
from trainspec_cli.planner.workload.ssm import mamba_params
from trainspec_cli.planner.workload.transformer import expert_layer_params
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    ConvModel,
    DecoderModel,
    ExpertSpec,
    HybridModel,
    LatentAttentionSpec,
    ModelSpec,
)
from trainspec_cli.recipe.keys.training import LoraSpec

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
    assert expert_layer_params(experts, 8, gated, active=True) == (2 + 2) * matrices * 8 * 10 + router
    assert expert_layer_params(experts, 8, gated, active=False) == (4 + 2) * matrices * 8 * 10 + router


def test_a_mamba_layer_has_projections_convolutions_with_biases_and_a_norm() -> None:
    model = HybridModel(
        hidden_size=8, vocab_size=16, mamba_layers=1, mamba_head_dim=4, mamba_state_size=3, mamba_groups=2
    )
    inner, heads, convolved = 16, 4, 16 + 2 * 2 * 3
    projections = 8 * (inner + convolved + heads) + inner * 8
    assert mamba_params(model) == projections + convolved * (4 + 1) + 3 * heads + inner


# Small models, counted on paper

LLAMA = DecoderModel(3, 8, 4, 2, 4, 16, 32)
LATENT = LatentAttentionSpec(kv_lora_rank=6, q_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
SHARED = ExpertSpec(8, 2, 12, shared_experts=2, shared_expert_ffn_size=6, first_dense_layers=1)
GPT = replace(LLAMA, gated_mlp=False, learned_positions=64, tied_embeddings=True, attention_bias="all")
WINDOW = replace(
    LLAMA, sliding_window=8, global_attention_every=3, attention_bias="qkv", qk_norm=True, attention_sinks=True
)
DEEPSEEK = replace(LLAMA, mla=LATENT, experts=SHARED, prediction_layers=1)
PLAIN_QUERIES = replace(
    LLAMA,
    mla=replace(LATENT, q_lora_rank=0),
    experts=replace(SHARED, shared_expert_ffn_size=None, every=2, first_dense_layers=0, shared_gate=True),
)
BIASED = replace(LLAMA, experts=ExpertSpec(8, 2, 12, bias=True))
HYBRID = HybridModel(
    *(16, 32),
    mamba_layers=2,
    attention_layers=1,
    mlp_layers=1,
    expert_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    experts=SHARED,
    mamba_head_dim=4,
    mamba_state_size=3,
    mamba_groups=2,
)


@pytest.mark.parametrize(
    ("model", "params", "active", "flops", "mixing"),
    [
        (LLAMA, 2872, 2872, 21_120, 5760),
        (GPT, 2864, 2864, 18_816, 5760),
        (WINDOW, 3004, 3004, 19_737.6, 4377.6),
        (DEEPSEEK, 11_744, 6560, 47_040, 8640),
        (PLAIN_QUERIES, 5866, 4138, 29_328, 6480),
        (BIASED, 9616, 3856, 27_024, 5760),
        (HYBRID, 10_504, 8200, 108_144, 62_592),
    ],
    ids=["llama", "gpt", "window", "deepseek", "plain queries", "biased experts", "hybrid"],
)
def test_parameters_and_flops_of_small_models(
    model: ModelSpec, params: int, active: int, flops: float, mixing: float
) -> None:
    """Such as the llama: a layer has 8 x 4 x 2 x (4 + 2) + 3 x 8 x 16 = 768 weights and two norms of 8; two tables of
    32 x 8. A token of 20 takes 6 x (3 x 768 + 256) FLOPs, and 12 x 3 x 16 x 10 of attention."""
    assert (count_params(model), count_active_params(model)) == (params, active)
    assert flops_per_token(model, 20) == pytest.approx(flops, rel=1e-12)
    assert mixing_flops_per_token(model, 20) == pytest.approx(mixing, rel=1e-12)


def told(work: Work | None) -> dict[str, Any]:
    """The fields that differ from their defaults; products as m, n, k, count, in the linear layers' format or not."""
    assert work is not None
    found = {item.name: getattr(work, item.name) for item in fields(Work) if getattr(work, item.name) != item.default}
    for name in ("gemms", "counted_gemms", "tp_delayed", "tp_delayed_after"):
        if name in found:
            found[name] = [(gemm.m, gemm.n, gemm.k, gemm.count, gemm.wide) for gemm in found[name]]
    return found


def one(
    m: float, n: float, k: float, *, count: float = 1, wide: bool = True
) -> tuple[float, float, float, float, bool]:
    return m, n, k, count, wide


def test_work_that_says_nothing_is_none() -> None:
    """A layer passes no bytes and holds no parameters but those that it names."""
    fixed = {"attention_head_dim": 128.0, "tensor_bytes": 1e9, "expert_copies": 1}
    assert {item.name: getattr(Work(), item.name) for item in fields(Work) if getattr(Work(), item.name)} == fixed
    assert (Gemm(2, 3, 5).flops, Gemm(2, 3, 5, 7).flops) == (60, 420)


CUT = Layout(tp=2, cp=2)
NOT_SPLIT = Layout(tp=2, sequence_parallel=False)
LLAMA_ATTENTION = {
    "gemms": [one(10, (16 + 2 * 8) / 2, 8), one(10, 8, 16 / 2)],
    "attention_flops": 4 * 10 * (16 / 2) * 10,
    "attention_head_dim": 4,
    "score_bytes": 2 * 10 * 20 * 4 / 2,
    "pass_bytes": 2 * 10 * (7 * 4 + 2 * (16 + 8) / 2),
    "eager_bytes": 10 * (24 * 4 + 16 * 12),
    "counted_gemms": [one(10, 8, 8), one(10, 4, 8), one(10, 4, 8), one(10, 8, 8)],
    # In a ring of two turns
    "counted_core": Core(4 * 10 * (16 / 2) * 10, 4, 2),
    "tensor_bytes": 2 * 10 * 4,
    "kernels": 16,
    "tp_bytes": 2 * 10 * 8,
    "tp_exchanges": 1,
    "tp_delayed": [one(10, 8, 8), one(10, 4, 8), one(10, 4, 8), one(10, 8, 8)],
    "tp_delayed_after": [one(10, 8, 8)],
    "cp_query_bytes": 2 * 10 * 8,
    "cp_bytes": 2 * 2 * 10 * 2 * (8 / 2),
    "params": 384 / 2 + 8,
    "saved_bytes": 2 * 10 * (2 * 4 + 2 * (16 + 8) / 2),
    "saved_gemm_bytes": 2 * 10 * (4 + 8),
    "saved_eager_bytes": 4 * 10 * 4,
    "input_bytes": 2 * 10 * 4,
}
LLAMA_MLP = {
    "gemms": [one(10, 2 * 8, 8), one(10, 8, 8)],
    "pass_bytes": 2 * 10 * (7 * 4 + 3 * 8),
    "eager_bytes": 10 * (24 * 4 + 4 * 8),
    "counted_gemms": [one(10, 8, 8), one(10, 8, 8), one(10, 8, 8)],
    "tensor_bytes": 80,
    "kernels": 10,
    "tp_bytes": 160,
    "tp_exchanges": 1,
    "tp_delayed": [one(10, 8, 8)],
    "tp_last": True,
    "params": 384 / 2 + 8,
    "saved_bytes": 2 * 10 * (2 * 4 + 3 * 8),
    "saved_gemm_bytes": 2 * 10 * (4 + 8),
    "saved_eager_bytes": 10 * (4 * 4 + 2 * 8),
    "input_bytes": 80,
}
WHOLE_SEQUENCE = {"tensor_bytes": 160, "input_bytes": 160}


def test_a_decoder_layer_on_a_rank_of_two_by_two() -> None:
    ((count, (attention, mlp)),) = layer_kinds(LLAMA, 10.0, 20, CUT)
    assert (count, told(attention), told(mlp)) == (3, LLAMA_ATTENTION, LLAMA_MLP)
    # Words of the other rank become zeros; the gradient is as large as the table.
    embedded = {4 * 10 * 8: 2, 0: 5}, {2 * 10 * 8 + 2 * 16 * 8: 1, 4 * 10 * 8: 1}
    found = told(embedding_work(LLAMA, 10.0, CUT))
    assert found == {
        "pass_bytes": 4 * 10 * 4,
        "counted_kernels": embedded,
        "kernels": 4,
        "tp_bytes": 160,
        "params": 32 * 8 / 2,
    }
    assert told(head_work(LLAMA, 10.0, CUT)) == {
        "gemms": [one(10, 16, 8, wide=False)],
        "pass_bytes": 8 * 10 * 4,
        "loss_bytes": 12 * 10 * 16,
        "counted_gemms": [one(10, 16, 8, wide=False)],
        "counted_kernels": (
            {4 * 10 * 4: 1, 0: 22, 4 * 10 * 16: 3, 6 * 10 * 16: 2, 8 * 10 * 16: 3},
            {6 * 10 * 4: 1, 4 * 10 * 8: 1},
        ),
        "kernels": 12,
        "tp_bytes": 160,
        "tp_exchanges": 1,
        "params": 16 * 8,
        "saved_bytes": 4 * 10 * 4,
        "input_bytes": 2 * 10 * 4,
    }


FIGURES = (
    *("attention_flops", "score_bytes", "pass_bytes", "eager_bytes", "tensor_bytes", "kernels", "tp_exchanges"),
    *("cp_bytes", "ep_bytes", "params", "expert_params", "saved_bytes", "saved_gemm_bytes", "saved_eager_bytes"),
    *("input_bytes",),
)


@pytest.mark.parametrize(
    ("model", "layout", "flops", "figures"),
    [
        (LLAMA, NOT_SPLIT, 25600,
         (9600, 2400, 10560, 18240, 960, 94, 7, 480, 0, 1456, 0, 5120, 1920, 2400, 1120)),
        (GPT, Layout(pp=3), 43520,
         (19200, 4800, 9600, 0, 960, 88, 7, 960, 0, 2992, 0, 7040, 2880, 0, 1120)),
        (GPT, Layout(tp=2), 21760,
         (9600, 2400, 4800, 0, 480, 88, 7, 480, 0, 1648, 0, 3520, 1440, 0, 560)),
        (WINDOW, Layout(), 51200,
         (14592, 4800, 13440, 24960, 960, 94, 7, 960, 0, 2864, 0, 8000, 2880, 2880, 1120)),
        (DEEPSEEK, Layout(tp=2, ep=4, dp_shard=4), 48720,
         (10800, 2400, 14880, 12800, 640, 328, 7, 1080, 320, 1884, 1152, 8400, 2220, 800, 560)),
        (PLAIN_QUERIES, CUT, 39920,
         (10800, 2400, 11280, 14080, 560, 238, 7, 2160, 160, 1820, 2304, 6800, 1980, 1120, 560)),
        (BIASED, Layout(tp=2, etp=2, ep=2, sequence_parallel=False), 35200,
         (9600, 2400, 17040, 11520, 1440, 364, 7, 480, 960, 1072, 1920, 6800, 3120, 960, 1120)),
        (BIASED, Layout(tp=2), 33280,
         (9600, 2400, 10320, 8640, 720, 364, 4, 480, 480, 1072, 7680, 5200, 2160, 480, 560)),
        (HYBRID, Layout(tp=2), 70400,
         (205440, 800, 26640, 0, 1280, 188, 6, 160, 320, 3812, 3072, 8560, 2520, 0, 960)),
        (HYBRID, NOT_SPLIT, 71680,
         (205440, 800, 33200, 0, 1600, 188, 6, 160, 320, 3812, 3072, 10480, 3320, 0, 1920)),
    ],
    ids=["llama, whole stream", "gpt", "gpt, cut", "window", "latent experts", "plain queries", "cut experts",
         "whole experts", "hybrid", "hybrid, whole stream"],
)  # fmt: skip
def test_work_of_small_models(model: ModelSpec, layout: Layout, flops: float, figures: tuple[float, ...]) -> None:
    """Sums over all layers and both ends, for 10 tokens of a sequence of 20 (ends pass no tensors: 1e9 of them). The
    llama's layer above is counted by hand; what other models and layouts change of it is in these sums."""
    works = [work for works in layer_works(model, 10.0, 20, layout) for work in works]
    works += [end for end in (embedding_work(model, 10.0, layout), head_work(model, 10.0, layout)) if end]
    assert sum(map(gemm_flops, works)) == pytest.approx(flops)
    assert [sum(getattr(work, name) % 1e9 for work in works) for name in FIGURES] == pytest.approx(figures)


def test_a_window_is_met_by_two_layers_of_three() -> None:
    """A query sees 10 tokens on average, or of a window 8 x (1 - 8 / 40)."""
    (windowed, (narrow, _)), (whole, (wide, _)) = layer_kinds(WINDOW, 10.0, 20, Layout())
    assert (windowed, whole) == (2, 1)
    assert narrow.attention_flops == pytest.approx(4 * 10 * 16 * 6.4)
    assert wide.attention_flops == pytest.approx(4 * 10 * 16 * 10)


def test_the_layers_of_a_hybrid_are_in_the_order_of_its_letters() -> None:
    more = replace(HYBRID, mamba_layers=4, attention_layers=3, mlp_layers=2, expert_layers=5)
    letters = {24: "M", 16: "*", 8: "-", 100: "E"}
    assert "".join(letters[work.kernels] for (work,) in layer_works(more, 10.0, 20, Layout())) == more.layers


CONVS = {
    "resnet": ConvModel("resnet", (32, 32), (4, 8), blocks=(1, 2), num_classes=10),
    "resnext": ConvModel("resnet", (32, 64), (4, 8), blocks=(2, 1), num_classes=10, groups=2),
    "retinanet": ConvModel("retinanet", (128, 128), (4, 8, 8, 16), blocks=(1, 1, 1, 1), num_classes=10),
    "maskrcnn": ConvModel("maskrcnn", (128, 128), (4, 8, 8, 16), blocks=(1, 1, 1, 1), num_classes=10),
    "unet": ConvModel("unet", (16, 16, 8), (4, 8), in_channels=1, num_classes=3),
}


@pytest.mark.parametrize(
    ("name", "params", "flops", "layers", "passed", "saved", "read", "frozen"),
    [
        ("resnet", 14_250, 15_304_704, 12, 317_440, 171_008, 60_928, 0),
        ("resnext", 11_498, 29_829_120, 12, 598_016, 321_536, 115_712, 0),
        ("retinanet", 8_015_798, 11_717_305_344, 35, 14_943_920, 5_017_432, 4_909_056, 5),
        ("maskrcnn", 20_123_985, 567_175_956_480, 37, 780_104_544, 219_356_080, 341_392_384, 6),
        ("unet", 13_991, 35_807_232, 13, 877_568, 397_312, 248_832, 0),
    ],
)
def test_convolutions_of_small_networks(
    name: str, params: int, flops: float, layers: int, passed: float, saved: float, read: float, frozen: int
) -> None:
    """Bytes of a micro-batch of two samples: moved by element-wise kernels, kept, and read by convolutions."""
    model = CONVS[name]
    ((count, works),) = layer_kinds(model, 2.0, 1, Layout())
    assert (count, len(works), sum(work.frozen for work in works)) == (1, layers, frozen)
    assert (count_params(model), count_active_params(model)) == (params, params)
    assert flops_per_token(model, 1) == flops == 3 * sum(map(gemm_flops, works)) / 2
    assert mixing_flops_per_token(model, 1) == 0
    assert sum(work.pass_bytes for work in works) == passed
    assert sum(work.saved_bytes for work in works) == saved
    assert sum(work.input_bytes for work in works) == read
    assert [work.leaf for work in works] == [True] + [False] * (layers - 1)
    assert all(work.convolves != (work.serial_kernels > 0) for work in works)
    assert embedding_work(model, 2.0, Layout()) is head_work(model, 2.0, Layout()) is None


ADAPTED = {
    "llama": (LLAMA, False, 2, {"q": (8, 8), "k": (4, 8), "v": (4, 8), "out": (8, 8), "gate": (8, 8), "up": (8, 8),
                                "down": (8, 8)}),
    "gpt": (GPT, False, 1, {"q": (16, 8), "k": (8, 8), "v": (8, 8), "out": (8, 16), "up": (16, 8), "down": (8, 16)}),
    "deepseek": (DEEPSEEK, True, 2, {"q": (12, 10), "out": (8, 6), "gate": (6, 8), "up": (6, 8), "down": (8, 6)}),
    "plain queries": (PLAIN_QUERIES, True, 1, {"q": (24, 8), "out": (8, 12), "gate": (24, 8), "up": (24, 8),
                                               "down": (8, 24)}),
    "routed experts alone": (BIASED, True, 1, {"q": (16, 8), "k": (8, 8), "v": (8, 8), "out": (8, 16)}),
}  # fmt: skip


@pytest.mark.parametrize(("model", "expert_layer", "tp", "sizes"), ADAPTED.values(), ids=ADAPTED)
def test_matrices_with_adapters(
    model: DecoderModel, expert_layer: bool, tp: int, sizes: dict[str, tuple[int, int]]
) -> None:
    """(outputs, inputs) of a rank's part."""
    for target in ("q", "k", "v", "out", "gate", "up", "down"):
        found = list(adapted_matrices(model, expert_layer, LoraSpec(rank=2, targets=(target,)), tp))
        assert found == ([sizes[target]] if target in sizes else [])
    assert list(adapted_matrices(model, expert_layer, LoraSpec(targets=("q",)), tp)) == []


def test_adapters_of_all_layers_are_counted() -> None:
    lora = LoraSpec(rank=2, targets=("q", "down"))
    assert adapter_params(DEEPSEEK, lora) == 2 * (3 * (24 + 10) + (8 + 16) + 2 * (8 + 12))
    assert adapter_params(HYBRID, lora) == adapter_params(LLAMA, LoraSpec()) == 0
