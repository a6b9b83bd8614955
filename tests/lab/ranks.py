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
    errors: str


def run_ranks(
    script: Path,
    ranks: Sequence[Sequence[object]],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> list[Ended]:
    """Run `script` with each rank's arguments in parallel, on one thread each. RANK and WORLD_SIZE are set."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, own in enumerate(ranks):
            job = {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), **(environment or {})}
            arguments = (script, list(map(str, own)), job, Path(folder) / str(rank))
            processes.append(fork_context().Process(target=_be_rank, args=arguments))
        for process in processes:
            process.start()
        codes = _await_all(processes, time.monotonic() + timeout_s)
        texts = [
            [path.read_text() if path.exists() else "" for path in _outputs(Path(folder) / str(rank))]
            for rank in range(len(ranks))
        ]
        return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def _outputs(file: Path) -> tuple[Path, Path]:
    """Return the files of a rank's stdout and stderr."""
    return file.with_suffix(".out"), file.with_suffix(".err")


def outputs(script: Path, ranks: Sequence[Sequence[object]], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return what each rank has printed; all must have ended well."""
    ended = run_ranks(script, ranks, environment)
    assert [rank.code for rank in ended] == [0] * len(ranks), "\n".join(rank.errors for rank in ended)
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
    for path, stream in zip(_outputs(printed), (sys.stdout, sys.stderr), strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()
