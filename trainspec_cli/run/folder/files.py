"""Files that are never seen half-written; `read_json` and `read_object` read what they hold, and `FileWatch` tells when
they are new."""

from __future__ import annotations

import filecmp
import os
import secrets
import shutil
import stat
from pathlib import Path

from trainspec_cli.core.reading.files import read_json, read_object
from trainspec_cli.recipe.json_text import json_text

__all__ = ["FileWatch", "read_json", "read_object", "replace_head", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, under a name at which nobody has put a file or link; flush to disk, rename into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_head(path: Path, old: bytes, new: bytes, backup: Path) -> None:
    """Put `new` in the place of `old`, with which a file begins; what follows it stays, and so does the file's mode. A
    copy of the file as it was is made first, under a name that must be free or hold just that.

    Raises FileExistsError where the name of the copy is taken, ValueError where the file does not begin with `old`.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with path.open("rb") as source, partial.open("xb") as target:
            if source.read(len(old)) != old:
                raise ValueError(f"{path} has changed meanwhile")
            target.write(new)
            shutil.copyfileobj(source, target)
            target.flush()
            os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
            os.fsync(target.fileno())
        _keep_copy(path, backup)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _keep_copy(path: Path, backup: Path) -> None:
    """A copy that an interruption has left is taken as it is."""
    if backup.is_file() and filecmp.cmp(path, backup, shallow=False):
        return
    with path.open("rb") as source, backup.open("xb") as target:
        os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def write_json(path: Path, content: object) -> None:
    write_text(path, json_text(content) + "\n")


class FileWatch:
    """Tells when a file is another one than before, at the cost of one `stat`: what is renamed into place is."""

    def __init__(self, path: Path):
        self._path = path
        self._seen = self._signature()

    def has_changed(self) -> bool:
        """Return whether the file was written since the last call, or since this watch was made."""
        signature = self._signature()
        if signature in (None, self._seen):
            return False
        self._seen = signature
        return True

    def _signature(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns
