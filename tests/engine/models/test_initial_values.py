"""Initial values by the parameter's name: their distribution, against the papers that each family follows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, HybridModel

DECODER = DecoderModel(8, 16, 2, 2, 8, 24, 32)
HYBRID = HybridModel(hidden_size=16, vocab_size=32, mamba_layers=25, mamba_num_heads=2, mamba_head_dim=8)
RESNET = ConvModel("resnet", (32, 32), widths=(4, 8), blocks=(1, 1), num_classes=5)
UNET = ConvModel("unet", (16, 16), widths=(4, 8), num_classes=3)
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
        (HYBRID, "blocks.1.mamba.out.weight", 0.02 / 5),
        (HYBRID, "blocks.1.mamba.x.weight", 0.02),
        (RESNET, "head.weight", 0.01),
    ],
)
def test_matrices_are_normal(model: object, name: str, std: float) -> None:
    """A layer of a decoder adds to the residual stream twice, one of a hybrid once."""
    full = drawn(model, name, 128, 256)
    assert float(full.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(full.mean())) < 0.03 * std


@pytest.mark.parametrize("model", [RESNET, UNET])
@pytest.mark.parametrize("shape", [(256, 16, 3, 3), (256, 8, 2, 3, 3)])
def test_convolutions_keep_the_variance_of_half_rectified_inputs(model: ConvModel, shape: tuple[int, ...]) -> None:
    full = drawn(model, "down.0.first.conv.weight", *shape)
    assert float(full.std()) == pytest.approx(math.sqrt(2 / 144), rel=0.02)


def test_attention_sinks_are_normal_and_not_ones() -> None:
    assert float(drawn(DECODER, "blocks.0.attention.sinks", 9999).std()) == pytest.approx(0.02, rel=0.05)


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


def test_an_adapters_first_matrix_is_uniform_of_variance_a_third_of_the_inputs() -> None:
    full = drawn(DECODER, "blocks.0.attention.q.lora_a", 64, 100)
    assert float(full.abs().max()) == pytest.approx(0.1, rel=0.01)
    assert float(full.std()) == pytest.approx(math.sqrt(1 / 300), rel=0.02)


@pytest.mark.parametrize("leaf", [f"conv_{part}.{kind}" for part in "xbc" for kind in ("weight", "bias")])
def test_a_scans_convolutions_are_uniform_over_their_four_taps(leaf: str) -> None:
    full = drawn(HYBRID, f"blocks.3.mamba.{leaf}", 4000)
    assert float(full.min()) == pytest.approx(-0.5, rel=0.01)
    assert float(full.max()) == pytest.approx(0.5, rel=0.01)


def test_a_scans_steps_are_log_uniform() -> None:
    """softplus(bias) from 0.001 to 0.1."""
    logs = F.softplus(drawn(HYBRID, "blocks.0.mamba.dt_bias", 20000).double()).log()
    assert float(logs.min()) == pytest.approx(math.log(1e-3), abs=0.01)
    assert float(logs.max()) == pytest.approx(math.log(0.1), abs=0.01)
    assert float(logs.mean()) == pytest.approx(math.log(1e-2), abs=0.03)


def test_a_scans_decays_are_uniform() -> None:
    decays = drawn(HYBRID, "blocks.0.mamba.a_log", 20000).exp()
    assert float(decays.min()) == pytest.approx(1.0, abs=0.01)
    assert float(decays.max()) == pytest.approx(16.0, abs=0.02)
    assert float(decays.mean()) == pytest.approx(8.5, abs=0.1)


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
    from dataclasses import replace

    from trainspec_cli.recipe.keys.model import ExpertSpec

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
