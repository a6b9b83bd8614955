"""The engine's own step of a plan, traced under fake tensors: one process a traced rank, no GPU and little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.launch.job.environment import own_modules
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.results.plan import Plan

TRACE = ("-m", "trainspec_cli.engine.tools.trace")


def traced_ranks(plan: Plan) -> list[int]:
    """One of the pipeline's first stage, and one of its last: the stages between hold less than one of them.

    Along cp the last, whose queries meet every part of the keys.
    """
    layout = plan.layout
    per_stage, along_cp = plan.world_size // layout.pp, (layout.cp - 1) * layout.tp
    return sorted({along_cp, (layout.pp - 1) * per_stage + along_cp})


def trace_plan(plan: Plan) -> dict[str, Any]:
    """What the fullest traced rank takes: bytes of tensors, FLOPs, bytes of collectives. Raises MachineError."""
    with tempfile.TemporaryDirectory(prefix="trainspec-trace-") as folder:
        write_json(Path(folder) / "plan.json", to_plain(plan))
        ranks = [_trace_rank(Path(folder), rank) for rank in traced_ranks(plan)]
    return max(ranks, key=lambda told: told["peak_memory_bytes"])


def _trace_rank(folder: Path, rank: int) -> dict[str, Any]:
    command = [sys.executable, *TRACE, str(folder), str(rank)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **own_modules()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise MachineError(Problem("trace_failed", f"the trace of rank {rank} failed\n\n{tail}", environment=True))
    told: dict[str, Any] = read_json(folder / f"trace.rank{rank}.json")
    return told
