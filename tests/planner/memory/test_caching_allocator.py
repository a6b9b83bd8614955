"""The simulated caching allocator against the rules that PyTorch documents: rounding, segments, splitting, joining."""

from __future__ import annotations

import itertools
import random

import pytest

from trainspec_cli.planner.memory.caching_allocator import MIB, CachingAllocator, MemoryBlock


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
    ],
    ids=["least", "rounded", "small", "medium", "largest medium", "large", "rounded segment"],
)
def test_a_first_request_reserves_a_segment(size: int, allocated: int, reserved: int) -> None:
    """What a large segment has left below 1 MiB stays with the block."""
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_requests_share_a_segment_and_freed_neighbours_join() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_holes_that_are_apart_serve_no_larger_request() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(10 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB, 30 * MIB)


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(12 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 52 * MIB


def test_small_requests_never_lie_in_large_segments() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 42 * MIB


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (11 * MIB, 11 * MIB, 20 * MIB),
        (21 * MIB, 21 * MIB, 40 * MIB),
    ],
    ids=["small page", "large page", "split to 512 bytes", "two pages"],
)
def test_a_segment_that_grows_maps_whole_pages(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_segment_that_grows_maps_no_more_than_is_missing_at_its_end() -> None:
    """A default allocator reserves a new segment for the larger request, and keeps the old one."""
    reserved = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        allocator.free(allocator.allocate(40 * MIB))
        allocator.allocate(60 * MIB)
        reserved.append(allocator.reserved_bytes)
    assert reserved == [100 * MIB, 60 * MIB]


def test_blocks_of_one_growing_segment_join_whatever_requests_made_them() -> None:
    reserved = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        for block in [allocator.allocate(30 * MIB) for _ in range(4)]:
            allocator.free(block)
        allocator.allocate(120 * MIB)
        reserved.append(allocator.reserved_bytes)
    assert reserved == [240 * MIB, 120 * MIB]


def test_the_block_that_can_grow_is_taken_last() -> None:
    """It counts as large as it can become, so that a hole that is larger than it serves a request first."""
    allocator = CachingAllocator(expandable=True)
    first, hole, last = allocator.allocate(20 * MIB), allocator.allocate(30 * MIB), allocator.allocate(10 * MIB)
    kept = allocator.allocate(20 * MIB)
    allocator.free(hole)
    allocator.free(kept)
    taken = allocator.allocate(20 * MIB)
    assert taken.address == 20 * MIB and not first.is_free and not last.is_free


@pytest.mark.parametrize("expandable", [False, True])
def test_a_full_device_gets_back_what_is_unused(expandable: bool) -> None:
    """Whole segments; of a segment that grows, the pages inside its holes, which are mapped again where they are
    needed."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=100 * MIB)
    blocks = [allocator.allocate(20 * MIB) for _ in range(5)]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    if not expandable:
        with pytest.raises(MemoryError):
            allocator.allocate(41 * MIB)
    else:
        allocator.allocate(40 * MIB)
        assert allocator.reserved_bytes == 100 * MIB
        with pytest.raises(MemoryError):
            allocator.allocate(MIB)
        allocator.free(blocks[2])
        allocator.allocate(MIB)
    assert allocator.reserved_bytes <= 100 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_keep_the_books(seed: int, expandable: bool) -> None:
    """Live blocks add up, nothing is reserved twice for what was freed whole, and peaks only grow until begun anew."""
    chance, live = random.Random(seed), list[MemoryBlock]()
    allocator = CachingAllocator(expandable=expandable)
    for _ in range(2000):
        if live and chance.random() < 0.5:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(allocator.allocate(chance.choice([700, 3 * MIB, 30 * MIB]) + chance.randrange(MIB)))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        places = sorted((id(block.pool), block.address, block.size) for block in live)
        for (pool, address, size), (next_pool, next_address, _) in itertools.pairwise(places):
            assert pool != next_pool or address + size <= next_address, "no two blocks lie over each other"
    reserved = allocator.reserved_bytes
    for block in live:
        allocator.free(block)
    allocator.begin()
    assert allocator.peak_allocated_bytes == 0 and allocator.peak_reserved_bytes == reserved
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == reserved
