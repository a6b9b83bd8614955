"""Inputs of an operation at given shapes: random numbers like those of a run.

Shapes: as in the kernels' own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.batch import IGNORED_TARGET
from trainspec_cli.engine.kernels import reference

Shape = tuple[int, ...]
Call = tuple[Shape | float | None, ...]
"""An operation's arguments: the shape of a tensor, the value of a number, None for anything else."""

CHECKED_TOKENS = 1024
"""Tokens per sample in the comparison with fp64, which holds all scores and logits."""


@dataclass(frozen=True)
class Inputs:
    arguments: tuple[Any, ...]
    leaves: tuple[int, ...]
    """Indices of the arguments that need gradients."""

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same numbers in another format."""
        return Inputs(tuple(_convert(argument, dtype) for argument in self.arguments), self.leaves)

    def with_gradients(self) -> Inputs:
        for index in self.leaves:
            self.arguments[index].requires_grad_()
        return self


def _convert(argument: Any, dtype: torch.dtype) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().to(dtype) if argument.is_floating_point() else argument


def make_inputs(op: str, call: Call, dtype: torch.dtype, device: torch.device, chunk: Any = None) -> Inputs:
    """Make random inputs for a call; `chunk` is the module for one chunk's loss of the linear cross-entropy."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: Any, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).to(dtype)

    def uniform(shape: Any, low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) * (high - low) + low

    return OPERATIONS[op].make(call, normal, uniform, device, chunk)


def describe_call(call: Call) -> str:
    """Describe a call by its shapes: `(8, 6, 512, 64) (8, 6, 512, 64) ...`."""
    return " ".join(str(argument) for argument in call if isinstance(argument, tuple))


# One function per operation


def _attention(call: Call, normal: Any, _uniform: Any, device: torch.device, _chunk: Any) -> Inputs:
    """Make inputs whose heads are adjacent in memory, as projections leave them."""
    q, k, v = (normal(_swap(shape)).transpose(1, 2) for shape in call[:3])
    mask = None
    if isinstance(call[3], tuple):
        row, column = (torch.arange(size, device=device) for size in call[3][-2:])
        mask = (column <= row[:, None] + call[3][-1] - call[3][-2]).expand(call[3])
    return Inputs((q, k, v, mask, call[4]), (0, 1, 2))


def _swap(shape: Any) -> Shape:
    batch, heads, tokens, size = shape
    return batch, tokens, heads, size


def _rms_norm(call: Call, normal: Any, _uniform: Any, _device: torch.device, _chunk: Any) -> Inputs:
    return Inputs((normal(call[0]), normal(call[1]), call[2]), (0, 1))


def _swiglu(call: Call, normal: Any, _uniform: Any, _device: torch.device, _chunk: Any) -> Inputs:
    return Inputs((normal(call[0]), normal(call[1])), (0, 1))


def _rope(call: Call, normal: Any, uniform: Any, _device: torch.device, _chunk: Any) -> Inputs:
    tokens, size = call[1]  # type: ignore[misc]
    x = normal(call[0])
    angles = uniform((tokens, size // 2), 0.0, 6.28).repeat(1, 2)
    return Inputs((x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)), (0,))


def _linear_cross_entropy(call: Call, normal: Any, uniform: Any, _device: torch.device, chunk: Any) -> Inputs:
    """Make inputs of which one target in sixteen is ignored."""
    vocabulary, size = call[1]  # type: ignore[misc]
    targets = uniform(call[2], 0, vocabulary).long().clamp_max(vocabulary - 1)
    targets[::16] = IGNORED_TARGET
    return Inputs((normal(call[0]), normal(call[1], size**-0.5), targets, chunk), (0, 1))


def _grouped_matmul(call: Call, normal: Any, _uniform: Any, device: torch.device, _chunk: Any) -> Inputs:
    """Make inputs with an even number of rows per expert, up to the remainder."""
    rows, experts = call[0][0], call[1][0]  # type: ignore[index]
    counts = torch.full((experts,), rows // experts, dtype=torch.int64, device=device)
    counts[: rows % experts] += 1
    return Inputs((normal(call[0]), normal(call[1], call[1][1] ** -0.5), counts), (0, 1))  # type: ignore[index]


def _ssd_scan(call: Call, normal: Any, uniform: Any, _device: torch.device, _chunk: Any) -> Inputs:
    """Make steps and decays like initial values (`models.mamba2`), in fp32 at least."""
    x, b, c = (normal(call[index]) for index in (0, 3, 4))
    wide = torch.promote_types(x.dtype, torch.float32)
    dt, a = uniform(call[1], 0.001, 0.1).to(wide), -uniform(call[2], 1.0, 16.0).to(wide)
    return Inputs((x, dt, a, b, c), (0, 1, 2, 3, 4))


# The comparison with fp64


def _clip(shape: Any, *dims: int) -> Any:
    """Clip a shape to `CHECKED_TOKENS` along `dims`."""
    if not isinstance(shape, tuple):
        return shape
    return tuple(min(size, CHECKED_TOKENS) if dim in dims else size for dim, size in enumerate(shape))


def _two(shape: Any) -> Any:
    """Reduce (samples, ...) to two samples: with one, a kernel could confuse samples unnoticed."""
    return (min(2, shape[0]), *shape[1:]) if isinstance(shape, tuple) and len(shape) > 2 else shape


def _check_attention(call: Call) -> Call:
    *heads, mask, scale = call
    q, k, v = (_two(_clip(shape, 2)) for shape in heads)
    return q, k, v, _two(_clip(mask, 2, 3) if isinstance(mask, tuple) and len(mask) > 2 else _clip(mask, 0, 1)), scale


def _check_samples(call: Call) -> Call:
    """Reduce shapes of (samples, tokens, ...)."""
    return tuple(_two(_clip(shape, 1)) if isinstance(shape, tuple) and len(shape) > 2 else shape for shape in call)


def _check_rows(call: Call) -> Call:
    """Reduce shapes of (rows, ...): the inputs, their matrix, and the values of each row."""
    x, weight, others, *rest = call
    return _clip(x, 0), weight, _clip(others, 0), *rest


@dataclass(frozen=True)
class TriedOperation:
    make: Callable[..., Inputs]
    reduce: Callable[[Call], Call]
    """Reduces a call to two samples of at most `CHECKED_TOKENS`, for the comparison with fp64."""
    reference: Callable[..., Tensor]
    """The operation in fp64."""


OPERATIONS = {
    "attention": TriedOperation(_attention, _check_attention, reference.attention),
    "rms_norm": TriedOperation(_rms_norm, _check_samples, reference.rms_norm),
    "swiglu": TriedOperation(_swiglu, _check_samples, reference.swiglu),
    "rope": TriedOperation(_rope, _check_samples, reference.rope),
    "linear_cross_entropy": TriedOperation(_linear_cross_entropy, _check_rows, reference.linear_cross_entropy),
    "grouped_matmul": TriedOperation(_grouped_matmul, _check_rows, reference.grouped_matmul),
    "ssd_scan": TriedOperation(_ssd_scan, _check_samples, reference.ssd_scan),
}
