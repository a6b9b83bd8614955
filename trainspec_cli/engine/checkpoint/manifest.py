"""The manifest of a checkpoint: what it is, and the digest of each of its files."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from trainspec_cli.errors import MachineError
from trainspec_cli.rundir.files import read_json, write_json

SCHEMA = "trainspec.checkpoint/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileDigest:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    """Updates done; the next sample's position is step * global_batch_size."""
    samples: int
    """Samples seen, over all ranks."""
    seed: int
    world_size: int
    recipe_digest: str
    files: tuple[FileDigest, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def digest_file(path: Path) -> FileDigest:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return FileDigest(path.name, path.stat().st_size, sha256)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, {"schema": SCHEMA, **asdict(manifest)})


def read_manifest(folder: Path) -> Manifest:
    try:
        fields = read_json(folder / MANIFEST)
        if fields.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        files = tuple(FileDigest(**entry) for entry in fields.pop("files"))
        return Manifest(**fields, files=files)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _refused(folder, f"{folder / MANIFEST} cannot be read: {error}") from error


def verify_files(folder: Path, files: tuple[FileDigest, ...]) -> None:
    """Raises MachineError that names the first file which is missing, truncated or altered."""
    for expected in files:
        path = folder / expected.name
        if not path.is_file():
            raise _refused(folder, f"{path} is missing")
        found = digest_file(path)
        if found.bytes != expected.bytes:
            raise _refused(folder, f"{path} has {found.bytes:,} bytes, the manifest says {expected.bytes:,}")
        if found.sha256 != expected.sha256:
            raise _refused(folder, f"{path} was altered: its sha256 is not the manifest's")


def _refused(folder: Path, what: str) -> MachineError:
    return MachineError(
        f"checkpoint refused: {what}",
        code="bad_checkpoint",
        hint=f"remove the folder {folder} to go on from the checkpoint before it",
    )
