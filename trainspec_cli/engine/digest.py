"""Compute digests of weights: a SHA-256 that is the same for every layout, and a fast digest for comparing replica
groups."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.shares import Share, unique_shares


@torch.no_grad()
def weights_sha256(shares: Sequence[Share], pipeline: dist.ProcessGroup) -> str:
    """Return a SHA-256 over each parameter's name and the SHA-256 of its little-endian bytes, in name order. Called
    collectively by all ranks. Only one full parameter is in memory at a time."""
    own = {share.name: _sha256(share.gather()) for share in unique_shares(shares)}
    stages = gather_json(own, _read_digests, pipeline)
    digest = hashlib.sha256()
    for name, parameter in sorted({item for stage in stages for item in stage.items()}):
        digest.update(f"{name} {parameter}\n".encode())
    return digest.hexdigest()


def _read_digests(received: Mapping[str, str]) -> dict[str, str]:
    if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in received.values()):
        raise ValueError("a parameter's digest is not a SHA-256")
    return dict(received)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@torch.no_grad()
def local_digest(shares: Sequence[Share]) -> Tensor:
    """Return the sum of the bits of this rank's parameters, read as integers: (1,) int64. Any single bit flip changes
    it."""
    return sum_bits([share.local.detach() for share in shares])


@torch.no_grad()
def sum_bits(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the bits of fp32 tensors (or of byte tensors), read as integers: (1,) int64."""
    words = [tensor if tensor.dtype == torch.uint8 else tensor.view(torch.int32) for tensor in tensors]
    sums = [of_tensor.sum(dtype=torch.int64) for of_tensor in words if of_tensor.numel()]
    return torch.stack(sums).sum(0, keepdim=True) if sums else torch.zeros(1, dtype=torch.int64)


def diverging_groups(digests: Sequence[Tensor]) -> list[int]:
    """Return the indices of the groups that differ from the majority or, if there is no majority (two groups), of all
    groups."""
    values = [int(digest) for digest in digests]
    counted = Counter(values).most_common(2)
    if len(counted) < 2:
        return []
    (usual, most), (_, next_most) = counted
    return [place for place, value in enumerate(values) if value != usual or most == next_most]


# Find NaN and infinity in tensors, without creating another tensor of the same size.


NOT_FINITE = "values that are not finite (NaN or infinity)"
"""The reason given for rejecting a file."""
REMEDY = "try a lower optim.lr, a longer optim.schedule.warmup_steps, or precision=bf16 instead of fp8"
"""A hint for a run that diverged."""


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; integers always are. Waits for the device."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    least, greatest = tensor.detach().aminmax()
    return bool(least.isfinite() & greatest.isfinite())


def count_not_finite(tensor: Tensor) -> int:
    return int((~tensor.isfinite()).sum())


# Types of the batches passed between the data, model and step modules, which do not import one another.


MicroBatch = tuple[Tensor, ...]
"""(tokens, targets), each (B, S) of int64, on the device; or (images (B, C, ...) of fp32, labels of int64). If
attention is limited to documents, (tokens, targets, documents), with each token's document number.
"""

IGNORED_TARGET = -1
"""The target value that the loss ignores."""


def held_part(micro_batch: MicroBatch, positions_S: Tensor | None) -> MicroBatch:
    """Return the part of each sequence that a rank holds, at `positions_S`; None means all positions."""
    if positions_S is None:
        return micro_batch
    return tuple(tensor[:, positions_S] for tensor in micro_batch)


# Time marks in the computation: on a CPU, host times; on an accelerator, events in the current stream.


Mark = float | torch.Event
Span = tuple[Mark, Mark]
"""The marks at the start and the end of some work."""


def mark(*, on_gpu: bool) -> Mark:
    """Mark the current moment; on an accelerator, the moment when the current stream reaches this point."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.Event(enable_timing=True)
    event.record()
    return event


def wait_for(moment: Mark) -> None:
    """Wait until the device has reached `moment`."""
    if isinstance(moment, torch.Event):
        moment.synchronize()


def elapsed_s(start: Mark, end: Mark) -> float:
    """Return the time between two moments, in seconds. On a GPU, the device must have reached both."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        return start.elapsed_time(end) / 1e3
    return float(end) - float(start)  # type: ignore[arg-type]
