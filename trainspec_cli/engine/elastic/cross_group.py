"""The exchange between ranks of one number in all replica groups: gloo over the host.

These ranks hold the same part of the model. Once gradients are summed inside each replica group, they are summed over
the groups here. The process group is made anew whenever the groups that take part change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.comm.rendezvous import RendezvousStore

HEAL_TAG = 0
LARGE_BYTES = 2**20
"""Tensors of this size are summed as they are; smaller ones travel together, in packets of this size."""


class CrossGroupComm:
    """Every call blocks until it is done. Raises RuntimeError where a peer is lost or does not come in time.

    Dropping the object closes its connections, which each peer that waits on them notices at once.
    """

    def __init__(self, name: str, rank: int, size: int, timeout_s: float):
        """All peers meet under `name`, which no other exchange of the run has had.

        Raises OSError where the rendezvous server is not reached.
        """
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = rank, size
        self._store = RendezvousStore(timeout)  # the process group holds its C++ half alone
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, timeout)

    def sum_(self, tensor: Tensor) -> None:
        """Sum over all peers, in place."""
        on_host = tensor.detach().cpu()
        self._group.allreduce([on_host]).wait()
        if tensor.device.type != "cpu":
            tensor.copy_(on_host)

    def swap_rows(self, sent_RB: Tensor) -> Tensor:
        """Send row i to peer i, and return what the peers have sent to this one, by peer."""
        on_host = sent_RB.cpu().contiguous()
        received = torch.empty_like(on_host)
        self._group.alltoall_base(received, on_host, [], []).wait()
        return received.to(sent_RB.device)

    def gather_rows(self, own_B: Tensor) -> Tensor:
        return torch.stack(self.gather(own_B)).to(own_B.device)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every peer's tensor, in order, on the host."""
        on_host = tensor.detach().cpu()
        gathered = [torch.empty_like(on_host) for _ in range(self.size)]
        self._group.allgather([gathered], [on_host]).wait()
        return gathered

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        for tensor in tensors:
            self._group.send([tensor.detach().cpu().contiguous()], to, HEAL_TAG).wait()

    def receive_(self, tensors: Sequence[Tensor], sender: int) -> None:
        """Overwrite `tensors` with those that `sender` sends."""
        for tensor in tensors:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._group.recv([on_host], sender, HEAL_TAG).wait()
            tensor.copy_(on_host)


def packets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the places of the tensors that are exchanged at once, of one type each."""
    small: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous():
            yield [place]
            continue
        waiting = small.setdefault(tensor.dtype, [])
        waiting.append(place)
        if sum(tensors[other].nbytes for other in waiting) >= LARGE_BYTES:
            yield small.pop(tensor.dtype)
    yield from small.values()


@torch.no_grad()
def sum_as_one(packet: Sequence[Tensor], sum_: Callable[[Tensor], None]) -> None:
    """Sum several tensors in one exchange, in the type of the first, in place."""
    if len(packet) == 1 and packet[0].is_contiguous():
        sum_(packet[0])
        return
    flat = torch.cat([tensor.flatten().to(packet[0]) for tensor in packet])
    sum_(flat)
    for tensor, part in zip(packet, flat.split([tensor.numel() for tensor in packet]), strict=True):
        tensor.copy_(part.view_as(tensor))
