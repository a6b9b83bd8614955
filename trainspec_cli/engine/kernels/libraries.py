"""Triton kernels from libraries (extra `kernels`), only for CUDA: Liger Kernel's fused operations (arXiv:2410.10989,
BSD-2) and fla-core's state-space scan (MIT).

Shapes: B samples, S tokens per sample, H heads, E head size, T tokens, D hidden size, V vocabulary. For the scan: G
groups, P head size, N state size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainspec_cli.engine.digest import IGNORED_TARGET


def rms_norm(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    """Normalise by RMS. The backward pass does not overwrite dy, which the residual stream also needs."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return LigerRMSNormFunction.apply(x, weight_D, eps, 0.0, "llama", False)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def rope(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate a copy of x, along with dummy keys of one head, because Liger's kernel rotates queries and keys together
    and in place.

    All samples share the tables of cosines and sines.
    """
    from liger_kernel.ops.rope import LigerRopeFunction

    seq_len = x_BSHE.shape[1]
    x_BHSE = x_BSHE.clone().transpose(1, 2)
    keys = torch.empty_like(x_BHSE[:, :1])
    turned, *_ = LigerRopeFunction.apply(x_BHSE, keys, cos_SE[None, :seq_len], sin_SE[None, :seq_len])
    return turned.transpose(1, 2)


def linear_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, _chunk: object = None, softcap: float | None = None
) -> Tensor:
    """Return the summed loss in fp32. The gradient of the head is also summed in fp32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    options = {} if softcap is None else {"softcap": softcap}
    loss = liger_fused_linear_cross_entropy(
        x_TD, weight_VD, targets_T, ignore_index=IGNORED_TARGET, reduction="sum", accum_dtype=torch.float32, **options
    )
    return loss.float()


def ssd_scan(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, c_BSGN: Tensor) -> Tensor:
    """Scan like `models.mamba2.selective_scan`; return (B, S, H, P).

    h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t^T is simple gated linear attention, with c as queries, b as keys, dt x as
    values and dt a as the logarithm of the gate, one number per head (arXiv:2405.21060, section 7).
    """
    from fla.ops.simple_gla import chunk_simple_gla

    heads_a_group = x_BSHP.shape[2] // b_BSGN.shape[2]
    b_BSHN, c_BSHN = (states.repeat_interleave(heads_a_group, dim=2) for states in (b_BSGN, c_BSGN))
    values_BSHP = x_BSHP * dt_BSH[..., None].to(x_BSHP.dtype)
    y_BSHP, _ = chunk_simple_gla(q=c_BSHN, k=b_BSHN, v=values_BSHP, g=dt_BSH * a_H, scale=1.0)
    return y_BSHP
