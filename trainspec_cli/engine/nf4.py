"""4-bit NormalFloat with double quantisation, the storage format of frozen weights in QLoRA (arXiv:2305.14314).

The rows of a matrix are divided into blocks of 64 weights; the last block of a row may be shorter. Each weight is
stored as the nearest of 16 quantiles of a normal distribution, times the block's largest magnitude. These magnitudes,
minus their mean, are in turn quantised to 8 bits in blocks of 256, in the dynamic format of arXiv:2110.02861. In total,
this takes 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits per weight. Codes, mean and scales are the same as in bitsandbytes.

Shapes: F rows of a matrix (outputs), D its columns (inputs), N blocks per row, G blocks of magnitudes. A stack of
matrices, such as those of experts, has further dimensions in front and is quantised as one matrix with all their rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainspec_cli.recipe.keys.training import NF4_BLOCK, NF4_CHUNK, NF4_SCALE_BLOCK

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The codebook from Appendix E of the paper."""


class Nf4(NamedTuple):
    """A matrix in NF4, or a rank's part of one."""

    codes: Tensor
    """(F, D / 2) uint8: two neighbouring codes per byte, the first in the high four bits."""
    magnitudes: Tensor
    """(F, N) uint8: each block's largest magnitude, quantised."""
    scales: Tensor
    """(1 + G,) fp32, for the full matrix: the mean of the magnitudes, followed by the largest distance from it in each
    block."""


@dataclass(frozen=True)
class Place:
    """The position of a rank's part within the blocks of the full matrix."""

    row: int = 0
    column: int = 0
    columns: int = 0
    """Number of blocks in a row of the full matrix; 0 if it is the same as in the part."""


def shapes_of(*shape: int) -> Nf4:
    """Return the tensors of a matrix or stack of this shape, on meta."""
    *rows, columns = shape
    blocks = -(-columns // NF4_BLOCK)
    groups = -(-math.prod(rows) * blocks // NF4_SCALE_BLOCK)
    return Nf4(
        torch.empty((*rows, columns // 2), dtype=torch.uint8, device="meta"),
        torch.empty((*rows, blocks), dtype=torch.uint8, device="meta"),
        torch.empty(1 + groups, device="meta"),
    )


def pair_table(device: torch.device | str) -> Tensor:
    """Return (256, 2): the two weights represented by each byte of codes."""
    book = torch.tensor(NF4, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([book[byte // 16], book[byte % 16]], dim=1)


def _dynamic_levels() -> tuple[float, ...]:
    """Return the format's values: 0, 1, and in each of seven decades the midpoints of equal intervals, with both signs.
    Each decade has twice as many intervals as the one below."""
    positive = [0.0, 1.0]
    negative = []
    for exponent in range(7):
        ends = torch.linspace(0.1, 1.0, 2**exponent + 1)
        middles = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (exponent - 6)).tolist()
        positive += middles
        negative += [-middle for middle in middles]
    return tuple(sorted([*negative, *positive]))


DYNAMIC = _dynamic_levels()
"""The 256 values in [-1, 1] of the dynamic 8-bit format, ascending."""


def magnitude_table(device: torch.device | str) -> Tensor:
    return torch.tensor(DYNAMIC, device=device)


@torch.no_grad()
def quantise(weight_FD: Tensor) -> Nf4:
    """Quantise a full fp32 matrix, or stack, with an even number of columns to NF4."""
    *rows, columns = weight_FD.shape
    blocks = F.pad(weight_FD, (0, -columns % NF4_BLOCK)).view(-1, NF4_BLOCK)
    largest = blocks.abs().amax(dim=1)
    scaled = blocks / torch.where(largest > 0, largest, 1.0)[:, None]
    codes = _nearest(torch.tensor(NF4, device=weight_FD.device), scaled).view(*rows, -1)[..., :columns]
    packed = codes[..., ::2] * 16 + codes[..., 1::2]

    # Quantise the magnitudes
    mean = largest.mean()
    groups = -(-len(largest) // NF4_SCALE_BLOCK)
    centred = largest.new_zeros(groups * NF4_SCALE_BLOCK)
    centred[: len(largest)] = largest - mean
    grouped = centred.view(groups, NF4_SCALE_BLOCK)
    furthest = grouped.abs().amax(dim=1)
    scaled = grouped / torch.where(furthest > 0, furthest, 1.0)[:, None]
    magnitudes = _nearest(magnitude_table(largest.device), scaled).flatten()[: len(largest)]
    return Nf4(packed, magnitudes.view(*rows, -1), torch.cat([mean[None], furthest]))


def _nearest(table: Tensor, values: Tensor) -> Tensor:
    """Return the index of the nearest entry of an ascending table, as uint8."""
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(values, middles, out_int32=True).to(torch.uint8)


def dequantise(held: Nf4, place: Place, pairs: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights (F, D) in `dtype`, rounded once from fp32. `pairs` and `levels` are lookup tables."""
    *stacked, half = held.codes.shape
    held = Nf4(held.codes.flatten(0, -2), held.magnitudes.flatten(0, -2), held.scales)
    rows = held.codes.shape[0]
    columns = 2 * half
    largest_FN = magnitudes_of(held, place, levels)
    weight_FD = torch.empty((rows, columns), dtype=dtype, device=held.codes.device)
    step = max(1, NF4_CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        # A separate function, so that the previous rows are freed before the next ones are computed.
        weight_FD[part] = _multiply_out(held.codes[part], largest_FN[part], pairs)
    return weight_FD.view(*stacked, columns)


def _multiply_out(codes: Tensor, largest_FN: Tensor, pairs: Tensor) -> Tensor:
    """Return the weights of some rows, fp32."""
    values_FD = pairs.index_select(0, codes.flatten().int()).view(len(codes), -1)
    blocks = values_FD.shape[1] // NF4_BLOCK
    whole, rest = values_FD.split([blocks * NF4_BLOCK, values_FD.shape[1] - blocks * NF4_BLOCK], dim=1)
    whole.unflatten(1, (blocks, NF4_BLOCK)).mul_(largest_FN[:, :blocks, None])
    rest.mul_(largest_FN[:, blocks:])
    return values_FD


def magnitudes_of(held: Nf4, place: Place, levels: Tensor) -> Tensor:
    """Return each block's largest magnitude (F, N), fp32. Blocks of magnitudes continue from row to row of the full
    matrix."""
    (rows, columns), device = held.magnitudes.shape, held.magnitudes.device
    row_F1 = torch.arange(place.row, place.row + rows, device=device)[:, None]
    column_N = torch.arange(place.column, place.column + columns, device=device)
    group_FN = (row_F1 * (place.columns or columns) + column_N) // NF4_SCALE_BLOCK
    return levels[held.magnitudes.int()] * held.scales[1:][group_FN] + held.scales[0]
