"""Messages between the stages of a pipeline, and weight gradients put off until a stage would wait.

Who sends what to whom in which order follows from the schedule, which every rank knows whole; so a receiver posts its
receives in the sender's order, and no message needs a tag (NCCL has none).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.comm.exchange import TimeCollective
from trainspec_cli.plan.pipeline import Action
from trainspec_cli.recipe.keys.layout import Layout


@dataclass(frozen=True)
class Hidden:
    """The hidden states that stages send to one another: (B, S / sequence_parts, D) in `dtype`."""

    hidden_size: int
    sequence_parts: int
    dtype: torch.dtype

    def like(self, tokens_BS: Tensor) -> Tensor:
        """Return an empty tensor of this shape for the batch, on meta."""
        batch, seq_len = tokens_BS.shape[:2]
        shape = (batch, seq_len // self.sequence_parts, self.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device="meta")


Schedule = Sequence[Sequence[Action]]
"""Each rank's actions."""


class Message(NamedTuple):
    """A message that a stage waits for: the input of its forward, or the gradient of its output."""

    stage: int
    micro_batch: int
    is_gradient: bool


def message_after(layout: Layout, action: Action) -> Message | None:
    """Return the message that `action` sends, if it sends one."""
    if action.kind == "forward" and action.stage + 1 < layout.num_stages:
        return Message(action.stage + 1, action.micro_batch, is_gradient=False)
    if action.kind in ("backward", "backward_input") and action.stage > 0:
        return Message(action.stage - 1, action.micro_batch, is_gradient=True)
    return None


@dataclass(frozen=True)
class Lines:
    """One group carries what goes to higher ranks, the other what goes to lower ones: neither waits for the other."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device

    def towards(self, up: bool) -> dist.ProcessGroup:
        return self.up if up else self.down


class Mailbox:
    """The messages of one rank over one run of a schedule."""

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        lines: Lines,
        like: Sequence[Tensor],
        time_collective: TimeCollective,
    ):
        """`like`: for each micro-batch a tensor (on meta) of its messages' shape and type."""
        self.layout, self.lines, self.like, self.time = layout, lines, like, time_collective
        self.rank = lines.up.rank()
        self._here: dict[Message, Tensor] = {}
        self._posted: dict[Message, tuple[Tensor, Any]] = {}
        self._sent: list[tuple[Tensor, Any]] = []
        self._expected = {
            sender: deque(self._messages_from(order)) for sender, order in enumerate(schedule) if sender != self.rank
        }

    def _messages_from(self, order: Sequence[Action]) -> list[Message]:
        messages = (message_after(self.layout, action) for action in order)
        return [m for m in messages if m is not None and self.layout.rank_of_stage(m.stage) == self.rank]

    def send(self, message: Message, tensor: Tensor) -> None:
        receiver = self.layout.rank_of_stage(message.stage)
        if receiver == self.rank:
            self._here[message] = tensor
            return
        tensor = tensor.contiguous()
        self._sent = [(sent, work) for sent, work in self._sent if not work.is_completed()]
        self._sent.append(
            (tensor, dist.isend(tensor, group=self.lines.towards(receiver > self.rank), group_dst=receiver))
        )

    def receive(self, message: Message) -> Tensor:
        sender_stage = message.stage + (1 if message.is_gradient else -1)
        sender = self.layout.rank_of_stage(sender_stage)
        if sender == self.rank:
            return self._here.pop(message)
        while message not in self._posted:
            self._post(sender)
        tensor, work = self._posted.pop(message)
        if self._expected[sender]:  # the next one may come while this one is worked on
            self._post(sender)
        with self.time():
            work.wait()
        return tensor

    def _post(self, sender: int) -> None:
        message = self._expected[sender].popleft()
        tensor = torch.empty_like(self.like[message.micro_batch], device=self.lines.device)
        work = dist.irecv(tensor, group=self.lines.towards(sender < self.rank), group_src=sender)
        self._posted[message] = (tensor, work)

    def end(self) -> None:
        """Every message has been taken."""
        with self.time():
            for _, work in self._sent:
                work.wait()
        self._sent.clear()


class WeightQueue:
    """Weight gradients that a split schedule computes later.

    While `holding` is set, the backward of a linear layer gives its input's gradient and leaves the weight's product
    in the queue.
    """

    def __init__(self) -> None:
        self.holding: list[Callable[[], None]] | None = None
        self._held: defaultdict[tuple[int, int], list[Callable[[], None]]] = defaultdict(list)

    def apply(self, model: nn.Module) -> None:
        for module in model.modules():
            if _is_plain(module):
                module.forward = self._linear(module)  # type: ignore[arg-type, assignment, method-assign]

    def _linear(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        # A compiler traces the backward together with the forward, when nothing is held back yet, and would put the
        # weight's product into it for good. It would also reuse the memory of `x` and `dout`, which the queue keeps.
        @torch.compiler.disable
        def forward(x: Tensor) -> Tensor:
            product = _SplitLinear.apply(x, module.weight, self)
            return product if module.bias is None else product + module.bias

        return forward

    def hold(self, stage: int, micro_batch: int) -> None:
        self.holding = self._held[stage, micro_batch]

    def stop_holding(self) -> None:
        self.holding = None

    def work_off(self, stage: int, micro_batch: int) -> None:
        for product in self._held.pop((stage, micro_batch), []):
            product()


def _is_plain(module: nn.Module) -> bool:
    """Return whether a linear layer multiplies by a weight that is its parameter, and does nothing else: heirs may."""
    return (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "weight" in module._parameters
    )


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,), weight, queue = ctx.saved_tensors, ctx.weight, ctx.queue
        dx = dout @ weight if ctx.needs_input_grad[0] else None
        if queue.holding is None:
            return dx, _weight_gradient(x, dout), None
        queue.holding.append(lambda: _add_gradient(weight, _weight_gradient(x, dout)))
        return dx, None, None


@torch.no_grad()
def _weight_gradient(x: Tensor, dout: Tensor) -> Tensor:
    """Compute a delayed weight gradient outside of autograd, where a graph of `x` would be recorded and keep `dout`."""
    return dout.flatten(0, -2).T @ x.flatten(0, -2)


@torch.no_grad()
def _add_gradient(weight: Tensor, gradient: Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
