"""Time the messages between neighbouring stages of a pipeline, when none are under way.

Within a step a message arrives while its receiver computes, and neither end sees how long it took. So after a sampled
step neighbours send one of the same size each way, to a peer that waits for it; a receipt of one number comes back.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.parallel.pipeline import Lines
from trainspec_cli.recipe.keys.layout import Layout


def neighbours(layout: Layout) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks of which the first sends forwards to the second, in the order that they are
    timed in: first those that have no rank in common."""
    pairs = [(rank, rank + 1) for rank in range(layout.pp - 1)]
    goes_round = 2 < layout.pp < layout.num_stages and layout.rank_of_stage(layout.pp) == 0
    return pairs[::2] + pairs[1::2] + ([(layout.pp - 1, 0)] if goes_round else [])


def time_messages(layout: Layout, lines: Lines, message: Tensor) -> tuple[float, float]:
    """Return the seconds that `message` takes to the next rank and to the one before; 0 where there is none.

    Called by all ranks of a pipeline together.
    """
    rank, ahead_s, back_s = lines.up.rank(), 0.0, 0.0
    for low, high in neighbours(layout):
        if rank == low:
            ahead_s = _send_timed(lines, message, high)
            _answer(lines, message, high)
        elif rank == high:
            _answer(lines, message, low)
            back_s = _send_timed(lines, message, low)
    return ahead_s, back_s


def _send_timed(lines: Lines, message: Tensor, receiver: int) -> float:
    receipt = message.new_empty(1)
    _receive(lines, receipt, receiver)  # it is ready, and waits
    started_s = time.perf_counter()
    _send(lines, message, receiver)
    _receive(lines, receipt, receiver)
    return time.perf_counter() - started_s


def _answer(lines: Lines, message: Tensor, sender: int) -> None:
    receipt = message.new_zeros(1)
    _send(lines, receipt, sender)
    _receive(lines, torch.empty_like(message), sender)
    _send(lines, receipt, sender)


def _send(lines: Lines, tensor: Tensor, receiver: int) -> None:
    dist.send(tensor, group=lines.towards(receiver > lines.up.rank()), group_dst=receiver)


def _receive(lines: Lines, tensor: Tensor, sender: int) -> None:
    dist.recv(tensor, group=lines.towards(sender < lines.up.rank()), group_src=sender)
