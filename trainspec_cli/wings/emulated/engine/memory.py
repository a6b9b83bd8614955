"""The memory of an emulated device: addresses as assigned by c10's caching allocator, backed by host memory.

A freed block returns to its stream's pool immediately, as on CUDA, and the next allocation may reuse its bytes. Work
that is still queued in another stream then reads overwritten data, unless `record_stream` has kept the block."""

from __future__ import annotations

import mmap
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.memory.caching_allocator import CachingAllocator, MemoryBlock
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog, LoggedBlock, find_origin
from trainspec_cli.wings.emulated.engine.costs import TIME
from trainspec_cli.wings.emulated.engine.streams import HOST, LOCK, SCHEDULER, Stream, StreamEvent, current_stream


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that has the same shape, strides and storage offset."""
    offset = int(tensor.storage_offset())
    if not offset:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    whole = torch.empty(offset + extent(tensor), dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), offset)


def described(value: Any) -> Any:
    """Replace an operation's argument for shape inference: a tensor by one without memory, a device by torch's meta
    device."""
    if isinstance(value, Tensor):
        return without_values(value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def extent(tensor: Tensor) -> int:
    """Return the number of elements that a tensor spans in memory, from its first element to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


ARENA_BYTES = 64 * GIB
"""Size of a pool's address space. Only written pages use host memory."""


MAP_NORESERVE = 0x4000
"""Linux flag to reserve address space without backing it with memory until it is written."""


def map_host_memory(nbytes: int) -> Tensor:
    """Return zeros as bytes. Only pages that are written use memory."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(memory, dtype=torch.uint8)


class EmulatedMemory:
    """The device's allocators, one per stream. They share the device's capacity."""

    def __init__(self, capacity_bytes: float = 80 * GIB, *, expandable: bool = True):
        self.capacity_bytes = capacity_bytes
        self.expandable = expandable
        self.retries = 0
        self.failures = 0
        self._allocators: dict[int, CachingAllocator] = {}
        self._arenas: dict[int, Tensor] = {}
        self._kept: list[tuple[Allocation, list[StreamEvent]]] = []
        """Freed blocks that other streams still use."""
        self._freed: defaultdict[int, list[Tensor]] = defaultdict(list)
        """In order mode: memory returned to each allocator since its last allocation."""
        self.peak_bytes = 0
        self.peak_reserved_bytes = 0
        self.has_values = True
        """If False, blocks are counted, but not backed by host memory."""
        self.log: AllocationLog | None = None
        self.on_change: Callable[[int, int], None] | None = None
        """Called with the allocated and the reserved bytes after each allocation and release."""

    @property
    def allocated_bytes(self) -> int:
        return sum(one.allocated_bytes for one in self._allocators.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(one.reserved_bytes for one in self._allocators.values())

    def allocate(self, nbytes: int, stream: Stream, shape: str = "") -> Allocation:
        """Allocate a block. Raises torch.OutOfMemoryError, which names `shape`, if it does not fit even after all
        unused memory is released."""
        self._retry_in_time(stream)
        with LOCK:
            self._reclaim()
            allocator = self._allocators.get(id(stream))
            if allocator is None:
                allocator = self._allocators[id(stream)] = CachingAllocator(expandable=self.expandable)
            block = self._try(allocator, nbytes)
            if block is None:
                self.retries += 1
                self.release_unused()
                block = self._try(allocator, nbytes)
            if block is None:
                self.failures += 1
                if self.log is not None:
                    self.log.fail(nbytes, shape)
                used, held, total = self.allocated_bytes / GIB, self.reserved_bytes / GIB, self.capacity_bytes / GIB
                wanted = f"{nbytes / GIB:.2f} GiB" + (f" for {shape}" if shape else "")
                raise torch.OutOfMemoryError(
                    f"emulated device out of memory: tried to allocate {wanted} at {find_origin()}; of {total:.2f} "
                    f"GiB, {used:.2f} GiB are allocated and {held - used:.2f} GiB reserved but unallocated"
                )
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            if self.on_change is not None:
                self.on_change(self.allocated_bytes, self.reserved_bytes)
            entry = self.log.add(int(block.size), shape) if self.log is not None else None
            allocation = Allocation(self, allocator, block, stream, entry)
            self._overwrite(allocation)
            return allocation

    def _retry_in_time(self, stream: Stream) -> None:
        """Spend the virtual time of an allocator retry, if memory is currently fragmented. The loader's thread is
        exempt: it has a separate clock, which is unrelated to the steps."""
        if TIME.costs is None or not HOST.is_shared:
            return
        with LOCK:  # work that is running now cannot wait for its own stream
            is_inside = SCHEDULER.is_running
        if not is_inside and (seconds := TIME.costs.retry_s(HOST.now_s)):
            stream.finish()
            HOST.work(seconds)
            TIME.costs.retried_s = HOST.now_s
            with LOCK:
                self.retries += 1
                self.release_unused()

    def _try(self, allocator: CachingAllocator, nbytes: int) -> MemoryBlock | None:
        others_bytes = self.reserved_bytes - allocator.reserved_bytes
        allocator.capacity_bytes = self.capacity_bytes - others_bytes
        try:
            return allocator.allocate(nbytes)
        except MemoryError:
            return None

    def release_unused(self) -> None:
        for allocator in self._allocators.values():
            allocator.release_unused()

    def free(self, allocation: Allocation) -> None:
        with LOCK:
            if allocation.used_by:
                self._kept.append((allocation, [stream.record_event() for stream in allocation.used_by]))
            else:
                self._release(allocation)

    def _reclaim(self) -> None:
        left = []
        for allocation, events in self._kept:
            if all(event.is_reached for event in events):
                self._release(allocation)
            else:
                left.append((allocation, events))
        self._kept = left

    def _release(self, allocation: Allocation) -> None:
        if SCHEDULER.random is not None and self.has_values:
            self._freed[id(allocation.allocator)].append(self._bytes_of(allocation.block))
        allocation.allocator.free(allocation.block)
        if allocation.entry is not None and self.log is not None:
            self.log.end(allocation.entry)
        if self.on_change is not None:
            self.on_change(self.allocated_bytes, self.reserved_bytes)

    def _overwrite(self, allocation: Allocation) -> None:
        """In order mode, fill a new block with NaN (-1 in integers), in its stream. Nothing may rely on its content,
        and another stream may still read it as part of a tensor that was freed too early. Also fill all other freed
        memory, which a tensor of another size could get. Freed memory is not filled right away, because the stream may
        wait for the others before its next allocation, and nothing writes the memory until then."""
        freed = self._freed.pop(id(allocation.allocator), [])
        if SCHEDULER.random is not None and self.has_values:
            memories = [*freed, self._bytes_of(allocation.block)]

            def fill() -> None:
                for memory in memories:
                    memory.fill_(255)

            allocation.stream.run(fill)

    def _bytes_of(self, block: MemoryBlock) -> Tensor:
        return self.arena(block)[block.address : block.address + int(block.size)]

    def arena(self, block: MemoryBlock) -> Tensor:
        """Return the host memory behind a block's pool, as bytes."""
        key = id(block.pool)
        if key not in self._arenas:
            self._arenas[key] = map_host_memory(ARENA_BYTES)
        return self._arenas[key]

    def statistics(self) -> dict[str, int]:
        """Return the entries of torch.accelerator.memory_stats that the engine uses."""
        return {
            "allocated_bytes.all.current": self.allocated_bytes,
            "allocated_bytes.all.peak": self.peak_bytes,
            "reserved_bytes.all.current": self.reserved_bytes,
            "num_alloc_retries": self.retries,
            "num_ooms": self.failures,
        }


@dataclass
class Allocation:
    memory: EmulatedMemory
    allocator: CachingAllocator
    block: MemoryBlock
    stream: Stream
    entry: LoggedBlock | None
    used_by: set[Stream] = field(default_factory=set)


class DeviceStorage:
    """The bytes behind a tensor and its views. FSDP frees and allocates parameters by resizing their storage."""

    def __init__(self, nbytes: int, memory: EmulatedMemory, shape: str = ""):
        self._memory = memory
        self._shape = shape
        self._nbytes = 0
        self._allocation: Allocation | None = None
        self.exchange: Any = None
        """The event that marks the end of the exchange producing these bytes, and the exchange's inputs. Kept until a
        stream waits for the exchange."""
        self.resize_(nbytes)

    def resize_(self, nbytes: int) -> DeviceStorage:
        if nbytes != self._nbytes:
            self._free()
            if nbytes:
                self._allocation = self._memory.allocate(nbytes, current_stream(), self._shape)
            self._nbytes = nbytes
        return self

    def _free(self) -> None:
        if self._allocation is not None:
            self._memory.free(self._allocation)
            self._allocation = None

    def __del__(self) -> None:
        self._free()

    def resizable(self) -> bool:
        return True

    def size(self) -> int:
        return self._nbytes

    def nbytes(self) -> int:
        return self._nbytes

    def data_ptr(self) -> int:
        return id(self) if self._nbytes else 0

    def record_stream(self, stream: Stream) -> None:
        if self._allocation is not None and stream is not self._allocation.stream:
            self._allocation.used_by.add(stream)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the host memory of a tensor in this storage. Without values, return a tensor that only has the
        shape."""
        shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
        if self._allocation is None and tensor.numel():
            raise RuntimeError("the memory of this tensor has been freed")
        if not self._memory.has_values:
            return without_values(tensor)
        if self._allocation is None:
            return torch.empty_strided(shape, strides, dtype=dtype)
        block = self._allocation.block
        arena = self._memory.arena(block)
        host = arena[block.address : block.address + self._nbytes]
        offset = block.address // dtype.itemsize + int(tensor.storage_offset())
        return host.view(dtype).as_strided(shape, strides, offset)
