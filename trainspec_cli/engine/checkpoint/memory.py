"""Copies of the newest state in the hosts' memory: they outlive the workers, and a neighbour's outlives its host.

Each rank's copy is a file of the checkpoint in /dev/shm, in one of two slots, so that one of them is always whole. With
several nodes every rank also keeps that of its neighbour, the same local rank of the node before. A run that starts
again on the same hosts goes on from there where all parts of a step are found that is newer than the disk's; parts that
a new host lacks are sent to it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.checkpoint.files import file_name
from trainspec_cli.engine.checkpoint.image import Image, pin, view_bytes
from trainspec_cli.engine.checkpoint.manifest import (
    About,
    CheckpointManifest,
    FileDigest,
    TensorEntry,
    WrittenPart,
    about_from,
    digest_file,
    entries_from,
    join_parts,
    part_from,
)
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.errors import MachineError
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.structure import convert


@dataclass(frozen=True)
class CopyLocation:
    """Where this rank stands among the hosts."""

    folder: Path
    """This host's, in memory."""
    rank: int
    world_size: int
    ranks_per_host: int

    @property
    def host(self) -> int:
        return self.rank // self.ranks_per_host

    @property
    def guest(self) -> int | None:
        """The rank whose copy is kept here too; None on a single host."""
        return (self.rank - self.ranks_per_host) % self.world_size if self.world_size > self.ranks_per_host else None

    @property
    def keeper(self) -> int:
        """The rank that keeps this one's copy."""
        return (self.rank + self.ranks_per_host) % self.world_size

    def slot(self, number: int) -> Path:
        return self.folder / f"slot{number}"


class MemoryCopies:
    """Of one rank. All ranks make the same calls; `share` alone runs in the writer's thread, on a group of its own."""

    def __init__(self, place: CopyLocation, image: Image, device: torch.device):
        self._place, self._image, self._device = place, image, device
        self._group = dist.new_group(backend="gloo")
        own = {"bytes": image.bytes, "tensors": _plain(image.entries(file_name(place.rank)))}
        self._images = gather_json(own, _read_image)
        self._own: dict[int, Tensor] = {}
        self._guests: dict[int, Tensor] = {}

    def open(self, slot: int) -> Tensor:
        """The slot's buffer, to be filled; what it held is a copy no more. Made when it is first wanted: until then
        it may hold what the run goes on from."""
        place, guest = self._place, self._place.guest
        _told(place.slot(slot), place.rank).unlink(missing_ok=True)
        if guest is not None:
            _told(place.slot(slot), guest).unlink(missing_ok=True)
        if slot not in self._own:
            self._own[slot] = _segment(place.slot(slot) / file_name(place.rank), self._image.bytes, self._device)
            self._image.put_header(self._own[slot])
            if guest is not None:
                size = self._images[guest][0]
                self._guests[slot] = _segment(place.slot(slot) / file_name(guest), size, torch.device("cpu"))
        return self._own[slot]

    def share(self, slot: int, about: About) -> None:
        """The slot is filled: digest it, send it to its keeper, and say of both copies here that they are whole."""
        digest = hashlib.sha256(view_bytes(self._own[slot])).digest()
        self._tell(slot, self._place.rank, about, digest)
        if self._place.guest is None:
            return
        theirs = torch.empty(len(digest), dtype=torch.uint8)
        ours = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        for sent, received in ((self._own[slot], self._guests[slot]), (ours, theirs)):
            sending = dist.isend(sent, self._place.keeper, group=self._group)
            receiving = dist.irecv(received, self._place.guest, group=self._group)
            for work in (sending, receiving):
                assert work is not None, "every rank is of the group"
                work.wait()
        self._tell(slot, self._place.guest, about, bytes(theirs.tolist()))

    def _tell(self, slot: int, rank: int, about: About, digest: bytes) -> None:
        size, entries = self._images[rank]
        part = WrittenPart(FileDigest(file_name(rank), size, digest.hex()), entries)
        told = KeptPart(slot, rank, about, self._place.world_size, part)
        write_json(_told(self._place.slot(slot), rank), asdict(told))


@dataclass(frozen=True)
class KeptPart:
    """What is told of a rank's whole copy, beside it."""

    slot: int
    rank: int
    about: About
    world_size: int
    part: WrittenPart

    @staticmethod
    def read(content: Mapping[str, Any]) -> KeptPart:
        """The inverse of `asdict`; raises as `part_from` does."""
        slot, rank, world_size = (convert(int, content[key]) for key in ("slot", "rank", "world_size"))
        return KeptPart(slot, rank, about_from(content["about"]), world_size, part_from(content["part"]))


@dataclass(frozen=True)
class FoundCopy:
    """A whole step in the hosts' memory."""

    folder: Path
    """The slot, on this host, with all files that its ranks need."""
    slot: int
    manifest: CheckpointManifest
    holders: dict[str, int]
    """By file: a rank on a host that has it."""


def find_newest(place: CopyLocation) -> FoundCopy | None:
    """The newest step of which every part is whole on some host; called by every rank together."""
    steps: dict[tuple[int, int], dict[int, tuple[int, KeptPart]]] = {}
    for teller, kept in enumerate(gather_json([asdict(part) for part in _whole_parts(place)], _read_kept)):
        for one in kept:
            steps.setdefault((one.about.step, one.slot), {}).setdefault(one.rank, (teller, one))
    for (_, slot), parts in sorted(steps.items(), reverse=True):
        ordered = [parts[rank][1] for rank in sorted(parts)]
        if sorted(parts) == list(range(ordered[0].world_size)):
            manifest = join_parts(ordered[0].about, [one.part for one in ordered])
            holders = {file_name(rank): teller for rank, (teller, _) in parts.items()}
            return FoundCopy(place.slot(slot), slot, manifest, holders)
    return None


def _read_kept(told: Sequence[Mapping[str, Any]]) -> list[KeptPart]:
    return [KeptPart.read(content) for content in told]


def _whole_parts(place: CopyLocation) -> Iterable[KeptPart]:
    """Those of this host; its ranks share out the verification."""
    told = sorted(place.folder.glob("slot*/rank*.json"))
    for path in told[place.rank % place.ranks_per_host :: place.ranks_per_host]:
        kept = KeptPart.read(read_json(path))
        segment = path.with_name(kept.part.file.name)
        if segment.is_file() and digest_file(segment) == kept.part.file:
            yield kept


def fetch(place: CopyLocation, found: FoundCopy, needed: set[str]) -> None:
    """Send the files of `found` that ranks need to hosts that lack them; called by every rank together."""
    has = {path.name for path in found.folder.glob("rank*.safetensors")}
    whole = {name for name in has if _told(found.folder, int(name[4:9])).is_file()}
    wanted = gather_json([place.host, sorted(needed - whole)], _read_wanted)
    requests = sorted({(name, host) for host, names in wanted for name in names})
    for name, host in requests:
        holder, receiver = found.holders[name], host * place.ranks_per_host
        size = next(file.bytes for file in found.manifest.files if file.name == name)
        if place.rank == holder:
            dist.send(torch.from_file(str(found.folder / name), shared=True, size=size, dtype=torch.uint8), receiver)
        if place.rank == receiver:
            buffer = _segment(found.folder / name, size, torch.device("cpu"))
            dist.recv(buffer, holder)
    dist.barrier()


def _read_wanted(told: tuple[Any, Any]) -> tuple[int, tuple[str, ...]]:
    """-> (a host, names of the files that it lacks)"""
    host, names = told
    return convert(int, host), convert(tuple[str, ...], names)


def clear(place: CopyLocation) -> None:
    """The disk has all that was held here."""
    if place.rank % place.ranks_per_host == 0:
        shutil.rmtree(place.folder, ignore_errors=True)


def _told(slot: Path, rank: int) -> Path:
    return slot / f"rank{rank:05d}.json"


def _segment(path: Path, size: int, device: torch.device) -> Tensor:
    """Memory that other processes see and that outlives this one; reserved, since a full tmpfs kills who writes."""
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
            hint="enlarge /dev/shm, or type checkpoint.memory_interval_steps=null",
        ) from error
    finally:
        os.close(descriptor)
    buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    pin(buffer, device)
    return buffer


def _plain(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {name: asdict(entry) for name, entry in entries.items()}


def _read_image(told: Mapping[str, Any]) -> tuple[int, dict[str, TensorEntry]]:
    return convert(int, told["bytes"]), entries_from(told["tensors"])
