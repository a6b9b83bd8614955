"""The line between the ranks of one number in all replica groups: gloo over the host, made anew when members change."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.comm.rendezvous import RendezvousStore

HEAL_TAG = 0


class Line:
    """Every call blocks until it is done; RuntimeError where a peer is lost or does not come in time.

    Dropping the object closes its connections, which each peer that waits on them notices at once.
    """

    def __init__(self, name: str, rank: int, size: int, timeout_s: float):
        """All members meet under `name`, which no other line of the run has had. Raises OSError where the rendezvous
        server is not reached."""
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = rank, size
        self._store = RendezvousStore(timeout)  # the group holds its C++ half alone
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, timeout)

    def sum_(self, tensor: Tensor) -> None:
        """In place."""
        on_host = tensor.detach().cpu()
        self._group.allreduce([on_host]).wait()
        _give_back(tensor, on_host)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Of all members, in order, on the host."""
        on_host = tensor.detach().cpu()
        gathered = [torch.empty_like(on_host) for _ in range(self.size)]
        self._group.allgather([gathered], [on_host]).wait()
        return gathered

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        for tensor in tensors:
            self._group.send([tensor.detach().cpu().contiguous()], to, HEAL_TAG).wait()

    def receive_(self, tensors: Sequence[Tensor], sender: int) -> None:
        """Into `tensors`, in place."""
        for tensor in tensors:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._group.recv([on_host], sender, HEAL_TAG).wait()
            tensor.copy_(on_host)


def _give_back(tensor: Tensor, on_host: Tensor) -> None:
    """Nothing to do where the tensor lives on the host itself."""
    if tensor.device.type != "cpu":
        tensor.copy_(on_host)
