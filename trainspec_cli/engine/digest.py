"""One digest for a model's weights, the same for every layout."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.shares import Share, unique_shares


@torch.no_grad()
def weights_sha256(shares: Sequence[Share], pipeline: dist.ProcessGroup) -> str:
    """SHA-256 over the parameters in name order, each as its name and the SHA-256 of its little-endian bytes.

    Called by every rank together; one full parameter at a time is held.
    """
    own = {share.name: _sha256(share.gather()) for share in unique_shares(shares)}
    stages = gather_json(own, _read_digests, pipeline)
    digest = hashlib.sha256()
    for name, parameter in sorted({item for stage in stages for item in stage.items()}):
        digest.update(f"{name} {parameter}\n".encode())
    return digest.hexdigest()


def _read_digests(told: Mapping[str, str]) -> dict[str, str]:
    if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in told.values()):
        raise ValueError("a parameter's digest is no SHA-256")
    return dict(told)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
