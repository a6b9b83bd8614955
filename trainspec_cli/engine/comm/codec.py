"""Numbers in fewer bits for the wire: bf16, and integers of 8 or 4 bits in blocks with one scale each.

A block's scale is its largest magnitude over the largest integer, in bf16. Each value is wrong by half a scale at most;
where the scale was rounded down, the largest value is cut off by 127 / 2**9 of it. bf16 and not fp16, whose smallest
number, 6e-8, is above many gradients of a mean loss. Four bits are taken of rotated values (a Hadamard matrix of
32 x 32, as SDP4Bit does, arXiv:2410.15526), which spreads an outlier over its neighbours; the rotation is its own
inverse and keeps Euclidean norms.

Shapes: R rows, one for each rank; N values; K blocks; B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

ROTATED = 32
GRADIENT_BLOCK, WEIGHT_BLOCK = 128, 2048
SCALE_BYTES = 2
NIBBLE = 15
TOO_SMALL = torch.finfo(torch.float32).tiny
"""A smaller scale is none: dividing by it may overflow."""


class Codec(Protocol):
    """One format. A row of the wire is decoded without the others."""

    @property
    def block(self) -> int:
        """Values that are encoded together; rows of a multiple of it waste nothing."""
        ...

    @property
    def feeds_back(self) -> bool:
        """Return whether what it loses of a gradient is worth adding to the next one."""
        ...

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return the rows as bytes, (R, B) of uint8; `x_RN` is fp32. A block with a value that is not finite is not
        finite when decoded."""
        ...

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        """Return (R, `values`) in fp32."""
        ...

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        """Return the sum of the decoded rows, (`values`,) in fp32, in the order of the rows."""
        ...


@dataclass(frozen=True)
class Bf16:
    block: int = 1
    feeds_back: bool = False
    """Rounding to 8 bits of mantissa has no bias, and is 1/256 of each value at most."""

    def encode(self, x_RN: Tensor) -> Tensor:
        return x_RN.to(torch.bfloat16).view(torch.uint8)

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        return wire_RB.view(torch.bfloat16)[:, :values].float()

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        return self.decode(wire_RB, values).sum(0)


@dataclass(frozen=True)
class Integers:
    """A row is the scales of its blocks, then their integers: two of 4 bits in a byte."""

    bits: int
    block: int
    rotates: bool = False
    feeds_back: bool = True

    @property
    def largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def encode(self, x_RN: Tensor) -> Tensor:
        rows, values = x_RN.shape
        whole_RN = pad(x_RN, (0, -values % self.block))
        x_RKV = (_rotate(whole_RN) if self.rotates else whole_RN).view(rows, -1, self.block)
        scale_RK = (x_RKV.abs().amax(-1) / self.largest).to(torch.bfloat16)
        scale_RK = torch.where(scale_RK < TOO_SMALL, 0.0, scale_RK)
        steps = scale_RK.float()
        per_step = torch.where(steps > 0, 1 / steps, 0.0)
        codes_RKV = (x_RKV * per_step[..., None]).round_().clamp_(-self.largest, self.largest).to(torch.int8)
        packed = _pack(codes_RKV) if self.bits == 4 else codes_RKV.view(torch.uint8)
        return torch.cat([scale_RK.view(torch.uint8), packed.view(rows, -1)], dim=1)

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        rotated_RN = self._decode_rotated(wire_RB, values)
        return (_rotate(rotated_RN) if self.rotates else rotated_RN)[:, :values]

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        """The sum is rotated back, and not each row."""
        rotated_N = self._decode_rotated(wire_RB, values).sum(0)
        return (_rotate(rotated_N) if self.rotates else rotated_N)[:values]

    def _decode_rotated(self, wire_RB: Tensor, values: int) -> Tensor:
        rows, blocks = len(wire_RB), -(-values // self.block)
        scales, packed = wire_RB.split([SCALE_BYTES * blocks, wire_RB.shape[1] - SCALE_BYTES * blocks], dim=1)
        scale_RK = scales.contiguous().view(torch.bfloat16).float()
        packed_RKB = packed.reshape(rows, blocks, -1)
        codes_RKV = _unpack(packed_RKB) if self.bits == 4 else packed_RKB.view(torch.int8)
        return (codes_RKV * scale_RK[..., None]).view(rows, -1)


GRADIENT_CODECS: dict[str, Codec] = {
    "bf16": Bf16(),
    "int8": Integers(8, GRADIENT_BLOCK),
    "int4": Integers(4, GRADIENT_BLOCK, rotates=True),
}
"""By the value of `comm.gradients`."""
PARAMETER_CODECS: dict[str, Codec] = {"bf16": Bf16(), "int8": Integers(8, WEIGHT_BLOCK, feeds_back=False)}


def _pack(codes: Tensor) -> Tensor:
    """Put the two halves of each block's integers into one byte each."""
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return (low & NIBBLE) | (high << 4)


def _unpack(packed: Tensor) -> Tensor:
    return torch.cat([packed & NIBBLE, packed >> 4], dim=-1).to(torch.int8) - 8


def _rotate(x: Tensor) -> Tensor:
    return (x.reshape(-1, ROTATED) @ _hadamard(x.device)).view(x.shape)


@cache
def _hadamard(device: torch.device) -> Tensor:
    """Sylvester's matrix of order `ROTATED`, symmetric and orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATED:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / ROTATED**0.5).to(device)
