"""The order of samples: a pure function of seed and position.

A position counts the samples of a run from 0, over all ranks and epochs; sample i of a split is its tokens
[i * seq_len, (i + 1) * seq_len], the last of which is only predicted. Each epoch visits every sample exactly once, in
an order of its own, whatever the number of ranks; and any position is found in O(1), so that a run resumes anywhere.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 8
"""Half rounds of the Feistel network; every second one stirs the other half."""


def num_samples(num_tokens: int, seq_len: int) -> int:
    """Whole samples in a split (the last target is the next sample's first input)."""
    return max(0, (num_tokens - 1) // seq_len)


def locate(positions: np.ndarray, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The epoch, and the index of the sample within the split, at each position (all int64)."""
    epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), samples)
    indices = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permute(within[here], samples, seed, int(epoch))
    return epochs, indices


def step_positions(step: int, global_batch_size: int) -> np.ndarray:
    """Positions of the samples of `step` (counted from 0), over all ranks."""
    return np.arange(step * global_batch_size, (step + 1) * global_batch_size, dtype=np.int64)


def rank_positions(step: int, global_batch_size: int, rank: int, num_ranks: int) -> np.ndarray:
    """The contiguous part of the step's positions that one data-parallel rank takes."""
    if global_batch_size % num_ranks:
        raise ValueError(f"{global_batch_size} samples a step do not divide by {num_ranks} data-parallel ranks")
    share = global_batch_size // num_ranks
    return step_positions(step, global_batch_size)[rank * share : (rank + 1) * share]


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where `indices` go under the permutation of range(size) that seed and epoch choose.

    A Feistel network over the smallest near-square grid that holds `size` cells; an index that lands on one of the few
    cells too many is sent on until it lands inside (cycle walking; Black and Rogaway 2002).
    """
    keys = _round_keys(seed, epoch)
    width = max(1, math.isqrt(max(size - 1, 0)) + 1)
    height = -(-size // width)
    out = _feistel(np.asarray(indices).astype(np.uint64), width, height, keys)
    while len(outside := np.flatnonzero(out >= size)):
        out[outside] = _feistel(out[outside], width, height, keys)
    return out.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(cells: np.ndarray, width: int, height: int, keys: np.ndarray) -> np.ndarray:
    """Each round adds to one coordinate a keyed hash of the other, which the inverse could subtract again."""
    row, column = np.divmod(cells, np.uint64(width))
    for key in keys.reshape(-1, 2):
        row = (row + _mix(column, key[0]) % np.uint64(height)) % np.uint64(height)
        column = (column + _mix(row, key[1]) % np.uint64(width)) % np.uint64(width)
    return row * np.uint64(width) + column


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """A 64-bit hash of each value: the finaliser of splitmix64 (Steele et al. 2014), keyed by an offset."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
