"""Held-out text: every row once, in batches that every rank has equally many of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainspec_cli.corpus.rows import Rows, empty_row
from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.data.loader import to_tensors


@dataclass(frozen=True)
class HeldoutLoss:
    nats_per_token: float
    bits_per_byte: float | None
    """Over the UTF-8 bytes of the text, so that it does not depend on the tokenizer; None where they are not known."""


def heldout_batches(rows: Rows, batch_size: int, rank: int, num_ranks: int) -> Iterator[MicroBatch]:
    """This rank's micro-batches; the last are filled up with rows that count nothing."""
    for turn in range(math.ceil(len(rows) / (batch_size * num_ranks))):
        first = (turn * num_ranks + rank) * batch_size
        read = [rows.read(index) for index in range(first, min(first + batch_size, len(rows)))]
        documents = rows.read(0).documents is not None
        yield to_tensors(read + [empty_row(rows.seq_len, documents=documents)] * (batch_size - len(read)))


def summarise(total_nats: float, rows: Rows, num_bytes: int) -> HeldoutLoss:
    tokens = max(1, sum(rows.counted(index) for index in range(len(rows))))
    return HeldoutLoss(total_nats / tokens, total_nats / math.log(2) / num_bytes if num_bytes else None)
