"""The safetensors format: the header's length in eight bytes, a JSON header, and the bytes of the tensors. It is
implemented here so that reading a header does not require torch, and at most one tensor is in memory at a time.
https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import (
    UnreadableFileError,
    open_regular,
    parse_json,
    read_field,
    read_object,
    show_kind,
)
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.records import read_record, to_plain

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on the size of a header."""
MAX_EXTENT = 2**53
MAX_DIMS = 16
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The formats that weights can be read from; others are quantised."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor's entry in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]
    """Offsets of the tensor's first byte and of the byte after its last one, counted from the end of the header."""


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file, in bytes."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in a folder's model.safetensors, or in the files listed in its index.

    Raises RecipeError if none exist, and MachineError if a file is missing or damaged."""
    if (folder / INDEX).is_file():
        names = sorted(set(_read_index(folder / INDEX).values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        message = f"{folder} has neither {SINGLE} nor {INDEX}"
        raise RecipeError(Problem("missing_file", message, "init.from", "specify a folder with safetensors files"))
    entries: dict[str, StoredTensor] = {}
    for name in names:
        entries |= read_header(folder / name)
    return entries


def _read_index(file: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    try:
        files = read_field(file, read_object(file), "weight_map", dict)
    except UnreadableFileError as error:
        raise _damaged(file, f"is not an index of safetensors files: {error}") from error
    names = {}
    for tensor, name in files.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise _damaged(file, f"names {show_kind(name)}, which is not a file in its folder")
        names[tensor] = name
    return names


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors in one file. Raises MachineError, naming the file or the faulty tensor."""
    if not file.is_file():
        raise _damaged(file, "is missing, but the index names it")
    with open_regular(file) as content:
        prefix = content.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise _damaged(file, "is not a safetensors file")
        try:
            header = parse_json(content.read(length))
            if not isinstance(header, dict):
                raise ValueError(f"it is {show_kind(header)}")
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            return {name: _entry(file, name, entry, 8 + length) for name, entry in tensors.items()}
        except ValueError as error:
            raise _damaged(file, f"has a header that cannot be read: {error}") from error


def _entry(file: Path, name: str, entry: JsonValue, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is {show_kind(entry)}")
    described = read_record(HeaderEntry, entry)
    shape, (start, end) = described.shape, described.data_offsets
    if described.dtype not in DTYPE_BYTES:
        message = f"{file}: {name} is of type {described.dtype}; supported are {', '.join(DTYPE_BYTES)}"
        raise RecipeError(Problem("unsupported", message, "init.from", "use a checkpoint that is not quantised"))
    # Check the dimensions before computing their product, which an untrusted header could make arbitrarily large.
    if len(shape) > MAX_DIMS or not all(0 <= number < MAX_EXTENT for number in (*shape, start, end)):
        raise ValueError(f"{name} has {list(shape)} as its shape, or offsets below 0")
    stored = StoredTensor(file, described.dtype, shape, data_start + start)
    if end - start != stored.bytes or data_start + end > file.stat().st_size:
        raise _damaged(file, f"is cut short or altered: {name} is not where its header says")
    return stored


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return a header for tensors (dtype, shape) stored in this order. Its length is a multiple of 8."""
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape) in tensors.items():
        end = start + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = to_plain(HeaderEntry(dtype, shape, (start, end)))
        start = end
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    # Padding aligns the tensors to 8 bytes, so that they can be mapped in place.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _damaged(file: Path, what: str) -> MachineError:
    return MachineError(f"{file} {what}", code="bad_checkpoint", hint="download it again")


# The tensors of a Hugging Face checkpoint that make up each parameter of the engine's decoder. The table is used in
# both directions: loading fills parameters from tensors, exporting splits parameters into them. Most tensors hold a
# complete parameter. A routed expert's matrices are parts of a parameter, and are transposed. LoRA adapters use PEFT's
# names, and have an adapter_config.json.


Shape = tuple[int, ...]

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ADAPTERS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_PROJECTIONS = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


@dataclass(frozen=True)
class Piece:
    """A tensor, and the box within a parameter that it fills."""

    tensor: str
    start: Shape
    """Start of the box within the parameter."""
    shape: Shape
    """Shape of the box, with the same number of dimensions as the parameter."""
    transposed: bool = False
    """True if the tensor stores the last two dimensions in reverse order."""

    @property
    def tensor_shape(self) -> Shape:
        """Return the tensor's shape in the file, which has no expert dimension."""
        shape = self.shape[-2:] if self.transposed else self.shape
        return shape[::-1] if self.transposed else shape

    def overlap(self, start: Shape, shape: Shape) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return (slices of this piece, slices of the box at `start`) for the overlap; None if they do not overlap."""
        inner = []
        outer = []
        for mine, size, theirs, extent in zip(self.start, self.shape, start, shape, strict=True):
            low = max(mine, theirs)
            high = min(mine + size, theirs + extent)
            if low >= high:
                return None
            inner.append(slice(low - mine, high - mine))
            outer.append(slice(low - theirs, high - theirs))
        return tuple(inner), tuple(outer)


@dataclass(frozen=True)
class Parameter:
    name: str
    """The parameter's name in the engine's model."""
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameters(model: DecoderModel) -> list[Parameter]:
    """Return every parameter of `model`, in checkpoint order. The model must be one that `config.model_type`
    supports."""
    hidden = model.hidden_size
    vocab = model.vocab_size
    found = [_whole("embed.weight", EMBED, (vocab, hidden))]
    for layer in range(model.num_layers):
        found += _layer(model, layer)
    found.append(_whole("norm.weight", "model.norm.weight", (hidden,)))
    return found if model.tied_embeddings else [*found, _whole("head.weight", HEAD, (vocab, hidden))]


def tensor_shapes(model: DecoderModel) -> dict[str, Shape]:
    """Return the shape of every tensor in a checkpoint of `model`, by name."""
    return {piece.tensor: piece.tensor_shape for parameter in parameters(model) for piece in parameter.pieces}


def _layer(model: DecoderModel, layer: int) -> Iterator[Parameter]:
    ours = f"blocks.{layer}"
    theirs = f"model.layers.{layer}"
    hidden = model.hidden_size
    yield _whole(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", (hidden,))
    attended = f"{theirs}.self_attn"
    hidden = model.hidden_size
    head = model.head_dim
    for matrix, heads in {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}.items():
        name = f"{ours}.attention.{matrix}"
        yield _whole(f"{name}.weight", f"{attended}.{matrix}_proj.weight", (heads * head, hidden))
        if model.attention_bias != "none":
            yield _whole(f"{name}.bias", f"{attended}.{matrix}_proj.bias", (heads * head,))
    yield _whole(f"{ours}.attention.out.weight", f"{attended}.o_proj.weight", (hidden, model.num_heads * head))
    if model.attention_bias == "all":
        yield _whole(f"{ours}.attention_bias", f"{attended}.o_proj.bias", (hidden,))
    if model.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield _whole(f"{ours}.attention.{norm}.weight", f"{attended}.{norm}.weight", (head,))
    yield _whole(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", (hidden,))
    if model.experts is not None:
        # Qwen3's names if queries and keys are normalised, otherwise Mixtral's.
        ours = f"{ours}.ffn"
        theirs = f"{theirs}.mlp" if model.qk_norm else f"{theirs}.block_sparse_moe"
        gate, up, down = ("gate_proj", "up_proj", "down_proj") if model.qk_norm else ("w1", "w3", "w2")
        count = model.experts.num_experts
        hidden = model.hidden_size
        width = model.experts.expert_ffn_size

        def piece(expert: int, matrix: str, column: int, shape: Shape) -> Piece:
            return Piece(
                f"{theirs}.experts.{expert}.{matrix}.weight", (expert, 0, column), (1, *shape), transposed=True
            )

        rows = range(count)
        halves = [piece(e, name, at, (hidden, width)) for e in rows for name, at in ((gate, 0), (up, width))]
        downs = [piece(e, down, 0, (width, hidden)) for e in rows]
        yield _whole(f"{ours}.router.weight", f"{theirs}.gate.weight", (count, hidden))
        yield Parameter(f"{ours}.experts.up", (count, hidden, 2 * width), tuple(halves))
        yield Parameter(f"{ours}.experts.down", (count, width, hidden), tuple(downs))
        return
    wide = (model.ffn_size, hidden)
    tall = (hidden, model.ffn_size)
    for matrix, shape in {"gate": wide, "up": wide, "down": tall}.items():
        yield _whole(f"{ours}.ffn.{matrix}.weight", f"{theirs}.mlp.{matrix}_proj.weight", shape)


def _whole(name: str, tensor: str, shape: Shape) -> Parameter:
    return Parameter(name, shape, (Piece(tensor, (0,) * len(shape), shape),))


def adapters_of(parameter: Parameter, lora: LoraSpec) -> list[Parameter]:
    """Return the two factors of a matrix's adapter, (R, D) and (F, R); nothing if the matrix has no adapter."""
    owner, _, leaf = parameter.name.rpartition(".")
    if not lora.rank or leaf != "weight" or not owner.startswith("blocks."):
        return []
    if owner.rpartition(".")[2] not in lora.targets or len(parameter.shape) != 2:
        return []
    outputs, inputs = parameter.shape
    name = f"{_PEFT_PREFIX}{parameter.pieces[0].tensor.removesuffix('.weight')}"
    shapes = {"lora_a": ("lora_A", (lora.rank, inputs)), "lora_b": ("lora_B", (outputs, lora.rank))}
    return [
        Parameter(f"{owner}.{ours}", shape, (Piece(f"{name}.{theirs}.weight", (0, 0), shape),))
        for ours, (theirs, shape) in shapes.items()
    ]


def adapter_config(lora: LoraSpec, base: str | None) -> JsonObject:
    """Return the content of adapter_config.json. `base` identifies the frozen weights for from_pretrained."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [_PROJECTIONS[target] for target in lora.targets],
        "bias": "none",
        "inference_mode": True,
    }
