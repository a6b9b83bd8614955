"""Save a run's state, synchronously or in the background. A synchronous save writes files directly from the live
tensors. A background save copies the state into a reused buffer, which a thread writes, so training waits only for the
copy. The thread runs no collectives, and only one checkpoint is written at a time.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainspec_cli.core.errors import MachineError, TrainspecError
from trainspec_cli.engine.accelerators import host_work, make_current, on_chip
from trainspec_cli.engine.checkpoint import files
from trainspec_cli.engine.checkpoint.files import (
    Held,
    TensorPart,
    choose_owners,
    copy_twins,
    overlap,
    rng_parts,
    set_rng,
    slices,
)
from trainspec_cli.engine.checkpoint.manifest import (
    About,
    CheckpointManifest,
    WrittenPart,
    read_manifest,
    refused,
    verify_files,
)
from trainspec_cli.engine.checkpoint.memory import (
    CODES,
    CopyLocation,
    Image,
    MemoryCopies,
    fetch,
    find_newest,
    plan_image,
    view_bytes,
)
from trainspec_cli.engine.checkpoint.nodes import NodeDisks
from trainspec_cli.engine.comm.json_collectives import agree_on_error, broadcast_json, errors_together, gather_json
from trainspec_cli.engine.cuda_only import pin, unpin
from trainspec_cli.engine.digest import NOT_FINITE, count_not_finite, elapsed_s, is_finite, mark, wait_for
from trainspec_cli.engine.nf4 import Nf4, shapes_of
from trainspec_cli.engine.shares import ADAPTERS, names_of, restore, split_quantised
from trainspec_cli.recipe.records import convert
from trainspec_cli.run.folder.generations import Fence
from trainspec_cli.run.folder.paths import RunDir

TOKEN_BYTES = 4
WRITER_NICENESS = 10
"""Added to the niceness of the writer's thread, so that training has priority if there are few cores."""
MOST_NICENESS = 19


@dataclass(frozen=True)
class Saved:
    """The result of a checkpoint: on rank 0 for the complete checkpoint, on other ranks for their own part."""

    about: About
    bytes: int
    blocked_s: float
    """Time that training waited, in seconds."""
    written_s: float
    """Time until the checkpoint was complete on disk, in seconds."""
    error: TrainspecError | None = None
    in_memory: bool = False
    """True if the checkpoint is kept only in the nodes' memory."""


class Saver:
    """Saves one rank's part. All ranks make the same calls in the same order."""

    def __init__(
        self,
        run_dir: RunDir,
        held: Held,
        device: torch.device,
        keep_last: int,
        memory: CopyLocation | None = None,
        disks: NodeDisks | None = None,
    ):
        """Create a saver. `memory`: the location of copies in the nodes' memory; None if no copies are kept. `disks`:
        the disks of nodes that do not share the run folder."""
        self._disks = disks
        self._run_dir = run_dir
        self._held = held
        self._device = device
        self._keep_last = keep_last
        self._memory_location = memory
        self.slot = 0
        """The slot for the next copy in memory. The other slot holds the newest copy, or the copy that the run resumed
        from."""
        self.kept_step: int | None = None
        """The checkpoint from this step is kept in addition to the most recent ones."""
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_enter_thread, initargs=(device,))
        self._pending: Future[Saved] | None = None
        self._token = ""

    def save(self, about: About) -> Saved:
        """Write a checkpoint and wait until it is complete. If any rank had an error, every rank's result contains that
        same error."""
        self.wait()
        started = time.perf_counter()
        image = self._image
        saved = self._write(about, started, 0.0, image.stream(self._own_parts()))
        size = broadcast_json(saved.bytes, lambda size: convert(int, size))
        error = agree_on_error(saved.error)
        taken_s = time.perf_counter() - started
        return Saved(about, size, taken_s, taken_s, error)

    def agree(self) -> None:
        """Agree on which rank writes which parts. `save_alone` requires this; other checkpoints do it when first
        needed."""
        _ = self._image

    def save_alone(self, about: About, kept: Mapping[str, Tensor]) -> Saved:
        """Write this rank's part of a checkpoint, without communication, while the other ranks write theirs. `kept`:
        values, by name, to write instead of the live ones."""
        assert "_image" in self.__dict__, "the ranks have agreed"
        self.wait()
        parts = [replace(part, tensor=kept.get(part.name, part.tensor)) for part in self._own_parts()]
        return self._write(about, time.perf_counter(), 0.0, self._image.stream(parts))

    def prepare(self) -> None:
        """Agree on which rank writes which parts, and allocate the copy's buffer, so that the first `begin` is not
        slow."""
        _ = self._memory or self._buffer

    def begin(self, about: About, *, to_disk: bool = True) -> None:
        """Start a checkpoint in the background. The result of the previous one must have been taken with
        `take_finished`.

        Without `to_disk`, the checkpoint is kept only in memory.
        """
        assert self._pending is None, "one checkpoint is written at a time"
        started = time.perf_counter()
        slot = self.slot
        self.slot = 1 - slot
        buffer = self._memory.open(slot) if self._memory else self._buffer
        begun = mark(on_gpu=on_chip(self._device))
        self._image.fill(buffer, self._own_parts())
        copied = mark(on_gpu=on_chip(self._device))
        copying_s = time.perf_counter() - started

        def write() -> Saved:
            # Updates are queued after the copies on the compute stream, so the host does not need to wait for the
            # copies.
            wait_for(copied)
            blocked_s = max(copying_s, elapsed_s(begun, copied))
            if self._memory:
                self._memory.share(slot, about)
            if to_disk:
                return self._write(about, started, blocked_s, [view_bytes(buffer)])
            taken_s = time.perf_counter() - started
            return Saved(about, self._image.bytes, blocked_s, taken_s, in_memory=True)

        self._pending = self._thread.submit(write)

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._pending is not None and not self._pending.done()

    def take_finished(self) -> Saved | None:
        """Return the result of the last `begin` once, after it has finished; otherwise None."""
        if self._pending is None or self.busy:
            return None
        saved = self._pending.result()
        self._pending = None
        return saved

    def wait(self) -> Saved | None:
        """Wait until no checkpoint is being written, then return the result of `take_finished`."""
        if self._pending:
            self._pending.exception()
        return self.take_finished()

    def close(self) -> None:
        """Wait until nothing is being written, and release the copies' buffers."""
        self._thread.shutdown()
        if "_buffer" in self.__dict__:
            unpin(self._buffer, self._device)
        if self.__dict__.get("_memory"):
            self.__dict__["_memory"].close()

    def _write(self, about: About, started: float, blocked_s: float, stream: Iterable[memoryview]) -> Saved:
        """Write this rank's part. Rank 0 waits for all parts and publishes the checkpoint.

        Raises WorkerError if a newer start owns the run.
        """
        Fence.of_worker(self._run_dir).check()
        partial = files.partial_folder(self._run_dir, about.step, self._token)
        name = files.file_name(self._rank)
        error = None
        size = 0
        host_work(self._device, "write")
        write_report = self._disks.write_report if self._disks else None
        try:
            partial.mkdir(parents=True, exist_ok=True)
            digest = files.write_file(partial / name, stream)
            if self._disks:
                self._disks.copy(partial / name)
            files.leave_part(partial, self._rank, WrittenPart(digest, self._image.entries(name)), write_report)
            size = digest.bytes
        except OSError as failure:
            files.leave_failure(partial, self._rank, failure, write_report)
            error = files.cannot_save(about.step, [f"rank {self._rank}: {failure.strerror or failure}"])
        if (
            self._rank == 0 and partial.is_dir()
        ):  # without the folder, no rank can report anything, not even this failure
            try:
                kept = (self._keep_last, self.kept_step, self._disks)
                size = files.commit(self._run_dir, partial, about, self._world_size, *kept).bytes
            except MachineError as failure:
                error = failure
        return Saved(about, size, blocked_s, time.perf_counter() - started, error)

    def _own_parts(self) -> list[TensorPart]:
        """Return the live parts that this rank writes, in the image's order."""
        now = {(part.name, part.offsets): part for part in self._all_parts()}
        return [now[part.name, part.offsets] for part in self._image.parts]

    def _all_parts(self) -> list[TensorPart]:
        return [*self._held.parts(), *self._held.feedback_parts(), *rng_parts(self._rank, self._device)]

    @cached_property
    def _image(self) -> Image:
        """The layout of this rank's file. All ranks agree on the layout once, together with the token; after a change
        of layout, a new saver is used."""
        parts = self._all_parts()
        self._token = broadcast_json(secrets.token_hex(TOKEN_BYTES), _read_token)
        own = [[part.name, part.offsets, part.bytes] for part in parts]
        owners = choose_owners(
            gather_json(
                own,
                lambda rows: {
                    (convert(str, name), convert(tuple[int, ...], offsets)): convert(int, size)
                    for name, offsets, size in rows
                },
            )
        )
        return plan_image([part for part in parts if owners[part.name, part.offsets] == self._rank])

    @cached_property
    def _memory(self) -> MemoryCopies | None:
        return MemoryCopies(self._memory_location, self._image, self._device) if self._memory_location else None

    @cached_property
    def _buffer(self) -> Tensor:
        """The buffer for the copy. With a GPU, it is pinned, so that the host can continue while the device copies."""
        buffer = torch.zeros(self._image.bytes, dtype=torch.uint8)
        pin(buffer, self._device)
        self._image.put_header(buffer)
        return buffer


def _read_token(token: Any) -> str:
    """Check a token, which becomes part of a folder name."""
    if not re.fullmatch(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}", token):
        raise ValueError("the save's token is not a hexadecimal number of the expected length")
    return str(token)


def _enter_thread(device: torch.device) -> None:
    """Select the copies' device, and lower this thread's priority: on Linux, niceness is per thread."""
    make_current(device)
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + WRITER_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(MOST_NICENESS, niceness))


# Load a checkpoint into this run's layout: the newest complete one, verified file by file, or only the weights of a
# run.


PREFIX = "model."
OTHER_STATE = "the checkpoint is intact, so keep it: resume with the model, adapters and optimizer that wrote it"


@dataclass(frozen=True)
class Restored:
    manifest: CheckpointManifest
    folder: Path
    slot: int | None = None
    """The slot in the nodes' memory that the state was loaded from; None if it was loaded from disk."""
    feedback: int = 0
    """Number of this rank's error feedback parts that the checkpoint contained. The other parts stay unchanged."""


def load_newest(
    run_dir: RunDir,
    held: Held,
    device: torch.device,
    memory: CopyLocation | None = None,
    disks: NodeDisks | None = None,
) -> Restored | None:
    """Restore the newest complete checkpoint from disk or (`memory`) from the nodes' memory; None if no checkpoint
    exists. `disks`: the disks of nodes that do not share the run folder, which have agreed on the newest checkpoint.

    Called collectively by all ranks. Raises MachineError if the checkpoint was altered.
    """
    newest = disks.newest_step if disks else max(run_dir.checkpoint_steps(), default=-1)
    found = find_newest(memory) if memory else None
    if memory and found and found.manifest.step > newest:
        parts = _parts(found.manifest, held, device)
        fetch(memory, found, files_needed(found.manifest, parts))
        _restore(found.folder, found.manifest, parts, held, device)
        return Restored(found.manifest, found.folder, found.slot, len(_kept_feedback(found.manifest, held)))
    return _load(run_dir.checkpoint(newest), held, device, disks) if newest >= 0 else None


def _load(folder: Path, held: Held, device: torch.device, disks: NodeDisks | None = None) -> Restored:
    """Divide the files among the ranks for verification, and restore the state once all files have passed."""
    with errors_together():
        manifest = read_manifest(folder)
        if disks is None:
            verify_files(folder, manifest.files[dist.get_rank() :: dist.get_world_size()])
    parts = _parts(manifest, held, device)
    if disks:
        disks.fetch(manifest, files_needed(manifest, parts))
    _restore(folder, manifest, parts, held, device)
    return Restored(manifest, folder, feedback=len(_kept_feedback(manifest, held)))


def _parts(manifest: CheckpointManifest, held: Held, device: torch.device) -> list[TensorPart]:
    """Return the parts to restore. Random generators are included if the world size is unchanged, error feedback if the
    layout is unchanged."""
    generators = rng_parts(dist.get_rank(), device) if manifest.world_size == dist.get_world_size() else []
    return [*held.parts(), *_kept_feedback(manifest, held), *generators]


def _kept_feedback(manifest: CheckpointManifest, held: Held) -> list[TensorPart]:
    """Return the parts of this rank's feedback that are in the checkpoint with the same shape."""
    entries = ((part, manifest.tensors.get(part.name)) for part in held.feedback_parts())
    return [part for part, entry in entries if entry is not None and entry.shape == part.full_shape]


def _restore(
    folder: Path, manifest: CheckpointManifest, parts: list[TensorPart], held: Held, device: torch.device
) -> None:
    with errors_together():
        fill_parts(folder, manifest, parts)
    copy_twins(held.shares, held.optimizer)
    set_rng([part for part in parts if part.name.startswith("rng.")], device)


def load_weights(folder: Path, held: Held) -> set[str]:
    """Fill parameters, and buffers that training changes, from a checkpoint with any layout. Return the names of
    adapters that the checkpoint does not contain.

    Raises MachineError if the checkpoint belongs to a different model.
    """
    manifest = read_manifest(folder)
    quantised = set[str]()  # parts that are 4-bit in `held` but in full precision in the checkpoint
    for matrix in split_quantised(held.shares)[1]:
        if f"{PREFIX}{matrix.name}" in manifest.tensors:
            full = torch.empty(matrix.full_shape)
            fill_parts(folder, manifest, [TensorPart.whole(f"{PREFIX}{matrix.name}", full)])
            matrix.fill(full)
            del full  # free memory, so that only one copy of a large tensor exists
            quantised |= {f"{PREFIX}{share.name}" for share in matrix.parts}
    parts = [part for part in held.parts() if part.name.startswith(PREFIX) and part.name not in quantised]
    new = {part.name for part in parts if part.name.endswith(ADAPTERS) and part.name not in manifest.tensors}
    fill_parts(folder, manifest, [part for part in parts if part.name not in new])
    copy_twins(held.shares, held.optimizer)
    return new


def read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return full parameters by name, dequantised and in fp32. This process reads them without any communication."""
    manifest = read_manifest(folder)
    quantised = {name for name in shapes if f"{PREFIX}{names_of(name)[0]}" in manifest.tensors}
    tensors = {name: torch.empty(shape) for name, shape in shapes.items() if name not in quantised}
    parts = [TensorPart.whole(f"{PREFIX}{name}", tensor) for name, tensor in tensors.items()]
    fill_parts(folder, manifest, parts)
    for name in quantised:
        held = Nf4(*(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in shapes_of(*shapes[name])))
        names = (f"{PREFIX}{each}" for each in names_of(name))
        fill_parts(folder, manifest, [TensorPart.whole(*each) for each in zip(names, held, strict=True)])
        tensors[name] = restore(held)
    return tensors


# Read only the overlapping slices; nothing is unpickled


def files_needed(manifest: CheckpointManifest, parts: Iterable[TensorPart]) -> set[str]:
    """Return the names of the files that overlap `parts`."""
    entries = ((part, manifest.tensors.get(part.name)) for part in parts)
    return {
        chunk.file for part, entry in entries if entry for chunk in entry.chunks if overlap(part, chunk) is not None
    }


@torch.no_grad()
def fill_parts(folder: Path, manifest: CheckpointManifest, parts: Sequence[TensorPart]) -> None:
    """Copy the checkpoint's content into the memory of the parts, which may have any layout.

    Raises MachineError if a tensor is missing, has the wrong shape or dtype, is not fully covered, or is not finite.
    """
    with ExitStack() as stack:
        opened: dict[str, safe_open] = {}
        for part in parts:
            entry = manifest.tensors.get(part.name)
            if entry is None:
                raise refused(
                    folder,
                    f"it does not contain {part.name}: it belongs to a different model or optimizer",
                    OTHER_STATE,
                )
            dtype = CODES[part.tensor.dtype]
            if (entry.dtype, entry.shape) != (dtype, part.full_shape):
                there = f"{entry.dtype} {list(entry.shape)}"
                here = f"{dtype} {list(part.full_shape)}"
                raise refused(folder, f"{part.name} is {there} in the checkpoint and {here} in this run", OTHER_STATE)
            filled = 0
            for chunk in entry.chunks:
                spans = overlap(part, chunk)
                if spans is None:
                    continue
                try:
                    if chunk.file not in opened:
                        opened[chunk.file] = stack.enter_context(safe_open(folder / chunk.file, framework="pt"))
                    source = opened[chunk.file].get_slice(part.name)
                    found = source[slices(spans, chunk.offsets)] if spans else opened[chunk.file].get_tensor(part.name)
                except (SafetensorError, OSError) as error:
                    raise refused(folder, f"{folder / chunk.file} cannot be read: {error}") from error
                if not is_finite(found):
                    count = count_not_finite(opened[chunk.file].get_tensor(part.name))
                    raise refused(folder, f"{folder / chunk.file} holds {count:,} {NOT_FINITE} in {part.name}")
                target = part.tensor[slices(spans, part.offsets)] if spans else part.tensor
                target.copy_(found)
                filled += found.numel()
                del source, found  # unmap this slice, which may be large
            if filled != part.tensor.numel():
                raise refused(
                    folder, f"it contains only {filled:,} of the {part.tensor.numel():,} elements of {part.name}"
                )
