"""Reference implementations of the operations in fp64, which every kernel is compared with.

Arguments are those of the kernels. Memory does not matter here: scores, logits and decays are held whole.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trainspec_cli.engine.batch import IGNORED_TARGET


def attention(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    heads_a_group = q_BHSE.shape[1] // k_BKTE.shape[1]
    k_BHTE, v_BHTE = (x.repeat_interleave(heads_a_group, dim=1) for x in (k_BKTE, v_BKTE))
    scores = q_BHSE @ k_BHTE.mT * (1 / math.sqrt(q_BHSE.shape[-1]) if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril() if mask is None else mask
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v_BHTE


def rms_norm(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def rope(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2), as a complex number, by its angle."""
    first, second = x_BSHE.chunk(2, dim=-1)
    half, seq_len = first.shape[-1], x_BSHE.shape[1]
    turn = torch.complex(cos_SE[:seq_len, None, :half].contiguous(), sin_SE[:seq_len, None, :half].contiguous())
    turned = torch.complex(first.contiguous(), second.contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, _chunk: object) -> Tensor:
    return F.cross_entropy(x_TD @ weight_VD.T, targets_T, ignore_index=IGNORED_TARGET, reduction="sum")


def grouped_matmul(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    expert_M = torch.repeat_interleave(torch.arange(len(counts_E), device=x_MD.device), counts_E)
    return torch.cat([x_MD[expert_M == expert] @ weight for expert, weight in enumerate(weight_EDF)])


def ssd_scan(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, c_BSGN: Tensor) -> Tensor:
    """Compute attention of c on b, scaled by the decay between the two tokens (arXiv:2405.21060, section 4)."""
    heads_a_group = x_BSHP.shape[2] // b_BSGN.shape[2]
    b, c = (states.repeat_interleave(heads_a_group, dim=2) for states in (b_BSGN, c_BSGN))
    faded_BHS = (dt_BSH * a_H).cumsum(1).transpose(1, 2)
    decay = (faded_BHS[..., :, None] - faded_BHS[..., None, :]).tril().exp().tril()
    scores = torch.einsum("bqhn,bkhn->bhqk", c, b) * decay
    return torch.einsum("bhqk,bkhp->bqhp", scores, x_BSHP * dt_BSH[..., None])
