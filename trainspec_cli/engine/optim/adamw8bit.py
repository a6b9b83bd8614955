"""AdamW with both moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), in plain operations of torch.

A moment is the code of each value, by the paper's dynamic map, and an fp32 scale for each block of a row: its largest
magnitude. Blocks end with rows, so that a block lies on one rank wherever rows are spread: every ZeRO layout has the
same blocks, computes the same update, and reads the others' checkpoints.

Shapes: R rows, C values of a row, N blocks of a row, K values of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from trainspec_cli.engine.optim.guarded import Group, Guard, GuardedOptimizer
from trainspec_cli.engine.shares import Share
from trainspec_cli.spec.recipe.optim import BLOCK, QUANTISED_ROW, QUANTISED_SIZE

EXPONENTS = 7
"""Powers of ten that the map covers."""
CHUNK_VALUES = 2**24
"""Values that are updated at a time, in fp32."""


def is_quantised(share: Share) -> bool:
    """Return whether the moments of a parameter are kept in 8 bits, which is alike in all layouts."""
    shape = share.full_shape
    return len(shape) > 1 and shape.numel() >= QUANTISED_SIZE and math.prod(shape[row_dim(shape) :]) >= QUANTISED_ROW


def row_dim(shape: torch.Size) -> int:
    """Return the first dimension of a row: of stacked matrices (experts) the last, else the second, so that a filter
    is a row."""
    return 2 if len(shape) == 3 else 1


@cache
def dynamic_map(device: torch.device, *, signed: bool) -> Tensor:
    """Return the 256 values of the dynamic tree of 8 bits, in order (arXiv:2110.02861, section 1.3).

    In each power of ten from 1e-7 to 1 are twice as many as in the one below, evenly spread: the magnitudes' bits after
    the exponent; those without a sign have one bit more. Besides there are 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        borders = torch.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1, dtype=torch.float64)
        middles = ((borders[:-1] + borders[1:]) / 2 * 10.0 ** (exponent + 1 - EXPONENTS)).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _borders(device: torch.device, *, signed: bool) -> Tensor:
    """Return the limits between the values of the map, above each of which the next one is nearer."""
    values = dynamic_map(device, signed=signed)
    return (values[:-1] + values[1:]) / 2


def quantise(values_RC: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """-> (codes_RC of uint8, scales_RN): of each value the nearest in the map.

    Without a sign, nothing but a block of zeros becomes 0: the root of a second moment divides the first, and a first
    moment beside it may be left.
    """
    blocks_RNK = _blocks(values_RC)
    scales_RN = blocks_RNK.abs().amax(-1)
    divisors = torch.where(scales_RN > 0, scales_RN, 1.0)
    codes = torch.bucketize(blocks_RNK / divisors[..., None], _borders(values_RC.device, signed=signed), out_int32=True)
    codes = codes if signed else codes.clamp_(min=1)
    return codes.to(torch.uint8).flatten(1)[:, : values_RC.shape[1]], scales_RN


def dequantise(codes_RC: Tensor, scales_RN: Tensor, *, signed: bool) -> Tensor:
    values_RNK = _blocks(dynamic_map(codes_RC.device, signed=signed)[codes_RC.int()])
    return (values_RNK * scales_RN[..., None]).flatten(1)[:, : codes_RC.shape[1]]


def _blocks(x_RC: Tensor) -> Tensor:
    """Return x by blocks, the last of a row filled up with zeros."""
    missing = -x_RC.shape[1] % BLOCK
    return (F.pad(x_RC, (0, missing)) if missing else x_RC).unflatten(1, (-1, BLOCK))


class AdamW8bit(GuardedOptimizer):
    """Groups with the rule `quantised` have moments of 8 bits."""

    def start_rule(self, parameter: Tensor, like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        lead, row = parameter.shape[: row_dim(parameter.shape)], parameter.shape[row_dim(parameter.shape) :]
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
            state, dim = self.state[parameter], row_dim(parameter.shape)
            guard.set_(state["step"], state["step"] + 1)
            flat = {
                name: tensor.flatten(0, dim - 1).flatten(1)
                for name, tensor in (state | {"weight": parameter, "gradient": parameter.grad}).items()
                if tensor.dim()
            }
            rows = max(1, CHUNK_VALUES // flat["weight"].shape[1])
            for start in range(0, len(flat["weight"]), rows):
                chunk = {name: tensor[start : start + rows] for name, tensor in flat.items()}
                _update_rows(chunk, state["step"], group, guard)


def _update_rows(rows: dict[str, Tensor], step: Tensor, group: Group, guard: Guard) -> None:
    """Update some rows of the weight and its moments in place, as arXiv:1711.05101 does, in fp32."""
    beta1, beta2 = group["betas"]
    gradient = rows["gradient"] / guard.scale
    first = dequantise(rows["exp_avg"], rows["exp_avg_scale"], signed=True).lerp_(gradient, 1 - beta1)
    second = dequantise(rows["exp_avg_sq"], rows["exp_avg_sq_scale"], signed=False)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    for name, moment, signed in (("exp_avg", first, True), ("exp_avg_sq", second, False)):
        codes, scales = quantise(moment, signed=signed)
        guard.set_(rows[name], codes)
        guard.set_(rows[f"{name}_scale"], scales)
    denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    change = first.div_(denominator).mul_(group["lr"] / (1 - beta1**step))
    guard.set_(rows["weight"], rows["weight"] * (1 - group["lr"] * group["weight_decay"]) - change)
