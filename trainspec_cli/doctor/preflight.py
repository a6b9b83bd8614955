"""What would stop a run on this one host, found in an instant: nothing is measured, nobody is compared with."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trainspec_cli.doctor.checks import Check, check_gpus, check_limits, check_memory, check_shm
from trainspec_cli.doctor.judge import refuse_unfit
from trainspec_cli.units import format_bytes


@dataclass(frozen=True)
class Needs:
    """Of a run, here. 0 bytes where that is not known."""

    processes: int
    memory_bytes: float
    """By all processes; of the host."""
    gpu_memory_bytes: float
    """By each process, of its GPU."""
    uses_gpus: bool
    checkpoint_bytes: float
    checkpoints: int
    """That are still to be written before older ones are removed."""


def preflight(folder: Path, needs: Needs) -> list[Check]:
    """What to look at. Raises MachineError where the run could not end well; `folder` need not be there yet."""
    checks = [*check_room(folder, needs), *check_memory(needs.memory_bytes)]
    if needs.uses_gpus:
        checks.extend(check_gpus(needs.gpu_memory_bytes))
    if needs.processes > 1:
        checks.extend((*check_shm(), *check_limits()))
    refuse_unfit([{"host": _name(), "checks": [asdict(check) for check in checks], "speed": {}}])
    return [check for check in checks if check.status == "warn"]


def check_room(folder: Path, needs: Needs) -> Iterator[Check]:
    """For a checkpoint, without which a run leaves nothing, and for as many as it keeps."""
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free, one = shutil.disk_usage(place).free, needs.checkpoint_bytes
    found = f"{format_bytes(free)} free in {place}, and a checkpoint takes {format_bytes(one)}"
    advice = "free some, choose another run.dir, or keep fewer (checkpoint.keep_last)"
    if free < one:
        yield Check("disk", "fail", found, advice)
    elif free < needs.checkpoints * one:
        yield Check("disk", "warn", f"{found}; {needs.checkpoints} are kept, the next included", advice)


def _name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
