"""The safetensors format: eight bytes of length, a JSON header, then the tensors' bytes.

Read and written here, so that reading a header needs no torch, and at most one tensor is held in memory.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
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
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.records import read_record

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_EXTENT = 2**53
MAX_DIMS = 16
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The formats that weights are read from; others are quantised."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]
    """Offsets of its first byte and behind its last one, from the end of the header."""


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
    """Return every tensor of a folder's model.safetensors, or of the files that its index names.

    Raises RecipeError if there is none, MachineError if a file is missing or damaged.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(_read_index(folder / INDEX).values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        message = f"{folder} holds neither {SINGLE} nor {INDEX}"
        raise RecipeError(Problem("missing_file", message, "init.from", "name a folder with safetensors files"))
    entries: dict[str, StoredTensor] = {}
    for name in names:
        entries |= read_header(folder / name)
    return entries


def _read_index(file: Path) -> dict[str, str]:
    """Return the file that holds each tensor."""
    try:
        files = read_field(file, read_object(file), "weight_map", dict)
    except UnreadableFileError as error:
        raise _damaged(file, f"is not an index of safetensors files: {error}") from error
    names = {}
    for tensor, name in files.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise _damaged(file, f"names {show_kind(name)}, which is not a file beside it")
        names[tensor] = name
    return names


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. Raises MachineError that names the file, or the tensor that is wrong."""
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
        message = f"{file}: {name} is of type {described.dtype}; weights are read from {', '.join(DTYPE_BYTES)}"
        raise RecipeError(Problem("unsupported", message, "init.from", "name a checkpoint that is not quantised"))
    if len(shape) > MAX_DIMS or not all(0 <= number < MAX_EXTENT for number in (*shape, start, end)):
        raise ValueError(f"{name} has {list(shape)} as its shape, or offsets below 0")
    stored = StoredTensor(file, described.dtype, shape, data_start + start)
    if end - start != stored.bytes or data_start + end > file.stat().st_size:
        raise _damaged(file, f"is cut short or altered: {name} is not where its header says")
    return stored


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return a header for tensors (dtype, shape) stored in this order; its length is a multiple of 8."""
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape) in tensors.items():
        end = start + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = to_plain(HeaderEntry(dtype, shape, (start, end)))
        start = end
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _damaged(file: Path, what: str) -> MachineError:
    return MachineError(f"{file} {what}", code="bad_checkpoint", hint="download it again")
