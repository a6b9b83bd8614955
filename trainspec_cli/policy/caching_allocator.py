"""PyTorch's caching allocator for CUDA devices, simulated: bytes that it reserves for a sequence of allocations.

Its rules, as c10/cuda/CUDACachingAllocator.cpp has them by default (no expandable segments, no largest size to split):

- a request is rounded up to 512 bytes;
- up to 1 MiB it comes out of segments of 2 MiB, up to 10 MiB out of segments of 20 MiB, and else out of a segment of
  its own size, rounded up to 2 MiB;
- the smallest free block that is large enough is taken; what is left of it stays free as a block of its own, if that
  is 512 bytes in a small segment and more than 1 MiB in a large one;
- a freed block joins its free neighbours in the segment; segments are kept.

What a full device makes it do besides (hand unused segments back and try again) is not simulated.
"""

from __future__ import annotations

from bisect import bisect_left, insort

KIB, MIB = 2**10, 2**20
ROUNDING = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
MEDIUM_REQUEST = 10 * MIB
MEDIUM_SEGMENT = 20 * MIB
LARGE_ROUNDING = 2 * MIB


class MemoryBlock:
    """A part of a segment. `before` and `after` are its neighbours there."""

    __slots__ = ("after", "before", "is_free", "number", "pool", "size")

    def __init__(self, size: int, pool: _Pool, number: int):
        self.size, self.pool, self.number = size, pool, number
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None
        self.is_free = False


class _Pool:
    """Free blocks of small or of large segments, the smallest first."""

    def __init__(self, least_left: int):
        self.least_left = least_left
        """Bytes that must be left of a block for it to be split."""
        self._free: list[tuple[int, int]] = []
        self._blocks: dict[int, MemoryBlock] = {}

    def add(self, block: MemoryBlock) -> None:
        block.is_free = True
        insort(self._free, (block.size, block.number))
        self._blocks[block.number] = block

    def remove(self, block: MemoryBlock) -> None:
        block.is_free = False
        del self._free[bisect_left(self._free, (block.size, block.number))]
        del self._blocks[block.number]

    def best_fit(self, size: int) -> MemoryBlock | None:
        place = bisect_left(self._free, (size, 0))
        return self._blocks[self._free[place][1]] if place < len(self._free) else None


class CachingAllocator:
    """Counts bytes: those of live blocks, those of segments, and the most there were of each."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = _Pool(ROUNDING), _Pool(SMALL_REQUEST + 1)
        self._count = 0

    def allocate(self, size: int) -> MemoryBlock:
        """`size` is more than 0."""
        size = rounded(size)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = pool.best_fit(size)
        if block is None:
            block = self._new(segment_size(size), pool)
            self.reserved_bytes += block.size
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        else:
            pool.remove(block)
        self._split(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: MemoryBlock) -> None:
        self.allocated_bytes -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                other.pool.remove(other)
                _join(block, other)
        block.pool.add(block)

    def begin(self) -> None:
        """Count peaks anew from here; what is reserved stays so."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def _new(self, size: int, pool: _Pool) -> MemoryBlock:
        self._count += 1
        return MemoryBlock(size, pool, self._count)

    def _split(self, block: MemoryBlock, size: int) -> None:
        if block.size - size < block.pool.least_left:
            return
        rest = self._new(block.size - size, block.pool)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        block.pool.add(rest)


def rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def segment_size(size: int) -> int:
    """Return the bytes that are asked of the device for a block of `size` bytes."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MEDIUM_REQUEST:
        return MEDIUM_SEGMENT
    return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING


def _join(block: MemoryBlock, other: MemoryBlock) -> None:
    """Make a neighbour part of the block."""
    if other is block.before:
        block.before = other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block
    block.size += other.size
