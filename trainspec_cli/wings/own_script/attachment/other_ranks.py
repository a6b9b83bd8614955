"""The ranks of a script that trains with JAX or TensorFlow, and their agreement on a stop."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

_FLAG = struct.Struct("<QQ")
"""The steps that a rank has made, and the first of them after which it wanted the run to end (0: none)."""
_POLL_S = 0.001


def find_place() -> tuple[int, int]:
    """Return this process' rank and the number of ranks: as JAX has them, as TensorFlow's TF_CONFIG says, or as a
    launcher's environment does; (0, 1) of a process that is alone."""
    jax: Any = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        return int(jax.process_index()), int(jax.process_count())
    if "tensorflow" in sys.modules and (place := _in_tf_config(os.environ.get("TF_CONFIG", ""))):
        return place
    if "torch" not in sys.modules:  # a script may use torch under a launcher, and train on one process
        rank = os.environ.get("RANK", "")
        ranks = os.environ.get("WORLD_SIZE", "")
        if rank.isdigit() and ranks.isdigit():
            return int(rank), int(ranks)
    return 0, 1


def _in_tf_config(text: str) -> tuple[int, int] | None:
    """Return the place among those that train: the chief, then the workers."""
    try:
        config = json.loads(text)
        trainers = [
            (kind, index) for kind in ("chief", "worker") for index in range(len(config["cluster"].get(kind, ())))
        ]
        task = config["task"]["type"], int(config["task"]["index"])
        return trainers.index(task), len(trainers)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class FlagFiles:
    """The agreement of ranks on this machine that have no torch: each writes after each step, into a file of its own,
    how many it has made and whether it wants to end. What was wanted in the step before is read of all, so that all
    act on it at the same step: none is more than the exchanges of one step ahead, and the rest is waited for."""

    def __init__(self, folder: Path, rank: int, ranks: int):
        self._paths = [folder / f"{number}.flag" for number in range(ranks)]
        self._rank = rank
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._own = os.open(self._paths[rank], flags, 0o600)
        self._made = self._wanted = 0

    def agree(self, wanted: bool) -> bool:
        """Count a step; return whether any rank wanted to end in the step before."""
        before = self._made
        self._made = self._made + 1
        if wanted and not self._wanted:
            self._wanted = self._made
        os.pwrite(self._own, _FLAG.pack(self._made, self._wanted), 0)
        return any(self._wanted_by(path, before) for path in self._paths) if before else False

    def _wanted_by(self, path: Path, step: int) -> bool:
        """Wait until a rank has made `step`, and return whether it wanted to end by then."""
        while True:
            made, wanted = _read(path)
            if made >= step:
                return 0 < wanted <= step
            time.sleep(_POLL_S)


def _read(path: Path) -> tuple[int, int]:
    """Return what a rank has written; nothing yet where it has not begun."""
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        return 0, 0
    return _FLAG.unpack(written) if len(written) == _FLAG.size else (0, 0)
