"""Send messages between pipeline stages, and delay weight gradients until a stage would otherwise wait.

The sender, receiver and order of messages follow from the schedule, which every rank knows completely. So a receiver
posts its receives in the sender's order, and messages do not need tags (NCCL has none).
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

from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.comm.exchange import Peers, TimeCollective
from trainspec_cli.engine.digest import Span, mark
from trainspec_cli.planner.pipeline import Action
from trainspec_cli.recipe.keys.layout import Layout


@dataclass(frozen=True)
class Hidden:
    """The hidden states that are sent between stages: (B, S / sequence_parts, D) in `dtype`."""

    hidden_size: int
    sequence_parts: int
    dtype: torch.dtype

    def like(self, tokens_BS: Tensor) -> Tensor:
        """Return an empty tensor on meta with this shape, for a batch."""
        batch, seq_len = tokens_BS.shape[:2]
        shape = (batch, seq_len // self.sequence_parts, self.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device="meta")


Schedule = Sequence[Sequence[Action]]
"""Each rank's actions, in order."""


class Message(NamedTuple):
    """A message that a stage waits for: the input of a forward pass, or the gradient of that pass's output."""

    stage: int
    micro_batch: int
    is_gradient: bool


def message_after(layout: Layout, action: Action) -> Message | None:
    """Return the message that `action` sends, if any."""
    if action.kind == "forward" and action.stage + 1 < layout.num_stages:
        return Message(action.stage + 1, action.micro_batch, is_gradient=False)
    if action.kind in ("backward", "backward_input") and action.stage > 0:
        return Message(action.stage - 1, action.micro_batch, is_gradient=True)
    return None


@dataclass(frozen=True)
class Lines:
    """Two process groups for messages, one to higher ranks and one to lower ranks, so that one direction does not wait
    for the other."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device

    def to(self, rank: int) -> dist.ProcessGroup:
        return self.up if rank > self.up.rank() else self.down

    def coming_from(self, rank: int) -> dist.ProcessGroup:
        return self.up if rank < self.up.rank() else self.down


class Mailbox:
    """Sends and receives one rank's messages during one run of a schedule."""

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        lines: Lines,
        like: Sequence[Tensor],
        time_collective: TimeCollective,
    ):
        """`like`: a tensor on meta for each micro-batch, with the shape and dtype of its messages."""
        self.layout = layout
        self.lines = lines
        self.like = like
        self.time = time_collective
        self.rank = lines.up.rank()
        self._here: dict[Message, Tensor] = {}
        self._posted: dict[Message, tuple[Tensor, Any]] = {}
        self._sent: list[tuple[Tensor, Any]] = []
        self._expected = {sender: deque[Message]() for sender in range(len(schedule)) if sender != self.rank}
        """The messages that this rank will receive from every other rank, in the sender's order."""
        for sender, expected in self._expected.items():
            sent = (message_after(layout, action) for action in schedule[sender])
            expected.extend(one for one in sent if one is not None and layout.rank_of_stage(one.stage) == self.rank)

    def send(self, message: Message, tensor: Tensor) -> None:
        receiver = self.layout.rank_of_stage(message.stage)
        if receiver == self.rank:
            self._here[message] = tensor
            return
        tensor = tensor.contiguous()
        # Pending sends are kept, because their memory is read until they are complete.
        self._sent = [(sent, work) for sent, work in self._sent if not work.is_completed()]
        self._sent.append((tensor, dist.isend(tensor, group=self.lines.to(receiver), group_dst=receiver)))

    def receive(self, message: Message) -> Tensor:
        sender_stage = message.stage + (1 if message.is_gradient else -1)
        sender = self.layout.rank_of_stage(sender_stage)
        if sender == self.rank:
            return self._here.pop(message)
        while message not in self._posted:
            self._post(sender)
        tensor, work = self._posted.pop(message)
        if self._expected[sender]:  # post the next receive, which may complete while this message is processed
            self._post(sender)
        with self.time():
            work.wait()
        return tensor

    def _post(self, sender: int) -> None:
        message = self._expected[sender].popleft()
        tensor = torch.empty_like(self.like[message.micro_batch], device=self.lines.device)
        work = dist.irecv(tensor, group=self.lines.coming_from(sender), group_src=sender)
        self._posted[message] = (tensor, work)

    def end(self) -> None:
        """Check that every message has been received."""
        with self.time():
            for _, work in self._sent:
                work.wait()
        self._sent.clear()


class WeightQueue:
    """The queue of weight gradients that a split schedule computes later. While `holding` is set, the backward pass of
    a linear layer computes the gradient of its input and queues the matmul for the weight."""

    def __init__(self) -> None:
        self.holding: list[Callable[[], None]] | None = None
        self._held: defaultdict[tuple[int, int], list[Callable[[], None]]] = defaultdict(list)

    def apply(self, model: nn.Module) -> None:
        for module in model.modules():
            # Subclasses may do more than multiply by a weight parameter.
            is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
            if is_plain and "weight" in module._parameters:
                module.forward = self._linear(module)  # type: ignore[arg-type, assignment, method-assign]

    def _linear(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        # A compiler traces the backward pass together with the forward pass, before anything is delayed, so the
        # weight's matmul would always be part of the backward pass. The compiler would also reuse the memory of `x` and
        # `dout`, which the queue keeps.
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


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.queue = queue
        return F.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        dx = dout @ weight if ctx.needs_input_grad[0] else None
        if ctx.queue.holding is None:
            return dx, _weight_gradient(x, dout), None

        def add_gradient() -> None:
            gradient = _weight_gradient(x, dout)
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

        ctx.queue.holding.append(torch.no_grad()(add_gradient))
        return dx, None, None


@torch.no_grad()
def _weight_gradient(x: Tensor, dout: Tensor) -> Tensor:
    """Compute a delayed weight gradient without autograd, which would record a graph of `x` and keep `dout`."""
    return dout.flatten(0, -2).T @ x.flatten(0, -2)


# Balance the load of the experts: count tokens over the global batch, and update the routers after each step.


def routers_of(parts: Sequence[Any]) -> list[Any]:
    return [router for part in parts for router in part.balance_modules()]


def sum_over_sequence(routers: Sequence[Any], over: Sequence[Peers]) -> None:
    """Let routers compute the balancing loss over full sequences, although these are spread over ranks."""

    def summed(counts_BE: Tensor) -> Tensor:
        counts_BE = counts_BE.clone()
        for peers in over:
            peers.sum_(counts_BE)
        return counts_BE

    for router in routers:
        router.sum_over_sequence = torch.compiler.disable(summed)


def scale_balance_loss(routers: Sequence[Any], global_tokens: int) -> None:
    """Divide the balancing loss by the same number of tokens as the main loss."""
    for router in routers:
        router.loss_scale.fill_(1 / global_tokens)


def forget_visits(routers: Sequence[Any]) -> None:
    """Discard the routers' token counts of a step that is being repeated."""
    for router in routers:
        router.tokens_per_expert_E.zero_()


def update_balance(routers: Sequence[Any], peers: Peers) -> None:
    """Update all routers with the token counts of the global batch, in one exchange.

    `peers`: the ranks that hold the same layers and process other tokens.
    """
    counts = peers.sum_(torch.stack([router.tokens_per_expert_E for router in routers]))
    for router, counts_E in zip(routers, counts, strict=True):
        router.update_balance(counts_E)


# Time the messages between neighbouring stages of a pipeline while no other messages are in flight.
#
# Within a step, a message arrives while its receiver is computing, and neither end knows how long the transfer took. So
# after a sampled step, neighbours send one message of the same size in each direction to a peer that is waiting for it,
# and get back a receipt of one number.


def neighbours(layout: Layout) -> list[tuple[int, int]]:
    """Return the pairs of neighbouring pipeline ranks (lower, higher) in the order in which they are timed: first every
    second pair, because these have no rank in common."""
    pairs = [(rank, rank + 1) for rank in range(layout.pp - 1)]
    goes_round = 2 < layout.pp < layout.num_stages and layout.rank_of_stage(layout.pp) == 0
    return pairs[::2] + pairs[1::2] + ([(layout.pp - 1, 0)] if goes_round else [])


def time_messages(layout: Layout, lines: Lines, message: Tensor) -> tuple[Span | None, Span | None]:
    """Return the time in seconds that `message` takes to the next rank and to the previous one; None if there is no
    such rank. Called collectively by all ranks of a pipeline."""
    rank = lines.up.rank()
    on_gpu = on_chip(lines.device)
    receipt = message.new_zeros(1)
    ahead: Span | None = None
    back: Span | None = None

    def send(tensor: Tensor, receiver: int) -> None:
        dist.send(tensor, group=lines.to(receiver), group_dst=receiver)

    def receive(tensor: Tensor, sender: int) -> None:
        dist.recv(tensor, group=lines.coming_from(sender), group_src=sender)

    def send_timed(receiver: int) -> Span:
        receive(receipt, receiver)  # wait until the peer is ready
        started = mark(on_gpu=on_gpu)
        send(message, receiver)
        receive(receipt, receiver)
        return started, mark(on_gpu=on_gpu)

    def answer(sender: int) -> None:
        send(receipt, sender)
        receive(torch.empty_like(message), sender)
        send(receipt, sender)

    for low, high in neighbours(layout):
        if rank == low:
            ahead = send_timed(high)
            answer(high)
        elif rank == high:
            answer(low)
            back = send_timed(low)
    return ahead, back
