"""Rotary position embeddings (arXiv:2104.09864) and their scaling to longer contexts.

Shapes: B samples, S tokens per sample, H heads, E rotary dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainspec_cli.recipe.keys.model import RopeScaling


def rope_angles(
    seq_len: int, head_dim: int, theta: float, device: torch.device | None = None, scaling: RopeScaling | None = None
) -> Tensor:
    """Return the angles of the pairs (eq. 15): (S, E/2), fp32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        # Divide the frequencies of long wavelengths by the factor, keep those of short ones, and interpolate linearly
        # in between.
        if (
            scaling.kind == "llama3"
        ):  # Llama 3: the bounds are wavelengths; interpolate over the number of rotations within the original length
            turns = scaling.original_seq_len * frequencies / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            kept = kept.clamp(0, 1)
        else:  # YaRN: the bounds are rotation counts; interpolate over the frequency index

            def index_of(turns: float) -> float:
                return head_dim * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

            low = index_of(scaling.beta_fast)
            high = index_of(scaling.beta_slow)
            if scaling.whole_bounds:
                low = math.floor(low)
                high = math.ceil(high)
            low = max(low, 0)
            high = min(high, head_dim - 1)
            index = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
            kept = 1 - ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        frequencies = frequencies / scaling.factor * (1 - kept) + frequencies * kept
    return torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)


def apply_rope(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head, which is the pairing in Hugging Face's Llama."""
    seq_len = x_BSHE.shape[1]
    first, second = x_BSHE.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x_BSHE * cos_SE[:seq_len, None, :] + rotated * sin_SE[:seq_len, None, :]


def neighbours_to_halves(x: Tensor) -> Tensor:
    """Bring pairs (2i, 2i + 1) of the last dim to (i, i + E/2), where they stay: scores do not change if queries and
    keys have the same order."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def score_factor(scaling: RopeScaling | None) -> float:
    """Return the factor for attention scores in addition to 1 / sqrt(E): YaRN's softer softmax (arXiv:2309.00071, eq.
    22).

    Published models multiply the rotated queries and keys by its square root or, if only a part of the head is rotated
    (DeepSeek-V3), the scores by the full factor. Both give the same result.
    """
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return (0.1 * scaling.mscale * math.log(scaling.factor) + 1.0) ** 2
