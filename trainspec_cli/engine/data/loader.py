"""Read a run's batches. A thread prefetches this rank's samples, as micro-batches on the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.data.corpus.labelled import LabelledSamples
from trainspec_cli.data.corpus.rows import Row, Rows, empty_row
from trainspec_cli.data.corpus.samples import SampleOrder, locate
from trainspec_cli.engine.accelerators import host_work, make_current, on_chip
from trainspec_cli.engine.digest import MicroBatch, held_part
from trainspec_cli.run.recovery.watch import READING_THREAD

# Copy batches to the device, in reused memory.
#
# On a GPU, a batch is assembled in pinned host memory and copied on a separate stream, several steps before it is
# needed. Only the device waits for the copy, not the host. On a CPU, nothing is copied.
#
# States of a slot: free -> filled by the loader's thread -> read by a step -> free when the next batch is read.


PREFETCHED_STEPS = 2
SLOTS = PREFETCHED_STEPS + 1
"""Number of slots: the prefetched batches, and the one in use."""


@dataclass
class Traffic:
    h2d_copies: int = 0
    h2d_bytes: int = 0
    allocations: int = 0
    """Number of buffers allocated on the host and the device. It stops growing once every slot has held the largest
    batch."""
    attended: int = 0
    """Sum of squared lengths of the sequences (or documents) that attention is limited to, counted on the host."""

    def add(self, other: Traffic) -> None:
        self.h2d_copies += other.h2d_copies
        self.h2d_bytes += other.h2d_bytes
        self.allocations += other.allocations
        self.attended += other.attended


def count_attended(micro_batch: MicroBatch) -> int:
    """Return `Traffic.attended` of a micro-batch on the host. Reading it from a device would require waiting for that
    device."""
    tokens, *others = micro_batch
    if len(others) < 2:
        return tokens.numel() * tokens.shape[-1]
    rows = others[1].reshape(-1, others[1].shape[-1])
    return sum(int(torch.bincount(row - row.min()).square().sum()) for row in rows)


class Slot:
    """Buffers for a step's batch."""

    def __init__(self, device: torch.device):
        self.on_gpu = on_chip(device)
        self._device = device
        self._host: list[Tensor] = []
        self._chip: list[Tensor] = []
        if self.on_gpu:
            self.copied, self.used = (torch.Event(device, enable_timing=False) for _ in range(2))
        self.batch: list[MicroBatch] = []
        """The batch on the device, once it has been copied."""
        self.traffic = Traffic()

    def fill(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Fill the slot. On a GPU, wait for the slot's last copy, and copy in the copy stream."""
        self.traffic = Traffic()
        if self.on_gpu:
            self.copied.synchronize()
            self.used.wait()
            host_work(self._device, "read")
        place = 0
        self.batch = []
        for part in micro_batches:
            brought = []
            for tensor in part:
                buffer = self._buffer(self._host, place, tensor, pin_memory=self.on_gpu)
                buffer.copy_(tensor)
                if self.on_gpu:
                    host = buffer
                    buffer = self._buffer(self._chip, place, tensor, device=self._device)
                    buffer.copy_(host, non_blocking=True)
                    self.traffic.add(Traffic(h2d_copies=1, h2d_bytes=tensor.nbytes))
                brought.append(buffer)
                place += 1
            self.batch.append(tuple(brought))
            self.traffic.add(Traffic(attended=count_attended(part)))
        if self.on_gpu:
            self.copied.record()

    def _buffer(self, buffers: list[Tensor], place: int, like: Tensor, **where: object) -> Tensor:
        """Return the buffer with this index, or a new one if the batch shape has changed."""
        if place < len(buffers) and buffers[place].shape == like.shape and buffers[place].dtype == like.dtype:
            return buffers[place]
        self.traffic.add(Traffic(allocations=1))
        buffers[place:] = [
            torch.empty(like.shape, dtype=like.dtype, **where),  # type: ignore[call-overload]
            *buffers[place + 1 :],
        ]
        return buffers[place]


class Staging:
    """Copies one rank's batches to the device. The loader's thread calls `stage`; the training thread calls all other
    methods."""

    def __init__(self, device: torch.device):
        self._device = device
        self._copies = torch.Stream(device) if on_chip(device) else None
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(SLOTS):
            self._free.put(Slot(device))
        self._taken: Slot | None = None
        self._traffic = Traffic()

    def stage(self, micro_batches: Sequence[MicroBatch]) -> Slot:
        """Assemble a batch and start its copy; wait if every slot is in use."""
        slot = self._free.get()
        if self._copies:
            make_current(self._device)  # otherwise this thread would allocate on the node's first device
        with self._copies or nullcontext():
            slot.fill(micro_batches)
        return slot

    def take(self, slot: Slot) -> list[MicroBatch]:
        """Return the batch on the device, which is valid until the next one is taken."""
        if self._taken is not None:
            self.give_back(self._taken)
        self._taken = slot
        if slot.on_gpu:
            slot.copied.wait(torch.accelerator.current_stream(self._device))
        self._traffic.add(slot.traffic)
        return slot.batch

    def give_back(self, slot: Slot) -> None:
        """Free the slot; computations on it may still be running."""
        if slot.on_gpu:
            slot.used.record(torch.accelerator.current_stream(self._device))
        self._free.put(slot)

    def cut(self) -> Traffic:
        """Return the counts for the batches taken since the last call."""
        traffic = self._traffic
        self._traffic = Traffic()
        return traffic


def positions_of(own: OwnSamples) -> np.ndarray:
    """Return the positions to read for `own`, one micro-batch after another. A rank without samples gets one position,
    whose sample determines the shapes of its empty micro-batches."""
    runs = [np.arange(start, start + size, dtype=np.int64) for start, size in zip(own.starts, own.sizes, strict=True)]
    return np.concatenate(runs) if own.samples else np.array(own.starts[:1])


def cut_micro_batches(whole: MicroBatch, own: OwnSamples) -> list[MicroBatch]:
    """Split the samples at `positions_of(own)` into micro-batches."""
    parts = zip(*(tensor[: own.samples].split(own.sizes) for tensor in whole), strict=True)
    return list(parts)


def read_tokens(order: SampleOrder, own: OwnSamples, positions_S: Tensor | None) -> list[MicroBatch]:
    """Return the micro-batches of `own`. `positions_S`: the positions of each sequence that this rank holds."""
    whole = to_tensors(order.rows(positions_of(own)))
    return [held_part(part, positions_S) for part in cut_micro_batches(whole, own)]


def to_tensors(rows: Sequence[Row]) -> MicroBatch:
    """Return (tokens, targets) or, if the rows have document numbers, (tokens, targets, documents), each (B, S) of
    int64."""
    fields = [(row.tokens, row.targets, *([] if row.documents is None else [row.documents])) for row in rows]
    return tuple(torch.from_numpy(np.stack(field)) for field in zip(*fields, strict=True))


class BatchReader:
    """Moves this rank's micro-batches to the device, and prefetches those that will most likely follow."""

    def __init__(self, read: Callable[[OwnSamples], list[MicroBatch]], staging: Staging):
        self._read = read
        self._staging = staging
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=READING_THREAD)
        self._ahead: deque[tuple[OwnSamples, Future[Slot]]] = deque()

    def take(self, wanted: OwnSamples, following: Iterable[OwnSamples]) -> list[MicroBatch]:
        """Return the micro-batches of `wanted`, valid until the next call, and start prefetching those that may follow.

        `following`: the expected samples of at most the next `PREFETCHED_STEPS` steps.
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
        """Drop the prefetched batches, which are no longer needed."""
        while self._ahead:
            _, slot = self._ahead.pop()
            if not slot.cancel() and slot.exception() is None:
                self._staging.give_back(slot.result())

    def close(self) -> None:
        self.forget()
        self._pool.shutdown()


# The batches of a run on images or volumes. A batch depends only on its samples' positions.


MAX_READERS = 16


class SampleLoader:
    """Reads samples with up to `MAX_READERS` threads, and returns them in order."""

    def __init__(self, samples: LabelledSamples, seed: int, num_readers: int):
        self.samples = samples
        self.seed = seed
        self._readers = ThreadPoolExecutor(max(1, min(MAX_READERS, num_readers)), thread_name_prefix="samples")

    @property
    def num_heldout(self) -> int:
        return self.samples.count("heldout")

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        """Return the micro-batches of `own` on the host. Every position has a different random crop."""
        positions = positions_of(own)
        _, indices = locate(positions, self.samples.count("train"), self.seed)
        return cut_micro_batches(self._read(indices, positions), own)

    def heldout_batches(self, size: int, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield (images, labels, number of real samples) for `rank`, with the same number of batches on every rank."""
        for turn in range(math.ceil(self.num_heldout / (size * num_ranks))):
            first = (turn * num_ranks + rank) * size
            wanted = np.arange(first, first + size)
            images, labels = self._read(np.minimum(wanted, self.num_heldout - 1), None)
            yield images, labels, int((wanted < self.num_heldout).sum())

    def _read(self, indices: np.ndarray, positions: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Return images (B, C, ...) in fp32 and labels in int64, at these positions or, without positions, from the
        held-out samples."""
        if positions is None:
            read = self._readers.map(self.samples.heldout, indices.tolist())
        else:
            generators = [np.random.default_rng([self.seed, position]) for position in positions.tolist()]
            read = self._readers.map(self.samples.train, indices.tolist(), generators)
        images, labels = zip(*read, strict=True)
        return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))


# Held-out text. Every row is read once, and every rank gets the same number of batches.


@dataclass(frozen=True)
class HeldoutLoss:
    nats: float
    tokens: int
    bytes: int
    """Size in bytes of the text in UTF-8; 0 if unknown."""

    @property
    def nats_per_token(self) -> float:
        return self.nats / max(1, self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss per byte, which does not depend on the tokenizer; None if the number of bytes is unknown."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def total(losses: Sequence[HeldoutLoss]) -> HeldoutLoss:
    """Return the loss of several texts as if they were a single text."""
    known = all(loss.bytes for loss in losses)
    return HeldoutLoss(
        nats=sum(loss.nats for loss in losses),
        tokens=sum(loss.tokens for loss in losses),
        bytes=sum(loss.bytes for loss in losses) if known else 0,
    )


def heldout_batches(rows: Rows, batch_size: int, rank: int, num_ranks: int) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches. The last batches are padded with rows that do not count towards the loss."""
    for turn in range(math.ceil(len(rows) / (batch_size * num_ranks))):
        first = (turn * num_ranks + rank) * batch_size
        read = [rows.read(index) for index in range(first, min(first + batch_size, len(rows)))]
        documents = rows.read(0).documents is not None
        yield to_tensors(read + [empty_row(rows.seq_len, documents=documents)] * (batch_size - len(read)))
