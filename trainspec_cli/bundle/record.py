"""bundle.json: what a bundle is for, and the digest of every other file in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.bundle.installer import RECORD, sha256_of
from trainspec_cli.reading.files import read_object, unreadable
from trainspec_cli.spec.records import Count, FieldError, read_record


@dataclass(frozen=True)
class BundledFile:
    sha256: str
    bytes: Count


@dataclass(frozen=True)
class BundleRecord:
    """The content of bundle.json, which `installer` reads too."""

    schema: str
    version: str
    """Of trainspec."""
    date: str
    python: str
    """Major and minor version, such as 3.12."""
    platforms: tuple[str, ...]
    extras: tuple[str, ...]
    command: str
    """The command line that made the bundle."""
    launches: dict[str, tuple[str, ...]]
    """Recipe -> what is typed after `trainspec launch`, in the folder of the bundle."""
    files: dict[str, BundledFile]
    """By their paths in the bundle."""

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def list_files(folder: Path) -> dict[str, BundledFile]:
    """Return every file below `folder` with its digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): BundledFile(sha256_of(path), path.stat().st_size)
        for path in files
        if path != folder / RECORD
    }


def read_bundle(folder: Path) -> BundleRecord:
    """Raises UnreadableFileError where bundle.json is missing or damaged."""
    file = folder / RECORD
    try:
        return read_record(BundleRecord, read_object(file))
    except FieldError as error:
        raise unreadable(file, f"is damaged: {error}") from error
