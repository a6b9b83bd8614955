"""The samples of each step, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainspec_cli.core.errors import Problem, RecipeError


class ShardedBatches:
    """A sampler of batches for a loader: step N of an epoch takes the N-th `batch_size` samples of a permutation, of
    which each rank takes its part (`counts`, equal ones where none are given), in order. Samples at an epoch's end that
    fill no batch are left out."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool,
        counts: tuple[int, ...] = (),
    ):
        _check(samples, batch_size, 1 if counts else ranks)
        self.counts = counts or (batch_size // ranks,) * ranks
        """The samples of each rank in a step: those of the next iteration."""
        self._samples, self._batch_size = samples, batch_size
        self._rank, self._seed, self._shuffle = rank, seed, shuffle
        self.epoch = 0
        self.first = 0
        """The first batch of the next iteration."""

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return self._samples // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        first, self.first = self.first, 0
        order = np.arange(self._samples)
        if self._shuffle:
            order = np.random.Generator(np.random.PCG64([self._seed, self.epoch])).permutation(self._samples)
        before, part = sum(self.counts[: self._rank]), self.counts[self._rank]
        for batch in range(first, len(self)):
            begin = batch * self._batch_size + before
            yield order[begin : begin + part].tolist()


def _check(samples: int, batch_size: int, ranks: int) -> None:
    if batch_size < 1 or batch_size % ranks:
        hint = "batch_size counts the samples of one step over all ranks"
        message = f"batch_size={batch_size} cannot be shared evenly among {ranks} ranks"
        raise RecipeError(Problem("not_divisible", message, "batch_size", hint))
    if samples < batch_size:
        message = f"batch_size={batch_size} is more than the dataset's {samples} samples"
        raise RecipeError(Problem("too_large", message, "batch_size", f"give {samples} at most"))
