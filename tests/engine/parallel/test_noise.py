"""The gradients that count for the noise, and their parts. `test_layouts.py` compares the norms with one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.engine.parallel.noise import Columns, NoiseProbe, SampleParts, parts_of

CPU = torch.device("cpu")


class Played:
    """Peers that note what is summed."""

    def __init__(self, size: int = 1):
        self.size = size
        self.summed: list[list[float]] = []

    def sum_(self, tensor: Tensor) -> Tensor:
        self.summed.append(tensor.flatten().tolist())
        return tensor


def probe_of(tp: Any = None, ends: Any = None) -> NoiseProbe:
    probe = NoiseProbe(CPU, Played(), tp or Played(), ends or Played())  # type: ignore[arg-type]
    probe.begin(SampleParts(16, own=(3, 0, 1), expert=(4, 3, 1)))
    return probe


def test_parts_are_micro_batches_or_whole_steps() -> None:
    parts = SampleParts(16, own=(3, 0, 1), expert=(4, 3, 1))
    assert [parts.weights(turn) for turn in (0, 1, 2, None)] == [
        (3 / 16, 0.25),
        (0, 3 / 16),
        (1 / 16,) * 2,
        (0.25, 0.5),
    ]
    assert parts.count(every_micro_batch=True) == (2, 3)
    assert parts.count(every_micro_batch=False) == (1, 1)
    assert SampleParts(16, own=(0, 0), expert=()).count(every_micro_batch=False) == (0, 0)


def test_experts_have_the_samples_of_all_ranks_that_share_them() -> None:
    """Ranks 2 and 3 of four take 2 and 1 of 8 samples, each in two micro-batches."""
    division = Division((4.0, 1.0, 2.0, 1.0), micro_batch_size=2)
    mesh: Any = SimpleNamespace(data_rank=2, expert_data_ranks=range(2, 4), experts="mesh")
    parts = parts_of(division, mesh, samples=8, step_samples=24)
    assert (parts.step_samples, sum(parts.own), sum(parts.expert), len(parts.expert)) == (24, 2, 3, 2)
    mesh.experts = None
    assert parts_of(division, mesh, samples=8, step_samples=24).expert == []


def test_an_empty_part_is_passed_over() -> None:
    probe = probe_of()
    probe.weigh(1)
    probe.add(torch.tensor([2.0]), Columns(1, (1,), ("own",), experts=False))
    assert probe.sums.tolist() == [0.0] * 4


def test_a_step_that_is_not_looked_at_exchanges_nothing() -> None:
    tp, ends = Played(2), Played(2)
    probe = probe_of(tp, ends)
    probe.begin(None)
    probe.weigh(0)
    probe.add(torch.ones(2), Columns(1, (1, 1), ("partial", "twin"), experts=False))
    probe.end(every_micro_batch=True, ranks_of_part=1, ranks_of_experts=1)
    assert (tp.summed, ends.summed, probe.sums.tolist()) == ([], [], [0.0] * 4)


def test_a_buffer_of_another_length_is_an_error() -> None:
    probe = probe_of()
    probe.weigh(None)
    with pytest.raises(AssertionError, match="have gradients"):
        probe.add(torch.ones(3), Columns(1, (2,), ("own",), experts=False))
