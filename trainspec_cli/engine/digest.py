"""One digest for a model's weights, the same for every layout."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over the full parameters in name order, each as its name and its little-endian bytes.

    Called by every rank together; one full parameter at a time is held.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(name.encode())
        digest.update(full.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
