"""Expert parallelism: each rank holds some of the experts, and tokens are sent to their experts and back
(arXiv:2006.16668).

The ranks of ep process different tokens, so a routed token is sent only once, to the rank with its expert. Experts are
not split.

Shapes: T tokens on this rank, K experts per token, M copies of tokens sorted by expert, E experts, N copies received, L
experts held here (E / n), D hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainspec_cli.engine.comm.exchange import Peers, exchange, sent_bytes
from trainspec_cli.engine.shares import Cut
from trainspec_cli.recipe.keys.run import Recompute


def apply_expert_parallel(model: Any, peers: Peers, sort: Sort) -> dict[str, Cut]:
    """Keep only this rank's experts in `model` (on meta). Return each split parameter's position in the full
    parameter."""
    cuts: dict[str, Cut] = {}
    names = {module: name for name, module in model.named_modules()}
    for mixture in model.expert_modules():
        num_experts = mixture.experts.num_experts
        cut = Cut(0, num_experts, peers.rank, peers.size, peers.group)
        for leaf, parameter in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, leaf, cut.part_of(parameter))
            cuts[f"{names[mixture.experts]}.{leaf}"] = cut
        for leaf, buffer in list(mixture.experts.named_buffers()):
            if buffer.dtype == torch.uint8:  # in 4 bits; scales and tables belong to the full matrix
                owner, _, last = leaf.rpartition(".")
                setattr(mixture.experts.get_submodule(owner), last, cut.part_of(buffer).detach())
                cuts[f"{names[mixture.experts]}.{leaf}"] = cut
        mixture.dispatch = SpreadDispatch(num_experts, peers, sort)
    return cuts


Sort = Callable[[Tensor, Tensor, int], Any]
"""Sorts copies of tokens by expert: (x_TD, indices_TK, num_experts) -> an object with x_MD, counts_E and `combine(y_MD,
weights_TK)`, which restores their order."""


class SpreadDispatch(nn.Module):
    """Sorts copies by expert, sends them to the experts' ranks, and sorts the received copies by expert again; results
    are sent back the same way."""

    def __init__(self, num_experts: int, peers: Peers, sort: Sort):
        super().__init__()
        self.num_experts = num_experts
        self.peers = peers
        self.sort = sort
        self.read_splits: Callable[[Tensor, Tensor, int], Splits] = read_splits

    @torch.compiler.disable
    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, experts: nn.Module) -> Tensor:
        copies = self.sort(x_TD, indices_TK, self.num_experts)
        counts_nL = copies.counts_E.view(self.peers.size, -1)
        came_nL = torch.empty_like(counts_nL)  # number of copies from each rank for each of this rank's experts
        with self.peers.time():
            dist.all_to_all_single(came_nL, counts_nL.contiguous(), group=self.peers.group)
        sent, came = self.read_splits(counts_nL, came_nL, len(copies.x_MD))
        taken = sum(sent)  # dropped copies are last and are not sent
        x_ND = self._rows(copies.x_MD[:taken], sent, came)
        # Rows are ordered by sender and then by expert. These indices reorder them by expert.
        expert_nL = torch.arange(came_nL.shape[1], device=came_nL.device).expand_as(came_nL)
        order_N = expert_nL.flatten().repeat_interleave(came_nL.flatten(), output_size=len(x_ND)).argsort(stable=True)
        y_ND = experts(x_ND[order_N], came_nL.sum(0))
        back_MD = self._rows(y_ND[order_N.argsort()], came, sent)
        dropped = back_MD.new_zeros((len(copies.x_MD) - taken, back_MD.shape[1]))
        return copies.combine(torch.cat((back_MD, dropped)), weights_TK)

    def _rows(self, x_MD: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        """Send rows to their ranks. In the backward pass, their gradients are sent back."""
        return exchange(x_MD, lambda x: self._swap_rows(x, sent, came), lambda dx: self._swap_rows(dx, came, sent))

    def _swap_rows(self, x_MD: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        received = x_MD.new_empty((sum(came), x_MD.shape[1]))
        with self.peers.time(sent_bytes(x_MD.nbytes, self.peers.size)):
            dist.all_to_all_single(received, x_MD.contiguous(), list(came), list(sent), group=self.peers.group)
        return received


Splits = tuple[list[int], list[int]]
"""Numbers of copies sent to each rank and received from each rank."""


def read_splits(counts_nL: Tensor, came_nL: Tensor, _copies: int) -> Splits:
    """Return the actual numbers of copies. The host waits for them once."""
    sent, came = torch.stack((counts_nL.sum(1), came_nL.sum(1))).tolist()
    return sent, came


def even_splits(counts_nL: Tensor, _came_nL: Tensor, copies: int) -> Splits:
    """Return the copy counts if they are the same on all ranks."""
    even = [copies // len(counts_nL)] * len(counts_nL)
    return even, even


# Linear layers that multiply in fp8, using torchao (extra `float8`): inputs and weights are rounded to e4m3, output
# gradients to e5m2, with one scale per tensor and accumulation in fp32 (arXiv:2209.05433).
#
# The parameters themselves keep their format, so sharding, checkpoints and the optimizer are not affected. A rank's
# scales are computed from its parts of the tensors. On a CPU, the rounding is exact and the matmul is computed in fp32,
# which is correct but slow.


def apply_float8(blocks: Sequence[nn.Module], *, emulate: bool) -> None:
    """Replace every linear layer of the blocks (on meta) in place. The grouped matmuls of experts, and the head, keep
    their format."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    # fp8 kernels need dimensions that are multiples of 16.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)
    for block in blocks:
        linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        for name, linear in linears:
            owner, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(owner), leaf, Float8Linear.from_float(linear, config))


# Recompute activations in the backward pass instead of keeping them (arXiv:1604.06174).
#
# `full` keeps only a block's input. `selective` keeps the results of matmuls and attention, and repeats the cheap
# operations: norms, rotations, activation functions, casts.


_aten = torch.ops.aten
COSTLY = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.convolution.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,  # for XPU and for devices added by plug-ins
    }
)
"""Operations whose results `selective` keeps."""


def apply_recompute(blocks: Sequence[nn.Module], recompute: Recompute, *, compiled: bool = False) -> None:
    """Replace the forward methods of the blocks in place. Parameter names stay the same."""
    if recompute == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy) if compiled else _keep_and_recall
    for block in blocks:
        forward = block.forward
        if compiled and recompute == "full":
            # torch.compile skips an activation checkpoint entirely if it cannot capture its content in one graph, as
            # with tp, ep or a split backward pass. In this case only the modules inside the checkpoint are compiled.
            # Otherwise, the checkpoint is compiled as a whole, as without recomputation.
            forward = torch.compile(forward)
        block.forward = _recomputed(forward, options)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputed(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, **named, **options)

    return recomputed


def _keep_and_recall() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return contexts for both passes. torch's own contexts require that every operation is repeated, but the
    operations in FSDP2's hooks inside a block are not."""
    kept: deque[Any] = deque()
    return _Costly(kept, recalls=False), _Costly(kept, recalls=True)


class _Costly(TorchDispatchMode):
    """In the first pass, stores the results of costly operations. In the second pass, which runs the operations in the
    same order, returns the stored results."""

    def __init__(self, kept: deque[Any], *, recalls: bool):
        super().__init__()
        self.kept = kept
        self.recalls = recalls

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recalls and func in COSTLY:
            return self.kept.popleft()
        result = func(*args, **(kwargs or {}))
        if func in COSTLY:
            self.kept.append(tree_map_only(Tensor, Tensor.detach, result))
        return result


def _policy(_context: Any, operation: Any, *_inputs: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
