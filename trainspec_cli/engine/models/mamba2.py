"""Mamba-2 (arXiv:2405.21060): a linear recurrence over tokens, computed in blocks as matmuls.

The state of a head is h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t^T, and its output y_t = h_t c_t. Within a block, this
equals masked attention with queries c and keys b; states are passed from block to block (section 6, listing 1). Decays
are computed in fp32.

Shapes: B samples, S tokens per sample, D hidden size, I inner size, G groups, R heads per group, H = G x R heads, P
head size, N state size, C blocks of Q tokens, W convolution taps.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.layers import precise
from trainspec_cli.recipe.keys.model import CONV_TAPS, SCAN_BLOCK, HybridModel

STEP_RANGE = (1e-3, 0.1)
"""Range of initial values of the step dt, log-uniform."""
DECAY_RANGE = (1.0, 16.0)
"""Range of initial values of -a, uniform."""


def selective_scan(
    x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, c_BSGN: Tensor, block: int = SCAN_BLOCK
) -> Tensor:
    """Return y (B, S, H, P), without the skip connection. `dt` and `a` (negative) are at least fp32; the heads of a
    group share b and c."""
    seq_len = x_BSHP.shape[1]
    groups = b_BSGN.shape[2]
    block = min(block, seq_len)
    x, dt, b, c = (_into_blocks(tensor, block) for tensor in (x_BSHP, dt_BSH, b_BSGN, c_BSGN))
    decay_log = (dt * a_H).unflatten(-1, (groups, -1)).permute(0, 1, 3, 4, 2).cumsum(-1)  # B C G R Q
    x = (x * dt[..., None].to(x.dtype)).unflatten(3, (groups, -1))  # B C Q G R P
    # In separate functions, so that the scores are freed before states are computed.
    y = _within_blocks(x, decay_log, b, c) + _from_earlier_blocks(x, decay_log, b, c)
    return y.flatten(1, 2)[:, :seq_len].flatten(2, 3)


def _into_blocks(tensor: Tensor, block: int) -> Tensor:
    """Split (B, S, ...) into (B, C, Q, ...), padded with zeros, which do not change the state, because their step dt is
    0."""
    padding = (*(0, 0) * (tensor.dim() - 2), 0, -tensor.shape[1] % block)
    return F.pad(tensor, padding).unflatten(1, (-1, block))


def _within_blocks(x: Tensor, decay_log: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the attention of queries c to keys b, scaled by the decay between the two tokens: (B, C, Q, G, R, P)."""
    block = x.shape[2]
    later = torch.ones(block, block, dtype=torch.bool, device=x.device).triu(1)
    decay = (decay_log[..., :, None] - decay_log[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores = torch.einsum("bcqgn,bckgn->bcgqk", c, b)
    faded = (scores[:, :, :, None] * decay).to(x.dtype)
    return torch.einsum("bcgrqk,bckgrp->bcqgrp", faded, x)


def _from_earlier_blocks(x: Tensor, decay_log: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the contribution of the state at the beginning of each block to the block's tokens: (B, C, Q, G, R, P)."""
    to_end = (decay_log[..., -1:] - decay_log).exp().permute(0, 1, 4, 2, 3)[..., None]
    added = torch.einsum("bcqgn,bcqgrp->bcgrpn", b, x * to_end.to(x.dtype))
    # Entry (..., c, z) of `weights` is the decay of block z's state when block c begins; 0 for z >= c. Its logarithm is
    # a sum over the blocks in between, because differences of cumulative sums would lose precision.
    total_C = decay_log[..., -1].permute(0, 2, 3, 1)
    blocks = total_C.shape[-1]
    between = torch.ones(blocks, blocks, dtype=torch.bool, device=total_C.device).tril(-1)
    # Entry (c, z) sums the totals of z < k < c: row k - 1 contributes from row k on.
    shifted = F.pad(total_C[..., :-1], (1, 0))[..., :, None].expand(*total_C.shape, blocks)
    entered = torch.arange(blocks, device=total_C.device)
    summed = shifted.where(entered[:, None] > entered + 1, 0.0).cumsum(-2)
    weights = summed.masked_fill(~between, -torch.inf).exp()
    entering = torch.einsum("bgrcz,bzgrpn->bcgrpn", weights, added.to(weights.dtype)).to(x.dtype)
    from_begin = decay_log.exp().permute(0, 1, 4, 2, 3)[..., None]
    return torch.einsum("bcqgn,bcgrpn->bcqgrp", c, entering) * from_begin.to(x.dtype)


class CausalConv(nn.Module):
    """A depthwise convolution over the last `CONV_TAPS` tokens."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, CONV_TAPS))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x_BSI: Tensor) -> Tensor:
        x_BIS = F.pad(x_BSI.transpose(1, 2), (CONV_TAPS - 1, 0))
        return F.conv1d(x_BIS, self.weight[:, None], self.bias, groups=len(self.weight)).transpose(1, 2)


class Mamba2(nn.Module):
    """The mixer of one layer. Each projection has a separate matrix and convolution, so that heads and groups can be
    split over ranks. The numbers of heads and groups follow from the matrices' shapes."""

    ssd_scan = staticmethod(selective_scan)

    def __init__(self, model: HybridModel):
        super().__init__()
        heads = model.mamba_heads
        inputs = model.hidden_size
        inner = heads * model.mamba_head_dim
        states = model.mamba_groups * model.mamba_state_size
        self.head_dim = model.mamba_head_dim
        self.state_size = model.mamba_state_size
        self.group_size = inner // model.mamba_groups
        self.norm_eps = model.norm_eps
        self.step_limits = (model.mamba_step_min, model.mamba_step_max) if model.limits_step else None
        self.z, self.x = nn.Linear(inputs, inner, bias=False), nn.Linear(inputs, inner, bias=False)
        self.b, self.c = nn.Linear(inputs, states, bias=False), nn.Linear(inputs, states, bias=False)
        self.dt = nn.Linear(inputs, heads, bias=False)
        self.conv_x, self.conv_b, self.conv_c = CausalConv(inner), CausalConv(states), CausalConv(states)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.norm = nn.Parameter(torch.empty(inner))
        self.out = nn.Linear(inner, inputs, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSHP = F.silu(self.conv_x(self.x(x_BSD))).unflatten(-1, (-1, self.head_dim))
        b_BSGN = F.silu(self.conv_b(self.b(x_BSD))).unflatten(-1, (-1, self.state_size))
        c_BSGN = F.silu(self.conv_c(self.c(x_BSD))).unflatten(-1, (-1, self.state_size))
        dt_BSH = F.softplus(precise(self.dt(x_BSD)) + precise(self.dt_bias))
        if self.step_limits is not None:
            dt_BSH = dt_BSH.clamp(*self.step_limits)
        y_BSHP = self.ssd_scan(x_BSHP, dt_BSH, -precise(self.a_log).exp(), b_BSGN, c_BSGN)
        y_BSHP = y_BSHP + x_BSHP * self.skip[:, None]
        gated = (y_BSHP.flatten(2) * F.silu(self.z(x_BSD))).unflatten(-1, (-1, self.group_size))
        return self.out(F.rms_norm(gated, (self.group_size,), eps=self.norm_eps).flatten(-2) * self.norm)


def init_scan(leaf: str, full: Tensor, generator: torch.Generator) -> bool:
    """Set a parameter of `Mamba2` to its initial values, as in the reference implementation. Return False for matrices
    and for parameters that start at one, which are initialised as in other modules."""
    if leaf.startswith("conv_"):
        full.uniform_(-(CONV_TAPS**-0.5), CONV_TAPS**-0.5, generator=generator)
    elif leaf == "dt_bias":  # softplus(bias) is log-uniform over `STEP_RANGE`
        step = full.uniform_(*map(math.log, STEP_RANGE), generator=generator).exp_()
        full.copy_(step + (-torch.expm1(-step)).log())
    elif leaf == "a_log":
        full.uniform_(*DECAY_RANGE, generator=generator).log_()
    else:
        return False
    return True
