"""Load a checkpoint into this run's layout: the newest whole one, verified file by file, or only a run's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainspec_cli.engine.checkpoint.image import CODES
from trainspec_cli.engine.checkpoint.manifest import (
    CheckpointManifest,
    Chunk,
    TensorEntry,
    read_manifest,
    refused,
    verify_files,
)
from trainspec_cli.engine.checkpoint.memory import CopyLocation, fetch, find_newest
from trainspec_cli.engine.checkpoint.parts import Held, TensorPart, copy_twins, overlap, rng_parts, set_rng, slices
from trainspec_cli.engine.comm.json_collectives import errors_together
from trainspec_cli.engine.finite import NOT_FINITE, count_not_finite, is_finite
from trainspec_cli.engine.nf4 import Nf4, shapes_of
from trainspec_cli.engine.quantised_shares import names_of, restore, split_quantised
from trainspec_cli.run.folder.paths import RunDir

PREFIX = "model."
ADAPTERS = ("lora_a", "lora_b")
"""Parameters that a run may add to a checkpoint without adapters."""
OTHER_STATE = (
    "the checkpoint is whole, so keep it: give the model, the adapters and the optimizer that it was written with"
)


@dataclass(frozen=True)
class Restored:
    manifest: CheckpointManifest
    folder: Path
    slot: int | None = None
    """The slot in the nodes' memory that it came from; None: from disk."""
    feedback: int = 0
    """The number of this rank's parts of error feedback that it held; the others stay as they are."""


def load_newest(
    run_dir: RunDir, held: Held, device: torch.device, memory: CopyLocation | None = None
) -> Restored | None:
    """Restore the newest whole checkpoint, on disk or (`memory`) in the nodes' memory; None if there is none.

    Called by all ranks together. Raises MachineError if it was altered.
    """
    newest = max(run_dir.checkpoint_steps(), default=-1)
    found = find_newest(memory) if memory else None
    if memory and found and found.manifest.step > newest:
        parts = _parts(found.manifest, held, device)
        fetch(memory, found, files_needed(found.manifest, parts))
        _restore(found.folder, found.manifest, parts, held, device)
        return Restored(found.manifest, found.folder, found.slot, len(_kept_feedback(found.manifest, held)))
    return _load(run_dir.checkpoint(newest), held, device) if newest >= 0 else None


def _load(folder: Path, held: Held, device: torch.device) -> Restored:
    """Verify all files, shared among the ranks, and restore when all have passed."""
    with errors_together():
        manifest = read_manifest(folder)
        verify_files(folder, manifest.files[dist.get_rank() :: dist.get_world_size()])
    _restore(folder, manifest, _parts(manifest, held, device), held, device)
    return Restored(manifest, folder, feedback=len(_kept_feedback(manifest, held)))


def _parts(manifest: CheckpointManifest, held: Held, device: torch.device) -> list[TensorPart]:
    """Return the parts to restore; random generators among them if the world size is unchanged, and error feedback if
    the layout is."""
    generators = rng_parts(dist.get_rank(), device) if manifest.world_size == dist.get_world_size() else []
    return [*held.parts(), *_kept_feedback(manifest, held), *generators]


def _kept_feedback(manifest: CheckpointManifest, held: Held) -> list[TensorPart]:
    """Return the parts of this rank's feedback that the checkpoint has in the same shape."""
    entries = ((part, manifest.tensors.get(part.name)) for part in held.feedback_parts())
    return [part for part, entry in entries if entry is not None and entry.shape == part.full_shape]


def _restore(
    folder: Path, manifest: CheckpointManifest, parts: list[TensorPart], held: Held, device: torch.device
) -> None:
    with errors_together():
        fill_parts(folder, manifest, parts)
    copy_twins(held.shares, held.optimizer)
    set_rng([part for part in parts if part.name.startswith("rng.")], device)


def load_weights(folder: Path, held: Held) -> None:
    """Fill parameters and the buffers that training changes, from a checkpoint of any layout.

    Raises MachineError if the checkpoint is of another model.
    """
    manifest = read_manifest(folder)
    in_full = _fill_quantised(folder, manifest, held)
    parts = [part for part in held.parts() if part.name.startswith(PREFIX) and part.name not in in_full]
    new = {part.name for part in parts if part.name.endswith(ADAPTERS) and part.name not in manifest.tensors}
    fill_parts(folder, manifest, [part for part in parts if part.name not in new])
    copy_twins(held.shares, held.optimizer)


def _fill_quantised(folder: Path, manifest: CheckpointManifest, held: Held) -> set[str]:
    """Quantise what `held` has in 4 bits and the checkpoint in full; -> the names of the parts so filled."""
    filled: set[str] = set()
    for matrix in split_quantised(held.shares)[1]:
        if f"{PREFIX}{matrix.name}" in manifest.tensors:
            full = torch.empty(matrix.full_shape)
            fill_parts(folder, manifest, [TensorPart.whole(f"{PREFIX}{matrix.name}", full)])
            matrix.fill(full)
            filled |= {f"{PREFIX}{share.name}" for share in matrix.parts}
    return filled


def read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return whole parameters by name, in fp32, read by this process alone, and dequantised."""
    manifest = read_manifest(folder)
    weights = (name for name in shapes if name.endswith(".weight"))
    quantised = {name for name in weights if f"{PREFIX}{names_of(name)[0]}" in manifest.tensors}
    tensors = {name: torch.empty(shape) for name, shape in shapes.items() if name not in quantised}
    parts = [TensorPart.whole(f"{PREFIX}{name}", tensor) for name, tensor in tensors.items()]
    fill_parts(folder, manifest, parts)
    return tensors | {name: _read_quantised(folder, manifest, name, shapes[name]) for name in quantised}


def _read_quantised(folder: Path, manifest: CheckpointManifest, name: str, shape: tuple[int, ...]) -> Tensor:
    held = Nf4(*(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in shapes_of(*shape)))
    names = (f"{PREFIX}{each}" for each in names_of(name))
    fill_parts(folder, manifest, [TensorPart.whole(*each) for each in zip(names, held, strict=True)])
    return restore(held)


# Only overlapping slices are read, and nothing is unpickled


def files_needed(manifest: CheckpointManifest, parts: Iterable[TensorPart]) -> set[str]:
    """Return the names of the files that overlap `parts`."""
    entries = ((part, manifest.tensors.get(part.name)) for part in parts)
    return {
        chunk.file for part, entry in entries if entry for chunk in entry.chunks if overlap(part, chunk) is not None
    }


@torch.no_grad()
def fill_parts(folder: Path, manifest: CheckpointManifest, parts: Sequence[TensorPart]) -> None:
    """Copy the checkpoint's content into the parts' own memory, in any layout.

    Raises MachineError if a tensor is missing, of another shape or dtype, not wholly covered, or not finite.
    """
    with ExitStack() as stack:
        opened: dict[str, safe_open] = {}
        for part in parts:
            chunks = _entry_of(folder, manifest, part).chunks
            filled = sum(_copy_chunk(folder, opened, stack, part, chunk) for chunk in chunks)
            if filled != part.tensor.numel():
                raise refused(folder, f"it holds {filled:,} of the {part.tensor.numel():,} elements of {part.name}")


def _entry_of(folder: Path, manifest: CheckpointManifest, part: TensorPart) -> TensorEntry:
    entry = manifest.tensors.get(part.name)
    if entry is None:
        raise refused(folder, f"it holds no {part.name}: it is of another model or optimizer", OTHER_STATE)
    found, wanted = (entry.dtype, entry.shape), (CODES[part.tensor.dtype], part.full_shape)
    if found != wanted:
        raise refused(
            folder, f"{part.name} is {_describe(*found)} there, and {_describe(*wanted)} in this run", OTHER_STATE
        )
    return entry


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _copy_chunk(folder: Path, opened: dict[str, safe_open], stack: ExitStack, part: TensorPart, chunk: Chunk) -> int:
    """Copy the overlap of a chunk and a part, and return the number of elements."""
    spans = overlap(part, chunk)
    if spans is None:
        return 0
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
    return found.numel()
