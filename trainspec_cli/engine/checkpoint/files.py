"""A checkpoint's folder: written as `.step_00000020.TOKEN.partial`, published by one rename when all parts exist.

So a folder of the real name is whole, whenever the run was killed. The ranks agree through the folder itself: each
writes `rank00003.json` beside its file when that is on disk, or `rank00003.failed.json`. The token is unique to a run,
so leftovers of a killed save are never taken for a part; the next published save removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.reading.files import read_field, read_object
from trainspec_cli.engine.checkpoint.manifest import (
    About,
    CheckpointManifest,
    FileDigest,
    WrittenPart,
    join_parts,
    part_from,
    write_manifest,
)
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import Fence
from trainspec_cli.run.folder.paths import RunDir

PIECE_BYTES = 2**24
POLL_S = 0.02
PATIENCE_S = 1800.0
"""A rank that has not reported its part after this long counts as failed."""


def partial_folder(run_dir: RunDir, step: int, token: str) -> Path:
    final = run_dir.checkpoint(step)
    return final.with_name(f".{final.name}.{token}.partial")


def file_name(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def write_file(path: Path, stream: Iterable[memoryview]) -> FileDigest:
    """Write and digest a file, and flush it to disk; other threads can run meanwhile."""
    sha256, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for view in stream:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                file.write(piece)
                sha256.update(piece)
                size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(path.name, size, sha256.hexdigest())


def leave_part(folder: Path, rank: int, part: WrittenPart) -> None:
    """Report that this rank's part is whole and on disk."""
    write_json(folder / f"rank{rank:05d}.json", asdict(part))


def leave_failure(folder: Path, rank: int, error: OSError) -> None:
    """Report that this rank's part could not be written; remove the partial file first, to free space."""
    with contextlib.suppress(OSError):
        (folder / file_name(rank)).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        write_json(folder / f"rank{rank:05d}.failed.json", {"rank": rank, "message": error.strerror or str(error)})


def commit(
    run_dir: RunDir, partial: Path, about: About, world_size: int, keep_last: int, kept_step: int | None = None
) -> CheckpointManifest:
    """Wait for every rank's part, then publish; called by one rank. The last checkpoints are kept, and that of
    `kept_step`. Raises MachineError if a part failed."""
    failures = _await_parts(partial, world_size)
    if failures:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_save(about.step, failures)
    Fence.of_worker(run_dir).check()
    try:
        manifest = _publish(run_dir, partial, about, world_size)
        for step in run_dir.checkpoint_steps()[:-keep_last]:
            if step != kept_step:
                shutil.rmtree(run_dir.checkpoint(step))
        # A save that was killed leaves its folder behind.
        for left in run_dir.checkpoints.glob(".step_*.partial"):
            if int(left.name.split(".")[1].removeprefix("step_")) <= about.step:
                shutil.rmtree(left)
        return manifest
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_save(about.step, [f"rank 0: {error.strerror or error}"]) from error


def cannot_save(step: int, failures: Sequence[str]) -> MachineError:
    return MachineError(
        f"the checkpoint of step {step} could not be written: {'; '.join(failures)}",
        code="cannot_save",
        hint="free some space, or lower checkpoint.keep_last; earlier checkpoints are intact",
    )


def _await_parts(partial: Path, world_size: int) -> list[str]:
    """Wait until every rank has reported its part, and return the ranks' error messages."""
    failures: list[str] = []
    waiting = set(range(world_size))
    deadline = time.monotonic() + PATIENCE_S
    while waiting:
        for rank in list(waiting):
            failed = partial / f"rank{rank:05d}.failed.json"
            if failed.is_file():
                failures.append(f"rank {rank}: {read_field(failed, read_object(failed), 'message', str)}")
                waiting.remove(rank)
            elif (partial / f"rank{rank:05d}.json").is_file():
                waiting.remove(rank)
        if waiting and time.monotonic() > deadline:
            return [*failures, f"rank {min(waiting)} has not reported for {PATIENCE_S:.0f} s"]
        if waiting:
            time.sleep(POLL_S)
    return failures


def _publish(run_dir: RunDir, partial: Path, about: About, world_size: int) -> CheckpointManifest:
    """Write the manifest, and rename the folder durably."""
    reports = [partial / f"rank{rank:05d}.json" for rank in range(world_size)]
    manifest = join_parts(about, [part_from(read_object(path)) for path in reports])
    write_manifest(partial, manifest)
    for path in reports:
        path.unlink()
    _sync_folder(partial)
    final = run_dir.checkpoint(about.step)
    partial.rename(final)
    _sync_folder(final.parent)
    return manifest


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
