"""The preflight of a run on this one node: an instant's checks; nothing is measured or compared."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.doctor.checks import check_gpus, check_limits, check_memory, check_shm, check_torch
from trainspec_cli.doctor.diagnosis import refuse_unfit
from trainspec_cli.launcher.job.machine import detect
from trainspec_cli.node import node_name
from trainspec_cli.spec.results.doctor import Check, NodeReport
from trainspec_cli.units import format_bytes


@dataclass(frozen=True)
class Needs:
    """The resources that a run takes of this node; 0 bytes where that is not known."""

    processes: int
    memory_bytes: float
    """Memory of the node that all processes take."""
    gpu_memory_bytes: float
    """Memory of its GPU that each process takes."""
    uses_gpus: bool
    checkpoint_bytes: float
    checkpoints: int
    """Checkpoints that are still to be written before older ones are removed."""


def preflight(folder: Path, needs: Needs) -> list[Check]:
    """Return what to look at. Raises MachineError where the run could not end well; `folder` need not be there yet."""
    checks = [*check_room(folder, needs), *check_memory(needs.memory_bytes)]
    if needs.uses_gpus:
        checks.extend((*check_torch(detect()), *check_gpus(needs.gpu_memory_bytes)))
    if needs.processes > 1:
        checks.extend((*check_shm(), *check_limits()))
    refuse_unfit([NodeReport(node_name(), time.time(), tuple(checks))])
    return [check for check in checks if check.status == "warn"]


def check_room(folder: Path, needs: Needs) -> Iterator[Check]:
    """Look for room for a checkpoint, without which a run leaves nothing, and for as many as it keeps."""
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free, one = shutil.disk_usage(place).free, needs.checkpoint_bytes
    found = f"{format_bytes(free)} free in {place}, and a checkpoint takes {format_bytes(one)}"
    advice = "free some, choose another run.dir, or keep fewer (checkpoint.keep_last)"
    if free < one:
        yield Check("disk", "fail", found, advice)
    elif free < needs.checkpoints * one:
        yield Check("disk", "warn", f"{found}; {needs.checkpoints} are kept, the next included", advice)
