"""A script that several ranks run, in processes forked from one that has imported the engine: once, not once a rank."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.tracing import fork_context
from lab.waiting import PATIENCE_S


@dataclass(frozen=True)
class Ended:
    """A rank's process that has ended."""

    code: int | None
    """Its exit code, or minus the signal's number; None if it had to be killed."""
    printed: str


def run_ranks(
    script: Path,
    ranks: Sequence[Sequence[object]],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> list[Ended]:
    """Run `script` with each rank's arguments, beside one another, on one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(len(ranks))]
        processes = [
            fork_context().Process(target=_be_rank, args=(script, list(map(str, own)), dict(environment or {}), file))
            for own, file in zip(ranks, files, strict=True)
        ]
        for process in processes:
            process.start()
        codes = _await_all(processes, time.monotonic() + timeout_s)
        return [Ended(code, file.read_text() if file.exists() else "") for code, file in zip(codes, files, strict=True)]


def outputs(script: Path, ranks: Sequence[Sequence[object]]) -> list[str]:
    """Return what each rank has printed; all must have ended well."""
    ended = run_ranks(script, ranks)
    assert [rank.code for rank in ended] == [0] * len(ranks)
    return [rank.printed for rank in ended]


def _await_all(processes: Sequence[multiprocessing.process.BaseProcess], deadline: float) -> list[int | None]:
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _be_rank(script: Path, arguments: list[str], environment: dict[str, str], printed: Path) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    with printed.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()
