"""Create a folder atomically: write it under a temporary name, flush it to disk, then rename it."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainspec_cli.core.cache import cannot_write


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`, which is renamed to `folder` when the block succeeds.

    Raises FileExistsError if `folder` was filled meanwhile, and MachineError if the disk is full or cannot be written;
    the temporary folder is then removed. Leftovers of a killed process are removed by the next one.
    """
    temporary = folder.parent / f".trainspec-{os.getpid()}-{secrets.token_hex(4)}{_suffix()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A killed process leaves its folder behind. Those of other nodes stay: their processes cannot be checked here.
        pattern = re.compile(rf"\.trainspec-(\d+)-\w+{re.escape(_suffix())}")
        for entry in folder.parent.iterdir():
            if (match := pattern.fullmatch(entry.name)) and not _is_alive(int(match[1])):
                shutil.rmtree(entry, ignore_errors=True)
        temporary.mkdir(0o700)
        yield temporary
        _flush(temporary)
        mask = os.umask(0)  # it can only be read by setting it
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)  # until here it is for its owner alone
        temporary.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(error.errno, "was made by another process", str(folder)) from error
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # already renamed on success


def _suffix() -> str:
    return f"@{socket.gethostname()}.tmp"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(folder: Path) -> None:
    """Flush all that is below the folder, then itself, to disk, so that a power cut after the rename leaves nothing
    empty."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
