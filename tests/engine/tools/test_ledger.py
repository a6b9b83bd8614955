"""Bytes and operations of small programs, counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainspec_cli.engine.comm.exchange import all_gather, reduce_scatter
from trainspec_cli.engine.tools.trace import Ledger, fake_world


def test_a_tensor_counts_while_it_lives() -> None:
    with Ledger() as ledger:
        first = torch.empty(10)
        second = torch.empty(5)
        view = first[2:]
        del first
        assert (ledger.live_bytes, ledger.peak_bytes) == (60, 60), "a view keeps what it looks at"
        del view
        assert (ledger.live_bytes, ledger.peak_bytes) == (20, 60)
        third = torch.empty(3)
        assert (ledger.live_bytes, ledger.peak_bytes) == (32, 60)
        ledger.begin()
        assert ledger.peak_bytes == 32
        assert ledger.peak_by_cause == {"temporaries": 32}
        del second, third
        assert ledger.live_bytes == 0
        assert ledger.by_cause["temporaries"] == 0


def test_what_is_named_changes_its_cause_and_keeps_it() -> None:
    with Ledger() as ledger:
        weight, other = torch.empty(10), torch.empty(4)
        ledger.name([weight], "parameters")
        ledger.name([torch.empty(7, device="meta")], "parameters")
        assert {cause: size for cause, size in ledger.by_cause.items() if size} == {"parameters": 40, "temporaries": 16}
        ledger.begin()
        peak = torch.empty(1000)
        del peak
        assert ledger.peak_by_cause == {"parameters": 40, "temporaries": 4016}
        del weight, other
        assert not any(ledger.by_cause.values())


def test_storages_that_are_resized_count_as_gathered() -> None:
    """FSDP2 frees what it gathered, and gathers it again into the same storage."""
    resize = torch.UntypedStorage.resize_
    with Ledger() as ledger:
        storage = torch.empty(10).untyped_storage()
        storage.resize_(0)
        assert (ledger.live_bytes, ledger.by_cause["gathered"]) == (0, 0)
        storage.resize_(100)
        assert (ledger.live_bytes, ledger.by_cause["gathered"], ledger.by_cause["temporaries"]) == (100, 100, 0)
        assert ledger.peak_bytes == 100
    assert torch.UntypedStorage.resize_ is resize


def test_what_autograd_saves_are_activations_until_the_backward() -> None:
    with Ledger() as ledger:
        weight = nn.Parameter(torch.ones(4, 4))
        ledger.name([weight], "parameters")
        x = torch.ones(2, 4)
        hidden = (x @ weight).exp()
        loss = hidden.sum()
        assert ledger.by_cause["activations"] == 2 * 4 * 4 * 2, "the input of the product and the result of exp"
        assert ledger.by_cause["parameters"] == 64
        loss.backward()
        del x, hidden, loss
        assert ledger.by_cause["activations"] == 0


def test_a_saved_view_of_a_parameter_counts_as_gathered() -> None:
    """FSDP2 sets what it gathered as the module's parameter: it is freed by another than autograd."""
    with Ledger() as ledger:
        weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4, requires_grad=True)
        hidden = x + 1
        out = hidden @ weight.T
        assert out.requires_grad
        assert (ledger.by_cause["gathered"], ledger.by_cause["activations"]) == (64, 32)
        again = (hidden.view(4, 2) * 2).view(2, 4).t().exp()
        assert again.requires_grad
        assert (ledger.by_cause["gathered"], ledger.by_cause["activations"]) == (64, 64)


def test_products_and_attention_are_counted() -> None:
    q = torch.randn(2, 3, 8, 4, requires_grad=True)
    with Ledger() as ledger:
        torch.ones(5, 6) @ torch.ones(6, 7)
        assert ledger.flops == 2 * 5 * 6 * 7
        ledger.begin()
        assert ledger.flops == 0
        F.scaled_dot_product_attention(q, q, q)
        whole = ledger.flops
        assert whole == 2 * (2 * 2 * 3 * 8 * 8 * 4), "scores, and their products with the values"
        ledger.begin()
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert ledger.flops == whole / 2
        ledger.begin()
        out.sum().backward()
        assert ledger.flops == 2.5 * whole / 2, "five products for two"
        ledger.begin()
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        assert ledger.flops == 3.5 * whole


def test_collectives_count_the_larger_side_along_their_axis() -> None:
    with fake_world(0, 4):
        pair = dist.new_group([0, 1])
        whole, part = torch.ones(8), torch.ones(4)
        with Ledger() as ledger:
            ledger.axes = {str(pair.group_name): "tp"}
            dist.all_reduce(whole, group=pair)
            dist.all_reduce(part, group=pair)
            all_gather(whole, part, group=pair)
            reduce_scatter(part, whole, group=pair)
            dist.all_to_all_single(part.clone(), part, group=pair)
            dist.broadcast(part, 0)
            dist.all_gather([part, part.clone(), part.clone(), part.clone()], part)
        assert dict(ledger.comm_bytes) == {
            "tp all_reduce": 32 + 16,
            "tp all_gather": 32,
            "tp reduce_scatter": 32,
            "tp all_to_all": 16,
            "all broadcast": 16,
            "all all_gather": 64,
        }
        ledger.begin()
        assert not ledger.comm_bytes


@pytest.mark.parametrize("grown", [0, 3])
def test_the_peak_is_the_most_that_lived_at_once(grown: int) -> None:
    with Ledger() as ledger:
        for size in (8, 2, 5):
            kept = torch.empty(size + grown)
            assert kept is not None
        assert ledger.peak_bytes == 4 * max(8 + grown, 8 + 2 + 2 * grown, 2 + 5 + 2 * grown)
