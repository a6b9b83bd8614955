"""The batches of a run on images or volumes: a rank's samples are a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from trainspec_cli.corpus.labelled import LabelledSamples
from trainspec_cli.corpus.samples import locate, rank_positions
from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.data.loader import BatchPlan

MAX_READERS = 16


class SampleLoader:
    """Reads samples in order, with several threads (at most `MAX_READERS`)."""

    def __init__(self, samples: LabelledSamples, plan: BatchPlan, num_readers: int):
        self.samples, self.plan = samples, plan
        self._readers = ThreadPoolExecutor(max(1, min(MAX_READERS, num_readers)), thread_name_prefix="samples")

    @property
    def num_heldout(self) -> int:
        return self.samples.count("heldout")

    def read_step(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of `step`, on the host; every position has its own random crop."""
        plan = self.plan
        return self.read_positions(rank_positions(step, plan.global_batch_size, plan.rank, plan.num_ranks))

    def read_positions(self, positions: np.ndarray) -> list[MicroBatch]:
        """Return the micro-batches of the samples at `positions`, in this order."""
        plan = self.plan
        _, indices = locate(positions, self.samples.count("train"), plan.seed)
        images, labels = self._read(indices, positions)
        return list(zip(images.split(plan.micro_batch_size), labels.split(plan.micro_batch_size), strict=True))

    def heldout_batches(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield this rank's (images, labels, number of real ones), in the same number of batches on every rank."""
        size, plan = self.plan.micro_batch_size, self.plan
        for turn in range(math.ceil(self.num_heldout / (size * plan.num_ranks))):
            first = (turn * plan.num_ranks + plan.rank) * size
            wanted = np.arange(first, first + size)
            images, labels = self._read(np.minimum(wanted, self.num_heldout - 1), None)
            yield images, labels, int((wanted < self.num_heldout).sum())

    def _read(self, indices: np.ndarray, positions: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Return (B, C, ...) of fp32 and labels of int64; held-out samples if there are no positions."""
        if positions is None:
            read = self._readers.map(self.samples.heldout, indices.tolist())
        else:
            generators = [np.random.default_rng([self.plan.seed, position]) for position in positions.tolist()]
            read = self._readers.map(self.samples.train, indices.tolist(), generators)
        images, labels = zip(*read, strict=True)
        return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))
