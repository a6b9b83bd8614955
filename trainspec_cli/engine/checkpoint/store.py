"""Saving and loading with torch.distributed.checkpoint.

A checkpoint is written to `.step_00000020.partial`; when every rank's part is on disk and digested it gets its
manifest and its real name, in one rename. So a folder of the real name is whole, whenever the run was killed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from trainspec_cli.engine.checkpoint.manifest import (
    FileDigest,
    Manifest,
    digest_file,
    read_manifest,
    verify_files,
    write_manifest,
)
from trainspec_cli.engine.checkpoint.state import copy_twins, gather_state, rng_state, set_rng_state
from trainspec_cli.engine.shares import Share
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir


@dataclass(frozen=True)
class Held:
    """What a rank saves and loads."""

    shares: Sequence[Share]
    parts: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        return gather_state(self.shares, self.parts, self.optimizer)


def save(
    run_dir: RunDir,
    held: Held,
    *,
    step: int,
    samples: int,
    seed: int,
    recipe_digest: str,
    keep_last: int,
    device: torch.device,
) -> Manifest:
    """Write the state after `step` updates; called by every rank together. -> its manifest."""
    final = run_dir.checkpoint(step)
    partial = final.with_name(f".{final.name}.partial")
    fence = Fence.of_worker(run_dir)
    fence.check()
    if dist.get_rank() == 0:
        _clear_partials(run_dir.checkpoints)
        partial.mkdir(parents=True)
    dist.barrier()
    state = held.state() | _own_rng(device)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
    files = _digest_all(partial)
    manifest = Manifest(step, samples, seed, dist.get_world_size(), recipe_digest, files)
    if dist.get_rank() == 0:
        write_manifest(partial, manifest)
        fence.check()
        _publish(partial, final)
        _prune(run_dir, keep_last)
    dist.barrier()
    return manifest


def load_newest(run_dir: RunDir, held: Held, device: torch.device) -> Manifest | None:
    """Restore the newest whole checkpoint; None where there is none. Raises MachineError on an altered one."""
    steps = run_dir.checkpoint_steps()
    if not steps:
        return None
    folder = run_dir.checkpoint(steps[-1])
    manifest = read_manifest(folder)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    verify_files(folder, manifest.files[rank::world_size])
    dist.barrier()
    same_ranks = manifest.world_size == world_size
    state = held.state() | (_own_rng(device) if same_ranks else {})
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    copy_twins(held.shares, held.optimizer)
    if same_ranks:
        prefix = f"rng.{rank}."
        set_rng_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}, device)
    return manifest


def _own_rng(device: torch.device) -> dict[str, Any]:
    return {f"rng.{dist.get_rank()}.{kind}": state for kind, state in rng_state(device).items()}


def _digest_all(folder: Path) -> tuple[FileDigest, ...]:
    """Each rank digests the files it wrote, rank 0 the index too; -> those of all ranks."""
    rank = dist.get_rank()
    mine = sorted(folder.glob(f"__{rank}_*")) + ([folder / ".metadata"] if rank == 0 else [])
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [digest_file(path) for path in mine])
    return tuple(file for files in gathered for file in files)


def _publish(partial: Path, final: Path) -> None:
    """Rename into place and make the rename itself durable."""
    partial.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(run_dir: RunDir, keep_last: int) -> None:
    for step in run_dir.checkpoint_steps()[:-keep_last]:
        shutil.rmtree(run_dir.checkpoint(step))


def _clear_partials(checkpoints: Path) -> None:
    """What a killed save left behind."""
    for partial in checkpoints.glob(".step_*.partial"):
        shutil.rmtree(partial)
