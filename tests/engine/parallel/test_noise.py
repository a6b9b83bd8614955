"""Squared norms of gradients that several ranks hold in different manners, with peers that are played."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.engine.parallel import noise as noise_module
from trainspec_cli.engine.parallel.noise import Columns, NoiseProbe, SampleParts, parts_of

CPU = torch.device("cpu")


class Played:
    """Peers of whom the others hold what `others` says of whatever is summed."""

    def __init__(self, size: int = 1, others: float = 0.0):
        self.size, self.others, self.group = size, others, None
        self.summed: list[list[float]] = []

    def sum_(self, tensor: Tensor) -> Tensor:
        self.summed.append(tensor.flatten().tolist())
        return tensor.add_(self.others)

    def time(self, sent_bytes: float) -> Any:
        return nullcontext(False)


def probe_of(tp: Played | None = None, ends: Played | None = None, cp: Played | None = None) -> NoiseProbe:
    found: Any = [peers or Played() for peers in (cp, tp, ends)]
    probe = NoiseProbe(CPU, *found)
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


def test_each_part_of_a_parameter_counts_once() -> None:
    """Of 3 columns the first is this rank's own, the second the same on both ranks, the third has 1 more elsewhere."""
    tp = Played(2, others=1.0)
    probe = probe_of(tp)
    probe.weigh(0)
    probe.add(torch.tensor([2.0, 4.0, 5.0, 3.0, 0.0, 1.0]), Columns(2, (1, 1, 1), ("own", "copied", "partial"), False))
    assert tp.summed == [[5.0, 1.0]]
    own, copied, partial = 4 + 9, 16 / 2, (36 + 4) / 2
    assert probe.sums.tolist() == pytest.approx([(own + copied + partial) / (3 / 16), 0, 0, 0])
    probe.add(torch.tensor([2.0, 1.0]), Columns(1, (2,), ("own",), experts=True))
    assert probe.sums[1].item() == 5 / 0.25


def test_an_empty_part_is_passed_over() -> None:
    probe = probe_of()
    probe.weigh(1)
    probe.add(torch.tensor([2.0]), Columns(1, (1,), ("own",), experts=False))
    assert probe.sums.tolist() == [0.0] * 4


def test_the_two_ends_of_a_tied_embedding_are_one() -> None:
    ends = Played(2, others=2.0)
    probe = probe_of(ends=ends)
    probe.weigh(None)
    probe.add(torch.tensor([1.0, 7.0]), Columns(1, (1, 1), ("twin", "own"), experts=False))
    probe.add(torch.tensor([5.0]), Columns(1, (1,), ("twin",), experts=False))
    assert ends.summed == [], "only when both ends are there"
    probe.end(every_micro_batch=False, ranks_of_part=4, ranks_of_experts=8)
    assert ends.summed == [[6.0]]
    assert probe.sums.tolist() == [(49 + 64 / 2) / 0.25, 0.0, 1 / 4, 1 / 8]


def test_ranks_that_hold_parts_of_sequences_sum_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of cp and two shards: this rank keeps the first two rows of four, with the other's added."""

    def reduce_scatter(kept: Tensor, rows: Tensor, group: None) -> None:
        kept.copy_(rows[:2] + 10)

    monkeypatch.setattr(noise_module, "reduce_scatter", reduce_scatter)
    probe = probe_of(cp=Played(2))
    probe.weigh(None)
    probe.add(torch.arange(8.0), Columns(4, (2,), ("own",), experts=False))
    assert probe.sums[0].item() == (100 + 121 + 144 + 169) / 0.25
    experts = Columns(4, (2,), ("own",), experts=True)
    probe.add(torch.ones(8), experts)
    assert probe.sums[1].item() == 8 / 0.5, "experts get the tokens of all of them"


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
    with pytest.raises(AssertionError, match="every trained parameter has a gradient"):
        probe.add(torch.ones(3), Columns(1, (2,), ("own",), experts=False))
