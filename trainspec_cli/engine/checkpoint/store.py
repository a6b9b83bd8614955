"""Load the newest whole checkpoint, verified file by file, into this run's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trainspec_cli.engine.checkpoint.manifest import CheckpointManifest, read_manifest, verify_files
from trainspec_cli.engine.checkpoint.memory import CopyLocation, fetch, find_newest
from trainspec_cli.engine.checkpoint.parts import Held, TensorPart, copy_twins, rng_parts, set_rng
from trainspec_cli.engine.checkpoint.reading import files_needed, fill_parts
from trainspec_cli.engine.comm.joint_errors import errors_together
from trainspec_cli.rundir.paths import RunDir


@dataclass(frozen=True)
class Restored:
    manifest: CheckpointManifest
    folder: Path
    slot: int | None = None
    """The slot in the nodes' memory that it came from; None: from disk."""


def load_newest(
    run_dir: RunDir, held: Held, device: torch.device, memory: CopyLocation | None = None
) -> Restored | None:
    """Restore the newest whole checkpoint, on disk or (`memory`) in the nodes' memory; None if there is none.

    Called by all ranks together. Raises MachineError if it was altered.
    """
    newest = max(run_dir.checkpoint_steps(), default=-1)
    found = find_newest(memory) if memory else None
    if memory and found and found.manifest.step > newest:
        parts = _parts(found.manifest, held, device)
        fetch(memory, found, files_needed(found.manifest, parts))
        _restore(found.folder, found.manifest, parts, held, device)
        return Restored(found.manifest, found.folder, found.slot)
    return _load(run_dir.checkpoint(newest), held, device) if newest >= 0 else None


def _load(folder: Path, held: Held, device: torch.device) -> Restored:
    """Verify all files, shared among the ranks, and restore when all have passed."""
    with errors_together():
        manifest = read_manifest(folder)
        verify_files(folder, manifest.files[dist.get_rank() :: dist.get_world_size()])
    _restore(folder, manifest, _parts(manifest, held, device), held, device)
    return Restored(manifest, folder)


def _parts(manifest: CheckpointManifest, held: Held, device: torch.device) -> list[TensorPart]:
    """Return the parts to restore; random generators among them if the world size is unchanged."""
    generators = rng_parts(dist.get_rank(), device) if manifest.world_size == dist.get_world_size() else []
    return [*held.parts(), *generators]


def _restore(
    folder: Path, manifest: CheckpointManifest, parts: list[TensorPart], held: Held, device: torch.device
) -> None:
    with errors_together():
        fill_parts(folder, manifest, parts)
    copy_twins(held.shares, held.optimizer)
    set_rng([part for part in parts if part.name.startswith("rng.")], device)
