"""Names of the parameters of text models, as the engine names them, without building a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel, Layer, TextModel, embeds_at_both_ends
from trainspec_cli.recipe.keys.training import ParameterGroup


def group_of(name: str, groups: Iterable[ParameterGroup]) -> ParameterGroup | None:
    """Return the first group whose pattern matches the parameter's name."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def is_frozen(name: str, groups: Iterable[ParameterGroup]) -> bool:
    group = group_of(name, groups)
    return group is not None and group.frozen


def parameter_names(model: DecoderModel | HybridModel) -> list[str]:
    """Return the names of all parameters, without those of adapters."""
    further = (model.layer_list[-1],) * model.prediction_layers
    blocks = [
        f"blocks.{number}.{name}"
        for number, layer in enumerate((*model.layer_list, *further))
        for name in block_names(model, layer, predicts=number >= model.num_layers)
    ]
    return [*outside_names(model, first=True, last=True), *blocks]


def outside_names(model: TextModel, *, first: bool, last: bool) -> list[str]:
    """Return the names outside the blocks on a pipeline stage, in the order of the planner's
    `units.outside_unit`."""
    names = ["embed.weight"] if first or (last and embeds_at_both_ends(model)) else []
    names += ["position_embed.weight"] if first and model.learned_positions else []
    names += _norm(model.as_decoder, "norm") if last else []
    return names + (["head.weight"] if last and not model.tied_embeddings else [])


def block_names(model: TextModel, layer: Layer, *, predicts: bool = False) -> Iterator[str]:
    """Yield the names within a block, in the order of the planner's `units.matrices_of`, routed experts last.
    `predicts`: a prediction layer."""
    decoder = model.as_decoder
    if predicts:
        yield "join.weight"
        for name in ("embed_norm", "hidden_norm", "head_norm"):
            yield from _norm(decoder, name)
    experts: list[str] = []
    for number, mixer in enumerate(layer.mixers):
        part = {"latent": "attention", "feed_forward": "ffn", "experts": "ffn"}.get(mixer, mixer)
        if isinstance(model, DecoderModel):
            norms = model.layer_norms[number]
            yield from _norm(decoder, f"{part}_norm") if norms.before else ()
            yield from _norm(decoder, f"{part}_out_norm") if norms.after else ()
        else:
            yield from _norm(decoder, "norm")
        if mixer == "attention":
            yield from _attention(decoder)
        elif mixer == "latent":
            yield from _latent(decoder)
        elif mixer == "feed_forward":
            yield from _feed_forward(decoder)
        elif mixer == "experts":
            yield from _mixture(decoder)
            biased = decoder.experts is not None and decoder.experts.bias
            experts += ["ffn.experts.up", "ffn.experts.down"]
            experts += ["ffn.experts.up_bias", "ffn.experts.down_bias"] if biased else []
        else:
            yield from _mamba()
    yield from experts


def _norm(model: DecoderModel, name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"] if model.norm_bias else [f"{name}.weight"]


def _attention(model: DecoderModel) -> Iterator[str]:
    yield from (f"attention.{name}.weight" for name in ("q", "k", "v", "out"))
    if model.attention_bias != "none":
        yield from (f"attention.{name}.bias" for name in "qkv")
    if model.attention_bias == "all":
        yield "attention_bias"
    if model.qk_norm:
        yield from _norm(model, "attention.q_norm")
        yield from _norm(model, "attention.k_norm")
    if model.attention_sinks:
        yield "attention.sinks"


def _latent(model: DecoderModel) -> Iterator[str]:
    assert model.mla is not None
    if model.mla.q_lora_rank:
        yield from ("attention.q_down.weight", "attention.q_norm.weight")
    yield from (f"attention.{name}.weight" for name in ("q", "kv_down", "kv_norm", "kv", "out"))


def _feed_forward(model: DecoderModel) -> Iterator[str]:
    wide = ("gate", "up") if model.gated_mlp else ("up",)
    yield from (f"ffn.{name}.weight" for name in (*wide, "down"))
    if model.mlp_bias:
        yield from (f"ffn.{name}.bias" for name in wide)
        yield "ffn_bias"


def _mixture(model: DecoderModel) -> Iterator[str]:
    spec = model.experts
    assert spec is not None
    yield "ffn.router.weight"
    if spec.bias:
        yield "ffn.router.bias"
    if spec.shared_experts:
        wide = ("gate", "up") if model.gated_mlp else ("up",)
        yield from (f"ffn.shared.{name}.weight" for name in (*wide, "down"))
    if spec.shared_gate:
        yield "ffn.shared_gate"


def _mamba() -> Iterator[str]:
    yield from (f"mamba.{name}.weight" for name in ("z", "x", "b", "c", "dt"))
    yield from (f"mamba.conv_{name}.{leaf}" for name in "xbc" for leaf in ("weight", "bias"))
    yield from (f"mamba.{name}" for name in ("dt_bias", "a_log", "skip", "norm", "out.weight"))
