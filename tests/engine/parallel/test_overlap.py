"""The order of the backward pass of regions during an exchange, and its bits."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.comm.exchange import Peers
from trainspec_cli.engine.models.layers import FeedForward
from trainspec_cli.engine.parallel import context
from trainspec_cli.engine.parallel.context import RegionLinear, apply_tensor_parallel
from trainspec_cli.engine.shares import Cut

HIDDEN = 6


class Block(nn.Module):
    """Two regions with biases and a residual stream, like attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"gated": True, "activation": "silu"}
        self.first = FeedForward(HIDDEN, 8, **options)
        self.second = FeedForward(HIDDEN, 8, **options)
        self.second.up = nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x.sin())
        return x + self.second(x.cos())


class Model(nn.Module):
    tensor_partial = ()
    tensor_cuts: ClassVar[dict[str, int]] = {"*.gate.*": 0, "*.up.*": 0, "*.down.weight": 1}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def block_modules(self) -> Any:
        return self.blocks

    def head_norms(self) -> dict[str, Any]:
        return {}

    def region_modules(self) -> Any:
        return [module for module in self.modules() if isinstance(module, FeedForward)]


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens during a backward pass, in order: exchanges start and end, products of weights are computed."""
    log: list[str] = []

    def started(name: str, end: Any) -> Any:
        log.append(f"start {name}")

        def wait() -> None:
            log.append(f"end {name}")
            end()

        return wait

    def gather(whole: Tensor, mine: Tensor, group: Any, async_op: bool) -> Any:
        return SimpleNamespace(wait=started("gather", lambda: whole.copy_(torch.cat((mine + 1, mine)))))

    def scatter(mine: Tensor, whole: Tensor, group: Any) -> Any:
        return started("scatter", lambda: mine.copy_((2 * whole + 1)[len(mine) :]))

    def reduce(x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        wait = started("sum", lambda: x.mul_(2).add_(1))
        return SimpleNamespace(wait=wait) if async_op else wait()

    monkeypatch.setattr(exchange, "all_gather", gather)
    monkeypatch.setattr(exchange, "start_reduce_scatter", scatter)
    monkeypatch.setattr(exchange.dist, "all_reduce", reduce)
    return log


def backward(happened: list[str], *, sequence_parallel: bool, overlaps: bool, recompute: bool = False) -> list[Tensor]:
    """Return the output and all gradients; `happened` has the names of the weights whose gradients are computed."""
    torch.manual_seed(0)
    model = Model()
    peers = Peers(SimpleNamespace(size=lambda: 2, rank=lambda: 1), lambda _=None: nullcontext(False))  # type: ignore
    cuts: dict[str, Cut] = {}
    apply_tensor_parallel(model, peers, cuts, sequence_parallel=sequence_parallel, overlaps=overlaps)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: happened.append(name.removesuffix(".weight")))
    x = torch.randn(2, 4, HIDDEN, requires_grad=True)
    y = x
    for block in model.blocks:
        y = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False) if recompute else block(y)
    happened.clear()
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_overlap_changes_no_bit(happened: list[str], sequence_parallel: bool, recompute: bool) -> None:
    expected = backward(happened, sequence_parallel=sequence_parallel, overlaps=False)
    found = backward(happened, sequence_parallel=sequence_parallel, overlaps=True, recompute=recompute)
    assert len(found) == len(expected) > 10
    assert all(map(torch.equal, found, expected))


def during(happened: list[str], exchange: str) -> list[set[str]]:
    """Return the weights whose gradients are computed during each such exchange."""
    found: list[set[str]] = []
    running = False
    for event in happened:
        if event == f"start {exchange}":
            found.append(set())
        running = running or event == f"start {exchange}"
        if event == f"end {exchange}":
            running = False
        elif running and not event.startswith("start"):
            found[-1].add(event)
    return found


def test_weights_are_multiplied_while_a_split_sequence_is_exchanged(happened: list[str]) -> None:
    """One product of the second region waits for the exchange of the first region's output."""
    backward(happened, sequence_parallel=True, overlaps=True)
    second = {"blocks.1.second.up", "blocks.1.second.up.bias"}
    first = {f"blocks.1.first.{name}" for name in ("gate", "up", "down")}
    assert during(happened, "scatter")[:2] == [second, first]
    # The gathering before a block's last region hides nothing: the block before it has been reduced.
    assert during(happened, "gather")[:3] == [set(), {"blocks.1.second.gate"}, set()]
    last = happened.index("start gather", happened.index("blocks.1.first.down"))
    assert all(name.startswith("blocks.1") for name in happened[:last] if "blocks" in name)
    assert all(name.startswith("blocks.0") for name in happened[last:] if "blocks" in name)


def test_weights_are_multiplied_while_gradients_of_inputs_are_summed(happened: list[str]) -> None:
    backward(happened, sequence_parallel=False, overlaps=True)
    second = {"blocks.1.second.gate", "blocks.1.second.up", "blocks.1.second.up.bias"}
    first = {f"blocks.1.first.{name}" for name in ("gate", "up", "down")}
    assert during(happened, "sum")[:2] == [second, first]


def test_without_overlap_each_exchange_ends_at_once(happened: list[str]) -> None:
    backward(happened, sequence_parallel=True, overlaps=False)
    assert not any(during(happened, "scatter") + during(happened, "gather"))


def test_graphs_are_freed_without_a_garbage_collector(happened: list[str]) -> None:
    """A reference cycle would keep a micro-batch's activations."""
    model = Model()
    peers = Peers(SimpleNamespace(size=lambda: 2, rank=lambda: 1), lambda _=None: nullcontext(False))  # type: ignore
    apply_tensor_parallel(model, peers, {}, sequence_parallel=True)
    assert any(isinstance(module, RegionLinear) for module in model.modules())
    gathered: list[Any] = []
    original = context.enter_region

    def entered(*given: Any) -> Any:
        result = original(*given)
        gathered.append(weakref.ref(result[0]))
        return result

    context.enter_region = entered  # type: ignore[assignment]
    gc.disable()
    try:
        model.blocks[0](torch.randn(2, 4, HIDDEN, requires_grad=True)).sum().backward()
        assert gathered
        assert not any(reference() is not None for reference in gathered)
    finally:
        gc.enable()
        context.enter_region = original
