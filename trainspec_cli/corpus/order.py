"""The stream of rows: which row stands at which position of a run, a pure function of the seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainspec_cli.corpus.rows import Row, Rows
from trainspec_cli.corpus.samples import locate


class Order(Protocol):
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
