"""Numbers in fewer bits for the wire: bf16, and integers of 8 or 4 bits in blocks with one scale each.

Eight bits: a block's scale is its largest magnitude over the largest integer, in bf16. Each value is wrong by half a
scale at most; where the scale was rounded down, the largest value is cut off by 127 / 2**9 of it. bf16 and not fp16,
whose smallest number, 6e-8, is above many gradients of a mean loss.

Four bits are taken of rotated values (a Hadamard matrix of 32 x 32, as SDP4Bit does, arXiv:2410.15526), which spreads
an outlier over its neighbours; the rotation is its own inverse and keeps Euclidean norms.

Shapes: R rows, one for each rank; N values; K blocks; V values of a block; B bytes.
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
SCALE_BYTES, STEP_BYTES = 2, 4
HALF, NIBBLE = 8, 15
NO_STEP, LARGEST_STEP, NOT_FINITE = 0, 254, 255
"""Codes of a block's step in four bits."""
STEPS_OF_AN_OCTAVE = 8
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
class EightBits:
    """A row is the scales of its blocks, then their integers."""

    block: int
    feeds_back: bool = True

    def encode(self, x_RN: Tensor) -> Tensor:
        rows, values = x_RN.shape
        x_RKV = pad(x_RN, (0, -values % self.block)).view(rows, -1, self.block)
        scale_RK = (x_RKV.abs().amax(-1) / 127).to(torch.bfloat16)
        scale_RK = torch.where(scale_RK < TOO_SMALL, 0.0, scale_RK)
        codes_RKV = (x_RKV * _inverse(scale_RK.float())[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale_RK.view(torch.uint8), codes_RKV.view(rows, -1).view(torch.uint8)], dim=1)

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        rows, blocks = len(wire_RB), -(-values // self.block)
        scales, codes = wire_RB.split([SCALE_BYTES * blocks, blocks * self.block], dim=1)
        scale_RK = scales.contiguous().view(torch.bfloat16).float()
        codes_RKV = codes.view(torch.int8).reshape(rows, blocks, -1)
        return (codes_RKV * scale_RK[..., None]).view(rows, -1)[:, :values]

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        return self.decode(wire_RB, values).sum(0)


@dataclass(frozen=True)
class FourBits:
    """Sixteen levels in the middles of steps of one size: -7.5, -6.5 ... 7.5 steps of the block.

    A block's step is at least an eighth of its largest magnitude, at most 2**(1/8) times that, and no rotated value is
    wrong by more than half of it. A row is its largest step in fp32, a byte for the step of each block (eighths of an
    octave below the largest), then two integers in a byte. A block whose step is less than 2**-31 of the row's largest
    is sent as zeros.
    """

    block: int = 64
    feeds_back: bool = True

    def encode(self, x_RN: Tensor) -> Tensor:
        rows, values = x_RN.shape
        x_RKV = _rotate(pad(x_RN, (0, -values % self.block))).view(rows, -1, self.block)
        needed_RK = x_RKV.abs().amax(-1) / HALF
        finite_RK = needed_RK.isfinite()
        largest_R1 = torch.where(finite_RK, needed_RK, 0.0).amax(-1, keepdim=True)
        below_RK = (torch.log2(needed_RK * _inverse(largest_R1)) * STEPS_OF_AN_OCTAVE).ceil()
        codes_RK = torch.where(finite_RK, (LARGEST_STEP + below_RK).clamp(NO_STEP, LARGEST_STEP), NOT_FINITE)
        codes_RK = codes_RK.to(torch.uint8)
        per_step_RK = _inverse(_steps(codes_RK, largest_R1))
        integers_RKV = (x_RKV * per_step_RK[..., None]).floor_().clamp_(-HALF, HALF - 1)
        packed_RB = _pack((integers_RKV + HALF).to(torch.uint8)).view(rows, -1)
        return torch.cat([largest_R1.view(torch.uint8), codes_RK, packed_RB], dim=1)

    def decode(self, wire_RB: Tensor, values: int) -> Tensor:
        return _rotate(self._decode_rotated(wire_RB, values))[:, :values]

    def sum(self, wire_RB: Tensor, values: int) -> Tensor:
        """The sum is rotated back, and not each row."""
        return _rotate(self._decode_rotated(wire_RB, values).sum(0))[:values]

    def _decode_rotated(self, wire_RB: Tensor, values: int) -> Tensor:
        rows, blocks = len(wire_RB), -(-values // self.block)
        largest, codes_RK, packed = wire_RB.split([STEP_BYTES, blocks, blocks * self.block // 2], dim=1)
        steps_RK = _steps(codes_RK, largest.flatten().clone().view(torch.float32)[:, None])
        middles_RKV = _unpack(packed.reshape(rows, blocks, -1)) - (HALF - 0.5)
        return (middles_RKV * steps_RK[..., None]).view(rows, -1)


GRADIENT_CODECS: dict[str, Codec] = {
    "bf16": Bf16(),
    "int8": EightBits(GRADIENT_BLOCK),
    "int4": FourBits(),
}
"""Codecs by the value of `comm.gradients`."""
PARAMETER_CODECS: dict[str, Codec] = {"bf16": Bf16(), "int8": EightBits(WEIGHT_BLOCK, feeds_back=False)}


def _inverse(x: Tensor) -> Tensor:
    """Return 1 / x, and 0 where x is too small to divide by or not a number."""
    return torch.where(x >= TOO_SMALL, 1 / x, 0.0)


def _steps(codes_RK: Tensor, largest_R1: Tensor) -> Tensor:
    """Return the blocks' steps; 0 where all values are 0, NaN where they are not finite."""
    steps_RK = _fractions(codes_RK.device)[codes_RK.int()] * largest_R1
    return torch.where(steps_RK < TOO_SMALL, 0.0, steps_RK)


@cache
def _fractions(device: torch.device) -> Tensor:
    """Steps as parts of the row's largest, by their codes."""
    parts = [2.0 ** ((code - LARGEST_STEP) / STEPS_OF_AN_OCTAVE) for code in range(NOT_FINITE)]
    return torch.tensor([0.0, *parts[1:], torch.nan], device=device)


def _pack(nibbles: Tensor) -> Tensor:
    """Put the two halves of each block's integers into one byte each."""
    low, high = nibbles.chunk(2, dim=-1)
    return low | (high << 4)


def _unpack(packed: Tensor) -> Tensor:
    return torch.cat([packed & NIBBLE, packed >> 4], dim=-1)


def _rotate(x: Tensor) -> Tensor:
    return (x.reshape(-1, ROTATED) @ _hadamard(x.device)).view(x.shape)


@cache
def _hadamard(device: torch.device) -> Tensor:
    """Sylvester's matrix of order `ROTATED`, symmetric and orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATED:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / ROTATED**0.5).to(device)
