"""One training step, to be read aloud: forward and backward over the micro-batches, agree, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.optim.update import gradient_norm, guarded_update


@dataclass(frozen=True)
class StepOutcome:
    """Scalars on the device, the same on every rank; read late so that nothing waits."""

    loss: Tensor
    """Mean over the global batch's tokens, in nats."""
    grad_norm: Tensor
    skipped: Tensor
    """1 where something was not finite and nothing was updated."""
    stop: Tensor
    """How many ranks were asked to stop."""


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    global_tokens: int,
    clip_norm: float | None,
    stop_requested: bool,
    clock: StepClock,
) -> StepOutcome:
    loss = accumulate_gradients(model, micro_batches, global_tokens, clock)
    agreed = torch.stack([loss, loss.new_tensor(float(stop_requested))])
    with clock.collective():
        dist.all_reduce(agreed)
    with clock.part("optimizer"):
        norm = gradient_norm(model.parameters())
        skipped = guarded_update(optimizer, norm, agreed[0], clip_norm)
    return StepOutcome(loss=agreed[0], grad_norm=norm, skipped=skipped, stop=agreed[1])


def accumulate_gradients(
    model: Any, micro_batches: Sequence[MicroBatch], global_tokens: int, clock: StepClock
) -> Tensor:
    """Gradients of the global batch's mean loss; ranks exchange them in the last backward alone.

    -> this rank's part of the mean loss.
    """
    total: Tensor | None = None
    for index, (tokens_BS, targets_BS) in enumerate(micro_batches):
        model.set_requires_gradient_sync(index == len(micro_batches) - 1)
        with clock.part("forward"):
            loss = model(tokens_BS, targets_BS) / global_tokens
        with clock.part("backward"):
            loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "a step has at least one micro-batch"
    return total
