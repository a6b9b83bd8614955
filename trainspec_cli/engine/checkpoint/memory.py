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
from collections.abc import Iterable
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
    FileDigest,
    Manifest,
    WrittenPart,
    digest_file,
    join_parts,
    part_from,
)
from trainspec_cli.errors import MachineError
from trainspec_cli.rundir.files import read_json, write_json


@dataclass(frozen=True)
class Place:
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

    def __init__(self, place: Place, image: Image, device: torch.device):
        self._place, self._image, self._device = place, image, device
        self._group = dist.new_group(backend="gloo")
        self._images = _gather((image.bytes, image.entries(file_name(place.rank))))
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
        told = {"about": asdict(about), "world_size": self._place.world_size, "part": asdict(part)}
        write_json(_told(self._place.slot(slot), rank), told)


@dataclass(frozen=True)
class Found:
    """A whole step in the hosts' memory."""

    folder: Path
    """The slot, on this host, with all files that its ranks need."""
    slot: int
    manifest: Manifest
    holders: dict[str, int]
    """By file: a rank on a host that has it."""


def find_newest(place: Place) -> Found | None:
    """The newest step of which every part is whole on some host; called by every rank together."""
    told = _gather([(slot, rank, content) for slot, rank, content in _whole_parts(place)])
    steps: dict[tuple[int, int], dict[int, tuple[int, Any]]] = {}
    for teller, parts in enumerate(told):
        for slot, rank, content in parts:
            steps.setdefault((content["about"]["step"], slot), {}).setdefault(rank, (teller, content))
    for (_, slot), parts in sorted(steps.items(), reverse=True):
        contents = [content for _, content in parts.values()]
        if sorted(parts) == list(range(contents[0]["world_size"])):
            ordered = [part_from(parts[rank][1]["part"]) for rank in sorted(parts)]
            manifest = join_parts(About(**contents[0]["about"]), ordered)
            holders = {file_name(rank): teller for rank, (teller, _) in parts.items()}
            return Found(place.slot(slot), slot, manifest, holders)
    return None


def _whole_parts(place: Place) -> Iterable[tuple[int, int, dict[str, Any]]]:
    """-> (slot, rank, what was told of it) of this host; its ranks share out the verification."""
    told = sorted(place.folder.glob("slot*/rank*.json"))
    for path in told[place.rank % place.ranks_per_host :: place.ranks_per_host]:
        content = read_json(path)
        file = FileDigest(**content["part"]["file"])
        segment = path.with_name(file.name)
        if segment.is_file() and digest_file(segment) == file:
            yield int(path.parent.name.removeprefix("slot")), int(path.stem.removeprefix("rank")), content


def fetch(place: Place, found: Found, needed: set[str]) -> None:
    """Send the files of `found` that ranks need to hosts that lack them; called by every rank together."""
    has = {path.name for path in found.folder.glob("rank*.safetensors")}
    whole = {name for name in has if _told(found.folder, int(name[4:9])).is_file()}
    wanted = _gather((place.host, sorted(needed - whole)))
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


def clear(place: Place) -> None:
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


def _gather(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
