"""Memory that batches wait in: used again and again, never while a batch in it is still needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime

import pytest
import torch

from trainspec_cli.engine.data.loader import read_ahead
from trainspec_cli.engine.data.staging import SLOTS, Staging, Traffic

CPU = torch.device("cpu")


def batch(value: int, size: int = 4, micro_batches: int = 2) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.full((2, size), value), torch.full((2, size), value + part)) for part in range(micro_batches)]


def places(batch: list[tuple[torch.Tensor, ...]]) -> set[int]:
    return {tensor.data_ptr() for part in batch for tensor in part}


def test_batches_go_round_in_the_same_memory():
    staging = Staging(CPU)
    seen = [places(step) for step in read_ahead(batch, staging, 0, 10)]
    assert len(set().union(*seen)) == SLOTS * 4
    assert all(seen[step] == seen[step + SLOTS] for step in range(10 - SLOTS))
    assert all(not seen[step] & seen[step + 1] for step in range(9))


def test_nothing_is_allocated_once_every_slot_was_used():
    staging, traffic = Staging(CPU), []
    for start in (0, 10):  # an evaluation lies between
        for _ in read_ahead(batch, staging, start, start + 10):
            traffic.append(staging.cut())
    assert traffic[:SLOTS] == [Traffic(allocations=4)] * SLOTS
    assert traffic[SLOTS:] == [Traffic()] * (20 - SLOTS), "and a CPU's batches are where they are needed"


def test_larger_batches_make_room_and_smaller_ones_use_a_part_of_it():
    staging = Staging(CPU)
    for size, micro_batches in ((4, 1), (4, 3), (8, 3), (8, 2), (8, 3)):
        for step in read_ahead(lambda _: batch(7, size, micro_batches), staging, 0, SLOTS):  # noqa: B023
            assert len(step) == micro_batches
            assert all(tensor.shape == (2, size) for part in step for tensor in part)
        made = staging.cut().allocations
    assert made == 0, "the last two fit where those before them lay"


def test_a_batch_is_left_alone_until_the_next_one_is_asked_for():
    staging, steps = Staging(CPU), 9
    for number, step in enumerate(read_ahead(batch, staging, 0, steps)):
        assert all((tensor == number + part).all() for part, (_, tensor) in enumerate(step))


def test_reading_stops_where_every_slot_is_in_use():
    staging = Staging(CPU)
    slots = [staging.stage(batch(0)) for _ in range(SLOTS)]
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(staging.stage, batch(1))
        with pytest.raises(NotInTime):
            late.result(0.05)
        staging.take(slots[0])
        staging.take(slots[1])
        assert late.result() is slots[0]


def test_slots_of_batches_that_nobody_took_are_free_again():
    staging = Staging(CPU)
    for _ in range(4):
        stopped = read_ahead(batch, staging, 0, 100)
        next(stopped)
        stopped.close()
    assert len(list(read_ahead(batch, staging, 0, 5))) == 5


def test_a_reader_that_fails_is_told_of_and_leaves_its_slot():
    def read(step: int) -> list[tuple[torch.Tensor, ...]]:
        if step == 1:
            raise OSError("the disk is gone")
        return batch(step)

    staging = Staging(CPU)
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            list(read_ahead(read, staging, 0, 5))
    assert len(list(read_ahead(batch, staging, 0, 5))) == 5
