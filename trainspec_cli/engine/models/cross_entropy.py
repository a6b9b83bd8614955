"""Cross-entropy of a linear head that never materialises the full logits.

For a few thousand tokens, the logits can take more memory than the model. Here they exist for one chunk of tokens at a
time: the forward pass computes each chunk's loss and, while its logits exist, also the gradients (d logits = softmax -
one_hot), so the backward pass only scales them. The idea is from Liger Kernel (arXiv:2410.10989).

Chunks are small because the softmax is in fp32. The matmuls with d logits are computed for groups of chunks, because
adding each result to the weight's fp32 gradient moves 10 bytes per weight. In that time, an H100 can perform 2,000
FLOPs, while the matmuls of a chunk of 261 tokens (for a vocabulary of 128k) take only 6 x 261 FLOPs per weight.

Shapes: T tokens, D hidden size, V vocabulary, C tokens of one chunk, G tokens of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.layers import precise
from trainspec_cli.recipe.keys.model import LOSS_CHUNK_BYTES, loss_chunk_tokens, loss_group_tokens


class ChunkCrossEntropy(nn.Module):
    """Computes one chunk's loss and gradient with plain arithmetic and no parameters, so that a compiler can fuse
    it."""

    def forward(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss summed over the chunk, d loss / d logits, which overwrites the logits)."""
        counted_C = targets_C != IGNORED_TARGET
        index_C1 = targets_C.clamp_min(0)[:, None]
        if not torch.compiler.is_compiling():
            # The computation below, in place, for runs without a compiler that fuses it. 1024 x 4096 logits take 7 ms
            # on a CPU core this way, and 21 ms one operation at a time.
            dtype = torch.promote_types(logits_CV.dtype, torch.float32)
            log_softmax_CV = logits_CV.log_softmax(dim=-1, dtype=dtype)
            loss_C = -log_softmax_CV.gather(1, index_C1)[:, 0]
            dlogits_CV = log_softmax_CV.exp_()
            dlogits_CV.scatter_(1, index_C1, dlogits_CV.gather(1, index_C1) - 1)
            logits_CV.copy_(dlogits_CV).masked_fill_(~counted_C[:, None], 0)
            return torch.where(counted_C, loss_C, 0.0).sum(), logits_CV
        logits_fp32_CV = precise(logits_CV)
        log_total_C = logits_fp32_CV.logsumexp(dim=-1)
        loss_C = log_total_C - logits_fp32_CV.gather(1, index_C1)[:, 0]
        softmax_CV = (logits_fp32_CV - log_total_C[:, None]).exp()
        is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == index_C1
        dlogits_CV = (softmax_CV - is_target_CV.float()) * counted_C[:, None]
        return torch.where(counted_C, loss_C, 0.0).sum(), logits_CV.copy_(dlogits_CV)


def capped_chunk(
    chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], softcap: float, logits_CV: Tensor, targets_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same as `chunk` for logits limited to softcap * tanh(logit / softcap) (Gemma 2, arXiv:2408.00118)."""
    tanh_CV = torch.tanh(precise(logits_CV) / softcap)
    loss, dlogits_CV = chunk(softcap * tanh_CV, targets_C)
    return loss, logits_CV.copy_(dlogits_CV * (1 - tanh_CV.square()))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        x_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        chunk_bytes: int,
    ) -> Tensor:
        needs_gradient = any(ctx.needs_input_grad)
        trains_weight = ctx.needs_input_grad[2]
        total = x_TD.new_zeros((), dtype=torch.float32)
        dx_TD = torch.empty_like(x_TD)
        # Sum in fp32, because bf16 would round after each of many groups.
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        dweight_VD: Tensor | None = None
        chunk_tokens = loss_chunk_tokens(weight_VD.shape[0], chunk_bytes)
        group_tokens = chunk_tokens
        if trains_weight:
            group_tokens = loss_group_tokens(weight_VD.shape[1], weight_VD.dtype.itemsize, chunk_tokens)
        for start in range(0, len(targets_T), group_tokens):
            x_GD = x_TD[start : start + group_tokens]
            targets_G = targets_T[start : start + group_tokens]
            # One matmul for the group, because with only 256 tokens, reading the weights takes as long as multiplying.
            logits_GV = x_GD @ weight_VD.T
            for first in range(0, len(x_GD), chunk_tokens):
                last = first + chunk_tokens
                total += chunk(logits_GV[first:last], targets_G[first:last])[0]
            dlogits_GV = logits_GV  # the gradients have overwritten the logits
            if needs_gradient:
                torch.mm(dlogits_GV, weight_VD, out=dx_TD[start : start + group_tokens])
            if trains_weight and dweight_VD is None:
                dweight_VD = (dlogits_GV.T @ x_GD).to(wide)
            elif dweight_VD is not None and wide == weight_VD.dtype:
                dweight_VD.addmm_(dlogits_GV.T, x_GD)
            elif dweight_VD is not None:
                dweight_VD += dlogits_GV.T @ x_GD
            del logits_GV, dlogits_GV  # otherwise these logits and the next group's would be in memory at once
        if trains_weight and dweight_VD is None:  # there were no tokens
            dweight_VD = torch.zeros_like(weight_VD, dtype=wide)
        ctx.save_for_backward(dx_TD, dweight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, Tensor, Tensor | None, None, None]:  # type: ignore[override]
        dx_TD, dweight_VD = ctx.saved_tensors
        scaled_VD = None
        if dweight_VD is not None:
            # Round while writing. With a large vocabulary, an fp32 result would be the largest tensor of a step.
            scaled_VD = torch.empty_like(dweight_VD, dtype=ctx.weight_dtype)
            torch.mul(dweight_VD, scale, out=scaled_VD)
        return None, dx_TD * scale.to(dx_TD.dtype), scaled_VD, None, None


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    chunk: nn.Module,
    softcap: float | None = None,
    chunk_bytes: int = LOSS_CHUNK_BYTES,
) -> Tensor:
    """Return the sum over tokens of -log softmax(x weight^T)[target]: a scalar in fp32. `IGNORED_TARGET`s are skipped.

    `chunk` computes the loss and gradient of one chunk of logits, of at most `chunk_bytes` in fp32. `softcap` limits
    the logits; None: they are not limited.
    """
    capped = chunk if softcap is None else partial(capped_chunk, chunk, softcap)
    return _LinearCrossEntropy.apply(capped, x_TD, weight_VD, targets_T, chunk_bytes)


class LinearCrossEntropy(nn.Module):
    """Returns the summed loss (a scalar in fp32) of tokens with targets; without targets, the logits (B, S, V)."""

    linear_cross_entropy = staticmethod(linear_cross_entropy)

    def __init__(self) -> None:
        super().__init__()
        self.chunk: nn.Module = ChunkCrossEntropy()
        self.softcap: float | None = None

    def forward(self, x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor | None) -> Tensor:
        if targets_BS is None:
            logits_BSV = F.linear(x_BSD, weight_VD)
            return logits_BSV if self.softcap is None else self.softcap * torch.tanh(logits_BSV / self.softcap)
        capped = () if self.softcap is None else (self.softcap,)
        return self.linear_cross_entropy(x_BSD.flatten(0, -2), weight_VD, targets_BS.flatten(), self.chunk, *capped)
