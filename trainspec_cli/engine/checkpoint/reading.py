"""Fill parts from a checkpoint's files: only overlapping slices are read, and nothing is unpickled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainspec_cli.engine.checkpoint.image import CODES
from trainspec_cli.engine.checkpoint.manifest import CheckpointManifest, Chunk, TensorEntry, refused
from trainspec_cli.engine.checkpoint.parts import TensorPart
from trainspec_cli.engine.finite import NOT_FINITE, count_not_finite, is_finite

Span = tuple[int, int]


def files_needed(manifest: CheckpointManifest, parts: Iterable[TensorPart]) -> set[str]:
    """Return the names of the files that overlap `parts`."""
    entries = ((part, manifest.tensors.get(part.name)) for part in parts)
    return {
        chunk.file
        for part, entry in entries
        if entry
        for chunk in entry.chunks
        if overlap(part.offsets, part.shape, chunk) is not None
    }


@torch.no_grad()
def fill_parts(folder: Path, manifest: CheckpointManifest, parts: Sequence[TensorPart]) -> None:
    """Copy the checkpoint's content into the parts' own memory, in any layout.

    Raises MachineError if a tensor is missing, of another shape or dtype, not wholly covered, or not finite.
    """
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for part in parts:
            chunks = _entry_of(folder, manifest, part).chunks
            filled = sum(_copy_chunk(folder, opened, stack, part, chunk) for chunk in chunks)
            if filled != part.tensor.numel():
                raise refused(folder, f"it holds {filled:,} of the {part.tensor.numel():,} elements of {part.name}")


def _entry_of(folder: Path, manifest: CheckpointManifest, part: TensorPart) -> TensorEntry:
    entry = manifest.tensors.get(part.name)
    if entry is None:
        raise refused(folder, f"it holds no {part.name}: it is of another model or optimizer")
    found, wanted = (entry.dtype, entry.shape), (CODES[part.tensor.dtype], part.full_shape)
    if found != wanted:
        raise refused(folder, f"{part.name} is {_describe(*found)} there, and {_describe(*wanted)} in this run")
    return entry


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _copy_chunk(folder: Path, opened: dict[str, Any], stack: ExitStack, part: TensorPart, chunk: Chunk) -> int:
    """Copy the overlap of a chunk and a part, and return the number of elements."""
    spans = overlap(part.offsets, part.shape, chunk)
    if spans is None:
        return 0
    try:
        if chunk.file not in opened:
            opened[chunk.file] = stack.enter_context(safe_open(folder / chunk.file, framework="pt"))
        source = opened[chunk.file].get_slice(part.name)
        found = source[_slices(spans, chunk.offsets)] if spans else opened[chunk.file].get_tensor(part.name)
    except (SafetensorError, OSError) as error:
        raise refused(folder, f"{folder / chunk.file} cannot be read: {error}") from error
    if not is_finite(found):
        count = count_not_finite(opened[chunk.file].get_tensor(part.name))
        raise refused(folder, f"{folder / chunk.file} holds {count:,} {NOT_FINITE} in {part.name}")
    target = part.tensor[_slices(spans, part.offsets)] if spans else part.tensor
    target.copy_(found)
    return found.numel()


def overlap(offsets: Sequence[int], shape: Sequence[int], chunk: Chunk) -> list[Span] | None:
    """Return the overlap of a part and a chunk in the full tensor, by dim; None if empty, [] for a scalar."""
    spans = [
        (max(ours, theirs), min(ours + our_size, theirs + their_size))
        for ours, our_size, theirs, their_size in zip(offsets, shape, chunk.offsets, chunk.shape, strict=True)
    ]
    return spans if all(begin < end for begin, end in spans) else None


def _slices(spans: Sequence[Span], offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - start, end - start) for (begin, end), start in zip(spans, offsets, strict=True))
