"""A checkpoint's manifest: its step, the digest of each file, and the location of each tensor's parts.

It is plain JSON that contains its own digest; no part of a checkpoint is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainspec_cli.balance.batch.batch import BatchPace
from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.node import is_plain_name
from trainspec_cli.core.reading.files import read_object
from trainspec_cli.recipe.records import read_record
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import CHECKPOINT_MANIFEST

SCHEMA = "trainspec.checkpoint/2"
OLDER = ("trainspec.checkpoint/1",)
MANIFEST = CHECKPOINT_MANIFEST


@dataclass(frozen=True)
class About:
    """The step of a checkpoint, and the run that wrote it."""

    step: int
    """Number of updates made."""
    samples: int
    """Number of samples read by all ranks, which is also the position of the next sample."""
    seed: int
    recipe_digest: str
    pace: BatchPace | None = None
    """The state of a batch-size schedule that follows the gradient noise; None for any other schedule."""


@dataclass(frozen=True)
class Chunk:
    """A part of a full tensor, stored in one of the checkpoint's files under the tensor's name."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    shape: tuple[int, ...]
    dtype: str
    """The name of the dtype in safetensors: F32, BF16, U8, ..."""
    chunks: tuple[Chunk, ...]
    """The chunks cover each element of the tensor exactly once."""


@dataclass(frozen=True)
class FileDigest:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class WrittenPart:
    """One rank's file and its tensors, as reported in `rank00003.json` next to the file."""

    file: FileDigest
    tensors: dict[str, TensorEntry]
    """The tensors in the file, each with only this rank's chunk."""


@dataclass(frozen=True)
class CheckpointManifest:
    about: About
    world_size: int
    files: tuple[FileDigest, ...]
    tensors: dict[str, TensorEntry]

    @property
    def step(self) -> int:
        return self.about.step

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def join_parts(about: About, parts: Sequence[WrittenPart]) -> CheckpointManifest:
    """Combine all ranks' parts into one manifest, in rank order."""
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            before = tensors[name].chunks if name in tensors else ()
            tensors[name] = TensorEntry(entry.shape, entry.dtype, before + entry.chunks)
    return CheckpointManifest(about, len(parts), tuple(part.file for part in parts), tensors)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    content = {"schema": SCHEMA, **asdict(manifest)}
    write_json(folder / MANIFEST, content | {"sha256": _digest(content)})


def read_manifest(folder: Path) -> CheckpointManifest:
    try:
        content = read_object(folder / MANIFEST)
        stated = content.pop("sha256", None)
        schema = content.get("schema")
        if schema in OLDER:
            raise ValueError(
                f"it was written by an earlier version of trainspec ({schema}), whose format contained pickled objects"
            )
        if schema != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        if stated != _digest(content):
            raise ValueError("it was altered: its sha256 does not match its content")
        manifest = read_record(CheckpointManifest, content)
        check_content(manifest.files, manifest.tensors)
        digested = {file.name for file in manifest.files}
        for name, entry in manifest.tensors.items():
            for chunk in entry.chunks:
                if chunk.file not in digested:
                    raise ValueError(f"a part of {name} is in a file that the manifest does not list, {chunk.file!r}")
        return manifest
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise refused(folder, f"{folder / MANIFEST} cannot be read: {error}") from error


def part_from(content: Mapping[str, object]) -> WrittenPart:
    """Create an instance from plain JSON; the inverse of `asdict`. Raises ValueError for malformed JSON."""
    part = read_record(WrittenPart, content)
    check_content((part.file,), part.tensors)
    return part


def check_content(files: Sequence[FileDigest], tensors: Mapping[str, TensorEntry]) -> None:
    """Raise ValueError if a file is outside the checkpoint's folder or a size is negative."""
    chunks = [chunk for entry in tensors.values() for chunk in entry.chunks]
    for name in dict.fromkeys([*(file.name for file in files), *(chunk.file for chunk in chunks)]):
        if not is_plain_name(name):
            raise ValueError(f"it names a file outside of its folder, {name!r}")
        if not re.fullmatch(r"rank\d{5,}\.safetensors", name):
            raise ValueError(f"{name!r} is not the name of a checkpoint file")
    for sizes in (
        *(entry.shape for entry in tensors.values()),
        *(c.shape for c in chunks),
        *(c.offsets for c in chunks),
    ):
        if any(size < 0 for size in sizes):
            raise ValueError(f"one of the sizes {list(sizes)} is negative")


def _digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def digest_file(path: Path) -> FileDigest:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return FileDigest(path.name, path.stat().st_size, sha256)


def verify_files(folder: Path, files: Sequence[FileDigest]) -> None:
    """Raise a MachineError that names the first file that is missing, truncated or altered."""
    for expected in files:
        path = folder / expected.name
        if path.is_symlink():
            raise refused(folder, f"{path} is a link")
        if not path.is_file():
            raise refused(folder, f"{path} is missing")
        found = digest_file(path)
        if found.bytes != expected.bytes:
            raise refused(folder, f"{path} has {found.bytes:,} bytes, but the manifest says {expected.bytes:,}")
        if found.sha256 != expected.sha256:
            raise refused(folder, f"{path} was altered: its sha256 does not match the manifest")


def refused(folder: Path, what: str, hint: str = "") -> MachineError:
    """`hint`: what to do if the checkpoint is intact. The default hint is to remove a damaged checkpoint."""
    damaged = f"remove the folder {folder} to resume from the previous checkpoint"
    return MachineError(f"checkpoint refused: {what}", code="bad_checkpoint", hint=hint or damaged)
