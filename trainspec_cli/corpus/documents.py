"""Beside the shards of conversations: where each document begins, and which of its tokens are learnt.

`train_documents.npy` holds the first token of each document and the end of the last (int64), `train_learnt.npy` a byte
for each token, 1 where it is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from trainspec_cli.corpus.damage import ANY_DAMAGE
from trainspec_cli.errors import MachineError


@dataclass
class Documents:
    starts: np.ndarray
    """(documents + 1,) of int64."""
    mask: np.ndarray
    """(tokens,) of uint8, mapped."""

    def learnt(self, start: int, count: int) -> np.ndarray:
        """(count,) of bool."""
        return np.asarray(self.mask[start : start + count]) != 0

    def learnt_before(self, tokens: np.ndarray) -> np.ndarray:
        """How many tokens before each of these are learnt."""
        return self._sums[tokens]

    @cached_property
    def _sums(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.mask, dtype=np.int64)))


def write_documents(folder: Path, split: str, masks: Sequence[np.ndarray]) -> None:
    """`masks` says of each document's tokens which are learnt."""
    np.save(folder / f"{split}_documents.npy", np.cumsum([0, *map(len, masks)], dtype=np.int64))
    mask = np.concatenate([np.zeros(0, dtype=np.uint8), *masks])
    np.save(folder / f"{split}_learnt.npy", mask.astype(np.uint8))


def read_documents(folder: Path, split: str, num_tokens: int) -> Documents:
    try:
        starts = np.load(folder / f"{split}_documents.npy", mmap_mode="r")
        mask = np.load(folder / f"{split}_learnt.npy", mmap_mode="r")
        if starts.ndim != 1 or starts.dtype != np.int64 or mask.ndim != 1 or mask.dtype != np.uint8:
            raise ValueError(
                f"they are of {starts.dtype} and {mask.dtype}, in {starts.ndim} and {mask.ndim} dimensions"
            )
        if not len(starts) or starts[0] != 0 or (np.diff(starts) < 0).any():
            raise ValueError("its documents do not follow one another")
        if starts[-1] != num_tokens or len(mask) != num_tokens:
            raise ValueError(f"they speak of {len(mask):,} tokens, the shards hold {num_tokens:,}")
    except ANY_DAMAGE as error:
        message = f"{folder}: the index of its documents cannot be read: {error}"
        raise MachineError(message, code="bad_token_folder", hint=f"remove it: rm -r {folder}") from error
    return Documents(starts, mask)
