"""Loading: the newest whole checkpoint, verified file by file, into whatever layout this run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.engine.checkpoint.files import clear_partials
from trainspec_cli.engine.checkpoint.manifest import Manifest, read_manifest, verify_files
from trainspec_cli.engine.checkpoint.parts import Held, copy_twins, rng_parts, set_rng
from trainspec_cli.engine.checkpoint.reading import fill_parts
from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.rundir.paths import RunDir


def load_newest(run_dir: RunDir, held: Held, device: torch.device) -> Manifest | None:
    """Restore the newest whole checkpoint; None where there is none. Raises MachineError on an altered one.

    Called by every rank together; what a killed save left behind is cleared.
    """
    if dist.get_rank() == 0:
        clear_partials(run_dir.checkpoints)
    steps = run_dir.checkpoint_steps()
    return _load(run_dir.checkpoint(steps[-1]), held, device) if steps else None


def _load(folder: Path, held: Held, device: torch.device) -> Manifest:
    """The ranks share out the files' verification, and go on when all have said yes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    error = None
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest.files[rank::world_size])
    except MachineError as refusal:
        error = refusal
    raise_together(error)
    restore(folder, manifest, held, device)
    return manifest


def restore(folder: Path, manifest: Manifest, held: Held, device: torch.device) -> None:
    """Random generators go on where they were, where the ranks are as many as they were."""
    generators = rng_parts(dist.get_rank(), device) if manifest.world_size == dist.get_world_size() else []
    fill_parts(folder, manifest, [*held.parts(), *generators])
    copy_twins(held.shares, held.optimizer)
    set_rng(generators, device)


def raise_together(error: MachineError | None) -> None:
    """Every rank raises what the first of those that have an error found."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error and error.problems[0])
    if problem := next(filter(None, found), None):
        assert isinstance(problem, Problem)
        raise MachineError(problem) from error
