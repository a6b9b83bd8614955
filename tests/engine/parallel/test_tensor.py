"""Cuts along a model's published dims, and the loss over a vocabulary that is cut over ranks (threads here)."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from engine.parallel.ranks import FakePeers, Ranks

from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.parallel.context import VocabularyCutChunk, apply_tensor_parallel
from trainspec_cli.engine.shares import Cut


@pytest.mark.parametrize("size", [2, 3])
def test_a_cut_vocabularys_loss_and_gradient_are_those_of_the_whole(size: int) -> None:
    """Ten words over three ranks: four, four and two. The largest logits are far from zero."""
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 10, generator=drawn) * 3 + 200
    targets = torch.tensor([0, 3, 4, 9, IGNORED_TARGET, 7, 8])
    loss, dlogits = ChunkCrossEntropy()(logits.clone(), targets)
    ranks = Ranks(size)

    def of_rank(rank: int) -> list[torch.Tensor]:
        cut = Cut(0, 10, rank, size, group=None)  # type: ignore[arg-type]
        own = logits[:, cut.start : cut.start + cut.size].clone()
        return list(VocabularyCutChunk(cut, FakePeers(ranks, rank))(own, targets))  # type: ignore[arg-type]

    found = ranks.run(of_rank)
    for own_loss, _ in found:
        torch.testing.assert_close(own_loss, loss)
    torch.testing.assert_close(torch.cat([own for _, own in found], dim=1), dlogits)
    half = VocabularyCutChunk(Cut(0, 10, 0, 1, group=None), FakePeers(Ranks(1), 0))  # type: ignore[arg-type]
    assert half(logits.bfloat16(), targets)[1].dtype == torch.bfloat16


class Model(torch.nn.Module):
    tensor_partial = ("blocks.*.norm", "blocks.*.lora_[ab]")
    tensor_cuts: ClassVar[dict[str, int]] = {"blocks.1.weight": 1, "blocks.*.weight": 0, "blocks.1.*": 0}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)])
        self.blocks[0].norm = torch.nn.Parameter(torch.ones(3))
        self.blocks[1].weight.requires_grad_(False)
        self.norm = torch.nn.Parameter(torch.ones(3))

    def head_norms(self) -> dict[str, torch.nn.Module]:
        return {}

    def region_modules(self) -> list[torch.nn.Module]:
        return []

    def block_modules(self) -> list[torch.nn.Module]:
        return []


PEERS: Any = SimpleNamespace(rank=1, size=2, group="tp", time=nullcontext)


def test_the_first_pattern_that_fits_decides_and_the_last_part_may_be_smaller() -> None:
    model, whole = Model(), dict(Model().named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape))
        whole[name] = parameter.detach().clone()
    cuts: dict[str, Cut] = {}
    apply_tensor_parallel(model, PEERS, cuts, sequence_parallel=True)
    assert {name: (cut.dim, cut.full_size, cut.index, cut.count, cut.group) for name, cut in cuts.items()} == {
        "blocks.0.weight": (0, 5, 1, 2, "tp"),
        "blocks.1.weight": (1, 6, 1, 2, "tp"),
        "blocks.1.bias": (0, 5, 1, 2, "tp"),
    }
    found = dict(model.named_parameters())
    assert torch.equal(found["blocks.0.weight"], whole["blocks.0.weight"][3:])
    assert torch.equal(found["blocks.1.weight"], whole["blocks.1.weight"][:, 3:])
    assert torch.equal(found["blocks.1.bias"], whole["blocks.1.bias"][3:])
    assert torch.equal(found["blocks.0.bias"], whole["blocks.0.bias"])
    assert {name for name, parameter in found.items() if not parameter.requires_grad} == {"blocks.1.weight"}


@pytest.mark.parametrize(
    ("sequence_parallel", "names"),
    [(False, ["blocks.0.norm"]), (True, ["norm", "blocks.0.norm"])],
)
def test_whole_parameters_are_partial_in_regions_and_where_the_sequence_is_cut(
    sequence_parallel: bool, names: list[str]
) -> None:
    """Not those that another axis cuts."""
    others: Any = {"blocks.0.bias": "cut over ep"}
    found = apply_tensor_parallel(Model(), PEERS, others, sequence_parallel=sequence_parallel)
    assert sorted(found) == sorted(names)
