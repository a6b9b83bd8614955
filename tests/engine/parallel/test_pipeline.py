"""Messages between stages, and weights' gradients that are computed later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.drawing import slow_after
from torch import nn

from trainspec_cli.engine.parallel import pipeline
from trainspec_cli.engine.parallel.pipeline import Hidden, Message, WeightQueue, message_after
from trainspec_cli.planner.pipeline import Action, Kind, actions
from trainspec_cli.recipe.keys.layout import Layout


@pytest.mark.parametrize(
    ("kind", "stage", "message"),
    [
        ("forward", 0, Message(1, 7, is_gradient=False)),
        ("forward", 2, Message(3, 7, is_gradient=False)),
        ("forward", 3, None),
        ("backward", 3, Message(2, 7, is_gradient=True)),
        ("backward", 1, Message(0, 7, is_gradient=True)),
        ("backward", 0, None),
        ("backward_input", 1, Message(0, 7, is_gradient=True)),
        ("backward_input", 0, None),
        ("backward_weight", 2, None),
    ],
)
def test_an_action_sends_to_the_next_stage_or_back(kind: Kind, stage: int, message: Message | None) -> None:
    layout = Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    assert message_after(layout, Action(kind, stage, 7)) == message


def test_hidden_states_are_the_sequences_parts_in_the_format_of_the_computation() -> None:
    like = Hidden(24, sequence_parts=4, dtype=torch.bfloat16).like(torch.zeros(3, 32, dtype=torch.int64))
    assert (tuple(like.shape), like.dtype, like.device.type) == ((3, 8, 24), torch.bfloat16, "meta")


class Net(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, bias=bias)
        self.second = nn.Linear(5, 4, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh() * 2).sin() * 3


def model(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(bias).double()


def gradients(net: nn.Module) -> list[Any]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in net.parameters()]


def step(net: nn.Module, seed: int, between: Callable[[], None] = lambda: None) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward, `between`, and backward; return the output and the input's gradient."""
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    out = net(x)
    between()
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize(("bias", "compiled"), slow_after(2, [(False, False), (True, False), (True, True)]))
def test_weights_gradients_come_when_their_micro_batch_is_worked_off(bias: bool, compiled: bool) -> None:
    """Schedules request this after the forward, when a compiler has already traced the backward."""
    plain, split, queue = model(bias), model(bias), WeightQueue()
    queue.apply(split)
    torch._dynamo.utils.counters.clear()
    if compiled:
        torch._dynamo.reset()
        split.compile(backend="aot_eager")
    wanted = []
    for seed in (1, 2):
        plain.zero_grad()
        wanted.append((step(plain, seed), gradients(plain)))
    torch.testing.assert_close((step(split, 2), gradients(split)), wanted[1])  # without holding it is a plain one
    split.zero_grad()
    for seed, ((out, dx), _) in zip((1, 2), wanted, strict=True):
        found_out, found_dx = step(split, seed, partial(queue.hold, 0, seed))
        queue.stop_holding()
        torch.testing.assert_close((found_out, found_dx), (out, dx))
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) is compiled
    weights = [parameter for parameter in split.parameters() if parameter.dim() > 1]
    assert all(parameter.grad is None for parameter in weights)
    queue.work_off(0, 2)
    of_second = [gradient for gradient in wanted[1][1] if gradient.dim() > 1]
    torch.testing.assert_close([parameter.grad for parameter in weights], of_second)
    queue.work_off(1, 1)  # another stage's
    torch.testing.assert_close([parameter.grad for parameter in weights], of_second)
    queue.work_off(0, 1)
    torch.testing.assert_close(gradients(split), [a + b for a, b in zip(wanted[0][1], wanted[1][1], strict=True)])
    queue.work_off(0, 1)
    torch.testing.assert_close(gradients(split), [a + b for a, b in zip(wanted[0][1], wanted[1][1], strict=True)])


def test_messages_come_from_their_senders_and_go_by_the_line_of_their_direction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The middle one of three ranks."""
    asked: list[tuple[Any, ...]] = []
    done = SimpleNamespace(wait=lambda: asked.append(("wait",)), is_completed=lambda: False)
    calls = SimpleNamespace(
        irecv=lambda tensor, group, group_src: asked.append(("receive", group, group_src)) or done,
        isend=lambda tensor, group, group_dst: asked.append(("send", group, group_dst)) or done,
    )
    monkeypatch.setattr(pipeline, "dist", calls)
    layout, up = Layout(pp=3), SimpleNamespace(rank=lambda: 1)
    lines = pipeline.Lines(up, "down", torch.device("cpu"))  # type: ignore[arg-type]
    mail = pipeline.Mailbox(layout, actions(layout, 1), lines, [torch.empty(2, device="meta")], nullcontext)
    mail.receive(Message(1, 0, is_gradient=False))
    mail.send(Message(2, 0, is_gradient=False), torch.ones(2))
    mail.receive(Message(1, 0, is_gradient=True))
    mail.send(Message(0, 0, is_gradient=True), torch.ones(2))
    mail.end()
    assert asked == [
        *(("receive", up, 0), ("wait",), ("send", up, 2)),
        *(("receive", "down", 2), ("wait",), ("send", "down", 0)),
        *(("wait",), ("wait",)),
    ], "receives are awaited immediately, sends at the end"
    mail.end()
    assert len(asked) == 8


def test_a_message_has_its_micro_batchs_shape_though_it_is_asked_for_before_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of two ranks posts the next message while it works on one."""
    sizes = (2, 0, 3)
    sent = iter(sizes)
    asked: list[int] = []

    def irecv(tensor: torch.Tensor, group: Any, group_src: int) -> Any:
        asked.append(len(tensor))
        tensor.fill_(next(sent))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(pipeline, "dist", SimpleNamespace(irecv=irecv))
    layout, up = Layout(pp=2, pipeline_schedule="gpipe"), SimpleNamespace(rank=lambda: 1)
    lines = pipeline.Lines(up, "down", torch.device("cpu"))  # type: ignore[arg-type]
    like = [torch.empty(size, 4, device="meta") for size in sizes]
    mail = pipeline.Mailbox(layout, actions(layout, 3), lines, like, nullcontext)
    for number, size in enumerate(sizes):
        received = mail.receive(Message(1, number, is_gradient=False))
        assert tuple(received.shape) == (size, 4) and (received == size).all()
        assert asked == list(sizes[: number + 2])
