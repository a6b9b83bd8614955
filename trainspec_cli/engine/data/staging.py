"""Staging of batches to the device, in memory that is reused.

On a GPU a batch is assembled in pinned host memory and copied from there on its own stream, steps before it is needed:
the computation waits for the copy on the device, and the host never waits. On a CPU nothing has to be copied.

The life of a slot: free -> filled by the loader's thread -> taken by a step -> free when the next batch is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from trainspec_cli.engine.accelerators import make_current, on_chip
from trainspec_cli.engine.batch import MicroBatch

PREFETCHED_STEPS = 2
SLOTS = PREFETCHED_STEPS + 1
"""The prefetched batches, and the one in use."""


@dataclass
class Traffic:
    h2d_copies: int = 0
    h2d_bytes: int = 0
    allocations: int = 0
    """Buffers allocated, on the host and on the device: none once every slot has held the largest batch."""

    def add(self, other: Traffic) -> None:
        self.h2d_copies += other.h2d_copies
        self.h2d_bytes += other.h2d_bytes
        self.allocations += other.allocations


class Slot:
    """Memory for a step's batch."""

    def __init__(self, device: torch.device):
        self.on_gpu = on_chip(device)
        self._device = device
        self._host: list[Tensor] = []
        self._chip: list[Tensor] = []
        if self.on_gpu:
            self.copied, self.used = (torch.Event(device, enable_timing=False) for _ in range(2))
        self.batch: list[MicroBatch] = []
        """The batch on the device, once it is copied."""
        self.traffic = Traffic()

    def fill(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Fill the slot, on a GPU in the stream of copies, after the last batch's copy has ended."""
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
        """Return the buffer of this index, or a new one if the shape of batches has changed."""
        if place < len(buffers) and buffers[place].shape == like.shape and buffers[place].dtype == like.dtype:
            return buffers[place]
        self.traffic.add(Traffic(allocations=1))
        buffers[place:] = [
            torch.empty(like.shape, dtype=like.dtype, **where),  # type: ignore[call-overload]
            *buffers[place + 1 :],
        ]
        return buffers[place]


class Staging:
    """Stages one rank's batches. The loader's thread calls `stage`, the training thread everything else."""

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
            make_current(self._device)  # a thread starts on the first device, and would allocate there
        with self._copies or nullcontext():
            slot.fill(micro_batches)
        return slot

    def take(self, slot: Slot) -> list[MicroBatch]:
        """Return the batch on the device; it is valid until the next one is taken."""
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
        """Return the traffic of the batches taken since the last `cut`."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic
