"""The claim on a run: one supervisor at a time holds a lock on pid.json, which ends with its process.

Across nodes not every file system keeps locks: of a Slurm job it is Slurm that knows whether it lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.launch.backend import processes
from trainspec_cli.launch.slurm import commands as slurm
from trainspec_cli.reading.files import unreadable
from trainspec_cli.reading.json_file import parse_json, read_object
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.json_text import json_text

_CANNOT_BE_LOOKED_AT = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)
"""It is not there, is closed to this user, or is a link, which no run of trainspec makes."""
GLANCE_S = 0.5
"""`is_running` holds the lock for an instant; a claim tries again for this long."""


@contextmanager
def claim(run: RunDir, launch_id: str) -> Iterator[None]:
    """Hold the run while the block runs. Raises RecipeError where another launch holds it, or its workers still live.

    The file is written in place: the lock belongs to the file, not to its name.
    """
    _give_up_earlier_start(run)
    descriptor = os.open(run.pid_json, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not _is_free(descriptor, run.pid_json):
            hint = "wait for it, or stop it with Ctrl-C where it runs (`trainspec runs` shows it)"
            raise RecipeError(Problem("still_running", f"the run in {run.root} is still running", hint=hint))
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "launch_id": launch_id, **_own_slurm_job()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json_text(owner, indent=None).encode(), 0)
        try:
            yield
        finally:
            if _is_same_file(descriptor, run.pid_json):
                run.pid_json.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def is_running(run: RunDir) -> bool:
    """Return True if a supervisor holds the run or orphaned workers live; False where that cannot be seen."""
    try:
        descriptor = os.open(run.pid_json, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _CANNOT_BE_LOOKED_AT:
            raise unreadable(run.pid_json, f"cannot be opened: {error.strerror}") from error
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise unreadable(run.pid_json, "is no regular file", "remove it: no launch has written it")
        return not _lock(descriptor) or _orphans(descriptor)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int, path: Path) -> bool:
    """Take the lock; False too when the launch that held it has ended and removed the file in between."""
    deadline = time.monotonic() + GLANCE_S
    while not _lock(descriptor):
        if time.monotonic() > deadline:
            return False
        time.sleep(GLANCE_S / 10)
    return _is_same_file(descriptor, path) and not _orphans(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    return path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino


def _own_slurm_job() -> dict[str, str]:
    job_id = os.environ.get("SLURM_JOB_ID")
    return {"slurm_job_id": job_id} if job_id else {}


def _give_up_earlier_start(run: RunDir) -> None:
    """Slurm starts a job anew only when the start before is over; what lives on behind a cut cable is fenced off."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        held_by = read_object(run.pid_json).get("slurm_job_id")
        if held_by and held_by == os.environ.get("SLURM_JOB_ID"):
            run.pid_json.unlink()


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _orphans(descriptor: int) -> bool:
    owner = _read(descriptor)
    if not owner:
        return False
    job_id = owner.get("slurm_job_id")
    in_slurm = job_id is not None and job_id != os.environ.get("SLURM_JOB_ID") and slurm.is_alive(job_id)
    return in_slurm or bool(processes.members(owner["launch_id"]))


def _read(descriptor: int) -> dict[str, Any]:
    """Empty where nobody has written who holds it: half a line, or something else."""
    try:
        owner = parse_json(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    kinds = {"launch_id": str, "slurm_job_id": str | None}
    whole = isinstance(owner, dict) and all(isinstance(owner.get(name), kind) for name, kind in kinds.items())
    return dict(owner) if whole else {}
