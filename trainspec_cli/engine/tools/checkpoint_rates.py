"""Measure how fast a job's processes write a checkpoint of a plan's state to a disk, read it back, and verify it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.run.scheduling.relayout import Meshes
from trainspec_cli.recipe.results.tools import CheckpointRates, CheckpointRatesRequest
from trainspec_cli.run.folder.paths import RunDir

REPEATS = 3


def run(request: CheckpointRatesRequest) -> CheckpointRates:
    plan = request.plan
    run_dir = RunDir(Path(request.folder))
    device = join_processes(plan.device)
    state = build_train_state(plan, device, Meshes().of(plan.layout, device.type))
    saver = Saver(run_dir, state.held, state.device, keep_last=1)
    written = []
    read = []
    for step in range(1, REPEATS + 1):
        dist.barrier()
        began = time.monotonic()
        saved_bytes = saver.save(About(step, 0, seed=0, recipe_digest="")).bytes
        dist.barrier()
        written.append(time.monotonic() - began)
        forget(run_dir.checkpoint(step))
        dist.barrier()
        began = time.monotonic()
        load_newest(run_dir, state.held, state.device)
        dist.barrier()
        read.append(time.monotonic() - began)
    saver.close()
    slowest = torch.tensor([min(written), min(read)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    write_s, read_s = slowest.tolist()
    return CheckpointRates(saved_bytes, write_s, read_s)


def forget(folder: Path) -> None:
    """Ask the system to drop the files from its page cache, so that they are read from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in (path for path in folder.iterdir() if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
