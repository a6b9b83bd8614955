"""What the compressed exchanges of a module have lost, as shares of its parameters: the form that fits any layout.

Each rank keeps what its own encoding has lost of the gradients that it sent (`comm/compressed.py`), which belongs to
the rows of one layout. Their sum over the ranks is what the sums of gradients lack so far, and has the shape of the
gradients: a rank's share of it moves to another layout as a moment does. There the rank keeps it for its own row, which
no exchange over shards encodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainspec_cli.engine.comm.compressed import Feedback
from trainspec_cli.engine.comm.exchange import all_reduce_, reduce_scatter
from trainspec_cli.engine.parallel.noise import trained, trained_columns


@dataclass(frozen=True)
class ModuleLosses:
    """The feedback of a module's exchanges of gradients on this rank, first over shards, then over replicas."""

    module: nn.Module
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup
    over_shards: Feedback | None
    over_replicas: Feedback | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter.sharded_param for parameter in trained(self.module)]

    @torch.no_grad()
    def sum_up(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with what the sums of its gradients lack, this rank's share, flat, in fp32.

        Called by the ranks of both groups together.
        """
        feedback = self.over_shards or self.over_replicas
        assert feedback is not None, "a module without feedback has lost nothing"
        own_N = torch.zeros(sum(self._columns), device=feedback.settled.device)
        if self.over_shards is not None:
            reduce_scatter(own_N, self.over_shards.settled.float().view(self.shards.size(), -1), self.shards)
        if self.over_replicas is not None:
            own_N += self.over_replicas.settled
        if self.replicas.size() > 1:
            all_reduce_(own_N, self.replicas)
        yield from zip(self.parameters, own_N.split(self._columns), strict=True)

    @torch.no_grad()
    def take(self, share_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Keep, in the place of what was kept, `share_of` each parameter; the replicas keep an equal part of it."""
        parts = []
        for parameter, columns in zip(self.parameters, self._columns, strict=True):
            share = share_of(parameter).float().flatten() / self.replicas.size()
            parts.append(torch.nn.functional.pad(share, (0, columns - len(share))))
        own_N = torch.cat(parts)
        if self.over_shards is not None:
            self.over_shards.clear()
            self.over_shards.settled.view(self.shards.size(), -1)[self.shards.rank()] = own_N.bfloat16()
        if self.over_replicas is not None:
            self.over_replicas.clear()
            if self.over_shards is None:
                self.over_replicas.settled.copy_(own_N)

    @property
    def _columns(self) -> list[int]:
        return list(trained_columns(self.module, self.shards.size()))
