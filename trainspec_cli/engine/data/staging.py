"""Batches on their way to the chip, in memory that is used again and again.

On a GPU a batch is put together in pinned host memory and copied from there on a stream of its own, steps before it is
needed: the computation waits for the copy on the device, the host for nothing. On a CPU nothing has to be copied.

A slot goes round: free -> filled by the loader's thread -> taken by a step -> free when the next batch is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from trainspec_cli.engine.batch import MicroBatch

PREFETCHED_STEPS = 2
SLOTS = PREFETCHED_STEPS + 1
"""Those that are read ahead, and the one that is computed with."""


@dataclass
class Traffic:
    """What bringing batches took."""

    h2d_copies: int = 0
    h2d_bytes: int = 0
    allocations: int = 0
    """Buffers made, on the host and on the device: none once every slot has held the largest batch."""

    def add(self, other: Traffic) -> None:
        self.h2d_copies += other.h2d_copies
        self.h2d_bytes += other.h2d_bytes
        self.allocations += other.allocations


class Slot:
    """Room for a step's batch."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._device = device
        self._host: list[Tensor] = []
        self._chip: list[Tensor] = []
        if self.on_gpu:
            self.copied, self.used = torch.cuda.Event(), torch.cuda.Event()
        self.batch: list[MicroBatch] = []
        """On the device, once it is copied."""
        self.traffic = Traffic()

    def fill(self, micro_batches: Sequence[MicroBatch]) -> None:
        """On a GPU in the stream of the copies. The last batch's copy has ended before its memory is written to."""
        self.traffic = Traffic()
        if self.on_gpu:
            self.copied.synchronize()
            self.used.wait()
        tensors = [tensor for part in micro_batches for tensor in part]
        brought = iter([self._bring(place, tensor) for place, tensor in enumerate(tensors)])
        self.batch = [tuple(next(brought) for _ in part) for part in micro_batches]
        if self.on_gpu:
            self.copied.record()

    def _bring(self, place: int, tensor: Tensor) -> Tensor:
        host = self._buffer(self._host, place, tensor, pin_memory=self.on_gpu)
        host.copy_(tensor)
        if not self.on_gpu:
            return host
        chip = self._buffer(self._chip, place, tensor, device=self._device)
        chip.copy_(host, non_blocking=True)
        self.traffic.add(Traffic(h2d_copies=1, h2d_bytes=tensor.nbytes))
        return chip

    def _buffer(self, buffers: list[Tensor], place: int, like: Tensor, **where: object) -> Tensor:
        """The one that was made for this place, unless batches have changed their shape."""
        if place < len(buffers) and buffers[place].shape == like.shape and buffers[place].dtype == like.dtype:
            return buffers[place]
        self.traffic.add(Traffic(allocations=1))
        buffers[place:] = [
            torch.empty(like.shape, dtype=like.dtype, **where),  # type: ignore[call-overload]
            *buffers[place + 1 :],
        ]
        return buffers[place]


class Staging:
    """Of one rank. `stage` is called by the loader's thread, all else by the one that trains."""

    def __init__(self, device: torch.device):
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(SLOTS):
            self._free.put(Slot(device))
        self._taken: Slot | None = None
        self._traffic = Traffic()

    def stage(self, micro_batches: Sequence[MicroBatch]) -> Slot:
        """Put a batch together and start its copy; waits where every slot is in use."""
        slot = self._free.get()
        if self._copies:
            torch.cuda.set_device(self._device)  # a thread begins on the first one, and would take memory there
        with torch.cuda.stream(self._copies):
            slot.fill(micro_batches)
        return slot

    def take(self, slot: Slot) -> list[MicroBatch]:
        """The batch on the device, for the computation that is started until the next one is taken."""
        if self._taken is not None:
            self.give_back(self._taken)
        self._taken = slot
        if slot.on_gpu:
            slot.copied.wait(torch.cuda.current_stream(self._device))
        self._traffic.add(slot.traffic)
        return slot.batch

    def give_back(self, slot: Slot) -> None:
        """What has been started with it may still be running."""
        if slot.on_gpu:
            slot.used.record(torch.cuda.current_stream(self._device))
        self._free.put(slot)

    def cut(self) -> Traffic:
        """Of the batches taken since the last `cut`."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic
