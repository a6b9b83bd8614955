"""Where a run keeps copies of its state in a host's memory: a folder that outlives its processes, but not the host."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.rundir.paths import RunDir

MEMORY = Path("/dev/shm")
OWNER = "owner.json"
BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own is."""


def newest_copy(run: RunDir) -> int:
    """The newest step that any rank of this host holds a copy of; 0 where there is none."""
    return _newest_in(memory_folder(run)) if run.run_json.is_file() else 0


def memory_folder(run: RunDir) -> Path:
    """The same for every start of a run, on every host; of no other run, not even one made later in its place."""
    key = json.dumps([str(run.root.resolve()), read_json(run.run_json).get("created_at")])
    return MEMORY / f"trainspec-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def make_memory_folder(run: RunDir) -> Path:
    """Its folder, with a note in it that says whose copies these are."""
    folder = memory_folder(run)
    write_json(folder / OWNER, {"run": str(run.root.resolve())})
    return folder


@dataclass(frozen=True)
class Copies:
    """What one run, or one that is no more, keeps in this host's memory."""

    folder: Path
    run: RunDir | None
    """None where nothing says whose they are."""
    step: int
    """Of the newest copy; 0 where none was finished."""
    bytes: int


def list_copies() -> list[Copies]:
    """Those that this user has on this host, the largest first."""
    return sorted(map(_describe, _folders()), key=lambda copies: copies.bytes, reverse=True)


def remove_copies(run: RunDir) -> None:
    """Those of a run that goes on from its disk, or not at all."""
    if run.run_json.is_file():
        remove_folder(memory_folder(run))


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _folders() -> Iterator[Path]:
    for folder in MEMORY.glob("trainspec-*"):
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            yield folder


def _describe(folder: Path) -> Copies:
    note = folder / OWNER
    run = RunDir(read_json(note)["run"]) if note.is_file() else None
    taken = sum(path.stat().st_blocks * BLOCK_BYTES for path in folder.rglob("*") if path.is_file())
    return Copies(folder, run, _newest_in(folder), taken)


def _newest_in(folder: Path) -> int:
    return max((read_json(path)["about"]["step"] for path in folder.glob("slot*/rank*.json")), default=0)
