"""When packets of gradients go, in which order, and that what they hold is final."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainspec_cli.engine.comm.forking import Background
from trainspec_cli.engine.elastic import cross_group
from trainspec_cli.engine.elastic.cross_group import GradientPackets, names_outside_blocks, packets_in_order
from trainspec_cli.engine.shares import Share

CPU = torch.device("cpu")
LAYERS = 3


class Lab:
    """A chain of matrices between two outer ones, each a packet of its own; their norms are small and share one."""

    def __init__(self, patch: pytest.MonkeyPatch, late: tuple[str, ...] = (), frozen: tuple[str, ...] = ()):
        patch.setattr(cross_group, "LARGE_BYTES", 100)
        names = ["embed", *(f"blocks.{n}.{kind}" for n in range(LAYERS) for kind in ("matrix", "norm")), "head"]
        self.shares = [
            Share(name, nn.Parameter(torch.ones(4) if "norm" in name else torch.eye(5) * 2, name not in frozen))
            for name in names
        ]
        self.sent: list[int] = []
        self.beside = Background(CPU, lambda *_: None)
        self.ordered = packets_in_order(self.shares, {"embed", "head"}, late)
        self.is_summed_inside = threading.Event()
        self.is_summed_inside.set()
        await_sums = partial(partial, self.is_summed_inside.wait, 20)
        self.packets = GradientPackets(self.ordered, late, self._sum, self.beside, await_sums)

    def _sum(self, number: int, flat: torch.Tensor) -> None:
        self.sent.append(number)
        flat.mul_(2)

    def names(self, number: int) -> list[str]:
        (packet,) = (packet for packet in self.ordered if packet.number == number)
        return [share.name for share in packet.shares]

    def accumulate(self, *names: str) -> None:
        """A backward pass that ends with the gradients of these; each is one."""
        for share in self.shares:
            if share.name in names:
                share.parameter.sum().backward()

    def sent_so_far(self) -> list[list[str]]:
        self.beside.wait()
        return [self.names(number) for number in self.sent]


NORMS = [f"blocks.{n}.norm" for n in range(LAYERS)]


def test_packets_go_from_the_last_block_to_the_first_and_then_what_lies_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch)
    lab.packets.begin(1)
    lab.accumulate("blocks.2.matrix")
    assert lab.sent_so_far() == [["blocks.2.matrix"]], "while the pass continues"
    lab.accumulate("blocks.0.matrix", "blocks.2.norm", "blocks.1.norm", "head")
    assert lab.sent_so_far() == [["blocks.2.matrix"]], "the order is the same in every group"
    lab.accumulate("blocks.1.matrix")
    assert lab.sent_so_far()[1:] == [["blocks.1.matrix"]], "norms of all blocks wait for the first one's"
    lab.accumulate("blocks.0.norm")
    assert lab.sent_so_far()[2:] == [NORMS, ["blocks.0.matrix"], ["head"]]
    lab.accumulate("embed")
    assert lab.sent_so_far()[5:] == [["embed"]]
    lab.packets.finish()
    assert len(lab.sent) == 6
    assert all(share.gradient is not None and share.gradient.eq(2).all() for share in lab.shares), "summed, once"


def test_a_packet_goes_when_its_gradients_are_summed_within_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    lab.is_summed_inside.clear()
    lab.packets.begin(1)
    lab.accumulate("blocks.2.matrix")
    assert lab.sent == []
    lab.is_summed_inside.set()
    assert lab.sent_so_far() == [["blocks.2.matrix"]]


def test_numbers_are_places_in_the_order_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name what compression has lost, and the composition does not hang on the order of sending."""
    lab = Lab(monkeypatch)
    assert [lab.names(number) for number in range(6)] == [
        *(["embed"], ["blocks.0.matrix"], ["blocks.1.matrix"], ["blocks.2.matrix"], ["head"], NORMS)
    ]


def test_a_gradient_that_several_micro_batches_add_to_goes_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    for step in range(2):
        lab.packets.begin(3)
        for _ in range(2):
            lab.accumulate(*(share.name for share in lab.shares))
        assert lab.sent_so_far() == []
        lab.accumulate("blocks.2.matrix")
        assert lab.sent_so_far() == [["blocks.2.matrix"]]
        lab.accumulate(*(share.name for share in lab.shares if share.name != "blocks.2.matrix"))
        lab.packets.finish()
        assert len(lab.sent) == 6
        for share in lab.shares:
            assert share.gradient is not None and share.gradient.eq(6).all(), step
            share.parameter.grad = None
        lab.sent.clear()


def test_what_is_held_back_goes_at_the_end_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, early = Lab(monkeypatch), Lab(monkeypatch)
    for each, exchanges in ((lab, 0), (early, 1)):
        each.packets.begin(exchanges)
        each.accumulate(*(share.name for share in each.shares))
    assert lab.sent_so_far() == []
    for each in (lab, early):
        each.packets.finish()
    assert lab.sent == early.sent and len(lab.sent) == 6


def test_gradients_that_are_summed_after_the_passes_go_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their packet would hold parts of sums."""
    lab = Lab(monkeypatch, late=("embed", "blocks.1.norm"))
    lab.packets.begin(1)
    lab.accumulate(*(share.name for share in lab.shares))
    assert lab.sent_so_far() == [["blocks.2.matrix"], ["blocks.1.matrix"], ["blocks.0.matrix"], ["head"]]
    lab.packets.finish()
    assert lab.sent_so_far()[4:] == [NORMS, ["embed"]]


def test_frozen_parameters_are_in_no_packet_and_unused_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, frozen=("embed", "blocks.1.norm"))
    lab.packets.begin(1)
    lab.accumulate(*(share.name for share in lab.shares if share.is_trained and share.name != "blocks.2.matrix"))
    lab.packets.finish()
    assert lab.sent_so_far() == [["blocks.1.matrix"], ["blocks.0.norm", "blocks.2.norm"], ["blocks.0.matrix"], ["head"]]


def test_a_step_that_is_abandoned_says_whether_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    lab.packets.begin(1)
    assert not lab.packets.abandon()
    lab.packets.begin(1)
    lab.accumulate("blocks.2.matrix")
    assert lab.packets.abandon()
    lab.accumulate(*(share.name for share in lab.shares))
    assert lab.sent_so_far() == [["blocks.2.matrix"]], "nothing more of it goes"
    lab.packets.begin(1)
    lab.accumulate(*(share.name for share in lab.shares))
    lab.packets.finish()
    assert len(lab.sent) == 7


def test_packets_of_a_state_that_was_replaced_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    lab.packets.begin(1)
    lab.packets.detach()
    lab.accumulate("blocks.2.matrix")
    assert lab.sent_so_far() == []


def test_names_outside_blocks_are_those_that_no_block_holds() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(3, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.norm = nn.LayerNorm(2)

        def block_modules(self) -> list[nn.Module]:
            return list(self.blocks)

    ends: Any = SimpleNamespace(block_modules=list, named_parameters=lambda: [("head", nn.Parameter(torch.ones(1)))])
    assert names_outside_blocks([Stage(), ends]) == {"embed.weight", "norm.weight", "norm.bias", "head"}
