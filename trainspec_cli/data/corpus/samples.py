"""The order of samples: a pure function of seed and position, for one source or a weighted mixture of several.

A position counts the samples of a run from 0, across all ranks and epochs. Sample i of a split consists of its tokens
[i * seq_len, (i + 1) * seq_len], the last of which is only predicted. Each epoch visits every sample exactly once, each
time in a different order, regardless of the number of ranks. The sample at any position is found in O(1), so a run can
resume anywhere."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from trainspec_cli.data.corpus.rows import Row, Rows

ROUNDS = 8
"""Number of half rounds of the Feistel network, alternating between the two coordinates."""


def locate(positions: np.ndarray, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each position, the epoch and the sample's index within the split (all int64).

    Raises ValueError if there are no samples.
    """
    if samples <= 0:  # no index would be in range, and `permute` would never end
        raise ValueError(f"{samples} samples cannot be ordered")
    epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), samples)
    indices = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permute(within[here], samples, seed, int(epoch))
    return epochs, indices


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Map `indices` with a permutation of range(size) that depends on seed and epoch.

    This is a Feistel network over the smallest near-square grid with at least `size` cells. A result that is not below
    `size` is mapped again until it is (cycle walking; Black and Rogaway 2002)."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    width = max(1, math.isqrt(max(size - 1, 0)) + 1)
    height = -(-size // width)
    out = _feistel(np.asarray(indices).astype(np.uint64), width, height, keys)
    while len(outside := np.flatnonzero(out >= size)):
        out[outside] = _feistel(out[outside], width, height, keys)
    return out.astype(np.int64)


def _feistel(cells: np.ndarray, width: int, height: int, keys: np.ndarray) -> np.ndarray:
    """Permute cells: each round adds a keyed hash of one coordinate to the other, which is invertible."""
    row, column = np.divmod(cells, np.uint64(width))
    for key in keys.reshape(-1, 2):
        row = (row + _mix(column, key[0]) % np.uint64(height)) % np.uint64(height)
        column = (column + _mix(row, key[1]) % np.uint64(width)) % np.uint64(width)
    return row * np.uint64(width) + column


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return a 64-bit hash of each value: the finaliser of splitmix64 (Steele et al. 2014), keyed by an offset."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class SampleOrder(Protocol):
    """A stream of rows. Positions count the samples of a run from 0, across all ranks and epochs."""

    def rows(self, positions: np.ndarray) -> list[Row]: ...

    def counted(self, positions: np.ndarray) -> int:
        """Return the total number of targets in these rows that count towards the loss."""


@dataclass(frozen=True)
class Shuffled:
    """A stream that visits every row once per epoch, each time in a different order."""

    source: Rows
    seed: int

    def rows(self, positions: np.ndarray) -> list[Row]:
        return [self.source.read(index) for index in self._indices(positions)]

    def counted(self, positions: np.ndarray) -> int:
        return sum(self.source.counted(index) for index in self._indices(positions))

    def _indices(self, positions: np.ndarray) -> list[int]:
        _, indices = locate(positions, len(self.source), self.seed)
        found: list[int] = indices.tolist()
        return found


BLOCK = 1000
"""Size of a block of positions in which the proportions of a mixture are exact, up to rounding."""


@dataclass(frozen=True)
class Mixed:
    """A weighted mixture of streams. A stream advances only when a row is drawn from it.

    Positions are divided into blocks. In each block, every stream has its share of the slots, and a permutation
    distributes the slots."""

    streams: Sequence[SampleOrder]
    weights: Sequence[float]
    seed: int

    def rows(self, positions: np.ndarray) -> list[Row]:
        return [self.streams[stream].rows(np.array([own]))[0] for stream, own in map(self.locate, positions)]

    def counted(self, positions: np.ndarray) -> int:
        return sum(self.streams[stream].counted(np.array([own])) for stream, own in map(self.locate, positions))

    def locate(self, position: int) -> tuple[int, int]:
        """Return the stream at `position`, and the position within that stream."""
        block, within = divmod(int(position), BLOCK)
        slot = int(permute(np.array([within]), BLOCK, self.seed, block)[0])
        stream = int(np.searchsorted(self._bounds, slot, side="right")) - 1
        before = slot - int(self._bounds[stream])
        return stream, block * int(self._bounds[stream + 1] - self._bounds[stream]) + before

    @cached_property
    def _bounds(self) -> np.ndarray:
        """Return the first slot of each stream in a block. Slots are assigned by largest remainder, with at least one
        per stream."""
        shares = np.array(self.weights) / sum(self.weights) * BLOCK
        slots = np.maximum(1, np.floor(shares).astype(np.int64))
        for stream in np.argsort(np.floor(shares) - shares, kind="stable")[: max(0, BLOCK - int(slots.sum()))]:
            slots[stream] += 1
        slots[int(np.argmax(slots))] += BLOCK - int(slots.sum())
        return np.concatenate(([0], np.cumsum(slots)))


# Choose held-out documents, and split long texts. Both depend only on content (or names), never on the order of
# documents.


PIECE_CHARS = 2**20
_HASHES = 2**64
_LINE_END = re.compile(r"(?<=\S)[\r\n]+(?=\S)")


def content_hash(text: str) -> int:
    """Return a 64-bit hash that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"heldout").digest(), "big")


@dataclass
class SplitScan:
    """Statistics of all documents, from a first pass over them."""

    documents: int = 0
    bytes: int = 0
    """Size in UTF-8 bytes."""
    lowest_hash: int = _HASHES
    highest_hash: int = -1

    def add(self, text: str) -> None:
        self.documents += 1
        self.bytes += len(text.encode())
        value = content_hash(text)
        self.lowest_hash = min(self.lowest_hash, value)
        self.highest_hash = max(self.highest_hash, value)


@dataclass(frozen=True)
class HeldoutRule:
    """The rule for holding out documents: those whose hash is below `threshold` or, if all documents are equal, the end
    of each one."""

    threshold: int
    cut_fraction: float | None = None

    @classmethod
    def from_scan(cls, scan: SplitScan, fraction: float) -> HeldoutRule:
        """Return the rule that holds out `fraction` of the documents: at least one, but not all."""
        if scan.lowest_hash == scan.highest_hash:
            return cls(threshold=0, cut_fraction=fraction)
        # Documents are held out by content, so that the split stays the same when files are renamed, added or
        # reordered.
        threshold = round(fraction * _HASHES)
        return cls(threshold=min(max(threshold, scan.lowest_hash + 1), scan.highest_hash))

    def parts(self, text: str) -> tuple[str, str]:
        """Return the training part and the held-out part. One of them is empty unless `cut_fraction` is set."""
        if self.cut_fraction is not None:
            return _cut(text, self.cut_fraction)
        return ("", text) if content_hash(text) < self.threshold else (text, "")


def _cut(text: str, fraction: float) -> tuple[str, str]:
    """Split off about the last `fraction` of a text, at the start of a line if there is one nearby."""
    at = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    line_start = text.rfind("\n", 0, at) + 1
    if line_start > 0 and at - line_start < len(text) * fraction:
        at = line_start
    return text[:at], text[at:]


def pieces(text: str, max_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Yield `text` in parts of about `max_chars`, divided at line ends with a visible character on both sides.

    If the tokenizer was trained by bpe.py, no token spans such a division, so the parts yield the same tokens as the
    full text."""
    start = 0
    while len(text) - start > max_chars and (found := _LINE_END.search(text, start + max_chars - 1)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def hold_out(names: Sequence[str], fraction: float) -> set[str]:
    """Choose about `fraction` of `names` by their hashes: at least one, but never all."""
    scan = SplitScan()
    for name in names:
        scan.add(name)
    threshold = HeldoutRule.from_scan(scan, fraction).threshold
    return {name for name in names if content_hash(name) < threshold}
