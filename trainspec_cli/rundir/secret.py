"""The secret that the processes of one start of a run share, in a file that its user alone may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from trainspec_cli.errors import MachineError, Problem

SECRET_BYTES = 32


def create_secret(path: Path) -> bytes:
    """Write a fresh secret to a file that must not exist yet, and return it. Raises MachineError where the file system
    does not keep it private."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Raises MachineError where the file is not the user's own, or others may read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise _unusable(path, "belongs to another user, or others may read it")
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise _unusable(path, f"holds {len(secret)} bytes instead of {SECRET_BYTES}")
    return secret


def _unusable(path: Path, what: str) -> MachineError:
    hint = "keep run.dir on a file system that all nodes share and that keeps owners and permissions"
    return MachineError(Problem("secret", f"the job's secret, {path}, {what}", hint=hint, environment=True))
