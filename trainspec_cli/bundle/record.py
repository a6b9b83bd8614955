"""The digests that bundle.json holds."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.bundle.installer import RECORD, BundledFile, sha256_of


def list_files(folder: Path) -> dict[str, BundledFile]:
    """Return every file below `folder` with its digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): BundledFile(sha256_of(path), path.stat().st_size)
        for path in files
        if path != folder / RECORD
    }
