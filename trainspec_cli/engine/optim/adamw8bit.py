"""AdamW with both moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), in plain torch operations.

A moment is stored as codes from the paper's dynamic map, one per value, and fp32 scales, one per block of a row. A
scale is the block's largest magnitude. Blocks do not cross rows, so each block is on one rank, however rows are
distributed. All ZeRO layouts have the same blocks, compute the same updates, and can read one another's checkpoints.

Shapes: R rows, C values per row, N blocks per row, K values per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from trainspec_cli.engine.optim.whole import Group, Guard, GuardedOptimizer
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.training import BLOCK, QUANTISED_ROW, QUANTISED_SIZE

EXPONENTS = 7
"""Number of decades that the map covers."""
CHUNK_VALUES = 2**24
"""Number of values that are updated at a time, in fp32."""


def is_quantised(share: Share) -> bool:
    """Return whether the moments of a parameter are kept in 8 bits. This does not depend on the layout."""
    shape = share.full_shape
    return len(shape) > 1 and shape.numel() >= QUANTISED_SIZE and math.prod(shape[row_dim(shape) :]) >= QUANTISED_ROW


def row_dim(shape: torch.Size) -> int:
    """Return the first dimension within a row: the last one for stacked matrices (experts), otherwise the second, so
    that a filter is a row."""
    return 2 if len(shape) == 3 else 1


def dynamic_map(device: torch.device, *, signed: bool) -> Tensor:
    """Return the 256 values of the 8-bit dynamic tree, in order (arXiv:2110.02861, section 1.3).

    Each power of ten from 1e-7 to 1 has twice as many evenly spaced values as the one below. The code's bits after the
    exponent select one of these values; unsigned maps have one more such bit. 0 and 1 are added.
    """
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        parts = 2 ** (exponent + (0 if signed else 1))
        borders = [0.1 + 0.9 * part / parts for part in range(parts + 1)]
        middles = [(low + high) / 2 * 10.0 ** (exponent + 1 - EXPONENTS) for low, high in pairwise(borders)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), device=device)


@dataclass(frozen=True)
class Codebook:
    """The code values for quantised moments."""

    values: Tensor
    borders: Tensor
    """The midpoints between neighbouring values: above a midpoint, the upper value is nearer."""
    signed: bool

    @staticmethod
    def make(device: torch.device, *, signed: bool) -> Codebook:
        values = dynamic_map(device, signed=signed)
        return Codebook(values, (values[:-1] + values[1:]) / 2, signed)

    def quantise(self, values_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes_RC of uint8, scales_RN). The code of a value is that of the nearest value in the map.

        With an unsigned map (for the second moment), values become 0 only in a block of zeros, because the first moment
        is divided by the square root of the second.
        """
        blocks_RNK = _blocks(values_RC)
        scales_RN = blocks_RNK.abs().amax(-1)
        divisors_RN = torch.where(scales_RN > 0, scales_RN, 1.0)
        codes = torch.bucketize(blocks_RNK / divisors_RN[..., None], self.borders, out_int32=True)
        codes = codes if self.signed else codes.clamp_(min=1)
        return codes.to(torch.uint8).flatten(1)[:, : values_RC.shape[1]], scales_RN

    def dequantise(self, codes_RC: Tensor, scales_RN: Tensor) -> Tensor:
        values_RNK = _blocks(self.values[codes_RC.int()])
        return (values_RNK * scales_RN[..., None]).flatten(1)[:, : codes_RC.shape[1]]


def _blocks(x_RC: Tensor) -> Tensor:
    """Return x in blocks, with the last block of each row padded with zeros."""
    missing = -x_RC.shape[1] % BLOCK
    return (F.pad(x_RC, (0, missing)) if missing else x_RC).unflatten(1, (-1, BLOCK))


class AdamW8bit(GuardedOptimizer):
    """Trains parameter groups that have a rule with 8-bit moments, and all other groups with plain AdamW."""

    def __init__(self, groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, lr, betas, eps)
        device = self.param_groups[0]["params"][0].device
        self.books = Codebook.make(device, signed=True), Codebook.make(device, signed=False)

    def start_rule(self, parameter: Tensor, like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        lead = parameter.shape[: row_dim(parameter.shape)]
        row = parameter.shape[row_dim(parameter.shape) :]
        blocks = -(-row.numel() // BLOCK)
        state = {"step": torch.zeros((), device=parameter.device)}
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = like(parameter.new_empty(parameter.shape, dtype=torch.uint8))
            state[f"{moment}_scale"] = like(parameter.new_empty((*lead, blocks)))
        return state

    def update_group(self, group: Group, guard: Guard) -> None:
        for parameter in group["params"]:
            if parameter.grad is None or not parameter.numel():
                continue
            state = self.state[parameter]
            dim = row_dim(parameter.shape)
            guard.set_(state["step"], state["step"] + 1)
            flat = {
                name: tensor.flatten(0, dim - 1).flatten(1)
                for name, tensor in (state | {"weight": parameter, "gradient": parameter.grad}).items()
                if tensor.dim()
            }
            rows = max(1, CHUNK_VALUES // flat["weight"].shape[1])
            for start in range(0, len(flat["weight"]), rows):
                chunk = {name: tensor[start : start + rows] for name, tensor in flat.items()}
                self._update_rows(chunk, state["step"], group, guard)

    def _update_rows(self, rows: dict[str, Tensor], step: Tensor, group: Group, guard: Guard) -> None:
        """Update some rows of the weight and of its moments in place, with AdamW in fp32 (arXiv:1711.05101)."""
        beta1, beta2 = group["betas"]
        gradient = rows["gradient"] / guard.scale
        first_book, second_book = self.books
        first = first_book.dequantise(rows["exp_avg"], rows["exp_avg_scale"]).lerp_(gradient, 1 - beta1)
        second = second_book.dequantise(rows["exp_avg_sq"], rows["exp_avg_sq_scale"])
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for name, moment, book in (("exp_avg", first, first_book), ("exp_avg_sq", second, second_book)):
            codes, scales = book.quantise(moment)
            guard.set_(rows[name], codes)
            guard.set_(rows[f"{name}_scale"], scales)
        del gradient, codes, scales
        denominator = second.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        change = first.div_(denominator).mul_(group["lr"] / (1 - beta1**step))
        guard.set_(rows["weight"], (rows["weight"] * (1 - group["lr"] * group["weight_decay"])).sub_(change))
