"""Initial values by the parameter's name: their distribution, against the papers that each family follows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, ExpertSpec, HybridModel

DECODER = DecoderModel(8, 16, 2, 2, 8, 24, 32)
HYBRID = HybridModel(hidden_size=16, vocab_size=32, mamba_layers=25, mamba_num_heads=2, mamba_head_dim=8)
RESNET = ConvModel("resnet", (32, 32), widths=(4, 8), blocks=(1, 1), num_classes=5)
UNET = ConvModel("unet", (16, 16), widths=(4, 8), num_classes=3)
KINDS = ("weight", "bias")
RESIDUAL = 0.02 / math.sqrt(2 * DECODER.num_layers)


def drawn(model: object, name: str, *shape: int) -> torch.Tensor:
    with torch.device("meta"):
        module = build_model(model, 8)  # type: ignore[arg-type]
    full = torch.full(shape, 77.0)
    module.init_parameter(name, full, torch.Generator().manual_seed(3))
    return full


@pytest.mark.parametrize(
    ("model", "name", "std"),
    [
        (DECODER, "embed.weight", 0.02),
        (DECODER, "head.weight", 0.02),
        (DECODER, "blocks.1.attention.q.weight", 0.02),
        (DECODER, "blocks.1.ffn.up.weight", 0.02),
        (DECODER, "blocks.1.ffn.experts.up", 0.02),
        (DECODER, "blocks.1.ffn.router.weight", 0.02),
        (DECODER, "blocks.1.attention.out.weight", RESIDUAL),
        (DECODER, "blocks.1.ffn.down.weight", RESIDUAL),
        (DECODER, "blocks.1.ffn.shared.down.weight", RESIDUAL),
        (DECODER, "blocks.1.ffn.experts.down", RESIDUAL),
        (DECODER, "blocks.0.attention.sinks", 0.02),
        (HYBRID, "blocks.1.mamba.out.weight", 0.02 / 5),
        (HYBRID, "blocks.1.mamba.x.weight", 0.02),
        (RESNET, "head.weight", 0.01),
    ],
)
def test_matrices_are_normal(model: object, name: str, std: float) -> None:
    """A layer of a decoder adds to the residual stream twice, one of a hybrid once."""
    full = drawn(model, name, *((32768,) if name.endswith("sinks") else (128, 256)))
    assert float(full.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(full.mean())) < 0.03 * std


@pytest.mark.parametrize("model", [RESNET, UNET])
@pytest.mark.parametrize("shape", [(256, 16, 3, 3), (256, 8, 2, 3, 3)])
def test_convolutions_keep_the_variance_of_half_rectified_inputs(model: ConvModel, shape: tuple[int, ...]) -> None:
    full = drawn(model, "down.0.first.conv.weight", *shape)
    assert float(full.std()) == pytest.approx(math.sqrt(2 / 144), rel=0.02)


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (DECODER, "norm.weight", 1.0),
        (DECODER, "blocks.0.attention.q_norm.weight", 1.0),
        (DECODER, "blocks.0.attention.q.bias", 0.0),
        (DECODER, "blocks.0.attention_bias", 0.0),
        (DECODER, "blocks.0.attention.q.lora_b", 0.0),
        (HYBRID, "blocks.0.mamba.norm", 1.0),
        (HYBRID, "blocks.0.mamba.skip", 1.0),
        (RESNET, "stem.norm.weight", 1.0),
        (RESNET, "stem.norm.bias", 0.0),
        (RESNET, "head.bias", 0.0),
        (RESNET, "blocks.0.widen.norm.weight", 0.0),
        (RESNET, "blocks.0.widen.norm.bias", 0.0),
        (RESNET, "blocks.0.narrow.norm.weight", 1.0),
        (UNET, "down.0.first.norm.weight", 1.0),
        (UNET, "down.0.first.norm.bias", 0.0),
    ],
)
def test_vectors_are_constant(model: object, name: str, value: float) -> None:
    shape = (5, 3) if name.endswith("lora_b") else (5,)
    assert drawn(model, name, *shape).unique().tolist() == [value]


@pytest.mark.parametrize(
    ("model", "name", "shape", "low", "high"),
    [
        (DECODER, "blocks.0.attention.q.lora_a", (640, 100), -0.1, 0.1),
        *((HYBRID, f"blocks.3.mamba.conv_{part}.{kind}", (40000,), -0.5, 0.5) for part in "xbc" for kind in KINDS),
    ],
)
def test_adapters_and_a_scans_convolutions_are_uniform_over_their_inputs(
    model: object, name: str, shape: tuple[int, ...], low: float, high: float
) -> None:
    check_uniform(drawn(model, name, *shape), low, high)


def test_a_scans_decays_are_uniform_and_its_steps_log_uniform() -> None:
    check_uniform(drawn(HYBRID, "blocks.0.mamba.a_log", 40000).exp(), 1.0, 16.0)
    steps = F.softplus(drawn(HYBRID, "blocks.0.mamba.dt_bias", 40000).double())
    check_uniform(steps.log(), math.log(1e-3), math.log(0.1))


def check_uniform(found: torch.Tensor, low: float, high: float) -> None:
    within = 0.002 * (high - low)
    assert (float(found.min()), float(found.max())) == pytest.approx((low, high), abs=within)
    assert float(found.mean()) == pytest.approx((low + high) / 2, abs=10 * within)
    assert float(found.std()) == pytest.approx((high - low) / math.sqrt(12), rel=0.02)


def test_running_statistics_begin_as_those_of_normal_numbers() -> None:
    net = build_model(RESNET, 1)
    for norm in net.norm_modules():
        norm.running_mean.fill_(9.0)
        norm.running_variance.fill_(9.0)
    net.init_buffers()
    buffers = dict(net.named_buffers())
    assert len(buffers) == 2 * (1 + 2 * 4), "the stem's, and four of each block, whose shortcuts all change the width"
    assert all(bool((buffer == float("variance" in name)).all()) for name, buffer in buffers.items())


def test_routers_begin_without_a_bias_and_without_visits() -> None:
    experts = ExpertSpec(num_experts=3, top_k=1, expert_ffn_size=8, balance_rate=0.1)
    model = build_model(replace(DECODER, num_layers=2, experts=experts), 8)
    for router in model.balance_modules():
        for buffer in router.buffers():
            buffer.fill_(5)
    model.init_buffers()
    for router in model.balance_modules():
        assert router.balance_bias_E.tolist() == [0.0] * 3
        assert router.tokens_per_expert_E.tolist() == [0] * 3
        assert float(router.loss_scale) == 1.0
    assert len(model.balance_modules()) == 2
