"""A folder that is there whole or not at all: written aside, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainspec_cli.errors import MachineError


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Gives a temporary folder beside `folder`, which takes its name when the block ends well.

    Raises FileExistsError if `folder` came to hold something meanwhile, and MachineError if the disk is full or may not
    be written; the temporary folder is then removed. What a killed process left behind is removed by the next one.
    """
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".trainspec-{os.getpid()}-", suffix=_suffix(), dir=folder.parent))
        yield temporary
        _flush(temporary)
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's is for its owner alone
        temporary.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(error.errno, "was made by another process", str(folder)) from error
        raise cannot_write(folder, error) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already when all went well


def _suffix() -> str:
    return f"@{socket.gethostname()}.tmp"


def _remove_abandoned(parent: Path) -> None:
    """Removes temporary folders of processes of this host that are no more."""
    pattern = re.compile(rf"\.trainspec-(\d+)-\w+{re.escape(_suffix())}")
    for entry in parent.iterdir():
        if (match := pattern.fullmatch(entry.name)) and not _is_alive(int(match[1])):
            shutil.rmtree(entry, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(folder: Path) -> None:
    """Brings every file to disk, so that a power cut after the rename leaves no empty ones."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def cannot_write(folder: Path, error: OSError) -> MachineError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(
            f"no space left to write {folder}",
            code="disk_full",
            hint=f"free some space on the disk of {folder.parent}, or choose another place (TRAINSPEC_CACHE=FOLDER)",
        )
    return MachineError(
        f"cannot write {folder}: {error.strerror or error}",
        code="cannot_write",
        hint="choose a place that may be written (TRAINSPEC_CACHE=FOLDER for prepared data)",
    )
