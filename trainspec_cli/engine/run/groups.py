"""What replica groups exchange in a step, on top of whatever layout is inside each of them.

A rank holds the same part of the model as the ranks of its number in the other groups; once the gradients are summed
inside the group, they are summed over the groups, and then the groups vote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.parallel.balance import forget_visits

LARGE_BYTES = 2**20
"""Gradients of this size go as they are; smaller ones travel together, in packets of this size."""


class Groups(Protocol):
    def sum_(self, tensor: Tensor) -> None:
        """Over all groups, in place."""

    def vote(self) -> bool:
        """Whether every exchange of the step went well, on every rank of this group."""


@torch.no_grad()
def sum_over_groups(state: TrainState, loss: Tensor, groups: Groups) -> bool:
    """Gradients, loss and the experts' visits, in place; -> whether the update may be made."""
    gradients = [share.gradient for share in state.shares]
    with state.clock.collective():
        for packet in packets([gradient for gradient in gradients if gradient is not None]):
            _sum_packet(packet, groups)
        _sum_packet([loss, *(router.tokens_per_expert_E for router in state.routers)], groups)
        committed = groups.vote()
    if not committed:
        forget_visits(state.routers)
    return committed


def packets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those that are exchanged at once, of one type each."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous():
            yield [tensor]
            continue
        waiting = small.setdefault(tensor.dtype, [])
        waiting.append(tensor)
        if sum(other.nbytes for other in waiting) >= LARGE_BYTES:
            yield small.pop(tensor.dtype)
    yield from small.values()


def _sum_packet(packet: Sequence[Tensor], groups: Groups) -> None:
    """Several tensors go as one, in the type of the first."""
    if len(packet) == 1 and packet[0].is_contiguous():
        groups.sum_(packet[0])
        return
    flat = torch.cat([tensor.flatten().to(packet[0]) for tensor in packet])
    groups.sum_(flat)
    for tensor, part in zip(packet, flat.split([tensor.numel() for tensor in packet]), strict=True):
        tensor.copy_(part.view_as(tensor))
