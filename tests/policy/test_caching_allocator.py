"""The simulated caching allocator against the rules that PyTorch documents: rounding, segments, splitting, joining."""

from __future__ import annotations

import random

import pytest

from trainspec_cli.policy.caching_allocator import MIB, CachingAllocator, MemoryBlock


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


@pytest.mark.parametrize("seed", range(5))
def test_random_histories_keep_the_books(seed: int) -> None:
    """Live blocks add up, nothing is reserved twice for what was freed whole, and peaks only grow until begun anew."""
    chance, allocator, live = random.Random(seed), CachingAllocator(), list[MemoryBlock]()
    for _ in range(2000):
        if live and chance.random() < 0.5:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(allocator.allocate(chance.choice([700, 3 * MIB, 30 * MIB]) + chance.randrange(MIB)))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    reserved = allocator.reserved_bytes
    for block in live:
        allocator.free(block)
    allocator.begin()
    assert allocator.peak_allocated_bytes == 0 and allocator.peak_reserved_bytes == reserved
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == reserved
