"""Copies of a run's state in a node's memory, in a folder that outlives the run's processes but not the node.

Any user may create files in /dev/shm. The folder's name therefore depends on a random word that is stored only in
run.json in the run's folder. The folder is used only if it belongs to this user and no other user can open it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.node import PRIVATE_FOLDER, check_private
from trainspec_cli.core.reading.files import read_field, read_object
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

MEMORY = Path("/dev/shm")
PREFIX = "trainspec-"
SECRET = "memory_secret"
"""The key in run.json of the random word in the folder's name."""
OWNER = "run.json"
"""The file that names the run that the folder belongs to."""
BLOCK_BYTES = 512
"""The unit of `st_blocks`, regardless of the file system's block size."""
HINT = "set checkpoint.memory_interval_steps=null, or ask this machine's administrator to remove it"


def new_secret() -> str:
    return secrets.token_hex(16)


def newest_copy(run: RunDir) -> int:
    """Return the newest step that any rank has a copy of on this node, or 0."""
    folder = find_copies(run)
    return _newest_in(folder) if folder else 0


def find_copies(run: RunDir) -> Path | None:
    """Return the run's memory folder on this node; None if it has none. Raises MachineError if others could use the
    folder."""
    if not run.run_json.is_file() or SECRET not in read_object(run.run_json):
        return None
    folder = memory_folder(run)
    if not os.path.lexists(folder):
        return None
    check_private(folder, HINT)
    return folder


def make_memory_folder(run: RunDir) -> Path:
    """Return the run's memory folder on this node, creating it if it is missing. Raises the same errors as
    `find_copies`."""
    folder = memory_folder(run)
    try:
        folder.mkdir(PRIVATE_FOLDER)
    except FileExistsError:
        check_private(folder, HINT)
    write_json(folder / OWNER, {"run": str(run.root.resolve())})
    return folder


def memory_folder(run: RunDir) -> Path:
    """Return the memory folder. Its name is the same for every start and node of a run, but different for another run
    and for a copy of this run's folder."""
    key = json.dumps(
        [str(run.root.resolve()), read_field(run.run_json, read_object(run.run_json), SECRET, str)], allow_nan=False
    )
    return MEMORY / f"{PREFIX}{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def own_folders() -> Iterator[Path]:
    """Yield the folders of all of this user's runs on this node. Each has an `OWNER` file unless its creation was
    interrupted."""
    for folder in sorted(MEMORY.glob(f"{PREFIX}*")):
        found = folder.lstat()
        if found.st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink():
            yield folder


@dataclass(frozen=True)
class Copies:
    """The copies of one run in this node's memory. The run's folder may have been deleted since."""

    folder: Path
    run: RunDir | None
    """The run's folder; None if the run is unknown."""
    step: int
    """The step of the newest copy; 0 if none is complete."""
    bytes: int


def list_copies() -> list[Copies]:
    """List this user's copies on this node, largest first."""
    return sorted(map(_describe, own_folders()), key=lambda copies: copies.bytes, reverse=True)


def remove_copies(run: RunDir) -> None:
    """Remove the in-memory copies of a run that will not resume from them."""
    if folder := find_copies(run):
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _describe(folder: Path) -> Copies:
    note = folder / OWNER
    run = RunDir(read_field(note, read_object(note), "run", str)) if note.is_file() else None
    taken = sum(path.stat().st_blocks * BLOCK_BYTES for path in folder.rglob("*") if path.is_file())
    return Copies(folder, run, _newest_in(folder), taken)


def _newest_in(folder: Path) -> int:
    about = [(mark, read_field(mark, read_object(mark), "about", dict)) for mark in folder.glob("slot*/rank*.json")]
    return max((read_field(mark, of_copy, "step", int) for mark, of_copy in about), default=0)
