"""Held-out text: every token but the first is predicted once, in windows without overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.corpus.shards import TokenFolder
from trainspec_cli.engine.batch import IGNORED_TARGET


@dataclass(frozen=True)
class HeldoutLoss:
    nats_per_token: float
    bits_per_byte: float
    """Over the UTF-8 bytes of the text, so that it does not depend on the tokenizer."""


def heldout_batches(
    folder: TokenFolder, seq_len: int, batch_size: int, rank: int, num_ranks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's (tokens, targets), each (B, S); all ranks get equally many batches."""
    predicted = folder.num_tokens("heldout") - 1
    windows = math.ceil(predicted / seq_len)
    rounds = math.ceil(windows / (batch_size * num_ranks))
    for turn in range(rounds):
        first = (turn * num_ranks + rank) * batch_size
        rows = [_window(folder, first + row, seq_len) for row in range(batch_size)]
        tokens, targets = (torch.from_numpy(np.stack(side)) for side in zip(*rows, strict=True))
        yield tokens, targets


def _window(folder: TokenFolder, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Window `index`, padded with ignored targets past the end of the text."""
    tokens = np.zeros(seq_len, dtype=np.int64)
    targets = np.full(seq_len, IGNORED_TARGET, dtype=np.int64)
    start = index * seq_len
    length = min(seq_len, folder.num_tokens("heldout") - 1 - start)
    if length > 0:
        text = folder.tokens("heldout", start, length + 1)
        tokens[:length], targets[:length] = text[:-1], text[1:]
    return tokens, targets


def summarise(total_nats: float, folder: TokenFolder) -> HeldoutLoss:
    tokens = max(1, folder.num_tokens("heldout") - 1)
    num_bytes = max(1, folder.num_bytes("heldout"))
    return HeldoutLoss(total_nats / tokens, total_nats / math.log(2) / num_bytes)
