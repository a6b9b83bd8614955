"""The batches of a run: the samples of a rank at a step are a pure function; reading is prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.corpus.rows import Row
from trainspec_cli.corpus.samples import SampleOrder, rank_positions
from trainspec_cli.engine.batch import MicroBatch, held_part
from trainspec_cli.engine.data.staging import PREFETCHED_STEPS, Slot, Staging


@dataclass(frozen=True)
class BatchPlan:
    """The settings that determine the tokens of a rank at a step."""

    global_batch_size: int
    micro_batch_size: int
    seed: int
    rank: int
    """The index among the data-parallel ranks."""
    num_ranks: int
    positions_S: Tensor | None = None
    """The positions of each sequence that this rank holds (context parallelism); None: all."""


def read_step(order: SampleOrder, plan: BatchPlan, step: int) -> list[MicroBatch]:
    """Return this rank's micro-batches of `step`, on the host."""
    return read_positions(order, plan, rank_positions(step, plan.global_batch_size, plan.rank, plan.num_ranks))


def read_positions(order: SampleOrder, plan: BatchPlan, positions: np.ndarray) -> list[MicroBatch]:
    """Return the micro-batches of the samples at `positions`, in this order."""
    rows = order.rows(positions)
    parts = [rows[start : start + plan.micro_batch_size] for start in range(0, len(rows), plan.micro_batch_size)]
    return [held_part(to_tensors(part), plan.positions_S) for part in parts]


def to_tensors(rows: Sequence[Row]) -> MicroBatch:
    """Return (tokens, targets), and the documents if rows have them; each (B, S) of int64."""
    fields = [(row.tokens, row.targets, *([] if row.documents is None else [row.documents])) for row in rows]
    return tuple(torch.from_numpy(np.stack(field)) for field in zip(*fields, strict=True))


def batches(order: SampleOrder, plan: BatchPlan, staging: Staging, start: int, end: int) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of steps `start` to `end` - 1, on the device."""
    return read_ahead(lambda step: read_step(order, plan, step), staging, start, end)


def read_ahead(
    read_step: Callable[[int], list[MicroBatch]], staging: Staging, start: int, end: int
) -> Iterator[list[MicroBatch]]:
    """Yield the batches of `read_step` for steps `start` to `end` - 1 on the device, prefetched by a thread.

    A batch is valid until the next one is requested: then its memory is reused.
    """

    def read(step: int) -> Slot:
        return staging.stage(read_step(step))

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
        coming = [pool.submit(read, step) for step in range(start, min(start + PREFETCHED_STEPS, end))]
        try:
            for step in range(start, end):
                batch = staging.take(coming.pop(0).result())
                if step + PREFETCHED_STEPS < end:
                    coming.append(pool.submit(read, step + PREFETCHED_STEPS))
                yield batch
        finally:
            for left in coming:
                if not left.cancel() and left.exception() is None:
                    staging.give_back(left.result())
