"""Checkpoints on nodes that do not share the run folder.

Each rank writes its file to its own node's disk, and a copy to the next node's, before it reports the file as written.
So a checkpoint that has been published survives the loss of any one node. Publishing it means to write the manifest to
every node and then to rename the folder there, on rank 0's node last.

A restart uses the newest step whose files exist on the nodes that are connected now, whatever layout has written them.
Each node fetches the files that its ranks will read and verifies them by their digests; a damaged file is replaced by
the other copy."""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from trainspec_cli.core.environment_names import GENERATION, NODE
from trainspec_cli.core.errors import MachineError
from trainspec_cli.engine.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileDigest,
    digest_file,
    read_manifest,
    refused,
)
from trainspec_cli.engine.comm.json_collectives import broadcast_json, errors_together, gather_json
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import convert, read_record
from trainspec_cli.run.channel.folders import RUN, RemoteFolder, finish, list_files, nodes_secret, remove
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.files import write_json, write_text
from trainspec_cli.run.folder.paths import CHECKPOINTS, RunDir

HERE = f"{RUN}/{CHECKPOINTS}"
REGISTER_S = 30.0
"""A node whose connection to the first node was lost restores it within this many seconds."""
LOST_S = 60.0
"""A node that could not be reached is not tried again for this many seconds, because each try may take ten."""
POLL_S = 0.2
SILENT_S = 5.0
"""A spare that has been silent for longer gets no copies of checkpoints."""


@dataclass(frozen=True)
class Disk:
    """A copy of the run folder on a node."""

    node: int | None
    """The node's number in the job; None for the first node."""
    host: str
    port: int
    """Where the node serves its folder."""

    @property
    def name(self) -> str:
        return f"the first node ({self.host})" if self.node is None else f"node {self.node} ({self.host})"


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest checkpoint that is complete on the connected disks."""

    step: int
    """-1 if there is none."""
    manifest: str = ""
    """The text of the manifest's file."""
    holders: dict[str, tuple[int, ...]] | None = None
    """The disks that have each file, by number."""


class NodeDisks:
    """The disks of the nodes that take part in this start, and of connected spares. All ranks create it together."""

    def __init__(self, run_dir: RunDir, secret: bytes, disks: Sequence[Disk], nodes: Sequence[int | None]):
        """`nodes`: the node of each rank's disk."""
        self._run_dir = run_dir
        self._secret = secret
        self._disks = disks
        numbers = {disk.node: number for number, disk in enumerate(disks)}
        self._of_ranks = [numbers[node] for node in nodes]
        """The number of each rank's disk."""
        self._own = self._of_ranks[dist.get_rank()]
        self._lost: dict[Disk, float] = {}
        """Monotonic time of the last failed connection to a disk."""
        self._found = FoundCheckpoint(-1)

    @staticmethod
    def of_worker(run_dir: RunDir) -> NodeDisks | None:
        """Return the disks; None if all nodes share the run folder, or if there is only one. Raises MachineError if the
        first node does not answer."""
        generation = os.environ.get(GENERATION)
        record = generations.read(run_dir, int(generation)) if generation else None
        secret = nodes_secret()
        if record is None or not record.folder or secret is None:
            return None
        host, _, port = record.folder.rpartition(":")
        disks = [Disk(None, host, int(port))]
        node: int | None = int(os.environ[NODE])
        with errors_together(), _refusing_lost(disks[0]), RemoteFolder((host, int(port)), secret) as first:
            if first.shares(run_dir.root):
                node = None
        nodes = gather_json(node, lambda number: convert(int | None, number))
        with errors_together(), _refusing_lost(disks[0]):
            if dist.get_rank() == 0:
                with RemoteFolder((host, int(port)), secret) as first:
                    disks += _await_registered(first, {node for node in nodes if node is not None})
        plain = broadcast_json([asdict(disk) for disk in disks], lambda rows: [read_record(Disk, row) for row in rows])
        return NodeDisks(run_dir, secret, plain, nodes) if len(plain) > 1 else None

    # Save

    @property
    def _is_alone(self) -> bool:
        """Return whether all ranks have the same disk, so that the others are those of spares."""
        return len(set(self._of_ranks)) == 1

    def copy(self, path: Path) -> None:
        """Copy a complete file to the next disk or, if that is full or its node lost, to the one after it. Raises
        OSError if no disk takes the copy, unless all ranks share one disk: then only spares could take it."""
        error: OSError | None = None
        for number in range(1, len(self._disks)):
            disk = self._disks[(self._own + number) % len(self._disks)]
            try:
                with self._open(disk) as folder:
                    try:
                        folder.send_file(path, self._remote(path))
                        return
                    except OSError:
                        with suppress(OSError):
                            folder.remove(self._remote(path))
                        raise
            except OSError as failure:
                error = failure
        assert error is not None, "there are at least two disks"
        if self._is_alone:
            return
        raise OSError(error.errno, f"no other node takes a copy: {error.strerror or error}")

    def write_report(self, path: Path, content: object) -> None:
        """Write a rank's report to the disk of rank 0, which waits for it there. Raises OSError."""
        if self._own == self._of_ranks[0]:
            write_json(path, content)
        else:
            with self._open(self._disks[self._of_ranks[0]]) as folder:
                folder.put(self._remote(path), json_text(content).encode())

    def publish(self, partial: Path, final: Path, keep_last: int, kept_step: int | None) -> None:
        """Publish a checkpoint on all other disks, and remove old ones there. A lost node's disk is skipped. Raises
        OSError if a disk is full, unless all ranks share one disk."""
        manifest = (partial / MANIFEST).read_bytes()
        for disk in self._others():
            with suppress(OSError if self._is_alone else ConnectionError), self._open(disk) as folder:
                folder.put(self._remote(partial / MANIFEST), manifest)
                folder.finish(self._remote(partial), self._remote(final))
        for disk in self._others():
            with suppress(OSError), self._open(disk) as folder:
                names = {path.split("/")[0] for path in folder.list(HERE)}
                steps = sorted(step for name in names if (step := _step_of(name)) >= 0)
                left = [name for name in names if name.endswith(".partial") and name <= partial.name]
                old = [self._run_dir.checkpoint(step).name for step in steps[:-keep_last] if step != kept_step]
                for name in (*left, *old):
                    folder.remove(f"{HERE}/{name}")

    def discard(self, partial: Path) -> None:
        """Remove what the ranks have written of a checkpoint that cannot be completed."""
        for disk in self._others():
            with suppress(OSError), self._open(disk) as folder:
                folder.remove(self._remote(partial))

    # Restore

    @property
    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint, as found by `agree_on_newest`; -1 if there is none."""
        return self._found.step

    def agree_on_newest(self, *, remove_newer: bool = False) -> None:
        """Put the manifest of the newest complete checkpoint into every node's folder. `remove_newer`: set aside what
        newer ones have left there, which only a run that restarts as a whole may do. Called collectively by all
        ranks. Raises MachineError if there are checkpoints, but none is complete on the connected nodes."""
        found: FoundCheckpoint | None = None
        with errors_together():
            if dist.get_rank() == 0:
                found = self._find()
        self._found = broadcast_json(found and asdict(found), lambda content: read_record(FoundCheckpoint, content))
        if self._of_ranks.index(self._own) == dist.get_rank():  # one rank for each disk
            for step in self._run_dir.checkpoint_steps():
                if remove_newer and step > self._found.step:
                    set_aside(self._run_dir.checkpoint(step))
            manifest = self._run_dir.manifest(self._found.step) if self._found.step >= 0 else None
            if manifest and not (manifest.is_file() and manifest.read_text() == self._found.manifest):
                partial = manifest.parent.with_name(f".{manifest.parent.name}.{secrets.token_hex(4)}.partial")
                write_text(partial / MANIFEST, self._found.manifest)
                finish(partial, manifest.parent)
        dist.barrier()

    def collect(self) -> None:
        """Fetch all files of the newest checkpoint to the first node, where `export` reads them. Called collectively by
        all ranks. Raises the same errors as `fetch`."""
        self.agree_on_newest()
        manifest = read_manifest(self._run_dir.checkpoint(self._found.step))
        self.fetch(manifest, set() if self._own else {file.name for file in manifest.files})

    def fetch(self, manifest: CheckpointManifest, needed: set[str]) -> None:
        """Fetch and verify the files that this node's ranks read; the node's ranks share the work. Called collectively
        by all ranks. Raises MachineError if no intact copy of a file can be reached."""
        rows = gather_json(sorted(needed), lambda names: convert(tuple[str, ...], names))
        here = [rank for rank, disk in enumerate(self._of_ranks) if disk == self._own]
        wanted = sorted({name for rank in here for name in rows[rank]})
        share = wanted[here.index(dist.get_rank()) :: len(here)]
        digests = {file.name: file for file in manifest.files}
        with errors_together():
            for name in share:
                self._fetch(self._run_dir.checkpoint(manifest.step), digests[name])

    def _fetch(self, folder: Path, wanted: FileDigest) -> None:
        place = folder / wanted.name
        if place.is_file() and not place.is_symlink() and digest_file(place) == wanted:
            return
        partial = folder / f".{wanted.name}.partial"
        why = "no connected node has it"
        for number in (self._found.holders or {}).get(wanted.name, ()):
            disk = self._disks[number]
            if number == self._own:
                why = f"the copy of {disk.name} is damaged"
                continue
            try:
                with self._open(disk) as remote, partial.open("ab") as file:
                    if file.tell() > wanted.bytes:
                        file.truncate(0)
                    for piece in remote.pieces(self._remote(place), file.tell()):
                        file.write(piece)
                if digest_file(partial) == FileDigest(partial.name, wanted.bytes, wanted.sha256):
                    finish(partial, place)
                    return
                why = f"the copy of {disk.name} is damaged"
                partial.unlink()
            except ConnectionError as error:
                why = f"{disk.name} cannot be reached: {error}"
            except OSError as error:
                raise refused(folder, f"{place} cannot be written: {error.strerror}", "free some space") from error
        raise refused(folder, f"{place} is missing, and {why}")

    def _find(self) -> FoundCheckpoint:
        """Return the newest step of which the disks have all files of one manifest."""
        listed: dict[int, dict[int, dict[str, int]]] = {}
        for number, disk in enumerate(self._disks):
            with suppress(OSError):
                for path, size in self._list(number, disk):
                    folder, _, name = path.partition("/")
                    if (step := _step_of(folder)) >= 0:
                        listed.setdefault(step, {}).setdefault(number, {})[name] = size
        for step in sorted(listed, reverse=True):
            texts: dict[str, list[int]] = {}
            for number, sizes in listed[step].items():
                if MANIFEST in sizes:
                    with suppress(OSError, UnicodeDecodeError):
                        texts.setdefault(self._manifest_text(number, step), []).append(number)
            for text, numbers in texts.items():
                sizes_of = {number: listed[step][number] for number in numbers}
                if holders := self._holders(step, text, sizes_of):
                    return FoundCheckpoint(step, text, holders)
        if published := sorted(
            step for step, disks in listed.items() if any(MANIFEST in one for one in disks.values())
        ):
            # Starting from the first step again would be worse than waiting for the other disks.
            newest = self._run_dir.checkpoint(published[-1])
            lacking = "files of it are missing on the nodes that are connected"
            raise refused(newest, f"{newest.name} cannot be restored: {lacking}", "start the run on more of its nodes")
        return FoundCheckpoint(-1)

    def _holders(self, step: int, text: str, sizes: dict[int, dict[str, int]]) -> dict[str, tuple[int, ...]] | None:
        """Return the disks that have each file of a manifest; None if one is missing or the manifest is damaged."""
        partial = self._run_dir.checkpoint(step).with_name(f".{secrets.token_hex(4)}.partial")
        try:
            write_text(partial / MANIFEST, text)
            files = read_manifest(partial).files
        except MachineError:
            return None
        finally:
            remove(partial)
        holders = {
            file.name: tuple(number for number, names in sizes.items() if names.get(file.name) == file.bytes)
            for file in files
        }
        return holders if all(holders.values()) else None

    def _list(self, number: int, disk: Disk) -> Iterator[tuple[str, int]]:
        if number == self._own:
            entries = list_files(self._run_dir.checkpoints)
        else:
            with self._open(disk) as folder:
                entries = list(folder.list(HERE).values())
        return ((entry.path, entry.size) for entry in entries)

    def _manifest_text(self, number: int, step: int) -> str:
        path = self._run_dir.manifest(step)
        if number == self._own:
            return path.read_text()
        with self._open(self._disks[number]) as folder:
            return folder.read(self._remote(path)).decode()

    def _others(self) -> Iterator[Disk]:
        return (disk for number, disk in enumerate(self._disks) if number != self._own)

    def _open(self, disk: Disk) -> RemoteFolder:
        """Connect to a disk's node. Raises ConnectionError; within `LOST_S` after a failure, at once."""
        if time.monotonic() - self._lost.get(disk, -math.inf) < LOST_S:
            raise ConnectionAbortedError(errno.EHOSTUNREACH, "its node was lost")
        try:
            return RemoteFolder((disk.host, disk.port), self._secret)
        except ConnectionError:
            self._lost[disk] = time.monotonic()
            raise

    def _remote(self, path: Path) -> str:
        return f"{RUN}/{path.relative_to(self._run_dir.root)}"


def _step_of(name: str) -> int:
    """Return the step of a complete checkpoint's folder, or -1."""
    digits = name.removeprefix("step_")
    return int(digits) if name.startswith("step_") and digits.isdigit() else -1


def _await_registered(first: RemoteFolder, nodes: Set[int]) -> list[Disk]:
    """Return the disks of these nodes and of connected spares. Raises ConnectionError if one of the nodes has lost its
    connection to the first node, and does not restore it."""
    deadline = time.monotonic() + REGISTER_S
    while True:
        found = [one for one in first.nodes() if one.node in nodes or one.silent_s < SILENT_S]
        if missing := nodes - {one.node for one in found}:
            if time.monotonic() > deadline:
                raise ConnectionAbortedError(errno.EHOSTUNREACH, f"node {min(missing)} is not connected to it")
            time.sleep(POLL_S)
            continue
        return [Disk(one.node, one.host, one.port) for one in found]


@contextmanager
def _refusing_lost(disk: Disk) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the run folder of {disk.name} cannot be reached: {error}"
        raise MachineError(message, code="folder_unreachable", hint="check the network between the nodes") from error


def set_aside(folder: Path) -> None:
    """Rename a checkpoint that is incomplete on the connected nodes, so that it does not count. Other nodes may still
    have its missing files."""
    aside = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
