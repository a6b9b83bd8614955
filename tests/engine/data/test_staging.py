"""Memory that batches wait in: used again and again, never while a batch in it is still needed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.data import loader as module
from trainspec_cli.engine.data.loader import PREFETCHED_STEPS, SLOTS, BatchReader, Staging, Traffic
from trainspec_cli.engine.digest import MicroBatch

CPU = torch.device("cpu")


def batch(value: int, size: int = 4, micro_batches: int = 2) -> list[MicroBatch]:
    return [(torch.full((2, size), value), torch.full((2, size), value + part)) for part in range(micro_batches)]


def steps_of(staging: Staging, end: int, size: int = 4, micro_batches: int = 2) -> Iterator[list[MicroBatch]]:
    """The batches of steps 0 to `end` - 1, read ahead."""
    reader = BatchReader(lambda own: batch(own.starts[0], size, micro_batches), staging)
    for step in range(end):
        following = range(step + 1, min(end, step + 1 + PREFETCHED_STEPS))
        yield reader.take(OwnSamples((step,), (1,)), [OwnSamples((later,), (1,)) for later in following])
    reader.close()


def places(batch: list[MicroBatch]) -> set[int]:
    return {tensor.data_ptr() for part in batch for tensor in part}


def test_batches_go_round_in_the_same_memory():
    seen = [places(step) for step in steps_of(Staging(CPU), 10)]
    assert len(set().union(*seen)) == SLOTS * 4
    assert all(seen[step] == seen[step + SLOTS] for step in range(10 - SLOTS))
    assert all(not seen[step] & seen[step + 1] for step in range(9))


def test_nothing_is_allocated_once_every_slot_was_used():
    staging, traffic = Staging(CPU), []
    for _ in range(2):  # an evaluation lies between
        for _ in steps_of(staging, 10):
            traffic.append(staging.cut())
    assert traffic[:SLOTS] == [Traffic(allocations=4, attended=64)] * SLOTS
    assert traffic[SLOTS:] == [Traffic(attended=64)] * (20 - SLOTS), "and a CPU's batches are where they are needed"


def test_larger_batches_make_room_and_smaller_ones_use_a_part_of_it():
    staging = Staging(CPU)
    for size, micro_batches in ((4, 1), (4, 3), (8, 3), (8, 2), (8, 3)):
        for step in steps_of(staging, SLOTS, size, micro_batches):
            assert len(step) == micro_batches
            assert all(tensor.shape == (2, size) for part in step for tensor in part)
        made = staging.cut().allocations
    assert made == 0, "the last two fit where those before them lay"


def test_micro_batches_of_different_sizes_and_none_are_whole():
    staging = Staging(CPU)
    sizes = [(3, 0, 2), (0, 0, 0), (2, 3, 0)]
    for wanted in sizes * 3:
        parts = [(torch.arange(6 * size).reshape(size, 6),) for size in wanted]
        staged = staging.take(staging.stage(parts))
        assert [tuple(tensor.shape) for (tensor,) in staged] == [(size, 6) for size in wanted]
        assert all(torch.equal(got[0], part[0]) for got, part in zip(staged, parts, strict=True))


def test_a_batch_is_left_alone_until_the_next_one_is_asked_for():
    for number, step in enumerate(steps_of(Staging(CPU), 9)):
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


# On an accelerator, whose streams and events are stand-ins


@dataclass
class CopyStream:
    """A context that can be entered again, as torch.Stream is."""

    chip: Gpu
    name: str

    def __enter__(self) -> None:
        self.chip.noted.append(("enter", self.name))

    def __exit__(self, *_: object) -> None:
        self.chip.noted.append(("leave", self.name))


class Gpu:
    """Stands in for torch: memory is on the host, and the calls of streams and events are recorded in order."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self.made = 0
        self.accelerator = SimpleNamespace(current_stream=lambda device: f"computing on {device}")

    def make_current(self, device: torch.device) -> None:
        self.noted.append(("make current", str(device)))

    def Event(self, device: torch.device, *, enable_timing: bool) -> Any:  # noqa: N802 - as torch has it
        assert not enable_timing
        self.made += 1
        name = "copied" if self.made % 2 else "used"

        def noting(what: str) -> Any:
            return lambda *stream: self.noted.append((name, what, *stream))

        return SimpleNamespace(**{what: noting(what) for what in ("record", "wait", "synchronize")})

    def empty(self, shape: Any, dtype: torch.dtype, pin_memory: bool = False, device: Any = None) -> torch.Tensor:
        self.noted.append(("pinned" if pin_memory else f"on {device}", tuple(shape)))
        return torch.empty(shape, dtype=dtype)

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - as torch has it
        return CopyStream(self, f"copies on {device}")

    def cut(self) -> list[tuple[Any, ...]]:
        noted, self.noted = self.noted, []
        return noted


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu"])
def test_a_chips_batch_is_copied_on_its_own_stream_and_neither_waits_on_the_host(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot is written over when its last copy has ended and, on the device, the last step that used it."""
    gpu = Gpu()
    monkeypatch.setattr(module, "torch", gpu)
    monkeypatch.setattr(module, "make_current", gpu.make_current)
    chip = torch.device(kind, 1)
    staging = Staging(chip)
    parts = [(torch.arange(6).view(2, 3), torch.ones(2, 3))]
    slot = staging.stage(parts)
    copies, computing = f"copies on {chip}", f"computing on {chip}"
    assert gpu.cut() == [
        *(("make current", str(chip)), ("enter", copies), ("copied", "synchronize"), ("used", "wait")),
        *[("pinned", (2, 3)), (f"on {chip}", (2, 3))] * 2,
        *(("copied", "record"), ("leave", copies)),
    ]
    ((tokens, targets),) = staging.take(slot)
    assert gpu.cut() == [("copied", "wait", computing)], "the computation waits, and not the host"
    assert torch.equal(tokens, parts[0][0]) and torch.equal(targets, parts[0][1])
    assert staging.cut() == Traffic(h2d_copies=2, h2d_bytes=6 * 8 + 6 * 4, allocations=4, attended=18)
    assert staging.cut() == Traffic()
    other = staging.stage(parts)
    gpu.cut()
    staging.take(other)
    assert gpu.cut() == [("used", "record", computing), ("copied", "wait", computing)]
    staging.stage(parts)
    gpu.cut()
    assert staging.stage(parts) is slot
    assert gpu.cut() == [
        *(("make current", str(chip)), ("enter", copies), ("copied", "synchronize"), ("used", "wait")),
        *(("copied", "record"), ("leave", copies)),
    ], "in the memory that it has"
