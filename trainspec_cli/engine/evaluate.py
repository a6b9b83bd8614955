"""Looking at the model: held-out loss, and text that it writes. Blocks run eagerly here: their shapes vary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.corpus.shards import TokenFolder
from trainspec_cli.engine.data.heldout import HeldoutLoss, heldout_batches, summarise

SHORTEST_CONTEXT = 16
"""Shorter ones are padded to this."""


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def heldout_loss(
    model: Any, folder: TokenFolder, *, seq_len: int, batch_size: int, rank: int, num_ranks: int, device: torch.device
) -> HeldoutLoss | None:
    """The loss on the held-out text, the same on every rank; None where the folder holds none out."""
    if folder.num_tokens("heldout") < 2:
        return None
    total = torch.zeros((), device=device)
    for tokens, targets in heldout_batches(folder, seq_len, batch_size, rank, num_ranks):
        total += model(tokens.to(device), targets.to(device))
    dist.all_reduce(total)
    return summarise(total.item(), folder)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def write_text(
    model: Any, prompt_ids: Sequence[int], *, count: int, temperature: float, max_context: int, seed: int
) -> list[int]:
    """`count` tokens after the prompt. Every rank writes the same text: its shards take part in each forward."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(count):
        context = ids[-max_context:]
        padded = torch.tensor([_pad(context, max_context)], device=device)
        logits_V = model(padded)[0, len(context) - 1].float()
        ids.append(_choose(logits_V, temperature, generator))
    return ids[len(prompt_ids) :]


def _pad(context: list[int], longest: int) -> list[int]:
    """To the next power of two: attention is causal, so what follows the context changes nothing in it.

    A text of 120 lengths would be 120 shapes of every matrix product, and the CPU's library keeps a kernel for each:
    173 MiB for a 6M-parameter llama, more than training it took.
    """
    length = min(longest, max(SHORTEST_CONTEXT, 1 << (len(context) - 1).bit_length()))
    return context + [0] * (length - len(context))


def _choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
