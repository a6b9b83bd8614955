"""The bytes of a rank's checkpoint file, in the safetensors format (huggingface.co/docs/safetensors, "Format").

Eight bytes of the header's length, the header in JSON, then the tensors' bytes without a gap. The largest elements come
first, so every tensor is aligned. Files are read by safetensors itself, and written from a buffer that is reused.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.checkpoint.manifest import Chunk, TensorEntry
from trainspec_cli.engine.checkpoint.parts import TensorPart
from trainspec_cli.engine.cuda_only import register_pinned, unregister_pinned

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""A dtype -> its name in safetensors."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
ALIGNMENT = 8


@dataclass(frozen=True)
class Image:
    """The layout of the file; it is filled again and again by parts of the same names, shapes and dtypes."""

    parts: tuple[TensorPart, ...]
    header: bytes
    starts: tuple[int, ...]
    """The offset of each part in the file."""

    @cached_property
    def bytes(self) -> int:
        return len(self.header) + sum(part.bytes for part in self.parts)

    def put_header(self, buffer: Tensor) -> None:
        """Write the header, which `fill` does not change."""
        buffer[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)

    def fill(self, buffer: Tensor, parts: Sequence[TensorPart]) -> None:
        """Copy `parts`, in this image's order, to their offsets in `buffer` (`bytes` of uint8)."""
        for start, part in zip(self.starts, parts, strict=True):
            target = buffer[start : start + part.bytes].view(part.tensor.dtype).view(part.shape)
            target.copy_(part.tensor, non_blocking=True)

    def stream(self, parts: Sequence[TensorPart]) -> Iterator[memoryview]:
        """Yield the file's bytes directly from the live tensors."""
        yield memoryview(self.header)
        for part in parts:
            yield view_bytes(part.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))

    def entries(self, file: str) -> dict[str, TensorEntry]:
        return {
            part.name: TensorEntry(part.full_shape, CODES[part.tensor.dtype], (Chunk(file, part.offsets, part.shape),))
            for part in self.parts
        }


def pin(buffer: Tensor, device: torch.device) -> None:
    """Pin the buffer where the device has a call for it, so that copies are asynchronous; elsewhere the host waits."""
    if device.type == "cuda":
        register_pinned(buffer)


def unpin(buffer: Tensor, device: torch.device) -> None:
    """Take back `pin`, before the buffer is let go of: its addresses may be another's next."""
    if device.type == "cuda":
        unregister_pinned(buffer)


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a one-dimensional tensor of uint8 on the CPU; it keeps the tensor alive.

    Not by way of numpy: torch lets go of no storage any more that numpy has seen, and a change of layout has to.
    """
    array: Any = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def plan_image(parts: Sequence[TensorPart]) -> Image:
    ordered = sorted(parts, key=lambda part: (-part.tensor.element_size(), part.name))
    offsets = list(accumulate((part.bytes for part in ordered), initial=0))
    fields = {
        part.name: {"dtype": CODES[part.tensor.dtype], "shape": part.shape, "data_offsets": span}
        for part, span in zip(ordered, pairwise(offsets), strict=True)
    }
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    starts = tuple(len(header) + offset for offset in offsets[:-1])
    return Image(tuple(ordered), header, starts)
