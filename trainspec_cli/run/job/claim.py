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
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import parse_json, read_object, unreadable
from trainspec_cli.recipe.canonical import ABSENT, Absent, to_plain
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import read_record
from trainspec_cli.run.backend import processes
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.slurm import commands as slurm

_CANNOT_BE_LOOKED_AT = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)
"""It is not there, is closed to this user, or is a link, which no run of trainspec makes."""
GLANCE_S = 0.5
"""`is_running` holds the lock for an instant; a claim tries again for this long."""
CLOCK_ERROR_S = 2.0
"""The time at which a process began is known to this."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """pid.json: the launch that holds the run."""

    pid: int = 0
    host: str = ""
    launch_id: str
    slurm_job_id: str | Absent | None = ABSENT
    """The Slurm job that it runs in, if any."""


@contextmanager
def claim(run: RunDir, launch_id: str) -> Iterator[None]:
    """Hold the run while the block runs. Raises RecipeError where another launch holds it, or its workers still live.

    The file is written in place: the lock belongs to the file, not to its name.
    """
    _give_up_earlier_start(run)
    # No link is followed to a file outside of the run, and a pipe of that name does not block the open.
    descriptor = os.open(run.pid_json, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not _is_free(descriptor, run.pid_json):
            hint = "wait for it, or stop it with Ctrl-C where it runs (`trainspec runs` shows it)"
            raise RecipeError(Problem("still_running", f"the run in {run.root} is still running", hint=hint))
        job_id = os.environ.get("SLURM_JOB_ID") or ABSENT
        owner = Owner(pid=os.getpid(), host=socket.gethostname(), launch_id=launch_id, slurm_job_id=job_id)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json_text(to_plain(owner), indent=None).encode(), 0)
        try:
            yield
        finally:
            # Slurm's next start of the job has removed the file and made its own, which is not this one's to remove.
            if _is_same_file(descriptor, run.pid_json):
                run.pid_json.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def find_owner(run: RunDir) -> Owner | None:
    """Return the launch whose supervisor holds the run; None where none does, or that cannot be seen."""
    try:
        descriptor = os.open(run.pid_json, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if _lock_within_glance(descriptor):
            return None
        owner = _read(descriptor)
        return owner if owner and _may_have_written(owner, os.fstat(descriptor).st_mtime) else None
    finally:
        os.close(descriptor)


def _may_have_written(owner: Owner, written_at: float) -> bool:
    """Return False where the file is an earlier launch's, whose process number may be somebody else's by now."""
    if owner.host != socket.gethostname():
        return True
    try:
        return bool(psutil.Process(owner.pid).create_time() <= written_at + CLOCK_ERROR_S)
    except psutil.NoSuchProcess:
        return False


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
    return _lock_within_glance(descriptor) and _is_same_file(descriptor, path) and not _orphans(descriptor)


def _lock_within_glance(descriptor: int) -> bool:
    """Take the lock, also from somebody who only looks whether it is taken."""
    deadline = time.monotonic() + GLANCE_S
    while not _lock(descriptor):
        if time.monotonic() > deadline:
            return False
        time.sleep(GLANCE_S / 10)
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    return path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino


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
    job_id = owner.slurm_job_id
    in_slurm = isinstance(job_id, str) and job_id != os.environ.get("SLURM_JOB_ID") and slurm.is_alive(job_id)
    return in_slurm or bool(processes.members(owner.launch_id))


def _read(descriptor: int) -> Owner | None:
    """Return None where nobody has written who holds it: half a line, or something else."""
    try:
        plain = parse_json(os.pread(descriptor, 4096, 0))
        return read_record(Owner, plain) if isinstance(plain, dict) else None
    except ValueError:  # no JSON, or a FieldError
        return None
