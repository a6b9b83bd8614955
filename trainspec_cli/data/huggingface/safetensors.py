"""The safetensors format: the header's length in eight bytes, a JSON header, and the bytes of the tensors. It is
implemented here so that reading a header does not require torch, and at most one tensor is in memory at a time.
https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from trainspec_cli.data.huggingface.config import HUB_TYPES, model_type
from trainspec_cli.data.huggingface.families import Names
from trainspec_cli.recipe.keys.model import CONV_TAPS, DecoderModel, HybridModel, LatentAttentionSpec, TextModel
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.records import read_record, to_plain

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on the size of a header."""
MAX_EXTENT = 2**53
MAX_DIMS = 16
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The formats that weights can be read from; others are quantised."""
_PACKED = ("_blocks", "_scales")
"""Endings of the names of MXFP4's tensors, which consist of bytes."""

_COMPUTED = re.compile(r"^__metadata__$|rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$")
"""Entries that are ignored: tables and masks of old checkpoints can be computed from config.json."""

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
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class PackedTensor:
    """A stack of transposed matrices in MXFP4 (OCP Microscaling Formats): blocks of 32 numbers, each of 4 bits, that
    share an exponent."""

    numbers: StoredTensor
    """(experts, columns, blocks, 16): two numbers per byte, the first one in the lower four bits."""
    exponents: StoredTensor
    """(experts, columns, blocks): the exponents of 2, plus 127."""

    @property
    def file(self) -> Path:
        return self.numbers.file

    @property
    def shape(self) -> tuple[int, ...]:
        experts, columns, blocks = self.exponents.shape
        return experts, 32 * blocks, columns


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


def pair_packed(entries: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | PackedTensor]:
    """Replace the two tensors of each MXFP4 tensor. Others, which no model has, keep their names."""
    found: dict[str, StoredTensor | PackedTensor] = dict(entries)
    for name, numbers in entries.items():
        whole = name.removesuffix(_PACKED[0])
        exponents = entries.get(whole + _PACKED[1])
        if name != whole and exponents and (*exponents.shape, 16) == numbers.shape and len(numbers.shape) == 4:
            del found[name], found[whole + _PACKED[1]]
            found[whole] = PackedTensor(numbers, exponents)
    return found


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
            tensors = {name: entry for name, entry in header.items() if not _COMPUTED.search(name)}
            return {name: _entry(file, name, entry, 8 + length) for name, entry in tensors.items()}
        except ValueError as error:
            raise _damaged(file, f"has a header that cannot be read: {error}") from error


def _entry(file: Path, name: str, entry: JsonValue, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is {show_kind(entry)}")
    described = read_record(HeaderEntry, entry)
    shape, (start, end) = described.shape, described.data_offsets
    if described.dtype not in DTYPE_BYTES and not (described.dtype == "U8" and name.endswith(_PACKED)):
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


# The tensors of a Hugging Face checkpoint that make up each parameter of the engine's model. The table is used in
# both directions: loading fills parameters from tensors, exporting splits parameters into them. Most tensors hold a
# complete parameter. A routed expert's matrices are parts of a parameter, and are transposed. LoRA adapters use PEFT's
# names, and have an adapter_config.json.


Shape = tuple[int, ...]

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ADAPTERS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Piece:
    """A box within a parameter, and the tensor that it comes from."""

    tensor: str
    start: Shape
    """Start of the box within the parameter."""
    shape: Shape
    """Shape of the box, with the same number of dimensions as the parameter."""
    transposed: bool = False
    """True if the tensor stores the last two dimensions in reverse order."""
    row: int | None = None
    """The first row within the tensor, if the box is only a part of it. (Rows are those of the parameter, even if the
    tensor is transposed.)"""
    stacked: bool = False
    """True if the tensor has the parameter's dimension of experts."""
    lane: tuple[int, int] | None = None
    """(k, n): the box is every n-th element of the tensor's last dimension, from the k-th on. The elements in between
    belong to other boxes."""
    is_conv: bool = False
    """True if the tensor has a dimension of size 1 after the first, as those of depthwise convolutions."""
    is_copy: bool = False
    """True if another piece of the parameter has the same values. Copies are written, but not read: some programs leave
    those of an earlier model in a folder."""
    leading: Shape = ()
    """Dims of size 1 that the tensor has before the parameter's."""

    @property
    def tensor_shape(self) -> Shape:
        """Return the shape of the box in the file, which has no expert dimension unless experts are stacked."""
        if self.is_conv:
            return (self.shape[0], 1, *self.shape[1:])
        if not self.transposed:
            return (*self.leading, *self.shape)
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return shape if self.stacked else shape[-2:]

    def part_of(self, tensor: Any) -> Any:
        """Return the box as a view of the tensor (of torch or numpy), with the parameter's dimensions."""
        if self.transposed:
            tensor = tensor.swapaxes(-1, -2)
        if self.row is not None:
            tensor = tensor[self.row : self.row + self.shape[0]]
        if self.lane is not None:
            tensor = tensor[..., self.lane[0] :: self.lane[1]]
        return tensor.reshape(self.shape)

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
    dtype: str | None = None
    """The format in files, if it is always the same."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameters(model: TextModel) -> list[Parameter]:
    """Return every parameter of `model`, in checkpoint order. The model must be one that `config.model_type`
    supports."""
    names = HUB_TYPES[model_type(model)].names
    hidden = model.hidden_size
    vocab = model.vocab_size
    found = [whole("embed.weight", f"{names.embed}.weight", (vocab, hidden))]
    if model.learned_positions:
        shape = (model.learned_positions, hidden)
        found.append(whole("position_embed.weight", f"{names.positions}.weight", shape))
    predicted = 0 if isinstance(model, HybridModel) else model.prediction_layers
    for layer in range(model.num_layers + predicted):
        found += _hybrid_layer(model, layer, names) if isinstance(model, HybridModel) else _layer(model, layer, names)
    found += _norm(model.as_decoder, "norm", names.norm, hidden)
    if not model.tied_embeddings:
        found.append(whole("head.weight", f"{names.head}.weight", (vocab, hidden)))
    # Each prediction layer has copies of the embedding and of the head.
    numbers = range(model.num_layers, model.num_layers + predicted)
    copies = {
        "embed.weight": [f"{names.layers}.{number}.embed_tokens.weight" for number in numbers],
        "head.weight": [f"{names.layers}.{number}.shared_head.head.weight" for number in numbers],
    }
    return [
        replace(
            one,
            pieces=(
                *one.pieces,
                *(replace(one.pieces[0], tensor=tensor, is_copy=True) for tensor in copies.get(one.name, ())),
            ),
        )
        for one in found
    ]


def tensor_shapes(model: TextModel) -> dict[str, Shape]:
    """Return the shape of every tensor in a checkpoint of `model`, by name."""
    return {name: stored_shape(places) for name, places in places_of(parameters(model)).items()}


Places = list[tuple[Parameter, Piece]]


def places_of(parameters: Iterable[Parameter]) -> dict[str, Places]:
    """Return the pieces that each tensor consists of, in the order of its rows."""
    places: dict[str, Places] = {}
    for parameter in parameters:
        for piece in parameter.pieces:
            places.setdefault(piece.tensor, []).append((parameter, piece))
    return {name: sorted(found, key=lambda place: place[1].row or 0) for name, found in places.items()}


def stored_shape(places: Places) -> Shape:
    """Return the shape of the tensor that consists of these pieces."""
    _, piece = places[0]
    shape = piece.tensor_shape
    if piece.lane is not None:
        return (*shape[:-1], shape[-1] * piece.lane[1])
    if piece.row is None:
        return shape
    rows = sum(one.shape[0] for _, one in places)
    return (*shape[:-1], rows) if piece.transposed else (rows, *shape[1:])


def _layer(model: DecoderModel, layer: int, names: Names) -> Iterator[Parameter]:
    ours = f"blocks.{layer}"
    theirs = f"{names.layers}.{layer}"
    named = names.of_layer(model)
    hidden = model.hidden_size
    if layer >= model.num_layers:  # a prediction layer
        yield whole(f"{ours}.join.weight", f"{theirs}.eh_proj.weight", (hidden, 2 * hidden))
        for name, tensor in {"embed_norm": "enorm", "hidden_norm": "hnorm", "head_norm": "shared_head.norm"}.items():
            yield from _norm(model, f"{ours}.{name}", f"{theirs}.{tensor}", hidden)
    of_attention, of_ffn = model.layer_norms

    def norm(name: str, has: bool) -> Iterator[Parameter]:
        if has:
            yield from _norm(model, f"{ours}.{name}", f"{theirs}.{named[name]}", hidden)

    fused: dict[str, list[tuple[str, int, int, int]]] = {}
    for name, tensor, start, row, rows in names.fused(model) if names.fused else ():
        fused.setdefault(name, []).append((f"{theirs}.{tensor}", start, row, rows))

    def matrix(name: str, rows: int, columns: int, *, biased: bool) -> Iterator[Parameter]:
        shape = (rows, columns)
        kept = fused.get(name)
        if kept is None:
            tensor = f"{theirs}.{named[name]}"
            pieces = [Piece(f"{tensor}.weight", (0, 0), shape, transposed=names.transposed)]
            of_bias = [Piece(f"{tensor}.bias", (0,), (rows,))]
        else:
            pieces = [
                Piece(f"{tensor}.weight", (start, 0), (count, columns), transposed=names.transposed, row=row)
                for tensor, start, row, count in kept
            ]
            of_bias = [Piece(f"{tensor}.bias", (start,), (count,), row=row) for tensor, start, row, count in kept]
        yield Parameter(f"{ours}.{name}.weight", shape, tuple(pieces))
        if biased:
            yield Parameter(f"{ours}.{name}.bias", (rows,), tuple(of_bias))

    yield from norm("attention_norm", of_attention.before)
    head = model.head_dim
    if model.mla is None:
        for name, heads in {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}.items():
            yield from matrix(f"attention.{name}", heads * head, hidden, biased=model.attention_bias != "none")
        yield from matrix("attention.out", hidden, model.num_heads * head, biased=False)
    else:
        for name, shape in _latent_shapes(model, model.mla).items():
            yield whole(f"{ours}.attention.{name}.weight", f"{theirs}.{named[f'attention.{name}']}.weight", shape)
    if model.attention_bias == "all":
        yield whole(f"{ours}.attention_bias", f"{theirs}.{named['attention.out']}.bias", (hidden,))
    if model.qk_norm:
        for name, heads in (("attention.q_norm", model.num_heads), ("attention.k_norm", model.num_kv_heads)):
            size = head * (heads if model.qk_norm_over == "all" else 1)
            yield from _norm(model, f"{ours}.{name}", f"{theirs}.{named[name]}", size)
    if model.attention_sinks:
        yield whole(f"{ours}.attention.sinks", f"{theirs}.{named['attention.sinks']}", (model.num_heads,))
    yield from norm("attention_out_norm", of_attention.after)
    yield from norm("ffn_norm", of_ffn.before)
    yield from norm("ffn_out_norm", of_ffn.after)
    if model.is_expert_layer(min(layer, model.num_layers - 1)):
        yield from _experts(model, f"{ours}.ffn", f"{theirs}.{names.moe}", names)
        return
    for name in ("gate", "up") if model.gated_mlp else ("up",):
        yield from matrix(f"ffn.{name}", model.ffn_size, hidden, biased=model.mlp_bias)
    yield from matrix("ffn.down", hidden, model.ffn_size, biased=False)
    if model.mlp_bias:
        yield whole(f"{ours}.ffn_bias", f"{theirs}.{named['ffn.down']}.bias", (hidden,))


def _hybrid_layer(model: HybridModel, layer: int, names: Names) -> Iterator[Parameter]:
    letter = model.layers[layer]
    kind = {"M": "mamba", "*": "attention"}.get(letter, "ffn")
    ours = f"blocks.{layer}"
    theirs = f"{names.layers}.{layer // names.merged}"
    hidden, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield whole(f"{ours}.norm.weight", f"{theirs}.{names.layer[f'{kind}_norm']}.weight", (hidden,))
    if letter == "M":
        yield from _mamba(model, f"{ours}.mamba", f"{theirs}.{names.layer['mamba']}")
        return
    if letter == "E":
        yield from _experts(model.as_decoder, f"{ours}.ffn", f"{theirs}.{names.moe}", names)
        return
    shapes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "out": (hidden, query)}
    if kind == "ffn":
        halves = dict.fromkeys(("gate", "up") if model.gated_mlp else ("up",), (model.ffn_size, hidden))
        shapes = halves | {"down": (hidden, model.ffn_size)}
    for name, shape in shapes.items():
        yield whole(f"{ours}.{kind}.{name}.weight", f"{theirs}.{names.layer[f'{kind}.{name}']}.weight", shape)


def _mamba(model: HybridModel, ours: str, theirs: str) -> Iterator[Parameter]:
    """The input projections of a state-space layer, and its convolutions, are each one tensor."""
    heads, hidden, states = model.mamba_heads, model.hidden_size, model.mamba_groups * model.mamba_state_size
    inner = heads * model.mamba_head_dim
    sizes = {"z": inner, "x": inner, "b": states, "c": states, "dt": heads}
    row = 0
    for name, rows in sizes.items():
        piece = Piece(f"{theirs}.in_proj.weight", (0, 0), (rows, hidden), row=row)
        yield Parameter(f"{ours}.{name}.weight", (rows, hidden), (piece,))
        row += rows
    row = 0
    for name in "xbc":
        shape = (sizes[name], CONV_TAPS)
        piece = Piece(f"{theirs}.conv1d.weight", (0, 0), shape, row=row, is_conv=True)
        yield Parameter(f"{ours}.conv_{name}.weight", shape, (piece,))
        piece = Piece(f"{theirs}.conv1d.bias", (0,), shape[:1], row=row)
        yield Parameter(f"{ours}.conv_{name}.bias", shape[:1], (piece,))
        row += sizes[name]
    for name, tensor in {"dt_bias": "dt_bias", "a_log": "A_log", "skip": "D"}.items():
        yield whole(f"{ours}.{name}", f"{theirs}.{tensor}", (heads,))
    yield whole(f"{ours}.norm", f"{theirs}.norm.weight", (inner,))
    yield whole(f"{ours}.out.weight", f"{theirs}.out_proj.weight", (hidden, inner))


def _latent_shapes(model: DecoderModel, mla: LatentAttentionSpec) -> dict[str, Shape]:
    """Return the shapes of the matrices and norms of latent attention."""
    hidden, heads = model.hidden_size, model.num_heads
    shapes: dict[str, Shape] = {}
    if mla.q_lora_rank:
        shapes |= {"q_down": (mla.q_lora_rank, hidden), "q_norm": (mla.q_lora_rank,)}
    return shapes | {
        "q": (heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank or hidden),
        "kv_down": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "kv_norm": (mla.kv_lora_rank,),
        "kv": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "out": (hidden, heads * mla.v_head_dim),
    }


def _experts(model: DecoderModel, ours: str, theirs: str, names: Names) -> Iterator[Parameter]:
    experts = model.experts
    assert experts is not None
    hidden, width = model.hidden_size, experts.expert_ffn_size
    rows = range(experts.num_experts)
    up_shape, down_shape = (experts.num_experts, hidden, 2 * width), (experts.num_experts, width, hidden)
    yield whole(f"{ours}.router.weight", f"{theirs}.{names.router}.weight", (experts.num_experts, hidden))
    if experts.bias:
        yield whole(f"{ours}.router.bias", f"{theirs}.{names.router}.bias", (experts.num_experts,))
    if experts.has_choice_bias and names.choice_bias:
        tensor = f"{theirs}.{names.choice_bias}"
        piece_of_bias = Piece(tensor, (0,), (experts.num_experts,), leading=names.choice_bias_leading)
        name = f"{ours}.router.balance_bias_E"
        yield Parameter(name, (experts.num_experts,), (piece_of_bias,), dtype="F32")
    if len(names.experts) == 2:  # all experts in one tensor
        both, down = names.experts

        def alternating(tensor: str, *shape: int) -> Iterator[Piece]:
            """Gate and linear half, whose columns alternate in the tensor."""
            for number, at in enumerate((0, width)):
                yield Piece(tensor, (*(0 for _ in shape), at), (*shape, width), lane=(number, 2))

        if names.alternating:
            ups = alternating(f"{theirs}.{both}", experts.num_experts, hidden)
            yield Parameter(f"{ours}.experts.up", up_shape, tuple(ups))
            yield whole(f"{ours}.experts.down", f"{theirs}.{down}", down_shape)
        else:
            for name, tensor, stacked in (("up", both, up_shape), ("down", down, down_shape)):
                stack = Piece(f"{theirs}.{tensor}", (0, 0, 0), stacked, transposed=True, stacked=True)
                yield Parameter(f"{ours}.experts.{name}", stacked, (stack,))
        if experts.bias:
            biases = alternating(f"{theirs}.{both}_bias", experts.num_experts)
            yield Parameter(f"{ours}.experts.up_bias", (up_shape[0], up_shape[2]), tuple(biases))
            yield whole(f"{ours}.experts.down_bias", f"{theirs}.{down}_bias", (down_shape[0], hidden))
    else:
        gate, up, down = names.experts

        def piece(expert: int, leaf: str, column: int, shape: Shape) -> Piece:
            return Piece(f"{theirs}.experts.{expert}.{leaf}.weight", (expert, 0, column), (1, *shape), transposed=True)

        halves = [piece(e, name, at, (hidden, width)) for e in rows for name, at in ((gate, 0), (up, width))]
        downs = [piece(e, down, 0, (width, hidden)) for e in rows]
        yield Parameter(f"{ours}.experts.up", up_shape, tuple(halves))
        yield Parameter(f"{ours}.experts.down", down_shape, tuple(downs))
    if experts.shared_experts:
        shared = experts.shared_experts * (experts.shared_expert_ffn_size or width)
        for name, tensor in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
            matrix = (hidden, shared) if name == "down" else (shared, hidden)
            yield whole(f"{ours}.shared.{name}.weight", f"{theirs}.{names.shared}.{tensor}.weight", matrix)
    if experts.shared_gate:
        yield whole(f"{ours}.shared_gate", f"{theirs}.{names.shared}_gate.weight", (1, hidden))


def _norm(model: DecoderModel, name: str, tensor: str, size: int) -> Iterator[Parameter]:
    yield whole(f"{name}.weight", f"{tensor}.weight", (size,))
    if model.norm_bias:
        yield whole(f"{name}.bias", f"{tensor}.bias", (size,))


def whole(name: str, tensor: str, shape: Shape) -> Parameter:
    return Parameter(name, shape, (Piece(tensor, (0,) * len(shape), shape),))


def adapters_of(parameter: Parameter, lora: LoraSpec) -> list[Parameter]:
    """Return the two factors of a matrix's adapter, (R, D) and (F, R), and its magnitude (F,) if there is one, or those
    of experts' adapters, (E, D, R) and (E, R, F); nothing if the matrix has no adapter."""
    owner, _, leaf = parameter.name.rpartition(".")
    if not lora.rank or not owner.startswith("blocks."):
        return []
    if owner.endswith(".experts") and f"experts.{leaf}" in lora.targets:
        return _adapters_of_experts(parameter, lora)
    if leaf != "weight" or owner.rpartition(".")[2] not in lora.targets or len(parameter.shape) != 2:
        return []
    return halves_of(owner, parameter.pieces[0].tensor.removesuffix(".weight"), parameter.shape, lora)


def halves_of(owner: str, tensor: str, shape: Shape, lora: LoraSpec) -> list[Parameter]:
    """Return the two factors of an adapter: of the linear layer `owner` in the engine, and `tensor` in the folder."""
    outputs, inputs = shape
    shapes = {"lora_a": ("lora_A", (lora.rank, inputs)), "lora_b": ("lora_B", (outputs, lora.rank))}
    halves = [
        Parameter(f"{owner}.{ours}", size, (Piece(f"{_PEFT_PREFIX}{tensor}.{theirs}.weight", (0, 0), size),))
        for ours, (theirs, size) in shapes.items()
    ]
    magnitude = whole(f"{owner}.lora_m", f"{_PEFT_PREFIX}{tensor}.lora_magnitude_vector", (outputs,))
    return [*halves, magnitude] if lora.magnitude else halves


def _adapters_of_experts(parameter: Parameter, lora: LoraSpec) -> list[Parameter]:
    """Return the factors for all experts. PEFT wraps the module of the experts once for each adapted parameter: the
    wrapper of `down` contains that of `up`, which is its `base_layer`."""
    experts, inputs, outputs = parameter.shape
    module, stacked, _ = parameter.pieces[0].tensor.partition(".experts.")
    module = module.replace(".block_sparse_moe", ".mlp")  # mixtral in transformers 5
    inner = parameter.name.endswith(".up") and "experts.down" in lora.targets
    name = f"{_PEFT_PREFIX}{module}{stacked}" + "base_layer." * inner
    shapes = {"a": (experts, inputs, lora.rank), "b": (experts, lora.rank, outputs)}
    return [
        Parameter(
            f"{parameter.name}_lora_{half}", shape, (Piece(f"{name}lora_{half.upper()}.weight", (0, 0, 0), shape),)
        )
        for half, shape in shapes.items()
    ]


def adapter_config(model: DecoderModel, lora: LoraSpec, base: str | None) -> JsonObject:
    """Return the content of adapter_config.json. `base` identifies the frozen weights for from_pretrained. Raises
    RecipeError if PEFT cannot load the adapters."""
    kind = model_type(model)
    names = HUB_TYPES[kind].names
    adapted = [one for one in parameters(model) if adapters_of(one, lora)]
    modules = [one.pieces[0].tensor.removesuffix(".weight") for one in adapted if len(one.shape) == 2]
    reason = None
    if names.fused or names.transposed:
        reason = f"{kind} stores several adapted matrices in one tensor, or transposed"
    elif model.experts is not None and model.experts.balance_rate > 0:
        reason = "the biases of the choice of experts are trained, too (`model.experts.balance_rate`)"
    elif lora.expert_targets and len(names.experts) == 2:
        reason = f"PEFT does not know the modules of {kind}'s experts"
    elif model.experts is not None and any(".self_attn." not in module for module in modules):
        # PEFT takes these names for those of routed experts (`peft.utils.transformers_weight_conversion`).
        reason = f"PEFT applies adapters of {kind}'s dense or shared feed-forwards to the routed experts"
    if reason is not None:
        message = f"{reason}, so PEFT cannot load the adapters"
        raise RecipeError(Problem("unsupported", message, "--format", "pass --format hf, which merges the adapters"))
    targets = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    parts = {"experts.up": "gate_up_proj", "experts.down": "down_proj"}
    return adapter_settings(lora, base, targets) | {
        "target_parameters": [f"mlp.experts.{parts[target]}" for target in lora.expert_targets] or None
    }


def adapter_settings(lora: LoraSpec, base: str | None, targets: Iterable[str]) -> JsonObject:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_dora": lora.magnitude,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
    }
