"""The state-space scan by fla-core (extra `kernels`, MIT): Triton, CUDA only; see `models.mamba2.selective_scan`.

h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t^T is simple gated linear attention with c for queries, b for keys, dt x for
values and dt a for the gate's logarithm, one number per head (arXiv:2405.21060, section 7).

Shapes: B samples, S tokens per sample, H heads, G groups, P head size, N state size.
"""

from __future__ import annotations

from torch import Tensor


def ssd_scan(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, c_BSGN: Tensor) -> Tensor:
    """Return (B, S, H, P)."""
    from fla.ops.simple_gla import chunk_simple_gla

    heads_a_group = x_BSHP.shape[2] // b_BSGN.shape[2]
    b_BSHN, c_BSHN = (states.repeat_interleave(heads_a_group, dim=2) for states in (b_BSGN, c_BSGN))
    values_BSHP = x_BSHP * dt_BSH[..., None].to(x_BSHP.dtype)
    y_BSHP, _ = chunk_simple_gla(q=c_BSHN, k=b_BSHN, v=values_BSHP, g=dt_BSH * a_H, scale=1.0)
    return y_BSHP
