"""Reading a run's batches: this rank's samples of a step as micro-batches on the device, read ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.data.corpus.rows import Row
from trainspec_cli.data.corpus.samples import SampleOrder
from trainspec_cli.engine.batch import MicroBatch, held_part
from trainspec_cli.engine.data.staging import Slot, Staging
from trainspec_cli.run.recovery.hang import READING_THREAD


def positions_of(own: OwnSamples) -> np.ndarray:
    """Return the positions to read for `own`, one micro-batch after another.

    Of a rank that has no samples one position, whose sample shows the shapes of its empty micro-batches.
    """
    runs = [np.arange(start, start + size, dtype=np.int64) for start, size in zip(own.starts, own.sizes, strict=True)]
    return np.concatenate(runs) if own.samples else np.array(own.starts[:1])


def cut_micro_batches(whole: MicroBatch, own: OwnSamples) -> list[MicroBatch]:
    """Cut the samples at `positions_of(own)` into micro-batches."""
    parts = zip(*(tensor[: own.samples].split(own.sizes) for tensor in whole), strict=True)
    return list(parts)


def read_tokens(order: SampleOrder, own: OwnSamples, positions_S: Tensor | None) -> list[MicroBatch]:
    """Return the micro-batches of `own`; `positions_S` are the positions of a sequence that this rank holds."""
    whole = to_tensors(order.rows(positions_of(own)))
    return [held_part(part, positions_S) for part in cut_micro_batches(whole, own)]


def to_tensors(rows: Sequence[Row]) -> MicroBatch:
    """Return (tokens, targets), and the documents if rows have them; each (B, S) of int64."""
    fields = [(row.tokens, row.targets, *([] if row.documents is None else [row.documents])) for row in rows]
    return tuple(torch.from_numpy(np.stack(field)) for field in zip(*fields, strict=True))


class BatchReader:
    """Brings this rank's micro-batches to the device, and reads ahead what most likely follows."""

    def __init__(self, read: Callable[[OwnSamples], list[MicroBatch]], staging: Staging):
        self._read, self._staging = read, staging
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=READING_THREAD)
        self._ahead: deque[tuple[OwnSamples, Future[Slot]]] = deque()

    def take(self, wanted: OwnSamples, following: Iterable[OwnSamples]) -> list[MicroBatch]:
        """Return the micro-batches of `wanted`, valid until the next call, and start to read what may follow.

        `following` are the samples of the next steps, as far as they are foreseen: `PREFETCHED_STEPS` at most.
        """
        if not self._ahead or self._ahead[0][0] != wanted:
            self.forget()
            self._start(wanted)
        batch = self._staging.take(self._ahead.popleft()[1].result())
        for own in list(following)[len(self._ahead) :]:
            self._start(own)
        return batch

    def _start(self, own: OwnSamples) -> None:
        self._ahead.append((own, self._pool.submit(lambda: self._staging.stage(self._read(own)))))

    def forget(self) -> None:
        """Drop what was read ahead: it is not wanted any more."""
        while self._ahead:
            _, slot = self._ahead.pop()
            if not slot.cancel() and slot.exception() is None:
                self._staging.give_back(slot.result())

    def close(self) -> None:
        self.forget()
        self._pool.shutdown()
