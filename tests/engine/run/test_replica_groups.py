"""A group's portions, read ahead: right also where the groups have changed, or a step is made again."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainspec_cli.engine.data.staging import SLOTS, Staging
from trainspec_cli.engine.run.replica_groups import PortionReader
from trainspec_cli.policy.spread import Portion
from trainspec_cli.spec.recipe.layout import Layout


class Numbered:
    """A sample is its position."""

    def __init__(self) -> None:
        self.staging = Staging(torch.device("cpu"))
        self.reads = 0

    def read(self, positions: np.ndarray) -> list[tuple[torch.Tensor, ...]]:
        self.reads += 1
        return [(torch.tensor([position]),) for position in positions]


@pytest.fixture
def source() -> Numbered:
    return Numbered()


@pytest.fixture
def reader(source: Numbered) -> PortionReader:
    plan = SimpleNamespace(layout=Layout(), micro_batch_size=1)
    state = SimpleNamespace(mesh=SimpleNamespace(data_rank=0), device=torch.device("cpu"))
    return PortionReader(plan, source, state)  # type: ignore[arg-type]


def taken(reader: PortionReader, portion: Portion) -> list[int]:
    return [int(tokens) for (tokens,) in reader.take(portion)]


def test_what_follows_is_read_ahead_and_what_does_not_is_read_again(reader: PortionReader, source: Numbered) -> None:
    steps = [Portion(start, 3, 6) for start in (0, 6, 12)]
    again, shrunk = steps[-1], Portion(18, 6, 6)
    for portion in (*steps, again, shrunk, Portion(24, 6, 6)):
        assert taken(reader, portion) == list(range(portion.start, portion.start + portion.samples))
    reader._pool.shutdown()
    assert source.reads == 6 + 3, "the first, one made again, one of another size; each time what follows"


def test_many_changes_leave_every_slot_in_use(reader: PortionReader) -> None:
    for start in range(0, 60, 6):  # none follows on the one before
        assert taken(reader, Portion(7 * start, 2, 6)) == [7 * start, 7 * start + 1]
    assert SLOTS == 3, "taken, read ahead, and read anew"
