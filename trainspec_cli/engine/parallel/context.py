"""Context parallelism: each rank holds a part of every sequence, and attention spans all parts. Ring attention
(arXiv:2310.01889) with the zigzag order of Llama 3 (arXiv:2407.21783): the sequence is split into 2n chunks, and rank r
holds chunks r and 2n-1-r, so that causal attention costs the same on every rank. Keys and values travel around the
ring; each result is merged using its log-sum-exp. Ulysses (arXiv:2309.14509): an all-to-all turns parts of the sequence
into parts of the heads, plain attention runs, and another all-to-all reverses this.

Shapes: B samples, S tokens on this rank, H heads, K key-value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.comm.exchange import Peers, enter_region, exchange, leave_region, sent_bytes
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.shares import Cut
from trainspec_cli.recipe.keys.layout import ContextMethod


def held_positions(seq_len: int, method: ContextMethod, rank: int, size: int) -> Tensor:
    """Return (S,) int64: the positions of the sequence that a rank holds, in the rank's order."""
    if method == "ulysses":
        return torch.arange(seq_len).chunk(size)[rank]
    chunks = torch.arange(seq_len).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


class UlyssesCore(nn.Module):
    def __init__(self, core: nn.Module, peers: Peers):
        super().__init__()
        self.core = core
        self.peers = peers

    def forward(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: None = None) -> Tensor:
        assert mask is None, "document masks with cp are rejected before launch"
        whole = [exchange(x, self._sequence_to_heads, self._heads_to_sequence) for x in (q_BSHE, k_BSKE, v_BSKE)]
        return exchange(self.core(*whole), self._heads_to_sequence, self._sequence_to_heads)

    def _sequence_to_heads(self, x_BSHE: Tensor) -> Tensor:
        """Redistribute sequence parts by heads: (B, S, H, E) -> (B, n S, H / n, E)."""
        n, (batch, seq, heads, size) = self.peers.size, x_BSHE.shape
        sent = x_BSHE.view(batch, seq, n, heads // n, size).permute(2, 0, 1, 3, 4).contiguous()
        return self._all_to_all(sent).transpose(0, 1).reshape(batch, n * seq, heads // n, size)

    def _heads_to_sequence(self, x_BSHE: Tensor) -> Tensor:
        """Redistribute heads by sequence parts: (B, n S, H / n, E) -> (B, S, H, E)."""
        n, (batch, seq, heads, size) = self.peers.size, x_BSHE.shape
        sent = x_BSHE.reshape(batch, n, seq // n, heads, size).transpose(0, 1).contiguous()
        return self._all_to_all(sent).permute(1, 2, 0, 3, 4).reshape(batch, seq // n, n * heads, size)

    def _all_to_all(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        with self.peers.time(sent_bytes(sent.nbytes, self.peers.size)):
            dist.all_to_all_single(received, sent, group=self.peers.group)
        return received


class RingCore(nn.Module):
    """Causal attention of a rank's zigzag part of the sequence to the full sequence."""

    def __init__(self, core: nn.Module, peers: Peers):
        super().__init__()
        self.peers = peers
        self.scale = getattr(core, "scale", None)

    @torch.compiler.disable
    def forward(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: None = None) -> Tensor:
        assert mask is None, "document masks with cp are rejected before launch"
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        return _Ring.apply(q, k, v, self.peers, self.scale).transpose(1, 2)


class ChunkPair(NamedTuple):
    """One pair of a rank's queries and a peer's keys and values: which of them attend to each other, as slices over the
    two chunks."""

    queries: slice
    keys: slice
    causal: bool


def _pair_of(rank: int, source: int, seq: int) -> ChunkPair:
    whole = slice(0, seq)
    if source == rank:
        return ChunkPair(whole, whole, causal=True)
    if source < rank:  # both of this rank's chunks come after the source's first chunk and before its second
        return ChunkPair(whole, slice(0, seq // 2), causal=False)
    return ChunkPair(slice(seq // 2, seq), whole, causal=False)


class _Ring(torch.autograd.Function):
    """Ring attention on (B, H, S, E). In the backward pass, the gradients of keys and values travel back to their
    rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, peers: Peers, scale: float | None) -> Tensor:
        out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=_precise(q), device=q.device)
        log_total = torch.full(q.shape[:3], -torch.inf, dtype=_precise(q), device=q.device)
        travelling = torch.stack((k, v))  # one message per step, which arrives during this step's computation
        for turn in range(peers.size):
            coming = _Passage(travelling, peers) if turn < peers.size - 1 else None
            pair = _pair_of(peers.rank, (peers.rank - turn) % peers.size, q.shape[2])
            part, part_log = _attend(q, travelling[0], travelling[1], pair, scale)
            # Merge the pair's attention into the result, both weighted by their fractions of the softmax's denominator.
            earlier_log = log_total[:, :, pair.queries]
            merged_log = torch.logaddexp(earlier_log, part_log)
            own_out = out[:, :, pair.queries].mul_((earlier_log - merged_log).exp()[..., None])
            own_out.add_(part.to(out.dtype) * (part_log - merged_log).exp()[..., None])
            earlier_log.copy_(merged_log)
            travelling = coming.arrive() if coming else travelling
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_total)
        ctx.peers = peers
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, out, log_total = ctx.saved_tensors
        peers = ctx.peers
        dout = dout.contiguous()
        dq = torch.zeros(q.shape, dtype=_precise(q), device=q.device)
        travelling = torch.stack((k, v))
        gradients = torch.zeros(travelling.shape, dtype=_precise(q), device=q.device)
        for turn in range(peers.size):
            coming = _Passage(travelling, peers) if turn < peers.size - 1 else None
            pair = _pair_of(peers.rank, (peers.rank - turn) % peers.size, q.shape[2])
            dq_part, dk, dv = _attend_backward(dout, q, travelling[0], travelling[1], out, log_total, pair, ctx.scale)
            dq[:, :, pair.queries] += dq_part
            gradients[0][:, :, pair.keys] += dk
            gradients[1][:, :, pair.keys] += dv
            travelling = coming.arrive() if coming else travelling
            gradients = _Passage(gradients, peers).arrive()
        return dq.to(q.dtype), gradients[0].to(k.dtype), gradients[1].to(v.dtype), None, None


class _Passage:
    """A send to the next rank of the ring and a receive from the previous one, which overlap with computation."""

    def __init__(self, x: Tensor, peers: Peers):
        self._peers, self._sent, self._received = peers, x, torch.empty_like(x)
        ranks = dist.get_process_group_ranks(peers.group)
        after = ranks[(peers.rank + 1) % peers.size]
        before = ranks[(peers.rank - 1) % peers.size]
        moves = [
            dist.P2POp(dist.isend, self._sent, after, group=peers.group),
            dist.P2POp(dist.irecv, self._received, before, group=peers.group),
        ]
        with peers.time(x.nbytes) as at_once:
            self._works = dist.batch_isend_irecv(moves)
            if at_once:
                self._wait()

    def arrive(self) -> Tensor:
        with self._peers.time():
            self._wait()
        return self._received

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


def _precise(x: Tensor) -> torch.dtype:
    """Return the dtype for summing blocks' results: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


# Compute one pair with the fused kernels that return the log-sum-exp


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Repeat each key-value head for the query heads that share it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x


def _attend(q: Tensor, k: Tensor, v: Tensor, pair: ChunkPair, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return (attention, its log-sum-exp)."""
    aten = torch.ops.aten
    q = q[:, :, pair.queries]
    k, v = (_grouped(x[:, :, pair.keys], q.shape[1]) for x in (k, v))
    if q.device.type == "cpu":
        part = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, pair.causal, attn_mask=None, scale=scale)
    elif q.dtype == torch.float32:  # the flash kernel supports only 16-bit formats
        part = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, pair.causal, scale=scale)
    else:
        part = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, pair.causal, False, scale=scale)
    # Kernels pad the log-sum-exp differently, and vectorized operations on strided rows may round differently.
    return part[0], part[1][:, :, : q.shape[2]].contiguous()


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_total: Tensor, pair: ChunkPair, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq of the pair's queries, dk and dv of its keys), given the full softmax's log-sum-exp."""
    aten = torch.ops.aten
    kv_heads = k.shape[1]
    dout, q, out = (x[:, :, pair.queries].contiguous() for x in (dout, q, out))
    log_total = log_total[:, :, pair.queries].contiguous()
    k, v = (_grouped(x[:, :, pair.keys], q.shape[1]).contiguous() for x in (k, v))
    given = (dout, q, k, v)
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(*given, out, log_total, 0.0, pair.causal, attn_mask=None, scale=scale)
    elif q.dtype == torch.float32:
        backward = aten._scaled_dot_product_efficient_attention_backward
        mask = [True, True, True, False]
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = F.pad(log_total, (0, -log_total.shape[2] % 32))
        dq, dk, dv, _ = backward(*given, None, out, padded, unused, unused, 0.0, mask, pair.causal, scale=scale)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        seeds = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = backward(*given, out, log_total, *lengths, 0.0, pair.causal, seeds, unused, scale=scale)
    # The gradient of a key-value head is the sum over its repetitions.
    dk, dv = (x.to(_precise(x)).unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


# Tensor parallelism (arXiv:1909.08053) with sequence parallelism and a vocabulary-parallel loss.
#
# A model declares which dimension of each parameter may be split, and which modules are regions. Here, each parameter
# is replaced by a smaller plain tensor, and hooks exchange the inputs and outputs of regions. The model's code is
# unchanged.


def apply_tensor_parallel(
    model: Any, peers: Peers, cuts: dict[str, Cut], *, sequence_parallel: bool, overlaps: bool = True
) -> list[str]:
    """Split `model` (on meta) in place, and add the position of each part to `cuts`, which already contains other axes'
    splits. Return the names of unsplit parameters whose gradient on a rank is only a partial sum: always those inside
    regions, and those outside if the sequence is split.

    With `overlaps`, exchanges of the backward pass overlap with the gradients of weights (`_overlap_exchanges`)."""
    patterns = dict(model.tensor_cuts)
    for name, norm in model.head_norms().items():
        norm.sum_over_ranks = peers.sum_
        patterns[f"{name}.weight"] = 0
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        dim = next((dim for pattern, dim in patterns.items() if fnmatchcase(name, pattern)), None)
        if dim is None:
            continue
        cut = cuts[name] = Cut(dim, parameter.shape[dim], peers.rank, peers.size, peers.group)
        owner, _, leaf = name.rpartition(".")
        part = cut.part_of(parameter)
        setattr(model.get_submodule(owner), leaf, part if isinstance(parameter, nn.Parameter) else part.detach())

    def embed_own_words(tokens_BS: Tensor) -> Tensor:
        """Embed the tokens in this rank's part of the vocabulary. Other tokens become zeros, so the sum over the ranks
        is the full embedding."""
        cut = cuts["embed.weight"]
        mine_BS = (tokens_BS >= cut.start) & (tokens_BS < cut.start + cut.size)
        row_BS = torch.where(mine_BS, tokens_BS - cut.start, 0)
        x_BSD = F.embedding(row_BS, model.embed.weight) * mine_BS[..., None]
        return leave_region(x_BSD, peers, sequence_parallel)[0]

    turns = {region: Turns() for region in model.region_modules()}
    for region, own in turns.items():
        region.register_forward_pre_hook(partial(_enter, peers, sequence_parallel, own))
        region.register_forward_hook(partial(_leave, peers, sequence_parallel, own))
    if overlaps:
        _overlap_exchanges(model, turns, cuts)
    if getattr(model, "embed", None) is not None:
        model.embed.forward = embed_own_words
    if getattr(model, "loss", None) is not None:
        model.loss.register_forward_pre_hook(partial(_enter, peers, sequence_parallel, Turns()))
        model.loss.chunk = VocabularyCutChunk(cuts.get("head.weight") or cuts["embed.weight"], peers)
    return [
        name
        for name, _ in model.named_parameters()
        if name not in cuts and (sequence_parallel or any(fnmatchcase(name, one) for one in model.tensor_partial))
    ]


@dataclass
class Turns:
    """Positions in autograd's order at which weight gradients hide an exchange of a region's backward pass
    (`exchange.cross`), for the graph that is being recorded."""

    entered: int | None = None
    """The position during the sum of the region's input gradient."""
    left: int | None = None
    """The position during the gathering of the region's output gradient; None if nothing is gathered."""


@torch.compiler.disable
def _enter(peers: Peers, sequence_parallel: bool, turns: Turns, _module: nn.Module, inputs: Any) -> tuple[Any, ...]:
    x_BSD, turns.entered = enter_region(inputs[0], peers, sequence_parallel)
    return (x_BSD, *inputs[1:])


@torch.compiler.disable
def _leave(
    peers: Peers, sequence_parallel: bool, turns: Turns, _module: nn.Module, _inputs: Any, output: Tensor
) -> Tensor:
    x_BSD, turn = leave_region(output, peers, sequence_parallel)
    turns.left = turn if sequence_parallel else None
    return x_BSD


def _overlap_exchanges(model: Any, turns: dict[nn.Module, Turns], cuts: dict[str, Cut]) -> None:
    """Compute the gradients of a region's weights while the gradient of its input is summed over the ranks. If the
    block has a region before this one, one weight gradient is computed while the gradient of that region's output is
    gathered. The same matmuls are computed, so results are bitwise identical.

    Nothing is computed later than the block's backward pass, at the end of which its gradients are reduced. In all
    regions of a block except the first, the last matmul is not delayed: it would keep the gathered gradient of the
    output while memory use is highest."""
    names = {module: name for name, module in model.named_modules()}
    for block in model.block_modules():
        before: Turns | None = None
        for region in block.modules():
            if region not in turns:
                continue
            own = turns[region]
            hidden_before = before
            for linear in region.modules():
                cut = cuts.get(f"{names[linear]}.weight")
                is_last = cut is not None and cut.dim == 1
                # Skip subclasses, which may do more than multiply by a weight.
                if type(linear) is not nn.Linear or (is_last and before is not None):
                    continue
                linear.__class__ = RegionLinear
                linear.turns = own  # type: ignore[assignment]
                linear.turns_before = hidden_before  # type: ignore[assignment]
                hidden_before = None
            before = own


class RegionLinear(nn.Linear):
    """A linear layer whose weight's gradient is computed while an exchange is in progress."""

    turns: Turns
    turns_before: Turns | None
    """The same positions for the block's previous region, if its exchange is to be hidden."""

    # A compiler would compute both gradients in one graph, without overlap.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        turn = self.turns.entered
        if self.turns_before is not None and self.turns_before.left is not None:
            turn = self.turns_before.left
        if turn is None or not (torch.is_grad_enabled() and x.requires_grad and self.weight.requires_grad):
            return super().forward(x)
        product = _Product(self.weight, self.bias)
        rows = x.flatten(0, -2)
        late: Any = _LateGradient.apply(self.weight, self.bias, len(rows), product)
        late.grad_fn._set_sequence_nr(turn)
        y: Tensor = _MultiplyRows.apply(rows, late, product)
        return y.unflatten(0, x.shape[:-1])


@dataclass
class _Product:
    """Tensors shared by the two halves of a linear layer's backward pass, one for the parameters and one for the
    input."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor | None = None


class _LateGradient(torch.autograd.Function):
    """The parameter half of a linear layer's backward pass: computes the parameter gradients from the gradient of the
    layer's output. The result of the forward pass has the output's shape but no values; it connects the two halves."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, rows: int, product: _Product) -> Tensor:
        ctx.product = product
        return weight.new_empty(()).expand(rows, len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x = ctx.product.x
        ctx.product.x = None
        return dy.T @ x, None if ctx.product.bias is None else dy.sum(0), None, None


class _MultiplyRows(torch.autograd.Function):
    """The input half of a linear layer's backward pass: computes the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _late: Tensor, product: _Product) -> Tensor:
        ctx.save_for_backward(x)
        ctx.product = product
        return F.linear(x, product.weight, product.bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (ctx.product.x,) = ctx.saved_tensors
        return dy @ ctx.product.weight, dy, None


class VocabularyCutChunk(nn.Module):
    """A chunk of the linear cross-entropy whose logits are split along the vocabulary (C, V / n)."""

    def __init__(self, cut: Cut, peers: Peers):
        super().__init__()
        self.cut = cut
        self.peers = peers

    @torch.compiler.disable
    def forward(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss summed over the chunk, the same on every rank; this rank's d loss / d logits, which overwrites
        the logits)."""
        counted_C = targets_C != IGNORED_TARGET
        mine_C = (targets_C >= self.cut.start) & (targets_C < self.cut.start + self.cut.size)
        index_C1 = torch.where(mine_C, targets_C - self.cut.start, 0)[:, None]
        # In place, because with one tensor per operation, it would need 17 bytes per logit and move about 80.
        softmax_CV = logits_CV.to(_precise(logits_CV))
        peak_C = self.peers.maximum_(softmax_CV.amax(dim=-1))
        target_C = torch.where(mine_C, softmax_CV.gather(1, index_C1)[:, 0], 0.0)
        softmax_CV.sub_(peak_C[:, None]).exp_()
        summed_2C = torch.stack([softmax_CV.sum(dim=-1), target_C])
        self.peers.sum_(summed_2C)
        softmax_CV.div_(summed_2C[0][:, None])
        softmax_CV.scatter_(1, index_C1, softmax_CV.gather(1, index_C1) - mine_C[:, None].float())
        loss = torch.where(counted_C, peak_C + summed_2C[0].log() - summed_2C[1], 0.0).sum()
        return loss, logits_CV.copy_(softmax_CV).masked_fill_(~counted_C[:, None], 0)
