"""A checkpoint's folder. It is written as `.step_00000020.TOKEN.partial`, and published by a single rename once all
parts exist. So a folder with the final name is always complete, even if the run is killed. The ranks coordinate through
the folder itself: each writes `rank00003.json` next to its file once the file is on disk, or `rank00003.failed.json` on
failure. The token is unique to a run, so leftovers of a killed save are never mistaken for a part; the next published
save removes them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.reading.files import read_field, read_object
from trainspec_cli.engine.accelerators import on_chip, random_state, set_random_state
from trainspec_cli.engine.checkpoint.manifest import (
    About,
    CheckpointManifest,
    FileDigest,
    WrittenPart,
    join_parts,
    part_from,
    write_manifest,
)
from trainspec_cli.engine.shares import Share, unique_shares
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import Fence
from trainspec_cli.run.folder.paths import RunDir

PIECE_BYTES = 2**24
POLL_S = 0.02
PATIENCE_S = 1800.0
"""A rank that has not reported its part after this many seconds is treated as failed."""
REPORTING_S = 10.0
"""On a full disk, a rank tries to report its failure for this many seconds. The other ranks free their space meanwhile;
without the report, rank 0 would wait for `PATIENCE_S`."""


def partial_folder(run_dir: RunDir, step: int, token: str) -> Path:
    final = run_dir.checkpoint(step)
    return final.with_name(f".{final.name}.{token}.partial")


def file_name(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def write_file(path: Path, stream: Iterable[memoryview]) -> FileDigest:
    """Write and digest a file, and flush it to disk. Other threads can run meanwhile."""
    sha256 = hashlib.sha256()
    size = 0
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


WriteReport = Callable[[Path, object], None]
"""Writes a rank's report as JSON where rank 0 reads it; by default on this node's disk."""


def leave_part(folder: Path, rank: int, part: WrittenPart, write: WriteReport | None = None) -> None:
    """Report that this rank's part is complete and on disk."""
    (write or write_json)(folder / f"rank{rank:05d}.json", asdict(part))


def leave_failure(folder: Path, rank: int, error: OSError, write: WriteReport | None = None) -> None:
    """Report that this rank's part could not be written; remove the partial file first, to free space."""
    with contextlib.suppress(OSError):
        (folder / file_name(rank)).unlink(missing_ok=True)
    report = {"rank": rank, "message": error.strerror or str(error)}
    deadline = time.monotonic() + REPORTING_S
    while True:
        try:
            (write or write_json)(folder / f"rank{rank:05d}.failed.json", report)
            return
        except OSError as refused:
            if refused.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > deadline:
                return
            time.sleep(POLL_S)


class OtherDisks(Protocol):
    """The disks of nodes that do not share the run folder (`nodes.NodeDisks`)."""

    def publish(self, partial: Path, final: Path, keep_last: int, kept_step: int | None) -> None: ...

    def discard(self, partial: Path) -> None: ...


def commit(
    run_dir: RunDir,
    partial: Path,
    about: About,
    world_size: int,
    keep_last: int,
    kept_step: int | None = None,
    disks: OtherDisks | None = None,
) -> CheckpointManifest:
    """Wait for every rank's part, then publish the checkpoint. Called by a single rank. The most recent checkpoints and
    the one from `kept_step` are kept. Raises MachineError if a part failed."""
    failures = _await_parts(partial, world_size)
    if failures:
        if disks:
            disks.discard(partial)
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_save(about.step, failures)
    Fence.of_worker(run_dir).check()
    try:
        reports = [partial / f"rank{rank:05d}.json" for rank in range(world_size)]
        manifest = join_parts(about, [part_from(read_object(path)) for path in reports])
        write_manifest(partial, manifest)
        for path in reports:
            path.unlink()
        # The file names must reach the disk before the folder's new name; otherwise a crash could leave a renamed
        # folder without files.
        _sync_folder(partial)
        final = run_dir.checkpoint(about.step)
        if disks:
            disks.publish(partial, final, keep_last, kept_step)
            shutil.rmtree(final, ignore_errors=True)  # what is left of one that was not complete
        partial.rename(final)
        _sync_folder(final.parent)
        for step in run_dir.checkpoint_steps()[:-keep_last]:
            if step != kept_step:
                shutil.rmtree(run_dir.checkpoint(step))
        # If a save is killed, its folder is left behind.
        for left in run_dir.checkpoints.glob(".step_*.partial"):
            if int(left.name.split(".")[1].removeprefix("step_")) <= about.step:
                shutil.rmtree(left)
        return manifest
    except OSError as error:
        if disks:
            disks.discard(partial)
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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Describe a checkpoint's content as named parts of full tensors, and assign each part to a rank that writes it.


PartKey = tuple[str, tuple[int, ...]]
"""(name of the tensor, start of the part in the tensor)"""
Span = tuple[int, int]


class Box(Protocol):
    """Name and position of a part of a full tensor, without its content."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def overlap(ours: Box, theirs: Box) -> list[Span] | None:
    """Return the overlap of two parts of a tensor as a span per dim; None if they do not overlap, [] for a scalar."""
    spans = [
        (max(our_start, their_start), min(our_start + our_size, their_start + their_size))
        for our_start, our_size, their_start, their_size in zip(
            ours.offsets, ours.shape, theirs.offsets, theirs.shape, strict=True
        )
    ]
    return spans if all(begin < end for begin, end in spans) else None


def slices(spans: Sequence[Span], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Convert `spans` of the full tensor to slices of a part that starts at `offsets`."""
    return tuple(slice(begin - start, end - start) for (begin, end), start in zip(spans, offsets, strict=True))


@dataclass(frozen=True)
class TensorPart:
    """A rank's part of a full tensor. `tensor` is the live memory, which starts at `offsets` in `full_shape`."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]

    @staticmethod
    def whole(name: str, tensor: Tensor) -> TensorPart:
        return TensorPart(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class Held:
    """The state that a rank saves and loads."""

    shares: Sequence[Share]
    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    feedback: Mapping[str, Tensor] = field(default_factory=dict)
    """Errors of compressed gradient exchanges on this rank, and the state of its coordinator, under names that no other
    rank or layout uses. They are saved and loaded, but not copied to another replica group."""
    lost: Sequence[TensorPart] = ()
    """The same errors as parameter shares, which can be moved to another layout. Created only for such a move."""

    def parts(self) -> list[TensorPart]:
        """Return the live tensors as parts named `model.*` and `optimizer.*`, without empty ones."""
        found = list(self.lost)
        for share in unique_shares(self.shares):
            found.append(_part(f"model.{share.name}", share, share.local.detach()))
            for key, value in self.optimizer.state[share.local].items():
                name = f"optimizer.state.{share.name}.{key}"
                found.append(_part(name, share, value) if value.dim() else TensorPart.whole(name, value))
        buffers = {name: buffer for module in self.modules for name, buffer in kept_buffers(module)}
        found += [TensorPart.whole(f"model.{name}", buffer) for name, buffer in buffers.items()]
        return [part for part in found if part.tensor.numel()]

    def feedback_parts(self) -> list[TensorPart]:
        return [TensorPart.whole(name, tensor) for name, tensor in self.feedback.items()]

    def tensors(self) -> list[Tensor]:
        """Return the parts' tensors in an order that depends only on the layout, and is identical on ranks with the
        same parts."""
        return [part.tensor for part in sorted(self.parts(), key=lambda part: (part.name, part.offsets))]


def _part(name: str, share: Share, tensor: Tensor) -> TensorPart:
    return TensorPart(name, tensor, *share.place_of(tensor))


def kept_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return the buffers that training changes, which are identical on all ranks that hold them."""
    kept = module.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


@torch.no_grad()
def copy_twins(shares: Sequence[Share], optimizer: torch.optim.Optimizer) -> None:
    """Copy loaded values to a second copy of a parameter on this rank (a tied embedding on two stages)."""
    first = {share.name: share for share in unique_shares(shares)}
    for share in shares:
        source = first[share.name]
        if source is not share:
            share.local.copy_(source.local)
            for key, value in optimizer.state[share.local].items():
                value.copy_(optimizer.state[source.local][key])


def rng_parts(rank: int, device: torch.device) -> list[TensorPart]:
    """Return copies of the states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if on_chip(device):
        states[device.type] = random_state(device)
    return [TensorPart.whole(f"rng.{rank}.{kind}", state) for kind, state in states.items()]


def set_rng(parts: Sequence[TensorPart], device: torch.device) -> None:
    """Set the random generators to the states loaded into `rng_parts`."""
    for part in parts:
        if part.name.endswith(".cpu"):
            torch.set_rng_state(part.tensor)
        else:
            set_random_state(part.tensor, device)


def choose_owners(held: Sequence[dict[PartKey, int]]) -> dict[PartKey, int]:
    """Return the rank that writes each part. `held[rank]`: the parts held by that rank, with their sizes in bytes.

    The largest parts are assigned first, each to the holder with the fewest bytes to write so far. All ranks compute
    the same result from the same lists.
    """
    holders: defaultdict[PartKey, list[int]] = defaultdict(list)
    sizes: dict[PartKey, int] = {}
    for rank, parts in enumerate(held):
        for key, size in parts.items():
            holders[key].append(rank)
            sizes[key] = size
    owners: dict[PartKey, int] = {}
    load_bytes = [0] * len(held)
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        owner = min(holders[key], key=lambda rank: (load_bytes[rank], rank))
        load_bytes[owner] += sizes[key]
        owners[key] = owner
    return owners
