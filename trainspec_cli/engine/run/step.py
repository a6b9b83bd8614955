"""One training step, to be read aloud: forward and backward over the micro-batches, agree, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.build.train_state import LateSum, TrainState
from trainspec_cli.engine.comm.exchange import Peers
from trainspec_cli.engine.optim.update import clear_gradients, guarded_update, squared_norm
from trainspec_cli.engine.parallel.balance import scale_balance_loss, update_balance
from trainspec_cli.engine.run.groups import Groups, sum_over_groups
from trainspec_cli.engine.run.passes import Passes
from trainspec_cli.policy.pipeline import actions


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
    writing: Tensor
    """How many ranks were writing a checkpoint."""

    def on_host(self) -> StepOutcome:
        """Copies, which are there when the device reaches what is asked of it next."""
        scalars = (self.loss, self.grad_norm, self.skipped, self.stop, self.writing)
        together = torch.stack([scalar.to(self.loss.device, torch.float64) for scalar in scalars])
        return StepOutcome(*together.to("cpu", non_blocking=True).unbind())


def train_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    *,
    global_tokens: int,
    clip_norm: float | None,
    stop_requested: bool,
    writing: bool = False,
) -> StepOutcome:
    loss = compute_gradients(state, micro_batches, global_tokens)
    return _update(state, loss, clip_norm, stop_requested, writing)


def try_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    *,
    global_tokens: int,
    clip_norm: float | None,
    groups: Groups,
    writing: bool = False,
) -> StepOutcome | None:
    """The same together with other replica groups; None where they did not agree on it, and nothing was updated."""
    loss = compute_gradients(state, micro_batches, global_tokens)
    if not sum_over_groups(state, loss, groups):
        clear_gradients(state.shares)
        return None
    return _update(state, loss, clip_norm, stop_requested=False, writing=writing)


def _update(
    state: TrainState, loss: Tensor, clip_norm: float | None, stop_requested: bool, writing: bool
) -> StepOutcome:
    """`loss` is this rank's share of the mean."""
    with state.clock.part("optimizer"):
        squared = squared_norm(state.shares).to(loss.device)
    flags = [squared.new_full((), float(flag)) for flag in (stop_requested, writing)]  # filled there, nothing is copied
    agreed = torch.stack([loss.double(), squared, *flags])
    with state.clock.collective():
        dist.all_reduce(agreed)
    mean_loss, norm = agreed[0].float(), agreed[1].sqrt().float()
    with state.clock.part("optimizer"):
        skipped = guarded_update(state.optimizer, state.shares, norm, mean_loss, clip_norm)
    if state.routers:
        update_balance(state.routers, Peers(state.mesh.stage.get_group(), state.clock.collective))
    return StepOutcome(loss=mean_loss, grad_norm=norm, skipped=skipped, stop=agreed[2], writing=agreed[3])


def compute_gradients(state: TrainState, micro_batches: Sequence[MicroBatch], global_tokens: int) -> Tensor:
    """Gradients of the global batch's mean loss, in place.

    -> this rank's share of the mean loss: the ranks' shares sum to it.
    """
    layout = state.mesh.layout
    scale_balance_loss(state.routers, global_tokens)
    loss = Passes(state.stages, actions(layout, len(micro_batches)), micro_batches, global_tokens).run()
    for late in state.late_sums:
        sum_late(late)
    return loss / layout.tp  # each rank of tp computed the same


def sum_late(late: LateSum) -> None:
    """One exchange for all of a group's gradients; shares of one name on this rank count as one."""
    by_name: dict[str, list[Tensor]] = {}
    for share in late.shares:
        if share.gradient is not None:
            by_name.setdefault(share.name, []).append(share.gradient)
    flat = torch.cat([torch.stack(gradients).sum(0).flatten() for gradients in by_name.values()])
    late.peers.sum_(flat)
    parts = flat.split([gradients[0].numel() for gradients in by_name.values()])
    for gradients, part in zip(by_name.values(), parts, strict=True):
        for gradient in gradients:
            gradient.copy_(part.view_as(gradient))
