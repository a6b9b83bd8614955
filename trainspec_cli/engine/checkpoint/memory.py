"""Keep copies of the newest state in the nodes' memory. They outlive the workers; a copy kept by a neighbour also
outlives the node.

Each rank's copy is a checkpoint file in one of two slots in /dev/shm, so that one copy is always complete. With several
nodes, every rank also keeps a copy for its neighbour, the same local rank on the previous node. A restarted run resumes
from these copies if all parts of a step exist and that step is newer than the one on disk. A new node gets its missing
parts from other nodes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.reading.files import read_object
from trainspec_cli.engine.checkpoint.files import TensorPart, file_name
from trainspec_cli.engine.checkpoint.manifest import (
    About,
    CheckpointManifest,
    Chunk,
    FileDigest,
    TensorEntry,
    WrittenPart,
    check_content,
    digest_file,
    join_parts,
    part_from,
)
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.cuda_only import pin, unpin
from trainspec_cli.recipe.records import convert, read_record
from trainspec_cli.run.folder.files import write_json

# Lay out a rank's checkpoint file in the safetensors format (huggingface.co/docs/safetensors, "Format").
#
# A file consists of eight bytes with the header's length, the header in JSON, and the tensors' bytes without gaps.
# Tensors with the largest element size come first, so every tensor is aligned. Files are read with safetensors itself,
# and written from a reused buffer.


CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Maps a dtype to its name in safetensors."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
ALIGNMENT = 8


@dataclass(frozen=True)
class Image:
    """The layout of a file that is written repeatedly, with parts that always have the same names, shapes and
    dtypes."""

    parts: tuple[TensorPart, ...]
    header: bytes
    starts: tuple[int, ...]
    """The offset of each part in the file."""

    @cached_property
    def bytes(self) -> int:
        return len(self.header) + sum(part.bytes for part in self.parts)

    def put_header(self, buffer: Tensor) -> None:
        """Write the header, which `fill` does not change."""
        buffer[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)

    def fill(self, buffer: Tensor, parts: Sequence[TensorPart]) -> None:
        """Copy `parts`, in this image's order, to their offsets in `buffer` (`bytes` of uint8)."""
        for start, part in zip(self.starts, parts, strict=True):
            target = buffer[start : start + part.bytes].view(part.tensor.dtype).view(part.shape)
            target.copy_(part.tensor, non_blocking=True)

    def stream(self, parts: Sequence[TensorPart]) -> Iterator[memoryview]:
        """Yield the bytes of the file directly from the live tensors."""
        yield memoryview(self.header)
        for part in parts:
            yield view_bytes(part.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))

    def entries(self, file: str) -> dict[str, TensorEntry]:
        return {
            part.name: TensorEntry(part.full_shape, CODES[part.tensor.dtype], (Chunk(file, part.offsets, part.shape),))
            for part in self.parts
        }


def view_bytes(tensor: Tensor) -> memoryview:
    """Return a memoryview of a one-dimensional uint8 tensor on the CPU. The view keeps the tensor alive. numpy is
    avoided because torch cannot free a storage that numpy has accessed, and a change of layout has to free it."""
    array: Any = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def plan_image(parts: Sequence[TensorPart]) -> Image:
    ordered = sorted(parts, key=lambda part: (-part.tensor.element_size(), part.name))
    offsets = list(accumulate((part.bytes for part in ordered), initial=0))
    fields = {
        part.name: {"dtype": CODES[part.tensor.dtype], "shape": part.shape, "data_offsets": span}
        for part, span in zip(ordered, pairwise(offsets), strict=True)
    }
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    starts = tuple(len(header) + offset for offset in offsets[:-1])
    return Image(tuple(ordered), header, starts)


@dataclass(frozen=True)
class CopyLocation:
    """A rank's position among the nodes, and the folder with its node's copies."""

    folder: Path
    """This node's folder in shared memory."""
    rank: int
    world_size: int
    ranks_per_node: int

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def guest(self) -> int | None:
        """The rank whose copy is also kept here; None on a single node."""
        return (self.rank - self.ranks_per_node) % self.world_size if self.world_size > self.ranks_per_node else None

    @property
    def keeper(self) -> int:
        """The rank that keeps this rank's copy."""
        return (self.rank + self.ranks_per_node) % self.world_size

    def slot(self, number: int) -> Path:
        return self.folder / f"slot{number}"


class MemoryCopies:
    """The copies that one rank keeps. All ranks make the same calls. `share` runs in the writer's thread and uses a
    separate process group."""

    def __init__(self, location: CopyLocation, image: Image, device: torch.device):
        self._location = location
        self._image = image
        self._device = device
        self._group = dist.new_group(backend="gloo")
        name = file_name(location.rank)
        own = WrittenPart(FileDigest(name, image.bytes, sha256=""), image.entries(name))
        self._images = gather_json(asdict(own), part_from)
        """The files of each rank's copy, without digests."""
        self._own: dict[int, Tensor] = {}
        self._guests: dict[int, Tensor] = {}

    def close(self) -> None:
        """Release this rank's buffers. Their content stays in the node's memory."""
        for buffer in self._own.values():
            unpin(buffer, self._device)
        self._own.clear()

    def open(self, slot: int) -> Tensor:
        """Return the slot's buffer, which the caller fills, and invalidate the slot's previous copy. The buffer is
        created at first use, because until then the slot may hold the copy that the run resumes from."""
        location = self._location
        guest = location.guest
        _mark_file(location.slot(slot), location.rank).unlink(missing_ok=True)
        if guest is not None:
            _mark_file(location.slot(slot), guest).unlink(missing_ok=True)
        if slot not in self._own:
            self._own[slot] = _segment(location.slot(slot) / file_name(location.rank), self._image.bytes, self._device)
            self._image.put_header(self._own[slot])
            if guest is not None:
                size = self._images[guest].file.bytes
                self._guests[slot] = _segment(location.slot(slot) / file_name(guest), size, torch.device("cpu"))
        return self._own[slot]

    def share(self, slot: int, about: About) -> None:
        """Digest a filled slot, send it to the neighbour that keeps it, and mark both copies on this node as
        complete."""
        digest = hashlib.sha256(view_bytes(self._own[slot])).digest()
        self._mark_whole(slot, self._location.rank, about, digest)
        if self._location.guest is None:
            return
        theirs = torch.empty(len(digest), dtype=torch.uint8)
        ours = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        for sent, received in ((self._own[slot], self._guests[slot]), (ours, theirs)):
            sending = dist.isend(sent, self._location.keeper, group=self._group)
            receiving = dist.irecv(received, self._location.guest, group=self._group)
            for work in (sending, receiving):
                assert work is not None, "every rank is in the group"
                work.wait()
        self._mark_whole(slot, self._location.guest, about, bytes(theirs.tolist()))

    def _mark_whole(self, slot: int, rank: int, about: About, digest: bytes) -> None:
        image = self._images[rank]
        part = replace(image, file=replace(image.file, sha256=digest.hex()))
        kept = KeptPart(slot, rank, about, self._location.world_size, part)
        write_json(_mark_file(self._location.slot(slot), rank), asdict(kept))


@dataclass(frozen=True)
class KeptPart:
    """The record of a rank's complete copy, stored next to the copy."""

    slot: int
    rank: int
    about: About
    world_size: int
    part: WrittenPart

    @staticmethod
    def read(content: Mapping[str, object]) -> KeptPart:
        """Create from plain JSON; the inverse of `asdict`. Raises the same errors as `part_from`."""
        kept = read_record(KeptPart, content)
        check_content((kept.part.file,), kept.part.tensors)
        return kept


@dataclass(frozen=True)
class FoundCopy:
    """A step that can be restored: each of its parts is in the memory of at least one node."""

    folder: Path
    """The slot's folder on this node, with all files that the node's ranks need."""
    slot: int
    manifest: CheckpointManifest
    holders: dict[str, int]
    """Maps each file to a rank on a node that has the file."""


def find_newest(location: CopyLocation) -> FoundCopy | None:
    """Return the newest step whose parts are all complete, each on at least one node. Called collectively by all
    ranks."""
    steps: dict[tuple[int, int], dict[int, tuple[int, KeptPart]]] = {}
    own = [asdict(part) for part in _whole_parts(location)]
    for holder, kept in enumerate(gather_json(own, lambda contents: list(map(KeptPart.read, contents)))):
        for one in kept:
            steps.setdefault((one.about.step, one.slot), {}).setdefault(one.rank, (holder, one))
    for (_, slot), parts in sorted(steps.items(), reverse=True):
        ordered = [parts[rank][1] for rank in sorted(parts)]
        if sorted(parts) == list(range(ordered[0].world_size)):
            manifest = join_parts(ordered[0].about, [one.part for one in ordered])
            holders = {file_name(rank): holder for rank, (holder, _) in parts.items()}
            return FoundCopy(location.slot(slot), slot, manifest, holders)
    return None


def _whole_parts(location: CopyLocation) -> Iterable[KeptPart]:
    """Yield the complete parts on this node. The node's ranks divide the verification among themselves.

    If a copy fails verification, its completion mark is removed, so that `fetch` replaces it.
    """
    marks = sorted(location.folder.glob("slot*/rank*.json"))
    for path in marks[location.rank % location.ranks_per_node :: location.ranks_per_node]:
        kept = KeptPart.read(read_object(path))
        segment = path.with_name(kept.part.file.name)
        if segment.is_file() and digest_file(segment) == kept.part.file:
            yield kept
        else:
            path.unlink()


def fetch(location: CopyLocation, found: FoundCopy, needed: set[str]) -> None:
    """Send the files of `found` to nodes whose ranks need them but do not have them. Called collectively by all
    ranks."""
    # A node that had other ranks in an earlier start still has their files, with the marks of earlier steps.
    whole = {file.name for file in found.manifest.files if _is_kept(found.folder, file)}
    wanted = gather_json(
        [location.node, sorted(needed - whole)],
        lambda content: (convert(int, content[0]), convert(tuple[str, ...], content[1])),
    )
    requests = sorted({(name, node) for node, names in wanted for name in names})
    for name, node in requests:
        holder = found.holders[name]
        receiver = node * location.ranks_per_node
        size = next(file.bytes for file in found.manifest.files if file.name == name)
        if location.rank == holder:
            dist.send(torch.from_file(str(found.folder / name), shared=True, size=size, dtype=torch.uint8), receiver)
        if location.rank == receiver:
            _mark_file(found.folder, int(name[4:9])).unlink(missing_ok=True)  # of what is overwritten
            buffer = _segment(found.folder / name, size, torch.device("cpu"))
            dist.recv(buffer, holder)
    dist.barrier()


def _is_kept(slot: Path, file: FileDigest) -> bool:
    """Return whether a slot holds this file, as `_whole_parts` has verified."""
    path = _mark_file(slot, int(file.name[4:9]))
    return path.is_file() and (slot / file.name).is_file() and KeptPart.read(read_object(path)).part.file == file


def clear(location: CopyLocation) -> None:
    """Remove the copies. Called once the state is on disk."""
    if location.rank % location.ranks_per_node == 0:
        shutil.rmtree(location.folder, ignore_errors=True)


def _mark_file(slot: Path, rank: int) -> Path:
    return slot / f"rank{rank:05d}.json"


def _segment(path: Path, size: int, device: torch.device) -> Tensor:
    """Return shared memory that outlives this process. It is reserved in advance, because writing to a full tmpfs kills
    the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.truncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink()
        raise MachineError(
            f"no room for a copy of {size:,} bytes in {path.parent}: {error.strerror}",
            code="cannot_save",
            hint="enlarge /dev/shm, or set checkpoint.memory_interval_steps=null",
        ) from error
    finally:
        os.close(descriptor)
    buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    pin(buffer, device)
    return buffer
