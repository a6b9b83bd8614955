"""Tensor parallelism (arXiv:1909.08053) with sequence parallelism and a vocabulary-parallel loss.

A model publishes which dimension of which parameter may be cut, and which modules are regions. Here the parameters
become smaller plain tensors, and hooks carry the exchange in and out of the regions; the model's own code is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.batch import IGNORED_TARGET
from trainspec_cli.engine.comm.exchange import Peers, enter_region, leave_region
from trainspec_cli.engine.shares import Cut


def apply_tensor_parallel(model: Any, peers: Peers, *, sequence_parallel: bool) -> dict[str, Cut]:
    """Cut `model` (on meta) in place; -> how each cut parameter lies in the whole one."""
    cuts = cut_parameters(model, model.tensor_cuts, peers)
    for region in model.region_modules():
        region.register_forward_pre_hook(_entering(peers, sequence_parallel))
        region.register_forward_hook(_leaving(peers, sequence_parallel))
    if getattr(model, "embed", None) is not None:
        model.embed.forward = partial(_embed_cut, model.embed, cuts["embed.weight"], peers, sequence_parallel)
    if getattr(model, "loss", None) is not None:
        model.loss.register_forward_pre_hook(_entering(peers, sequence_parallel))
        model.loss.chunk = VocabularyCutChunk(cuts.get("head.weight") or cuts["embed.weight"], peers)
    return cuts


def cut_parameters(model: nn.Module, patterns: dict[str, int], peers: Peers) -> dict[str, Cut]:
    """Replace each parameter or buffer whose name fits a pattern by this rank's part along the pattern's dimension."""
    cuts: dict[str, Cut] = {}
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        dim = next((dim for pattern, dim in patterns.items() if fnmatchcase(name, pattern)), None)
        if dim is None:
            continue
        cut = cuts[name] = Cut(dim, parameter.shape[dim], peers.rank, peers.size, peers.group)
        owner, _, leaf = name.rpartition(".")
        part = cut.part_of(parameter)
        setattr(model.get_submodule(owner), leaf, part if isinstance(parameter, nn.Parameter) else part.detach())
    return cuts


def partial_parameters(model: Any, *, sequence_parallel: bool, cuts: dict[str, Cut]) -> list[str]:
    """Names of whole parameters whose gradient on a rank is only its share.

    Inside regions always; outside them where the sequence is cut.
    """
    return [
        name
        for name, _ in model.named_parameters()
        if name not in cuts
        and (sequence_parallel or any(fnmatchcase(name, pattern) for pattern in model.tensor_partial))
    ]


def _entering(peers: Peers, sequence_parallel: bool) -> Callable[..., Any]:
    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (enter_region(inputs[0], peers, sequence_parallel), *inputs[1:])

    return enter


def _leaving(peers: Peers, sequence_parallel: bool) -> Callable[..., Any]:
    def leave(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return leave_region(output, peers, sequence_parallel)

    return leave


def _embed_cut(embed: nn.Embedding, cut: Cut, peers: Peers, sequence_parallel: bool, tokens_BS: Tensor) -> Tensor:
    """Rows of the ranks' own words; the others' words are zeros, and the sum is the whole embedding."""
    mine_BS = (tokens_BS >= cut.start) & (tokens_BS < cut.start + cut.size)
    row_BS = torch.where(mine_BS, tokens_BS - cut.start, 0)
    x_BSD = F.embedding(row_BS, embed.weight) * mine_BS[..., None]
    return leave_region(x_BSD, peers, sequence_parallel)


class VocabularyCutChunk(nn.Module):
    """A chunk of the linear cross-entropy whose logits are cut along the vocabulary (C, V / n)."""

    def __init__(self, cut: Cut, peers: Peers):
        super().__init__()
        self.cut, self.peers = cut, peers

    @torch.compiler.disable
    def forward(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """-> (loss summed over the chunk, the same on every rank; this rank's d loss / d logits)."""
        counted_C = targets_C != IGNORED_TARGET
        mine_C = (targets_C >= self.cut.start) & (targets_C < self.cut.start + self.cut.size)
        index_C1 = torch.where(mine_C, targets_C - self.cut.start, 0)[:, None]
        logits_fp32_CV = logits_CV.float()
        peak_C = self.peers.maximum_(logits_fp32_CV.amax(dim=-1))
        summed_2C = torch.stack(
            [
                (logits_fp32_CV - peak_C[:, None]).exp().sum(dim=-1),
                torch.where(mine_C, logits_fp32_CV.gather(1, index_C1)[:, 0], 0.0),
            ]
        )
        self.peers.sum_(summed_2C)
        log_total_C = peak_C + summed_2C[0].log()
        softmax_CV = (logits_fp32_CV - log_total_C[:, None]).exp()
        is_target_CV = (torch.arange(logits_CV.shape[1], device=logits_CV.device) == index_C1) & mine_C[:, None]
        dlogits_CV = (softmax_CV - is_target_CV.float()) * counted_C[:, None]
        loss = torch.where(counted_C, log_total_C - summed_2C[1], 0.0).sum()
        return loss, dlogits_CV.to(logits_CV.dtype)
