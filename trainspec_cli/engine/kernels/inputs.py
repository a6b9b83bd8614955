"""The test of each operation: inputs with given shapes, random numbers similar to those of a run, and a reference.

Shapes: as in the kernels' own modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainspec_cli.engine.digest import IGNORED_TARGET

Shape = tuple[int, ...]
Call = tuple[Shape | float | None, ...]
"""An operation's arguments: the shape of a tensor, the value of a number, and None for anything else."""

CHECKED_TOKENS = 1024
"""Number of tokens per sample in the comparison with fp64, which keeps all scores and logits in memory."""


@dataclass(frozen=True)
class Inputs:
    arguments: tuple[Any, ...]
    leaves: tuple[int, ...]
    """Indices of the arguments that need gradients."""

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same numbers in a different format."""
        found = []
        for argument in self.arguments:
            is_number = isinstance(argument, Tensor) and argument.is_floating_point()
            found.append(argument.detach().to(dtype) if is_number else argument)
        return Inputs(tuple(found), self.leaves)

    def with_gradients(self) -> Inputs:
        for index in self.leaves:
            self.arguments[index].requires_grad_()
        return self


def make_inputs(op: str, call: Any, dtype: torch.dtype, device: torch.device, chunk: Any = None) -> Inputs:
    """Make random inputs for a call (`Call`), with numbers similar to those of a run. `chunk`: the module of the linear
    cross-entropy for the loss of one chunk."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: Any, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).to(dtype)

    def uniform(shape: Any, low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) * (high - low) + low

    if op == "attention":
        *heads, mask, scale = call
        # Heads are adjacent in memory, as in the output of projections.
        q, k, v = (normal((batch, tokens, number, size)).transpose(1, 2) for batch, number, tokens, size in heads)
        if mask is not None:  # causal up to the last query
            row, column = (torch.arange(size, device=device) for size in mask[-2:])
            mask = (column <= row[:, None] + mask[-1] - mask[-2]).expand(mask)
        return Inputs((q, k, v, mask, scale), (0, 1, 2))
    if op == "rope":
        tokens, size = call[1]
        x = normal(call[0])
        angles = uniform((tokens, size // 2), 0.0, 6.28).repeat(1, 2)
        return Inputs((x, angles.cos().to(dtype), angles.sin().to(dtype)), (0,))
    if op == "linear_cross_entropy":
        vocabulary, size = call[1]
        targets = uniform(call[2], 0, vocabulary).long().clamp_max(vocabulary - 1)
        targets[::16] = IGNORED_TARGET
        return Inputs((normal(call[0]), normal(call[1], size**-0.5), targets, chunk), (0, 1))
    if op == "grouped_matmul":
        rows = call[0][0]
        experts, inputs, _ = call[1]
        counts = torch.full((experts,), rows // experts, dtype=torch.int64, device=device)
        counts[: rows % experts] += 1
        return Inputs((normal(call[0]), normal(call[1], inputs**-0.5), counts), (0, 1))
    if op == "ssd_scan":
        x, b, c = (normal(call[index]) for index in (0, 3, 4))
        # Steps and decays are similar to initial values (`models.mamba2`), in at least fp32.
        wide = torch.promote_types(dtype, torch.float32)
        dt = uniform(call[1], 0.001, 0.1).to(wide)
        a = -uniform(call[2], 1.0, 16.0).to(wide)
        return Inputs((x, dt, a, b, c), (0, 1, 2, 3, 4))
    return Inputs(tuple(normal(given) if isinstance(given, tuple) else given for given in call), (0, 1))


def describe_call(call: Call) -> str:
    """Describe a call by its shapes: `(8, 6, 512, 64) (8, 6, 512, 64) ...`."""
    return " ".join(str(argument) for argument in call if isinstance(argument, tuple))


# References in fp64, with which every kernel is compared; scores, logits and decays are kept in full


def fp64_attention(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    heads_a_group = q_BHSE.shape[1] // k_BKTE.shape[1]
    k_BHTE, v_BHTE = (x.repeat_interleave(heads_a_group, dim=1) for x in (k_BKTE, v_BKTE))
    scores = q_BHSE @ k_BHTE.mT * (1 / math.sqrt(q_BHSE.shape[-1]) if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril() if mask is None else mask
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v_BHTE


def fp64_rms_norm(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D


def fp64_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def fp64_rope(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2), taken as a complex number, by its angle."""
    first, second = x_BSHE.chunk(2, dim=-1)
    half = first.shape[-1]
    seq_len = x_BSHE.shape[1]
    turn = torch.complex(cos_SE[:seq_len, None, :half].contiguous(), sin_SE[:seq_len, None, :half].contiguous())
    turned = torch.complex(first.contiguous(), second.contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def fp64_linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, _chunk: object) -> Tensor:
    return F.cross_entropy(x_TD @ weight_VD.T, targets_T, ignore_index=IGNORED_TARGET, reduction="sum")


def fp64_grouped_matmul(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    expert_M = torch.repeat_interleave(torch.arange(len(counts_E), device=x_MD.device), counts_E)
    return torch.cat([x_MD[expert_M == expert] @ weight for expert, weight in enumerate(weight_EDF)])


def fp64_ssd_scan(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, c_BSGN: Tensor) -> Tensor:
    """Compute attention of c on b, scaled by the decay between the two tokens (arXiv:2405.21060, section 4)."""
    heads_a_group = x_BSHP.shape[2] // b_BSGN.shape[2]
    b, c = (states.repeat_interleave(heads_a_group, dim=2) for states in (b_BSGN, c_BSGN))
    faded_BHS = (dt_BSH * a_H).cumsum(1).transpose(1, 2)
    decay = (faded_BHS[..., :, None] - faded_BHS[..., None, :]).tril().exp().tril()
    scores = torch.einsum("bqhn,bkhn->bhqk", c, b) * decay
    return torch.einsum("bhqk,bkhp->bqhp", scores, x_BSHP * dt_BSH[..., None])


# Shapes of the comparison with fp64


def _clip(shape: Any, *dims: int) -> Any:
    """Clip a shape to `CHECKED_TOKENS` along `dims`."""
    if not isinstance(shape, tuple):
        return shape
    return tuple(min(size, CHECKED_TOKENS) if dim in dims else size for dim, size in enumerate(shape))


def _two(shape: Any) -> Any:
    """Reduce (samples, ...) to two samples. With only one, a kernel that mixes up samples would not be noticed."""
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
    reduce: Callable[[Call], Call]
    """Reduces a call to two samples of at most `CHECKED_TOKENS`, for the comparison with fp64."""
    reference: Callable[..., Tensor]
    """The operation in fp64."""


OPERATIONS = {
    "attention": TriedOperation(_check_attention, fp64_attention),
    "rms_norm": TriedOperation(_check_samples, fp64_rms_norm),
    "swiglu": TriedOperation(_check_samples, fp64_swiglu),
    "rope": TriedOperation(_check_samples, fp64_rope),
    "linear_cross_entropy": TriedOperation(_check_rows, fp64_linear_cross_entropy),
    "grouped_matmul": TriedOperation(_check_rows, fp64_grouped_matmul),
    "ssd_scan": TriedOperation(_check_samples, fp64_ssd_scan),
}
