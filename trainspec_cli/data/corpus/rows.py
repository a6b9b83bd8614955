"""Rows: the tokens and targets of one training sample, for any source.

A row has `seq_len` tokens and `seq_len` targets. Text is split into consecutive windows. Conversations are packed
whole, several per row, and only the targets to train on count. Rows are a pure function of the files on disk, so a
row's number identifies it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from trainspec_cli.data.corpus.shards import Split, TokenFolder
from trainspec_cli.recipe.keys.run import DataSpec

IGNORED = -1
"""The target value that the loss ignores."""
PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class Row:
    """The arrays of a sample, each with `seq_len` elements (int64)."""

    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None = None
    """The number of the document that each token belongs to, if attention must stay within documents."""


class Rows(Protocol):
    @property
    def seq_len(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Row: ...

    def counted(self, index: int) -> int:
        """Return the number of targets in the row that count towards the loss, without reading the row."""


def empty_row(seq_len: int, *, documents: bool) -> Row:
    """Return a row in which no target counts, for filling up a batch."""
    tokens = np.zeros(seq_len, dtype=np.int64)
    targets = np.full(seq_len, IGNORED, dtype=np.int64)
    return Row(tokens, targets, np.full(seq_len, PADDING_DOCUMENT, dtype=np.int64) if documents else None)


@dataclass(frozen=True)
class Windows:
    """A text divided into non-overlapping windows; each window's last target is the first token of the next window."""

    folder: TokenFolder
    split: Split
    seq_len: int
    keeps_rest: bool = False
    """True if the remainder at the end also becomes a row, padded to full length. In evaluation, every token counts."""
    masks_documents: bool = False

    def __len__(self) -> int:
        windows = max(0, self.folder.num_tokens(self.split) - 1) / self.seq_len
        return math.ceil(windows) if self.keeps_rest else math.floor(windows)

    def counted(self, index: int) -> int:
        return min(self.seq_len, self.folder.num_tokens(self.split) - 1 - index * self.seq_len)

    def read(self, index: int) -> Row:
        length = self.counted(index)
        text = self.folder.tokens(self.split, index * self.seq_len, length + 1)
        row = empty_row(self.seq_len, documents=self.masks_documents)
        row.tokens[:length], row.targets[:length] = text[:-1], text[1:]
        if row.documents is not None:
            ends = np.cumsum(text[:-1] == self.folder.manifest.end_of_document_id)
            row.documents[0], row.documents[1:length] = 0, ends[: length - 1]
        return row


class Packed:
    """The documents of a split, several per row and none of them split, packed by best fit, longest first
    (arXiv:2404.10830). A document longer than a row is truncated at the end, or omitted if no target that counts is
    left."""

    def __init__(self, folder: TokenFolder, split: Split, seq_len: int):
        self.folder = folder
        self.split = split
        self.seq_len = seq_len
        index = folder.documents(split)
        self._starts = index.starts
        whole = np.diff(index.starts) - 1
        self._lengths = np.minimum(whole, seq_len)
        """Number of targets of each document: all tokens except the first."""
        first_targets = index.starts[:-1] + 1
        before = index.learnt_before(first_targets)
        self._counts = index.learnt_before(first_targets + self._lengths) - before
        self._learnt = index
        self.cut = int((whole > seq_len).sum())
        """Number of documents that were truncated."""
        self.silenced = int(((self._counts == 0) & (index.learnt_before(first_targets + whole) > before)).sum())
        """Number of documents that were omitted, because truncation removed all targets that count."""

    @property
    def is_empty(self) -> bool:
        """Return True if no document has a target that counts within `seq_len`."""
        return not self._counts.any()

    @cached_property
    def _rows(self) -> list[list[int]]:
        """Return the documents of each row."""
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []
        """Sorted list of (number of free tokens, row)."""
        # Documents of the same length keep the order of the files, so that rows are the same on every machine.
        order = np.lexsort((np.arange(len(self._lengths)), -self._lengths))
        for document in (int(d) for d in order if self._counts[d] > 0):
            length = int(self._lengths[document])
            # Take the fullest row that still has enough space.
            fit = bisect.bisect_left(room, (length, -1))
            left, row = room.pop(fit) if fit < len(room) else (self.seq_len, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(document)
            if left > length:
                bisect.insort(room, (left - length, row))
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def counted(self, index: int) -> int:
        return int(self._counts[self._rows[index]].sum())

    def read(self, index: int) -> Row:
        row = empty_row(self.seq_len, documents=True)
        assert row.documents is not None
        filled = 0
        for number, document in enumerate(self._rows[index]):
            start = int(self._starts[document])
            length = int(self._lengths[document])
            span = slice(filled, filled + length)
            text = self.folder.tokens(self.split, start, length + 1)
            learnt = self._learnt.learnt(start + 1, length)
            row.tokens[span], row.targets[span] = text[:-1], np.where(learnt, text[1:], IGNORED)
            row.documents[span] = number
            filled += length
        return row


class JoinedRows:
    """The rows of several sources, one after another."""

    def __init__(self, sources: Sequence[Rows]):
        self._sources = [source for source in sources if len(source)]
        self._starts = np.cumsum([0, *map(len, self._sources)])
        self.seq_len = sources[0].seq_len

    def __len__(self) -> int:
        return int(self._starts[-1])

    def counted(self, index: int) -> int:
        source, within = self._locate(index)
        return source.counted(within)

    def read(self, index: int) -> Row:
        source, within = self._locate(index)
        return source.read(within)

    def _locate(self, index: int) -> tuple[Rows, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[number], index - int(self._starts[number])


def open_rows(folder: TokenFolder, split: Split, data: DataSpec, *, keeps_rest: bool | None = None) -> Rows:
    """Open a split with the settings in `data`. `keeps_rest`: see `Windows`; by default, set only for held-out text."""
    if folder.manifest.learns_parts:
        return Packed(folder, split, data.seq_len)
    rest = split == "heldout" if keeps_rest is None else keeps_rest
    return Windows(folder, split, data.seq_len, rest, data.masks_documents)


def first_text(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a row's first document (or of the entire row, if every token is trained on) and the mask of
    those that are targets. The first token, which is never a target, is masked like the second."""
    within = np.ones(len(row.tokens), dtype=bool)
    if row.documents is not None and (row.targets == IGNORED).any():
        within = row.documents == row.documents[0]
    targets = row.targets[within]
    learnt = targets != IGNORED
    last = targets[-1:][learnt[-1:]]  # the last target is unknown if it is not trained on
    tokens = np.concatenate((row.tokens[within], last))
    return tokens, np.concatenate((learnt[:1], learnt))[: len(tokens)]
