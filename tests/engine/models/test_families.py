"""What every family of models of text promises to the rest of the engine: counts, stages, cuts, first values."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from lab.drawing import slow_after
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.models.lora import apply_lora
from trainspec_cli.engine.parallel.expert import apply_recompute
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.workload import adapter_params, count_params, flops_per_token
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, LatentAttentionSpec, TextModel
from trainspec_cli.recipe.keys.training import LoraSpec

TEXT = {name: model for name, model in models().items() if isinstance(model, TextModel)}
TINY = {name: model for name, model in TEXT.items() if name.endswith("_tiny")}
TINY["latent"] = DecoderModel(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=96,
    vocab_size=512,
    mla=LatentAttentionSpec(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    experts=replace(models()["moe_tiny"].experts, balance_loss=0.01),
)
TINY["gpt"] = replace(
    models()["llama_tiny"], gated_mlp=False, activation="gelu", learned_positions=64, tied_embeddings=True
)
TINY["gpt_oss"] = replace(
    models()["llama_tiny"],
    sliding_window=8,
    global_attention_every=2,
    attention_bias="all",
    attention_sinks=True,
    gate_limit=7.0,
    experts=replace(models()["moe_tiny"].experts, shared_experts=0, bias=True),
)
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v3": 671_026_404_352,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "mamba2_130m": 128_989_632,
    "mamba2_370m": 368_346_624,
    "mamba2_780m": 780_161_280,
    "mamba2_1b": 1_343_757_312,
    "mamba2_3b": 2_702_599_680,
    "nemotron_h_8b": 8_100_852_736,
}
"""Parameters of the checkpoints named in each file of conf/model; DeepSeek-V3 without its prediction layer."""


def without_prediction(model):
    return replace(model, prediction_layers=0) if isinstance(model, DecoderModel) else model


def made(model, layers: range | None = None, seq_len: int = 32):
    """With first values, and biases and norms away from theirs."""
    module = build_model(model, seq_len, layers)
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        module.init_parameter(name, parameter.data, generator)
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    module.init_buffers()
    return module


def tokens(model, batch: int = 2, seq_len: int = 32) -> torch.Tensor:
    return torch.randint(0, model.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", TEXT | TINY)
def test_engine_planner_and_publication_count_the_same_parameters(name) -> None:
    model = without_prediction((TEXT | TINY)[name])
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in build_model(model, 16).parameters())
    assert counted == count_params(model) == PUBLISHED.get(name, counted)


@pytest.mark.parametrize("name", TINY)
def test_the_loss_is_the_summed_cross_entropy_of_the_logits(name) -> None:
    module, ids = made(TINY[name]), tokens(TINY[name])
    with torch.no_grad():
        expected = F.cross_entropy(module(ids).flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")
        torch.testing.assert_close(module(ids, ids.roll(-1, 1)), expected)


@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_tiny"])
def test_flops_per_token_equal_those_that_torch_counts(name) -> None:
    """Forward and backward; attention is counted over the causal half, torch's counter over the full square."""
    model = TINY[name]
    ids = tokens(model)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        made(model)(ids).sum().backward()
    other_half = 6.0 * model.num_layers * model.num_heads * model.head_dim * ids.shape[1]
    assert counter.get_total_flops() == (flops_per_token(model, ids.shape[1]) + other_half) * ids.numel()


@pytest.mark.parametrize(
    "name", slow_after(8, [name for name, model in TEXT.items() if isinstance(model, DecoderModel)])
)
def test_engine_and_planner_count_the_same_adapters(name) -> None:
    model = without_prediction(TEXT[name])
    lora = LoraSpec(rank=8, targets=("q", "v", "out", "gate", "down"))
    with torch.device("meta"):
        module = build_model(model, 16)
        apply_lora(module, lora)
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert trained == adapter_params(model, lora)


def gradients(module, *inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = module(*inputs)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", TINY)
def test_stages_one_after_another_are_the_whole_model(name) -> None:
    model = TINY[name]
    whole, ids = made(model), tokens(model)
    targets = ids.roll(-1, 1)
    loss, expected = gradients(whole, ids, targets)
    first, last = made(model, range(1)), made(model, range(1, model.num_layers))
    hidden = first(ids)
    torch.testing.assert_close(last(hidden, targets), loss)
    last(hidden, targets).backward()
    found = {name: parameter.grad for name, parameter in [*last.named_parameters(), *first.named_parameters()]}
    assert found.keys() == expected.keys()
    for parameter in found.keys() - {"embed.weight"}:
        torch.testing.assert_close(found[parameter], expected[parameter], rtol=1e-4, atol=1e-4)


@pytest.mark.clause("NUM-4")
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_blocks_have_the_same_gradients(name, recompute) -> None:
    ids = tokens(TINY[name])
    loss, expected = gradients(made(TINY[name]), ids, ids.roll(-1, 1))
    module = made(TINY[name])
    apply_recompute(module.block_modules(), recompute)
    found_loss, found = gradients(module, ids, ids.roll(-1, 1))
    assert torch.equal(found_loss, loss)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient)


@pytest.mark.parametrize("name", TINY)
def test_the_past_does_not_depend_on_the_future(name) -> None:
    module, ids = made(TINY[name]), tokens(TINY[name])
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % TINY[name].vocab_size
    with torch.no_grad():
        before, after = module(ids), module(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("name", TINY)
def test_all_regions_sum_to_the_whole_when_cut_in_two(name) -> None:
    """Each region with half of what `tensor_cuts` names: two halves' outputs sum to the whole's."""
    module, model = made(TINY[name]).double(), TINY[name]
    names = {region: name for name, region in module.named_modules()}
    x = torch.randn(1, 16, model.hidden_size, dtype=torch.float64)
    inputs = tuple(table[:16].double() for table in module.block_inputs(x))
    for region in module.region_modules():
        rotation = inputs if region in module.attention_modules() else ()
        expected, total = region(x, *rotation), torch.zeros_like(x)
        whole = dict(region.named_parameters())
        for half in range(2):
            part = {
                leaf: cut_in_two(f"{names[region]}.{leaf}", parameter, module.tensor_cuts, half)
                for leaf, parameter in whole.items()
            }
            total = total + torch.func.functional_call(region, part, (x, *rotation))
        torch.testing.assert_close(total, expected)


def cut_in_two(name: str, parameter: torch.Tensor, cuts: dict[str, int], half: int) -> torch.Tensor:
    dim = next((dim for pattern, dim in cuts.items() if fnmatchcase(name, pattern)), None)
    return parameter if dim is None else parameter.chunk(2, dim=dim)[half]


@pytest.mark.parametrize("name", TINY)
def test_what_is_cut_or_partial_is_all_that_regions_hold(name) -> None:
    module = made(TINY[name])
    names = {region: name for name, region in module.named_modules()}
    patterns = (*module.tensor_cuts, *module.tensor_partial)
    for region in module.region_modules():
        for leaf, _ in region.named_parameters():
            assert any(fnmatchcase(f"{names[region]}.{leaf}", pattern) for pattern in patterns), leaf


TINY_CONV = {name: model for name, model in models().items() if isinstance(model, ConvModel) and "tiny" in name}


def samples(model, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    if not isinstance(model, ConvModel):
        ids = tokens(model, batch=count)
        return ids, ids.roll(-1, 1)
    shape = (count,) if model.architecture == "resnet" else (count, *model.input_size)
    images = torch.randn(count, model.in_channels, *model.input_size, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(count).reshape(-1, *[1] * (len(shape) - 1)).expand(shape) % model.num_classes


@pytest.mark.parametrize("name", slow_after(6, [*TINY, *TINY_CONV]))
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_empty_micro_batch_changes_nothing(name, recompute) -> None:
    """Its loss and gradients are zeros; statistics and visits stay as they are."""
    model = {**TINY, **TINY_CONV}[name]
    module = made(model)
    apply_recompute(module.block_modules(), recompute)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    loss, found = gradients(module, *samples(model, 0))
    assert loss == 0
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name, gradient in found.items() if gradient is not None} == trained
    assert all(not gradient.any() for gradient in found.values() if gradient is not None)
    assert {name: torch.equal(buffer, before[name]) for name, buffer in module.named_buffers()} == dict.fromkeys(
        before, True
    )
    wanted = gradients(made(model), *samples(model, 4))
    again = gradients(module, *samples(model, 4))
    torch.testing.assert_close(again, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", TINY)
def test_it_learns(name) -> None:
    """To repeat a sequence of 32 tokens: the loss falls below a third in 20 steps."""
    module, ids = made(TINY[name]), tokens(TINY[name], batch=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = module(ids, ids.roll(-1, 1)) / ids.numel()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 3
