"""Simulate PyTorch's caching allocator for CUDA devices, to find how many bytes it reserves for a sequence of
allocations.

The rules follow c10/cuda/CUDACachingAllocator.cpp. With and without expandable segments:

- a request is rounded up to 512 bytes; up to 1 MiB it is served by the small pool, otherwise by the large one;
- the smallest free block that is large enough is taken, and its remainder stays free as a separate block;
- a freed block is merged with its free neighbours.

By default, a pool consists of segments, each from one cudaMalloc: 2 MiB in the small pool, 20 MiB for requests below 10
MiB, otherwise the request rounded up to 2 MiB. Blocks of different segments never merge, and a large block is split
only if more than 1 MiB remains. Segments are kept until the device is full; then the segments without live blocks are
released.

With `expandable_segments:True`, a pool is one range of addresses that grows by pages of 2 MiB (small) or 20 MiB
(large), so that holes can merge with their neighbours. Blocks are split down to 512 bytes. The free block at the end of
the range is treated as if the range had grown to its maximum, so it is used last. When the device is full, the pages
inside free blocks are unmapped; their addresses are kept and are the first to be mapped again.

Only one stream is simulated. Other streams have separate pools, whose free blocks it cannot use.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

KIB = 2**10
MIB = 2**20
ROUNDING = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
MEDIUM_REQUEST = 10 * MIB
MEDIUM_SEGMENT = 20 * MIB
LARGE_ROUNDING = 2 * MIB


GROWS_SEGMENTS = frozenset({"nvidia"})
"""Device vendors for which the launcher and the planner use `expandable_segments:True`.

Builds for ROCm before torch 2.12 ignore it with a warning, and later ones were reported to crash with it (pytorch issue
187343) and to lose the contents of live blocks (ROCm issue 6603), so it is set only for NVIDIA.
"""


class MemoryBlock:
    """A part of a segment, with its neighbours `before` and `after`."""

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "pool", "size")

    def __init__(self, address: int, size: float, pool: _Pool, *, is_mapped: bool = True):
        self.address = address
        self.size = size
        """Size in bytes; infinite for the unmapped end of an address range."""
        self.pool = pool
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None
        self.is_free = not is_mapped
        self.is_mapped = is_mapped

    @property
    def reach(self) -> float:
        """Return the size of a free block after it has grown as far as possible."""
        grows = self.after is not None and not self.after.is_mapped
        return self.size + (self.after.size if self.after is not None and grows else 0)


class _Pool:
    """The small or the large pool: its free blocks, smallest first, and its unmapped ranges, by address."""

    def __init__(self, page: int, least_left: int, *, is_expandable: bool):
        self.page = page
        self.least_left = least_left
        """A block is split only if at least this many bytes remain."""
        self.end = 0
        """The next address for a new segment."""
        self.free: list[tuple[float, int]] = []
        self.unmapped: list[int] = []
        self.blocks: dict[int, MemoryBlock] = {}
        """Free and unmapped blocks, by address."""
        if is_expandable:
            self.add(MemoryBlock(0, math.inf, self, is_mapped=False))

    def add(self, block: MemoryBlock) -> None:
        block.is_free = True
        if block.is_mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)
        self.blocks[block.address] = block

    def remove(self, block: MemoryBlock) -> None:
        block.is_free = False
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]
        del self.blocks[block.address]

    def best_fit(self, size: int) -> MemoryBlock | None:
        """Return the smallest free block that is large enough; the size of a block that can grow is its maximum
        size."""
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        found = self.blocks[self.free[place][1]]
        for _, address in self.free[place + 1 :]:
            larger = self.blocks[address]
            if larger.reach >= found.reach:
                break
            found = larger
        return found

    def growing_block(self, size: int) -> MemoryBlock:
        """Return the free or unmapped block with the lowest address from which `size` bytes can be mapped."""
        for address in self.unmapped:
            start = self.blocks[address]
            if start.before is not None and start.before.is_free:
                start = start.before
            room: float = 0
            block: MemoryBlock | None = start
            while block is not None and block.is_free and room < size:
                room += block.size
                block = block.after
            if room >= size:
                return start
        raise AssertionError("the end of the addresses is always unmapped")


class CachingAllocator:
    """Counts the bytes in live blocks, the reserved bytes, and the peaks of both."""

    def __init__(self, *, expandable: bool = False, capacity_bytes: float = math.inf) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.expandable = expandable
        self.capacity_bytes = capacity_bytes
        self._small = _Pool(SMALL_SEGMENT, ROUNDING, is_expandable=expandable)
        self._large = _Pool(MEDIUM_SEGMENT, ROUNDING if expandable else SMALL_REQUEST + 1, is_expandable=expandable)

    def allocate(self, size: int) -> MemoryBlock:
        """Allocate `size` bytes, which must be above 0. Raises MemoryError if they do not fit even after releasing all
        unused memory."""
        size = -(-size // ROUNDING) * ROUNDING
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = pool.best_fit(size) or self._reserve(pool, size)
        if block is None:
            self.release_unused()
            block = pool.best_fit(size) or self._reserve(pool, size)
        if block is None:
            raise MemoryError(f"{size} bytes do not fit: {self.reserved_bytes} of {self.capacity_bytes} are reserved")
        pool.remove(block)
        if block.size - size >= pool.least_left:
            pool.add(_cut(block, size))
        self.allocated_bytes += int(block.size)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: MemoryBlock) -> None:
        self.allocated_bytes -= int(block.size)
        block.pool.add(_joined(block))

    def begin(self) -> None:
        """Reset the peaks; reserved memory stays reserved."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def release_unused(self) -> None:
        """Release the segments without live blocks, or the pages inside free blocks."""
        for pool in (self._small, self._large):
            for block in [pool.blocks[address] for _, address in pool.free]:
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= int(block.size)

    def _reserve(self, pool: _Pool, size: int) -> MemoryBlock | None:
        """Return a free block of at least `size` bytes from newly reserved memory; None if the device has too little
        memory."""
        if self.expandable:
            return self._expand(pool, size)
        segment = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        if size <= SMALL_REQUEST:
            segment = SMALL_SEGMENT
        elif size < MEDIUM_REQUEST:
            segment = MEDIUM_SEGMENT
        if self.reserved_bytes + segment > self.capacity_bytes:
            return None
        block = MemoryBlock(pool.end, segment, pool)
        pool.end += segment
        self._add_reserved(segment)
        pool.add(block)
        return block

    def _expand(self, pool: _Pool, size: int) -> MemoryBlock | None:
        block = pool.growing_block(size)
        while not block.is_mapped or block.size < size:
            unmapped = block.after if block.is_mapped else block
            assert unmapped is not None, "the addresses after a free block that can grow are unmapped"
            missing = size - (int(block.size) if block.is_mapped else 0)
            mapped = int(min(unmapped.size, -(-missing // pool.page) * pool.page))
            if self.reserved_bytes + mapped > self.capacity_bytes:
                return None
            self._add_reserved(mapped)
            pool.remove(unmapped)
            if unmapped.size > mapped:
                pool.add(_cut(unmapped, mapped))
            unmapped.is_mapped = True
            block = _joined(unmapped)
            pool.add(block)
        return block

    def _add_reserved(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _unmap(self, block: MemoryBlock) -> None:
        """Unmap the pages that lie entirely inside a free block; the remainders at its ends stay free."""
        pool = block.pool
        first = -(-block.address // pool.page) * pool.page
        last = (block.address + int(block.size)) // pool.page * pool.page
        if last <= first:
            return
        pool.remove(block)
        unmapped = block
        if first > block.address:
            unmapped = _cut(block, first - block.address)
            pool.add(block)
        if unmapped.size > last - first:
            pool.add(_cut(unmapped, last - first))
        unmapped.is_mapped = False
        self.reserved_bytes -= last - first
        pool.add(_joined(unmapped))


def _cut(block: MemoryBlock, size: int) -> MemoryBlock:
    """Split a block, which must not be in any list, at `size` bytes. Return the rest."""
    rest = MemoryBlock(block.address + size, block.size - size, block.pool, is_mapped=block.is_mapped)
    rest.before = block
    rest.after = block.after
    if rest.after is not None:
        rest.after.before = rest
    block.size = size
    block.after = rest
    return rest


def _joined(block: MemoryBlock) -> MemoryBlock:
    """Merge a block, which must not be in any list, with its free neighbours in the same state (mapped or unmapped).
    Return the merged block."""
    before = block.before
    after = block.after
    if before is not None and before.is_free and before.is_mapped == block.is_mapped:
        before.pool.remove(before)
        _absorb(before, block)
        block = before
    if after is not None and after.is_free and after.is_mapped == block.is_mapped:
        after.pool.remove(after)
        _absorb(block, after)
    return block


def _absorb(block: MemoryBlock, after: MemoryBlock) -> None:
    """Merge a block with the one after it."""
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block
