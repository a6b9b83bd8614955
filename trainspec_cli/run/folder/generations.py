"""The starts of a run: which one owns the run folder, what its processes share, and whether it was asked to stop.

Every launch and every resume opens a new generation: RUN/generations/00000003.json exists from the third start on. If a
worker of an older generation comes back (a repaired cable, a node that was considered dead), it finds this file and
writes nothing more: it is fenced off.

Before asking a start's workers to stop, a process records the request in RUN/stops/00000003.json. Workers also write a
checkpoint and exit when another process sends them a signal, or when torchrun dies and its workers are terminated.
Without a recorded request, this means that the run has failed."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.errors import MachineError, Problem, WorkerError
from trainspec_cli.core.node import PRIVATE_FILE, read_private
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RECIPE, RunDir

FENCED = "fenced"
"""The error code of processes that exit because a newer start owns the run."""
CHECK_INTERVAL_S = 1.0
SECRET_BYTES = 32


def newest(run: RunDir) -> int:
    """Return the newest generation; 0 before the first start. The folder is listed, because listing makes a network
    file system query its server."""
    try:
        numbers = [int(path.stem) for path in run.generations.iterdir() if path.stem.isdigit()]
    except FileNotFoundError:
        return 0
    return max(numbers, default=0)


def begin(run: RunDir) -> int:
    """Take ownership of the run, and return the generation's number. Simultaneous starts get different numbers."""
    run.generations.mkdir(parents=True, exist_ok=True)
    while True:
        number = newest(run) + 1
        try:
            os.close(os.open(run.generation(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            continue
        return number


@dataclass(frozen=True)
class UnplannedWork:
    """The work of every node in a job without a plan."""

    kind: str
    """The kind of job; each node looks up the code for it."""
    work: str
    """A JSON object whose content depends on the kind of job."""


@dataclass(frozen=True)
class GenerationRecord:
    """The file of a generation. It states where the processes rendezvous and, from the field `num_nodes` on, what every
    node runs."""

    generation: int
    at: float
    """Unix time in seconds."""
    host: str
    """The first node's own hostname."""
    head: str
    """The name or address that the other nodes connect to."""
    hub_port: int
    rendezvous: dict[str, str]
    """Environment variables that tell the processes how to rendezvous."""
    num_nodes: int
    launch_id: str
    logs: str
    worker: tuple[str, ...]
    examine: tuple[str, ...]
    """Arguments for Python to run each node's check; if empty, the nodes are not checked."""
    nodes: tuple[int, ...] = ()
    """The nodes' numbers in the job, ordered by place; from place `num_nodes` on, they are spares. If empty, each
    node's number is its place."""
    supervisor: int | None = None
    """Number of the node whose process supervises the run, which may be none of those that run it; null: that of the
    first place."""
    suspects: tuple[str, ...] = ()
    """Hostnames of nodes that have failed repeatedly for one cause. If not empty, only these are checked."""
    folder: str = ""
    """HOST:PORT of the first node's folder server (`run/channel/folders.py`), from which nodes without a shared disk
    copy the run folder; empty if all nodes must share it."""
    own: UnplannedWork | None = None
    """None for a recipe, because its plan describes what to run."""

    @property
    def kind(self) -> str:
        return self.own.kind if self.own else RECIPE

    def place_of(self, node: int) -> int:
        """Return the place in the job of the node with this number."""
        return self.nodes.index(node) if node in self.nodes else node

    @property
    def supervising_node(self) -> int:
        if self.supervisor is not None:
            return self.supervisor
        return self.nodes[0] if self.nodes else 0


def describe(run: RunDir, record: GenerationRecord) -> None:
    """Write the record once its content is known. A file with that number already exists."""
    write_json(run.generation(record.generation), to_plain(record))


def read(run: RunDir, number: int) -> GenerationRecord | None:
    """Return the record of a generation; None until it has been written."""
    try:
        return from_plain(GenerationRecord, read_json(run.generation(number)))
    except (FileNotFoundError, ValueError):
        return None


class Fence:
    """Lets a worker or supervisor of one start check who owns the run. Without a generation (in a process that no
    launch started), everything is allowed."""

    def __init__(self, run: RunDir, generation: int | None):
        self._run = run
        self._generation = generation
        self._checked_at = -CHECK_INTERVAL_S

    @staticmethod
    def of_worker(run: RunDir) -> Fence:
        generation = os.environ.get(GENERATION)
        return Fence(run, int(generation) if generation else None)

    def is_closed(self) -> bool:
        """Return whether a newer start owns the run."""
        return self._generation is not None and newest(self._run) > self._generation

    def check(self) -> None:
        """Call this before writing anything permanent. Raises WorkerError if the run belongs to a newer start."""
        self._checked_at = time.monotonic()
        if self.is_closed():
            owner = newest(self._run)
            message = (
                f"fenced off: start {owner} owns the run now, so this start, {self._generation}, writes nothing more"
            )
            raise WorkerError(message, code=FENCED)

    def check_now_and_then(self) -> None:
        """For frequent writes: call `check`, but at most once per `CHECK_INTERVAL_S`."""
        if time.monotonic() - self._checked_at >= CHECK_INTERVAL_S:
            self.check()


# The secret, in a file that only the user can read


def create_secret(path: Path, content: bytes | None = None) -> bytes:
    """Write a secret, by default a new one, to a file that must not exist yet, and return it. Raises MachineError if
    the file system cannot keep it private."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # With O_EXCL, opening fails if the file exists, so nobody else can have prepared it.
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, PRIVATE_FILE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content or secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Read the secret. Raises MachineError if the file does not belong to the user, or if others can read it."""
    try:
        secret = read_private(path, SECRET_BYTES + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error
    if len(secret) != SECRET_BYTES:
        raise _unusable(path, f"holds {len(secret)} bytes instead of {SECRET_BYTES}")
    return secret


def _unusable(path: Path, what: str) -> MachineError:
    hint = "put the run folder on a file system that all nodes share and that preserves owners and permissions"
    return MachineError(Problem("secret", f"the job's secret, {path}, {what}", hint=hint, environment=True))


# Requests to stop a start's workers


def note_stop(run: RunDir, generation: int) -> None:
    """Record the request. If the disk is full, the workers are still asked to stop, because the supervisor remembers
    its own requests."""
    with contextlib.suppress(OSError):
        write_json(run.stop(generation), {"generation": generation, "host": socket.gethostname(), "at": time.time()})


def was_stop_noted(run: RunDir, generation: int) -> bool:
    return run.stop(generation).is_file()


def may_stop(run: RunDir) -> bool:
    """Return True if the start that this worker belongs to was asked to stop. For a worker that no launch started, a
    signal is sufficient."""
    generation = os.environ.get(GENERATION)
    return generation is None or was_stop_noted(run, int(generation))
