"""Expert parallelism: each rank holds some of the experts, and tokens travel to theirs and back (arXiv:2006.16668).

Ranks of ep see different tokens, so a routed token is sent once, to the rank that holds its expert. Experts stay whole.

Shapes: T tokens of this rank, K experts a token, M copies of tokens sorted by expert, E experts, N copies received,
L experts held here (E / n), D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainspec_cli.engine.comm.exchange import Peers, exchange, sent_bytes
from trainspec_cli.engine.shares import Cut


def apply_expert_parallel(model: Any, peers: Peers, sort: Sort) -> dict[str, Cut]:
    """Keep this rank's experts of `model` (on meta) in place; -> how each cut parameter lies in the whole one."""
    cuts: dict[str, Cut] = {}
    names = {module: name for name, module in model.named_modules()}
    for mixture in model.expert_modules():
        num_experts = next(mixture.experts.parameters()).shape[0]
        cut = Cut(0, num_experts, peers.rank, peers.size, peers.group)
        for leaf, parameter in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, leaf, cut.part_of(parameter))
            cuts[f"{names[mixture.experts]}.{leaf}"] = cut
        mixture.dispatch = SpreadDispatch(num_experts, peers, sort)
    return cuts


Sort = Callable[[Tensor, Tensor, int], Any]
"""Copies of tokens in their experts' order: (x_TD, indices_TK, num_experts) -> an object with x_MD, counts_E and
`combine(y_MD, weights_TK)`, which puts them back."""


class SpreadDispatch(nn.Module):
    """Sort by expert; send to the experts' ranks; sort what came by expert again; and all the way back."""

    def __init__(self, num_experts: int, peers: Peers, sort: Sort):
        super().__init__()
        self.num_experts, self.peers, self.sort = num_experts, peers, sort
        self.read_splits: Callable[[Tensor, Tensor, int], Splits] = read_splits

    @torch.compiler.disable
    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, experts: nn.Module) -> Tensor:
        copies = self.sort(x_TD, indices_TK, self.num_experts)
        counts_nL = copies.counts_E.view(self.peers.size, -1)
        came_nL = self._swap_counts(counts_nL)
        sent, came = self.read_splits(counts_nL, came_nL, len(copies.x_MD))
        taken = sum(sent)  # dropped copies stand last and stay here
        x_ND = self._rows(copies.x_MD[:taken], sent, came)
        order_N = _by_expert(came_nL, len(x_ND))
        y_ND = experts(x_ND[order_N], came_nL.sum(0))
        back_MD = self._rows(y_ND[order_N.argsort()], came, sent)
        dropped = back_MD.new_zeros((len(copies.x_MD) - taken, back_MD.shape[1]))
        return copies.combine(torch.cat((back_MD, dropped)), weights_TK)

    def _swap_counts(self, counts_nL: Tensor) -> Tensor:
        """The number of copies from each rank for each expert held here."""
        came_nL = torch.empty_like(counts_nL)
        with self.peers.time():
            dist.all_to_all_single(came_nL, counts_nL.contiguous(), group=self.peers.group)
        return came_nL

    def _rows(self, x_MD: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        """Send rows to their ranks; backward, their gradients come back."""
        return exchange(x_MD, lambda x: self._swap_rows(x, sent, came), lambda dx: self._swap_rows(dx, came, sent))

    def _swap_rows(self, x_MD: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        received = x_MD.new_empty((sum(came), x_MD.shape[1]))
        with self.peers.time(sent_bytes(x_MD.nbytes, self.peers.size)):
            dist.all_to_all_single(received, x_MD.contiguous(), list(came), list(sent), group=self.peers.group)
        return received


Splits = tuple[list[int], list[int]]
"""Copies that go to each rank, and that come from each."""


def read_splits(counts_nL: Tensor, came_nL: Tensor, _copies: int) -> Splits:
    """The host waits for them, once."""
    sent, came = torch.stack((counts_nL.sum(1), came_nL.sum(1))).tolist()
    return sent, came


def even_splits(counts_nL: Tensor, _came_nL: Tensor, copies: int) -> Splits:
    """Return the splits as if all ranks got equally many copies."""
    even = [copies // len(counts_nL)] * len(counts_nL)
    return even, even


def _by_expert(came_nL: Tensor, rows: int) -> Tensor:
    """(N,): rows stand by sender and then by expert; where to take them from to stand by expert."""
    expert_nL = torch.arange(came_nL.shape[1], device=came_nL.device).expand_as(came_nL)
    return expert_nL.flatten().repeat_interleave(came_nL.flatten(), output_size=rows).argsort(stable=True)
