"""Evaluation: held-out loss and metrics, and text that the model writes. Blocks run eagerly: their shapes vary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.data.corpus.rows import Rows
from trainspec_cli.engine.batch import held_part
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.heldout import HeldoutLoss, heldout_batches
from trainspec_cli.engine.data.sample_loader import SampleLoader
from trainspec_cli.engine.finite import REMEDY, is_finite
from trainspec_cli.engine.run.pipeline_run import forward_only

NO_TOKEN = -1

SHORTEST_CONTEXT = 16
"""Shorter ones are padded to this."""


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def heldout_loss(state: TrainState, rows: Rows, *, num_bytes: int, batch_size: int) -> HeldoutLoss:
    """Return the loss on held-out text of `num_bytes`, the same on every rank."""
    total = torch.zeros((), device=state.device)
    ranks = state.mesh.layout.data_parallel_size
    for part in heldout_batches(rows, batch_size, state.mesh.data_rank, ranks):
        on_device = tuple(tensor.to(state.device) for tensor in part)
        loss = forward_only(state.stages, *held_part(on_device, state.positions_S))
        if loss is not None:
            total += loss / state.mesh.layout.tp
    dist.all_reduce(total)
    return HeldoutLoss(total.item(), sum(rows.counted(index) for index in range(len(rows))), num_bytes)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def heldout_metrics(state: TrainState, loader: SampleLoader, *, batch_size: int) -> dict[str, float] | None:
    """Return means over the held-out samples (`loss`, and `accuracy` or `dice`), on every rank.

    None where no sample is held out.
    """
    if loader.num_heldout == 0:
        return None
    (part,), ranks = state.parts, state.mesh.layout.data_parallel_size
    part.eval()
    totals: dict[str, Tensor] = {}
    for images, labels, num_real in loader.heldout_batches(batch_size, state.mesh.data_rank, ranks):
        predictions = forward_only(state.stages, images.to(state.device))
        assert predictions is not None, "convolutions have one stage"
        for name, per_sample in part.judge(predictions, labels.to(state.device)).items():
            totals[name] = totals.get(name, 0.0) + per_sample[:num_real].sum()
    part.train()
    summed = torch.stack(list(totals.values()))
    dist.all_reduce(summed)
    means = (summed / loader.num_heldout).tolist()
    return dict(zip(totals, means, strict=True))


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def write_text(
    state: TrainState, prompt_ids: Sequence[int], *, count: int, temperature: float, max_context: int, seed: int
) -> list[int]:
    """Write `count` tokens after the prompt. Every rank writes the same text: all take part in each forward.

    Raises WorkerError, on all of them, where the logits are not finite.
    """
    generator = torch.Generator(state.device).manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(count):
        logits_V = _next_logits(state, ids[-max_context:], max_context)
        token = NO_TOKEN
        if logits_V is not None and is_finite(logits_V):
            token = _choose(logits_V, temperature, generator)
        agreed = torch.tensor(token, device=state.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if int(agreed) == NO_TOKEN:
            raise WorkerError("the model cannot write: its logits are not finite", code="not_finite", hint=REMEDY)
        ids.append(int(agreed))
    return ids[len(prompt_ids) :]


def _next_logits(state: TrainState, context: Sequence[int], seq_len: int) -> Tensor | None:
    """Return logits (V,) after `context`; None on ranks that hold neither the last stage nor its last token."""
    last = len(context) - 1
    length = _padded_length(len(context), seq_len, state)
    tokens = torch.zeros((1, length), dtype=torch.int64, device=state.device)
    tokens[0, : len(context)] = torch.tensor(context, device=state.device)
    if state.positions_S is not None:
        tokens = tokens[:, state.positions_S]
    logits_BSV = forward_only(state.stages, tokens)
    if logits_BSV is None:
        return None
    index = last if state.positions_S is None else int((state.positions_S == last).int().argmax())
    mine = state.positions_S is None or last in state.positions_S
    logits_V = _whole_vocabulary(logits_BSV[0, index], state)
    return logits_V if mine else None


def _padded_length(length: int, longest: int, state: TrainState) -> int:
    """Round up to the next power of two: attention is causal, so what follows the context changes nothing in it.

    A text of 120 lengths would be 120 shapes of every matrix product, and the CPU's library keeps a kernel for each:
    173 MiB for a 6M-parameter llama, more than training it took.
    """
    if state.mesh.layout.cp > 1:
        return longest
    padded = min(longest, max(SHORTEST_CONTEXT, 1 << (length - 1).bit_length()))
    return padded + -padded % state.mesh.layout.tp


def _whole_vocabulary(logits_V: Tensor, state: TrainState) -> Tensor:
    """Gather the logits of the whole vocabulary, of which each rank of tp holds a part."""
    if state.mesh.layout.tp == 1:
        return logits_V
    parts = [torch.empty_like(logits_V) for _ in range(state.mesh.layout.tp)]
    dist.all_gather(parts, logits_V.contiguous(), group=state.mesh.group("tp"))
    return torch.cat(parts)


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))
