"""AdamW with moments of 8 bits: against the same written out value by value, and in parts as ranks hold them."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainspec_cli.engine.optim.adamw8bit import Codebook, dynamic_map
from trainspec_cli.engine.optim.muon import Muon
from trainspec_cli.engine.optim.optimizer import build_optimizer, guarded_update
from trainspec_cli.engine.shares import Cut, Share
from trainspec_cli.planner.memory.engine.units import Unit, state_bytes
from trainspec_cli.planner.setup import QUANTISED_BYTES, UPDATE_BYTES
from trainspec_cli.recipe.keys.training import OptimizerName, OptimSpec

CPU = torch.device("cpu")
SPEC = OptimSpec(name="adamw8bit", lr=0.03, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.2)
ROWS, ROW = 12, 600
"""Rows of two whole blocks and a part of one."""


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def update(optimizer: Any, shares: list[Share], gradients: list[Tensor], loss: float = 1.0) -> Tensor:
    for share, gradient in zip(shares, gradients, strict=True):
        share.parameter.grad = gradient.clone()
    return guarded_update(optimizer, shares, torch.tensor(2.0), torch.tensor(loss), 1.0)


def test_the_map_is_the_papers() -> None:
    """Ends, middle and finest steps, as bitsandbytes has them (create_dynamic_map, 8 bits, 7 of them exponents)."""
    signed, unsigned = dynamic_map(CPU, signed=True), dynamic_map(CPU, signed=False)
    for values in (signed, unsigned):
        assert len(values) == len(values.unique()) == 256 and values[-1] == 1
    assert signed[0].item() == pytest.approx(-0.9929688) and signed[127] == 0
    assert signed[128].item() == pytest.approx(5.5e-7) and signed[254].item() == pytest.approx(0.9929688)
    assert unsigned[0] == 0 and unsigned[1].item() == pytest.approx(3.25e-7)
    assert unsigned[254].item() == pytest.approx(0.9964844)


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_becomes_the_nearest_of_the_map(signed: bool) -> None:
    x = drawn(1, 3, ROW) * torch.tensor([[1e-9], [1.0], [0.0]])
    x = x if signed else x.abs()
    book = Codebook.make(CPU, signed=signed)
    codes, scales = book.quantise(x)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scales.shape == (3, 3)
    found, values = book.dequantise(codes, scales), book.values
    for block in range(3):
        own = slice(256 * block, 256 * (block + 1))
        assert torch.equal(scales[:, block], x[:, own].abs().amax(1))
        nearest = (x[:2, own, None] - scales[:2, block, None, None] * values).abs().amin(-1)
        assert torch.allclose((found[:2, own] - x[:2, own]).abs(), nearest, rtol=1e-3, atol=0)
    assert not found[2].any()


def test_a_second_moment_is_not_rounded_to_nothing() -> None:
    """A first moment that is left is divided by its root."""
    second = torch.full((1, 256), 1e-12)
    second[0, 0] = 1.0
    book = Codebook.make(CPU, signed=False)
    assert book.dequantise(*book.quantise(second)).amin() > 0


def test_three_steps_are_those_written_out() -> None:
    share, small, norm = (
        Share(name, torch.nn.Parameter(drawn(0, *shape)))
        for name, shape in (("w", (ROWS, ROW)), ("small", (8, 256)), ("norm", (5000,)))
    )
    optimizer, shares = build_optimizer([share, small, norm], SPEC), [share, small, norm]
    weight, books = share.local.detach().clone(), [Codebook.make(CPU, signed=signed) for signed in (True, False)]
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    usual = [Share(one.name, torch.nn.Parameter(one.parameter.detach().clone())) for one in (small, norm)]
    adamw = build_optimizer(usual, OptimSpec(**{**SPEC.__dict__, "name": "adamw"}))
    for step in range(1, 4):
        gradients = [drawn(10 * step + place, *one.local.shape) for place, one in enumerate(shares)]
        assert update(optimizer, shares, gradients) == 0
        update(adamw, usual, gradients[1:])
        gradient = gradients[0] / 2
        first, second = 0.7 * first + 0.3 * gradient, 0.8 * second + 0.2 * gradient**2
        weight *= 1 - 0.03 * 0.2
        weight -= 0.03 * (first / (1 - 0.7**step)) / ((second / (1 - 0.8**step)).sqrt() + 1e-3)
        first, second = (
            torch.cat([book.dequantise(*book.quantise(row[None])) for row in moment])
            for moment, book in zip((first, second), books, strict=True)
        )
    torch.testing.assert_close(share.local.detach(), weight, rtol=1e-4, atol=1e-4)
    for own, other in zip(shares[1:], usual, strict=True):
        assert torch.equal(own.local, other.local)
        assert optimizer.state[own.local]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("name", ["adamw8bit", "muon"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nothing_moves_when_something_is_not_finite(name: OptimizerName, where: str) -> None:
    shares = [Share(each, torch.nn.Parameter(drawn(0, 64, 80))) for each in ("blocks.0.q.weight", "embed.weight")]
    optimizer = build_optimizer(shares, OptimSpec(name=name, lr=0.1))
    update(optimizer, shares, [drawn(2, 64, 80)] * 2)
    tensors = [tensor for share in shares for tensor in (share.local, *optimizer.state[share.local].values())]
    before = [tensor.detach().clone() for tensor in tensors]
    bad = drawn(3, 64, 80)
    if where == "gradient":
        bad[1, 1] = math.nan
    for share in shares:
        share.parameter.grad = bad.clone()
    loss = torch.tensor(math.inf if where == "loss" else 1.0)
    assert guarded_update(optimizer, shares, bad.norm(), loss, 1.0) == 1
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert update(optimizer, shares, [drawn(4, 64, 80)] * 2) == 0
    assert not any(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_rows_on_several_ranks_make_the_update_of_the_whole() -> None:
    """Codes, scales and weights to the bit, and a checkpoint finds the parts' places."""
    whole = Share("w", torch.nn.Parameter(drawn(0, ROWS, ROW)))
    cuts = [Cut(0, ROWS, index, 5, cast("Any", None)) for index in range(5)]
    parts = [Share("w", cut.part_of(whole.parameter), cut) for cut in cuts]
    optimizers = [build_optimizer([share], SPEC) for share in (whole, *parts)]
    for step in range(3):
        gradient = drawn(step, ROWS, ROW)
        for share, optimizer in zip((whole, *parts), optimizers, strict=True):
            update(optimizer, [share], [share.part_of(gradient)])
    state = optimizers[0].state[whole.local]
    for key in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        for share, optimizer in zip(parts, optimizers[1:], strict=True):
            part = optimizer.state[share.local][key]
            offsets, full_shape = share.place_of(part)
            assert full_shape == tuple(state[key].shape)
            assert torch.equal(part, state[key][offsets[0] : offsets[0] + len(part)])
    assert torch.equal(torch.cat([share.local for share in parts]), whole.local)


def test_columns_on_several_ranks_have_blocks_of_their_own() -> None:
    cut = Cut(1, 1200, 1, 2, cast("Any", None))
    share = Share("w", torch.nn.Parameter(torch.zeros(ROWS, 600)), cut)
    state = build_optimizer([share], SPEC).state[share.local]
    assert share.place_of(state["exp_avg"]) == ((0, 600), (ROWS, 1200))
    assert share.place_of(state["exp_avg_scale"]) == ((0, 3), (ROWS, 6))


def test_the_state_takes_what_the_planner_counts() -> None:
    shapes = [(256, 512), (12, 600), (16, 64), (512,), (4096, 4)]
    shares = [Share(str(number), torch.nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]
    optimizer = build_optimizer(shares, SPEC)
    held = [sum(t.nbytes for t in optimizer.state[share.local].values() if t.dim()) for share in shares]
    assert held[0] == QUANTISED_BYTES * 256 * 512 == (2 + 8 / 256) * 256 * 512
    for taken, (rows, *row) in zip(held, shapes, strict=True):
        assert taken == state_bytes("adamw8bit", Unit(((rows, *(row or [1])),), shards=1), in_block=True)  # type: ignore[arg-type]


class Traffic(TorchDispatchMode):
    """Adds up what operations on large tensors read and write."""

    VIEWS = ("view", "_unsafe_view", "slice", "expand", "unsqueeze", "transpose", "alias", "split", "detach")
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] not in self.VIEWS:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1000)
        return result


@pytest.mark.parametrize("name", ["adamw8bit", "muon"])
def test_the_planner_counts_the_traffic_of_the_update(name: OptimizerName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Newton-Schulz, which is counted by its arithmetic."""
    monkeypatch.setattr("trainspec_cli.engine.optim.muon.orthogonalise", lambda matrices: matrices)
    share = Share("blocks.0.q.weight", torch.nn.Parameter(drawn(0, 256, 256)))
    optimizer = build_optimizer([share], OptimSpec(name=name, lr=1e-3))
    if isinstance(optimizer, Muon):
        optimizer.compute = torch.bfloat16
    share.parameter.grad = drawn(1, 256, 256)
    with Traffic() as traffic:
        guarded_update(optimizer, [share], torch.tensor(2.0), torch.tensor(1.0), 1.0)
    assert traffic.bytes == pytest.approx(UPDATE_BYTES[name] * share.local.numel(), rel=0.02)
