"""Shapes as runs have them, small."""

from __future__ import annotations

from collections import Counter

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

CALLS = {
    "attention": [
        ((2, 4, 48, 16), (2, 4, 48, 16), (2, 4, 48, 16), None, None),
        ((2, 6, 33, 32), (2, 2, 33, 32), (2, 2, 33, 32), None, 0.1),  # heads share keys; no round number of tokens
        ((2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), (2, 1, 24, 24), 0.25),  # documents
        ((4, 4, 16, 16), (4, 2, 32, 16), (4, 2, 32, 16), (16, 32), 0.25),  # a window's blocks
    ],
    "rms_norm": [((2, 24, 64), (64,), 1e-5), ((2, 24, 4, 16), (16,), 1e-6), ((96, 40), (40,), None)],
    "swiglu": [((2, 24, 160), (2, 24, 160)), ((77, 48), (77, 48))],
    "rope": [((2, 24, 4, 16), (32, 16), (32, 16)), ((2, 32, 1, 64), (32, 64), (32, 64))],
    "linear_cross_entropy": [((96, 64), (512, 64), (96,), None), ((130, 32), (1000, 32), (130,), None)],
    "grouped_matmul": [((96, 32), (4, 32, 48), (4,)), ((50, 64), (8, 64, 32), (8,))],
    "ssd_scan": [((2, 96, 4, 16), (2, 96, 4), (4,), (2, 96, 2, 8), (2, 96, 2, 8)),
                 ((1, 300, 2, 8), (1, 300, 2), (2,), (1, 300, 1, 16), (1, 300, 1, 16))],
}  # fmt: skip
"""Operation -> calls, as `engine.tools.kernels` describes them."""

PARAMETERS = Counter({(64, 160): 3, (160, 64): 2, (64,): 5})
