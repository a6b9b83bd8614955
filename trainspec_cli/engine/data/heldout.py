"""Held-out text: every row once, in the same number of batches on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainspec_cli.data.corpus.rows import Rows, empty_row
from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.data.loader import to_tensors


@dataclass(frozen=True)
class HeldoutLoss:
    nats: float
    tokens: int
    bytes: int
    """Bytes of UTF-8, or 0 if unknown."""

    @property
    def nats_per_token(self) -> float:
        return self.nats / max(1, self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss per byte, which does not depend on the tokenizer; None if the bytes are unknown."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def total(losses: Sequence[HeldoutLoss]) -> HeldoutLoss:
    """Return the loss of several texts as if they were one."""
    known = all(loss.bytes for loss in losses)
    return HeldoutLoss(
        nats=sum(loss.nats for loss in losses),
        tokens=sum(loss.tokens for loss in losses),
        bytes=sum(loss.bytes for loss in losses) if known else 0,
    )


def heldout_batches(rows: Rows, batch_size: int, rank: int, num_ranks: int) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches; the last ones are padded with rows that do not count."""
    for turn in range(math.ceil(len(rows) / (batch_size * num_ranks))):
        first = (turn * num_ranks + rank) * batch_size
        read = [rows.read(index) for index in range(first, min(first + batch_size, len(rows)))]
        documents = rows.read(0).documents is not None
        yield to_tensors(read + [empty_row(rows.seq_len, documents=documents)] * (batch_size - len(read)))
