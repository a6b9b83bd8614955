"""Which start of a run owns its folder: every launch and every resume begins a new generation.

RUN/generations/00000003.json exists from the third start on. A worker of an older one that comes back (a healed cable,
a host that was thought dead) finds it there and writes no more: it is fenced off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from trainspec_cli.environment_names import GENERATION as GENERATION
from trainspec_cli.errors import WorkerError
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.rundir.paths import RunDir

FENCED = "fenced"
"""The code of the error that ends what belongs to an older start."""
LOOK_INTERVAL_S = 1.0


def newest(run: RunDir) -> int:
    """0 before the first start. Listing the folder makes a network file system ask its server."""
    try:
        numbers = [int(path.stem) for path in run.generations.iterdir() if path.stem.isdigit()]
    except FileNotFoundError:
        return 0
    return max(numbers, default=0)


def begin(run: RunDir) -> int:
    """Own the run from now on; -> the number. Of two that begin at once each gets a number of its own."""
    run.generations.mkdir(parents=True, exist_ok=True)
    while True:
        number = newest(run) + 1
        try:
            os.close(os.open(run.generation(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            continue
        return number


def describe(run: RunDir, number: int, about: Mapping[str, Any]) -> None:
    """Where its processes find one another; written once it is known."""
    write_json(run.generation(number), {"generation": number, "at": time.time(), **about})


def read(run: RunDir, number: int) -> dict[str, Any]:
    """Empty until it is described."""
    try:
        return dict(read_json(run.generation(number)))
    except (FileNotFoundError, ValueError):
        return {}


class Fence:
    """Who owns the run, as a worker or supervisor of one start sees it. Without a generation (no launch started it)
    everything is allowed."""

    def __init__(self, run: RunDir, generation: int | None):
        self._run, self._generation = run, generation
        self._looked_at = -LOOK_INTERVAL_S

    @staticmethod
    def of_worker(run: RunDir) -> Fence:
        generation = os.environ.get(GENERATION)
        return Fence(run, int(generation) if generation else None)

    def is_closed(self) -> bool:
        """Whether a newer start owns the run."""
        return self._generation is not None and newest(self._run) > self._generation

    def check(self) -> None:
        """Before anything that lasts is written. Raises WorkerError where the run belongs to a newer start."""
        self._looked_at = time.monotonic()
        if self.is_closed():
            owner = newest(self._run)
            message = f"fenced off: start {owner} owns the run now, and this one, {self._generation}, writes no more"
            raise WorkerError(message, code=FENCED)

    def check_now_and_then(self) -> None:
        """As `check`, at most once in `LOOK_INTERVAL_S`: for what is written often."""
        if time.monotonic() - self._looked_at >= LOOK_INTERVAL_S:
            self.check()
