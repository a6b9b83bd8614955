"""The location of a tensor's values: files, offsets and strides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import MachineError
from trainspec_cli.data.huggingface.safetensors import DTYPE_BYTES

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StridedTensor:
    """Values of a tensor in a file. They need not be contiguous."""

    file: Path
    dtype: str
    """The name of the dtype in safetensors."""
    shape: Shape
    start: int
    """Byte offset of the first value in the file."""
    strides: Shape
    """Distance between neighbours along each dimension, in elements."""

    @property
    def span_bytes(self) -> int:
        """Return the number of bytes from the first value to the end of the last one."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Part:
    """A box within a tensor, and the location of its values."""

    start: Shape
    """Start of the box within the tensor."""
    held: StridedTensor


@dataclass(frozen=True)
class PartedTensor:
    """A tensor assembled from parts of one or several files."""

    shape: Shape
    parts: tuple[Part, ...]

    @property
    def file(self) -> Path:
        return self.parts[0].held.file

    @property
    def is_whole(self) -> bool:
        """Return whether the parts contain exactly as many values as the tensor has."""
        return sum(math.prod(part.held.shape) for part in self.parts) == math.prod(self.shape)


Tensors = Mapping[str, PartedTensor]


def damaged(file: Path, what: str) -> MachineError:
    return MachineError(f"{file} {what}", code="bad_checkpoint", hint="copy it again, or name another in init.from")
