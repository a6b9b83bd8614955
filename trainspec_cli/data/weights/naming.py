"""The tensors of other projects' checkpoints, expressed as rows of Hugging Face's tensors.

The table is used in both directions. A project may use other names, combine several tensors into one (litgpt's and
Megatron's queries, keys and values), order the rows of each head differently (rotary embeddings pair neighbouring rows
in torchtitan, and the two halves in Hugging Face), or stack all layers (Megatron). In each case, rows of one tensor
correspond to equally spaced rows of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.data.huggingface.config import model_type
from trainspec_cli.data.huggingface.safetensors import EMBED, HEAD, tensor_shapes
from trainspec_cli.data.weights.stored import Shape
from trainspec_cli.recipe.keys.model import DecoderModel, TextModel, departs

Naming = Literal["hf", "torchtitan", "megatron", "megatron_layers", "litgpt"]
"""`megatron` stacks the layers of each tensor, and `megatron_layers` numbers them; Megatron writes both."""
SUPPORTED: Mapping[Naming, tuple[str, ...]] = {
    "torchtitan": ("llama", "qwen3"),
    "megatron": ("llama", "qwen2", "qwen3"),
    "megatron_layers": ("llama", "qwen2", "qwen3"),
    "litgpt": ("llama", "qwen2", "qwen3"),
}
"""The model types (Hugging Face's names) for which a project's tensor names are known."""


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a Hugging Face tensor, and their location in another project's tensor."""

    tensor: str
    """The name of the Hugging Face tensor."""
    start: int
    """The first row in the Hugging Face tensor."""
    count: int
    at: int
    """The first row in the other tensor."""
    step: int = 1
    """Distance between consecutive rows in the other tensor."""
    layer: int | None = None
    """Index along the other tensor's first dimension, if it stacks layers."""


@dataclass(frozen=True)
class OtherTensor:
    """A tensor of another project's checkpoint."""

    name: str
    shape: Shape
    rows: tuple[RowRange, ...]
    is_copy: bool = False
    """True if other tensors contain all of its content, such as the head of a model whose head is tied to its
    embedding."""


def other_tensors(model: TextModel, naming: Naming) -> list[OtherTensor]:
    """Return every tensor of `model` under the names of a project. Raises RecipeError if the project has no names for
    this model."""
    kind = model_type(model)
    shapes = tensor_shapes(model)
    if naming == "hf":
        return [_whole(name, name, shape) for name, shape in shapes.items()]
    hint = "use Hugging Face's names or format"
    if kind not in SUPPORTED[naming]:
        known = ", ".join(SUPPORTED[naming])
        message = f"the model is of type {kind}; {naming}'s names are known only for {known}"
        raise RecipeError(Problem("unsupported", message, "model", hint))
    assert isinstance(model, DecoderModel), "the types in `SUPPORTED` are decoders"
    for key in ("mlp_bias", "activation") + (("attention_bias",) if model.attention_bias == "all" else ()):
        if departs(model, key):
            message = f"`model.{key}` is {getattr(model, key)}, which {naming}'s {kind} does not have"
            raise RecipeError(Problem("unsupported", message, f"model.{key}", hint))
    return list(_tensors(model, naming, shapes))


def _whole(name: str, tensor: str, shape: Shape, *, is_copy: bool = False) -> OtherTensor:
    return OtherTensor(name, shape, (RowRange(tensor, 0, shape[0], 0),), is_copy)


_TITAN = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ENDS = {
    "torchtitan": {EMBED: "tok_embeddings.weight", "model.norm.weight": "norm.weight", HEAD: "lm_head.weight"},
    "litgpt": {EMBED: "transformer.wte.weight", "model.norm.weight": "transformer.ln_f.weight", HEAD: "lm_head.weight"},
    "megatron": {
        EMBED: "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        HEAD: "output_layer.weight",
    },
}


def _ends(
    model: DecoderModel, shapes: Mapping[str, Shape], naming: Naming, *, copies_head: bool
) -> Iterator[OtherTensor]:
    """Yield the tensors that come before and after the layers."""
    for tensor, name in _ENDS[naming].items():
        if tensor in shapes:
            yield _whole(name, tensor, shapes[tensor])
    if model.tied_embeddings and copies_head:
        yield _whole(_ENDS[naming][HEAD], EMBED, shapes[EMBED], is_copy=True)


def _pairs(tensor: str, rows: int, head_dim: int) -> Iterator[RowRange]:
    """Yield the two halves of each head; their rows alternate in the other tensor."""
    half = head_dim // 2
    for head in range(0, rows, head_dim):
        yield RowRange(tensor, head, half, head, step=2)
        yield RowRange(tensor, head + half, half, head + 1, step=2)


_LITGPT = {
    "self_attn.o_proj": "attn.proj",
    "self_attn.q_norm": "attn.norm_q",
    "self_attn.k_norm": "attn.norm_k",
    "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2",
    "mlp.down_proj": "mlp.proj",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
}


def _joined(name: str, parts: list[str], shapes: Mapping[str, Shape]) -> OtherTensor:
    """Return the concatenation of other tensors along the rows."""
    rows = []
    at = 0
    for tensor in parts:
        rows.append(RowRange(tensor, 0, shapes[tensor][0], at))
        at += shapes[tensor][0]
    return OtherTensor(name, (at, *shapes[parts[0]][1:]), tuple(rows))


_MEGATRON = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{matrix}_proj.weight" for matrix in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{matrix}_proj.bias" for matrix in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


def _megatron_layer(model: DecoderModel, layer: int, shapes: Mapping[str, Shape]) -> Iterator[OtherTensor]:
    """Yield the tensors of one layer, where each group of heads has its queries, followed by its key and its
    value."""
    for name, modules in _MEGATRON.items():
        parts = [f"model.layers.{layer}.{module}" for module in modules]
        if parts[0] in shapes:
            joined = _joined(name, parts, shapes)
            yield replace(joined, rows=tuple(_groups(model, parts))) if len(parts) == 3 else joined


def _groups(model: DecoderModel, parts: list[str]) -> Iterator[RowRange]:
    head = model.head_dim
    queries = model.num_heads // model.num_kv_heads
    at = 0
    for group in range(model.num_kv_heads):
        for tensor, heads in zip(parts, (queries, 1, 1), strict=True):
            yield RowRange(tensor, group * heads * head, heads * head, at)
            at += heads * head


def _tensors(model: DecoderModel, naming: Naming, shapes: Mapping[str, Shape]) -> Iterator[OtherTensor]:
    if naming == "torchtitan":
        yield from _ends(model, shapes, "torchtitan", copies_head=True)
        for tensor, shape in shapes.items():
            if not tensor.startswith("model.layers."):
                continue
            # `model.layers.3.mlp.up_proj.weight` -> "3", "mlp.up_proj", "weight"
            layer, _, rest = tensor.removeprefix("model.layers.").partition(".")
            module, _, leaf = rest.rpartition(".")
            name = f"layers.{layer}.{_TITAN[module]}.{leaf}"
            is_rotated = module in ("self_attn.q_proj", "self_attn.k_proj") and not model.qk_norm
            # If queries and keys are normalised, torchtitan rotates halves, like Hugging Face.
            rows = _pairs(tensor, shape[0], model.head_dim) if is_rotated else _whole(name, tensor, shape).rows
            yield OtherTensor(name, shape, tuple(rows))
    elif naming == "litgpt":  # the project's models always have a separate head
        yield from _ends(model, shapes, "litgpt", copies_head=True)
        for number in range(model.num_layers):
            ours = f"model.layers.{number}"
            theirs = f"transformer.h.{number}"
            for leaf in ("weight", "bias"):
                parts = [f"{ours}.self_attn.{matrix}_proj.{leaf}" for matrix in "qkv"]
                if parts[0] in shapes:
                    yield _joined(f"{theirs}.attn.qkv.{leaf}", parts, shapes)
            for module, name in _LITGPT.items():
                if (tensor := f"{ours}.{module}.weight") in shapes:
                    yield _whole(f"{theirs}.{name}.weight", tensor, shapes[tensor])
    else:
        yield from _ends(model, shapes, "megatron", copies_head=False)
        layers = [list(_megatron_layer(model, number, shapes)) for number in range(model.num_layers)]
        if naming == "megatron_layers":
            for number, of_layer in enumerate(layers):
                yield from (replace(one, name=f"decoder.layers.{number}.{one.name}") for one in of_layer)
            return
        for stacked in zip(*layers, strict=True):  # each tensor stacks all layers
            in_layers = tuple(replace(rows, layer=number) for number, one in enumerate(stacked) for rows in one.rows)
            shape = (model.num_layers, *stacked[0].shape)
            yield OtherTensor(f"decoder.layers.{stacked[0].name}", shape, in_layers)


def other_spellings(name: str, naming: Naming) -> Iterator[str]:
    """Yield the names that releases of a project use for a tensor. The name used for exports comes first."""
    yield name
    if naming == "torchtitan":
        yield name.replace(".qkv_linear.", ".")
        if name == "lm_head.weight":
            yield "output.weight"
