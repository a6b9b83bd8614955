"""What a model's sizes say about its layers, and about what the engine can do with it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.keys.model import (
    FEATURES,
    ConvModel,
    DecoderModel,
    ExpertSpec,
    HybridModel,
    LatentAttentionSpec,
    Layer,
    OwnModel,
    TracedPart,
    TransformersModel,
    loss_chunk_tokens,
)
from trainspec_cli.recipe.keys.run import DataSpec, InitSpec, PartSpec
from trainspec_cli.recipe.keys.training import LoraSpec

LLAMA = DecoderModel(6, 64, 4, 2, 16, 128, 512)
HYBRID = HybridModel(
    64, 512, 3, attention_layers=1, mlp_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96
)


@pytest.mark.parametrize(
    ("first", "every", "expert_layers"),
    [(0, 1, [0, 1, 2, 3, 4, 5]), (2, 1, [2, 3, 4, 5]), (0, 2, [1, 3, 5]), (1, 2, [2, 4]), (1, 3, [3])],
)
def test_expert_layers(first: int, every: int, expert_layers: list[int]) -> None:
    experts = ExpertSpec(4, 2, 8, first_dense_layers=first, every=every)
    model = replace(LLAMA, experts=experts)
    assert [layer for layer in range(6) if model.is_expert_layer(layer)] == expert_layers
    assert [number for number, layer in enumerate(model.layer_list) if "experts" in layer.mixers] == expert_layers
    assert not any(LLAMA.is_expert_layer(layer) for layer in range(6))


@pytest.mark.parametrize(
    ("every", "windows"),
    [(1, [None] * 6), (2, [8, None] * 3), (3, [8, 8, None] * 2), (0, [8] * 6)],
)
def test_windows_of_layers(every: int, windows: list[int | None]) -> None:
    model = replace(LLAMA, sliding_window=8, global_attention_every=every)
    assert [model.window_of(layer) for layer in range(6)] == windows
    assert [layer.window for layer in model.layer_list] == windows


def test_mixers_of_decoders() -> None:
    assert LLAMA.layer_list == (Layer(("attention", "feed_forward")),) * 6
    latent = replace(LLAMA, mla=LatentAttentionSpec(16, qk_rope_head_dim=24))
    assert latent.layer_list == (Layer(("latent", "feed_forward")),) * 6
    assert (LLAMA.rotated_size, latent.rotated_size) == (16, 24)
    assert LLAMA.rotates and not replace(LLAMA, learned_positions=32).rotates
    assert LLAMA.as_decoder is LLAMA
    assert not LLAMA.scans


def test_a_hybrids_layers_are_spread_evenly_or_as_its_pattern_says() -> None:
    """Middles of equal parts: M at 1/6, 1/2, 5/6, attention at 1/2, feed-forwards at 1/4 and 3/4."""
    assert HYBRID.layers == "M-M*-M"
    patterned = replace(HYBRID, layer_pattern="MMM*--")
    assert patterned.layers == "MMM*--"
    assert [layer.mixers for layer in patterned.layer_list] == [
        ("mamba",), ("mamba",), ("mamba",), ("attention",), ("feed_forward",), ("feed_forward",)
    ]  # fmt: skip
    expert = HybridModel(64, 512, 1, expert_layers=1, experts=ExpertSpec(4, 2, 8))
    assert [layer.mixers for layer in expert.layer_list] == [("mamba",), ("experts",)]
    assert (HYBRID.num_layers, HYBRID.layer_counts) == (6, {"M": 3, "*": 1, "-": 2, "E": 0})
    assert HYBRID.scans and not HybridModel(64, 512, 0, attention_layers=1).scans


def test_heads_of_a_scan() -> None:
    assert HYBRID.mamba_heads == 2 * 64 // 64
    assert replace(HYBRID, mamba_expand=4, mamba_head_dim=32).mamba_heads == 8
    assert replace(HYBRID, mamba_num_heads=5).mamba_heads == 5


def test_a_hybrid_in_a_decoders_terms() -> None:
    experts = ExpertSpec(4, 2, 8)
    model = replace(HYBRID, tied_embeddings=True, norm_eps=1e-3, gated_mlp=True, activation="relu2", experts=experts)
    assert model.as_decoder == DecoderModel(
        *(6, 64, 4, 2, 16, 96, 512),
        tied_embeddings=True,
        norm_eps=1e-3,
        gated_mlp=True,
        activation="relu2",
        experts=experts,
        rotary_fraction=0.0,
    )
    rotated = replace(HYBRID, rotary_fraction=0.5, rope_theta=100.0)
    assert (rotated.as_decoder.rotary_fraction, rotated.as_decoder.rope_theta, rotated.rotated_size) == (0.5, 100.0, 8)
    assert rotated.rotates and not HYBRID.rotates and not replace(rotated, attention_layers=0).rotates
    without = HybridModel(64, 512, 3).as_decoder
    assert (without.num_heads, without.num_kv_heads) == (1, 1), "sizes to divide by"


def test_families_say_what_they_are() -> None:
    conv = ConvModel("resnet", (32, 32), (4, 8))
    assert [model.unit for model in (LLAMA, HYBRID, conv)] == ["tokens", "tokens", "samples"]
    assert [conv.expansion, replace(conv, groups=32).expansion] == [4, 2]
    architectures = ("resnet", "retinanet", "maskrcnn", "unet")
    built = [replace(conv, architecture=name).is_built for name in architectures]
    assert built == [True, False, False, True]
    assert [replace(conv, architecture=name).segments for name in architectures] == [False, False, False, True]
    assert LLAMA.is_built and HYBRID.is_built
    assert (conv.num_layers, conv.hidden_size, conv.experts) == (1, 0, None)


def test_families_refuse_what_the_engine_cannot_do_and_name_modules_that_exist() -> None:
    part = TracedPart(("4x4",))
    module = TransformersModel("{}", 1, 8, 16, "layers", "", (part,), part, 8, 4)
    families = (LLAMA, HYBRID, OwnModel(2, 8, 16), module, ConvModel("unet", (8, 8), (4,)))
    refused = {model.family: set(model.record.refuses) for model in families}
    assert refused == {
        "decoder": set(),
        "hybrid": {"cp", "lora", "fp8"},
        "own": {"tp", "cp", "lora", "fp8", "muon"},
        "transformers": {"tp", "cp", "pp", "ep", "nf4", "fp8", "muon", "loss", "kernels"},
        "conv": {"tp", "cp", "pp", "lora", "fp8", "compile", "elastic"},
    }
    assert set().union(*refused.values()) <= {*MESH_AXES, *FEATURES}
    for record in (model.record for model in families):
        assert all(find_spec(name) for name in (record.work, record.builder, record.memory) if name)


@pytest.mark.parametrize(("rows", "tokens"), [(512, 65_536), (128_256, 256), (151_936, 192), (2**19, 64), (2**25, 64)])
def test_the_loss_computes_at_most_128_mib_of_logits_in_multiples_of_64_tokens(rows: int, tokens: int) -> None:
    assert loss_chunk_tokens(rows) == tokens
    assert loss_chunk_tokens(rows, chunk_bytes=2**30) == max(64, 2**28 // rows // 64 * 64)


def test_adapters_are_scaled_by_their_rank() -> None:
    assert LoraSpec(rank=8, alpha=32.0).scale == 4


def test_sources_of_data() -> None:
    """One source is a mixture of itself; conversations are always kept apart."""
    plain = DataSpec(8, "jsonl", path="a", text_field="body")
    assert plain.parts == {"": PartSpec("jsonl", "a", "body")}
    parts = {"a": PartSpec("text", "x", weight=2.0), "b": PartSpec("chat", "y", "messages")}
    mixed = replace(plain, source="mixture", mixture=parts, validation={"v": parts["a"]})
    assert mixed.parts == parts
    one = mixed.with_part(parts["b"])
    assert one == DataSpec(8, "chat", path="y", text_field="messages")
    assert [data.masks_documents for data in (plain, mixed, one)] == [False, True, True]
    assert replace(plain, document_masks=True).masks_documents
    units = {source: DataSpec(1, source).unit for source in ("text", "phantom", "images", "volumes", "mixture")}  # type: ignore[arg-type]
    assert [source for source, unit in units.items() if unit == "samples"] == ["phantom", "images", "volumes"]


def test_where_weights_begin() -> None:
    drawn, hugging, run = InitSpec(), InitSpec("hf:/models/x"), InitSpec("runs/x")
    assert (drawn.hugging_face, drawn.run) == (None, None)
    assert (str(hugging.hugging_face), hugging.run) == ("/models/x", None)
    assert run.hugging_face is None and run.run is not None and run.run.name == "x"
