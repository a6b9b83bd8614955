"""Move gradient compression errors from one layout to another, along with parameters and moments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.files import TensorPart
from trainspec_cli.engine.comm.exchange import all_reduce_
from trainspec_cli.engine.optim.optimizer import without_memory
from trainspec_cli.engine.shares import Share

PREFIX = "lost."


@torch.no_grad()
def lost_parts(state: TrainState) -> list[TensorPart]:
    """Return this rank's shares of the compression errors that are still missing from the gradient sums, in bf16; empty
    if no format has error feedback. Called collectively by all ranks."""
    if not state.compression.feeds_back:
        return []
    flat = {id(parameter): lost for losses in state.losses for parameter, lost in losses.sum_up()}
    found: dict[int, Tensor] = {}
    for share in _trained(state):
        local = share.local
        lost = flat.get(id(share.parameter), torch.zeros(local.numel(), device=state.device))
        found[id(share.parameter)] = lost[: local.numel()].view(local.shape)
    for late in state.late_sums:
        for share in late.shares:
            whole = found[id(share.parameter)].contiguous()
            if late.peers.size > 1:
                all_reduce_(whole, late.peers.group)
            found[id(share.parameter)] = whole
    by_name: dict[str, TensorPart] = {}
    for share in _trained(state):
        lost = found[id(share.parameter)]
        if (earlier := by_name.get(share.name)) is not None:  # a tied embedding is on two stages of this rank
            lost = lost + earlier.tensor
        by_name[share.name] = _part(share, lost.bfloat16())
    return [part for part in by_name.values() if part.tensor.numel()]


def parts_to_fill(state: TrainState) -> list[TensorPart]:
    """Return the parts that `lost_parts` would return in this layout, without allocating their memory."""
    if not state.compression.feeds_back:
        return []
    by_name = {share.name: share for share in _trained(state)}
    parts = []
    for share in by_name.values():
        lost = without_memory(torch.empty(share.local.shape, dtype=torch.bfloat16, device=state.device))
        parts.append(_part(share, lost))
    return [part for part in parts if part.tensor.numel()]


def take_lost(state: TrainState, parts: list[TensorPart]) -> bool:
    """Pass the contents of `parts` to the exchanges of `state`. Return True if some of it does not belong to any
    exchange with error feedback in this layout. If gradients are summed over more ranks than before, each of these gets
    an equal part."""
    takers = {id(share.parameter): late.peers.size for late in state.late_sums for share in late.shares}
    left = {part.name.removeprefix(PREFIX): part.tensor for part in parts}
    names = {id(share.parameter): share.name for share in _trained(state)}

    def share_of(parameter: nn.Parameter) -> Tensor:
        lost = left.pop(names[id(parameter)], None)
        return torch.zeros(0, device=state.device) if lost is None else lost / takers.get(id(parameter), 1)

    for losses in state.losses:
        losses.take(share_of)
    return any(bool(lost.any()) for lost in left.values())


def has_other_losses(state: TrainState) -> bool:
    """Return whether exchanges between replica groups, which are not part of the layout, have stored errors."""
    moved = {id(kept) for losses in state.losses for kept in (losses.over_shards, losses.over_replicas)}
    others = (kept for kept in state.compression.feedbacks.values() if id(kept) not in moved)
    return any(bool(kept.committed.any()) for kept in others)


def _trained(state: TrainState) -> list[Share]:
    return [share for share in state.shares if share.is_trained]


def _part(share: Share, lost: Tensor) -> TensorPart:
    return TensorPart(f"{PREFIX}{share.name}", lost, tuple(share.offsets), tuple(share.full_shape))
