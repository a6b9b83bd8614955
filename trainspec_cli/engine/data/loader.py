"""The batches of a run: which samples a rank reads at a step is a pure function, how they arrive is prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.corpus.samples import locate, num_samples, rank_positions
from trainspec_cli.corpus.shards import TokenFolder
from trainspec_cli.engine.batch import MicroBatch, held_part

PREFETCHED_STEPS = 2


@dataclass(frozen=True)
class BatchPlan:
    """Everything that decides which tokens a rank sees at a step."""

    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    seed: int
    rank: int
    """Among the data-parallel ranks."""
    num_ranks: int
    positions_S: Tensor | None = None
    """Of each sequence, the positions this rank holds (context parallelism); None: all."""


def read_step(folder: TokenFolder, plan: BatchPlan, step: int) -> list[MicroBatch]:
    """This rank's micro-batches of `step`: (tokens, targets), each (B, S), on the host."""
    return read_positions(folder, plan, rank_positions(step, plan.global_batch_size, plan.rank, plan.num_ranks))


def read_positions(folder: TokenFolder, plan: BatchPlan, positions: np.ndarray) -> list[MicroBatch]:
    """The micro-batches of the samples at `positions`, in this order."""
    samples = num_samples(folder.num_tokens("train"), plan.seq_len)
    _, indices = locate(positions, samples, plan.seed)
    windows = np.stack([folder.tokens("train", int(i) * plan.seq_len, plan.seq_len + 1) for i in indices])
    parts = torch.from_numpy(windows).split(plan.micro_batch_size)
    pairs = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]
    return [held_part(pair, plan.positions_S) for pair in pairs]


def batches(
    folder: TokenFolder, plan: BatchPlan, device: torch.device, start: int, end: int
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of steps `start` to `end` - 1 on the device."""
    return read_ahead(lambda step: read_step(folder, plan, step), device, start, end)


def read_ahead(
    read_step: Callable[[int], list[MicroBatch]], device: torch.device, start: int, end: int
) -> Iterator[list[MicroBatch]]:
    """What `read_step` gives for steps `start` to `end` - 1, on the device, read ahead by a thread."""

    def read(step: int) -> list[MicroBatch]:
        return [_stage(pair, device) for pair in read_step(step)]

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
        coming = [pool.submit(read, step) for step in range(start, min(start + PREFETCHED_STEPS, end))]
        for step in range(start, end):
            ready = coming.pop(0).result()
            if step + PREFETCHED_STEPS < end:
                coming.append(pool.submit(read, step + PREFETCHED_STEPS))
            yield bring(ready, device)


def bring(micro_batches: list[MicroBatch], device: torch.device) -> list[MicroBatch]:
    return [
        (inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        for inputs, targets in micro_batches
    ]


def _stage(pair: tuple[Tensor, Tensor], device: torch.device) -> MicroBatch:
    """Pinned on a GPU's host, so that the copy to the chip runs beside the computation."""
    if device.type != "cuda":
        return pair
    return pair[0].pin_memory(), pair[1].pin_memory()
