"""The batches of a run on images or volumes: a pure function of their positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.data.corpus.labelled import LabelledSamples
from trainspec_cli.data.corpus.samples import locate
from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.data.loader import cut_micro_batches, positions_of

MAX_READERS = 16


class SampleLoader:
    """Reads samples in order, with several threads (at most `MAX_READERS`)."""

    def __init__(self, samples: LabelledSamples, seed: int, num_readers: int):
        self.samples, self.seed = samples, seed
        self._readers = ThreadPoolExecutor(max(1, min(MAX_READERS, num_readers)), thread_name_prefix="samples")

    @property
    def num_heldout(self) -> int:
        return self.samples.count("heldout")

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        """Return the micro-batches of `own`, on the host; every position has its own random crop."""
        positions = positions_of(own)
        _, indices = locate(positions, self.samples.count("train"), self.seed)
        return cut_micro_batches(self._read(indices, positions), own)

    def heldout_batches(self, size: int, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield (images, labels, number of real ones) of `rank`, in the same number of batches on every rank."""
        for turn in range(math.ceil(self.num_heldout / (size * num_ranks))):
            first = (turn * num_ranks + rank) * size
            wanted = np.arange(first, first + size)
            images, labels = self._read(np.minimum(wanted, self.num_heldout - 1), None)
            yield images, labels, int((wanted < self.num_heldout).sum())

    def _read(self, indices: np.ndarray, positions: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Return (B, C, ...) of fp32 and labels of int64; held-out samples if there are no positions."""
        if positions is None:
            read = self._readers.map(self.samples.heldout, indices.tolist())
        else:
            generators = [np.random.default_rng([self.seed, position]) for position in positions.tolist()]
            read = self._readers.map(self.samples.train, indices.tolist(), generators)
        images, labels = zip(*read, strict=True)
        return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))
