"""The stream of rows: which row stands at which position of a run, a pure function of the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from trainspec_cli.corpus.rows import Row, Rows
from trainspec_cli.corpus.samples import locate, permute


class SampleOrder(Protocol):
    """Positions count the samples of a run from 0, over all ranks and epochs."""

    def rows(self, positions: np.ndarray) -> list[Row]: ...

    def counted(self, positions: np.ndarray) -> int:
        """Targets that count, of all these rows together."""


@dataclass(frozen=True)
class Shuffled:
    """Each epoch visits every row once, in an order of its own."""

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
"""Positions over which a mixture's shares are exact, but for rounding."""


@dataclass(frozen=True)
class Mixed:
    """Streams drawn from by weight. Each goes on by itself, however often it is drawn from.

    Positions are cut into blocks; in each, every stream has its share of places, which a permutation spreads.
    """

    streams: Sequence[SampleOrder]
    weights: Sequence[float]
    seed: int

    def rows(self, positions: np.ndarray) -> list[Row]:
        return [self.streams[stream].rows(np.array([place]))[0] for stream, place in map(self.locate, positions)]

    def counted(self, positions: np.ndarray) -> int:
        return sum(self.streams[stream].counted(np.array([place])) for stream, place in map(self.locate, positions))

    def locate(self, position: int) -> tuple[int, int]:
        """-> (which stream stands at `position`, and at which position of its own)."""
        block, within = divmod(int(position), BLOCK)
        place = int(permute(np.array([within]), BLOCK, self.seed, block)[0])
        stream = int(np.searchsorted(self._bounds, place, side="right")) - 1
        before = place - int(self._bounds[stream])
        return stream, block * int(self._bounds[stream + 1] - self._bounds[stream]) + before

    @cached_property
    def _bounds(self) -> np.ndarray:
        """Where each stream's places begin in a block: largest remainders, at least one place each."""
        shares = np.array(self.weights) / sum(self.weights) * BLOCK
        places = np.maximum(1, np.floor(shares).astype(np.int64))
        for stream in np.argsort(np.floor(shares) - shares, kind="stable")[: max(0, BLOCK - int(places.sum()))]:
            places[stream] += 1
        places[int(np.argmax(places))] += BLOCK - int(places.sum())
        return np.concatenate(([0], np.cumsum(places)))
