"""Where the numbers of a tensor lie: in which files, from which byte on, and how far apart."""

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
    """Numbers of a file, which need not lie side by side."""

    file: Path
    dtype: str
    """As safetensors names it."""
    shape: Shape
    start: int
    """Offset of the first number in the file, in bytes."""
    strides: Shape
    """Numbers between two neighbours along each dim."""

    @property
    def span_bytes(self) -> int:
        """Bytes from the first number to the end of the last one."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and where its numbers lie."""

    start: Shape
    """The start of the box in the tensor."""
    held: StridedTensor


@dataclass(frozen=True)
class PartedTensor:
    """A tensor that is put together of parts of one or several files."""

    shape: Shape
    parts: tuple[Part, ...]

    @property
    def file(self) -> Path:
        return self.parts[0].held.file

    @property
    def is_whole(self) -> bool:
        """False if the parts hold fewer or more numbers than the tensor has."""
        return sum(math.prod(part.held.shape) for part in self.parts) == math.prod(self.shape)


Tensors = Mapping[str, PartedTensor]


def damaged(file: Path, what: str) -> MachineError:
    return MachineError(f"{file} {what}", code="bad_checkpoint", hint="copy it again, or name another in init.from")
