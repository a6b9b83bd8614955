"""This node's copy of the run folder, for a node that shares no file system with the first one.

A `Mirror` runs on every node but the first, as long as the node takes part in the run. It copies the first node's
control files (recipe, plan, starts, result, ...) to this node, and what this node's processes write (events, logs,
reports of errors) to the first node, so that all other code reads and writes the run folder as if it were shared. On a
node that does share the folder, it copies nothing.

Checkpoints are not copied here: see `engine/checkpoint/nodes.py`."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainspec_cli.core.errors import MachineError, Problem, TrainspecError
from trainspec_cli.core.node import PRIVATE_FILE, PRIVATE_FOLDER
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.core.reading.files import parse_json
from trainspec_cli.run.channel.folders import (
    DATA,
    FAREWELL_S,
    NOT_COPIED,
    RUN,
    Entry,
    FolderServer,
    RemoteFolder,
    finish,
    is_copied,
    list_files,
    secret_of_start,
)
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.memory import SECRET
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir
from trainspec_cli.run.job.machine import listen

INTERVAL_S = 0.3
RETRY_S = 1.0
OF_A_START = ("errors", "stops", "generations", "result.json")
"""Names whose files end with their start: a node that returns removes those that the first node no longer has."""
LAST = "generations/"
"""Files that a node may only see once it has all others of the start."""


@dataclass
class _Known:
    """A file as it was when it was last the same on both nodes."""

    local: tuple[int, int] | None
    """Size and modification time in microseconds; None if it is missing."""
    remote: tuple[int, int] | None
    """None if it is unknown: this node has changed the file, and does not want its own change back."""
    is_own: bool = False
    """True once this node's processes have written to the file since it was last copied from the first node."""


class Mirror:
    def __init__(
        self,
        run: RunDir,
        node: int,
        address: tuple[str, int],
        secret: bytes,
        report: Callable[[str], None] = lambda _: None,
    ):
        """`address`: the first node's folder server, which may not be listening yet."""
        self._run = run
        self._node = node
        self._address = address
        self._secret = secret
        self._report = report
        self._known: dict[str, _Known] = {}
        self._error: TrainspecError | None = None
        self._ended = threading.Event()
        self._is_same = threading.Event()
        self._ends_s = 0.0
        """Monotonic time until which an ended mirror still copies."""
        self._server: FolderServer | None = None
        self._secret_of_start: Path | None = None
        self._thread = threading.Thread(target=self._keep_same, name="mirror", daemon=True)
        self._thread.start()

    @property
    def has_own_copy(self) -> bool:
        """True once it is known that this node does not share the run folder with the first one."""
        return self._server is not None

    @property
    def is_same(self) -> bool:
        """True once this node's folder holds what the first node's does, rather than what an earlier run has left."""
        return self._is_same.is_set()

    def check(self) -> None:
        """Raises MachineError if this node's folder belongs to another run."""
        if self._error:
            raise self._error

    def prepare(self, record: GenerationRecord) -> None:
        """Before this node joins a start: derive its secret, and copy the run's data, unless both nodes share them."""
        if not record.folder or self._server is None:
            return
        self._remove_secret()
        self._secret_of_start = self._run.secret(record.generation)
        self._secret_of_start.unlink(missing_ok=True)
        generations.create_secret(
            self._secret_of_start, secret_of_start(self._secret, record.launch_id, record.generation)
        )
        data_dir = read_data_dir(self._run)
        if data_dir is not None and not Path(data_dir).exists():
            with RemoteFolder(self._address, self._secret) as first:
                copied = copy_folder(first, DATA, Path(data_dir))
            self._report(f"node {self._node}: copied the run's data, {format_bytes(copied)}, to {data_dir}")

    def close(self) -> None:
        """End the copying; after a run has ended, only once the first node has ended, too, because it still completes
        the result."""
        self._ends_s = time.monotonic() + (FAREWELL_S if self._run.result_json.is_file() else 0.0)
        self._ended.set()
        self._thread.join()
        self._remove_secret()
        if self._server:
            self._server.close()

    def _remove_secret(self) -> None:
        """Remove the secret of the last start, whose processes have ended."""
        if self._secret_of_start:
            self._secret_of_start.unlink(missing_ok=True)

    def _keep_same(self) -> None:
        reported = ""
        while not self._ended.is_set():
            try:
                with RemoteFolder(self._address, self._secret) as first:
                    if first.shares(self._run.root):
                        self._is_same.set()
                        return
                    self._register(first)
                    is_new = not self._known  # after an interruption, what was written meanwhile is sent
                    while not self._ended.is_set() or time.monotonic() < self._ends_s:
                        if not is_new:
                            time.sleep(INTERVAL_S)
                        self._send(first, skip=is_new)
                        self._fetch(first, is_first=is_new)
                        is_new = False
                        self._is_same.set()
            except ConnectionError:
                pass  # the first node has not started yet, or has ended
            except TrainspecError as error:
                self._error = error
                return
            except (OSError, ValueError) as error:
                text = f"node {self._node}: cannot copy the run folder: {error}"
                if text != reported:
                    self._report(text)
                    reported = text
            self._ended.wait(RETRY_S)

    def _register(self, first: RemoteFolder) -> None:
        theirs = parse_json(first.read(f"{RUN}/run.json"))
        own = parse_json(self._run.run_json.read_bytes()) if self._run.run_json.is_file() else theirs
        if not isinstance(own, dict) or not isinstance(theirs, dict) or own.get(SECRET) != theirs.get(SECRET):
            message = f"{self._run.root} holds a different run on this node than on the first one"
            raise MachineError(Problem("other_run", message, hint="move the folder away", environment=True))
        if self._server is None:
            self._run.root.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._server = FolderServer(self._run, self._secret, listen(first.own_address))
            self._report(f"node {self._node}: has its own copy of {self._run.root}")
        first.register(self._node, self._server.port)

    def _send(self, first: RemoteFolder, *, skip: bool) -> None:
        """Copy what has changed on this node; with `skip`, only remember what is there."""
        for entry in list_files(self._run.root, skip=NOT_COPIED):
            path = PurePosixPath(entry.path)
            signature = (entry.size, entry.mtime_us)
            known = self._known.get(entry.path)
            if any(part.startswith(".") for part in path.parts):
                continue
            if skip:
                self._known[entry.path] = _Known(signature, known.remote if known else signature)
            elif known is None or known.local != signature:
                begin = known.local[0] if known and known.local else 0
                if entry.path.endswith((".jsonl", ".log")) and entry.size >= begin:
                    signature = (self._append(first, entry, begin), entry.mtime_us)
                else:
                    with suppress(FileNotFoundError):
                        content = (self._run.root / entry.path).read_bytes()
                        first.put(f"{RUN}/{entry.path}", content, entry.mtime_us)
                self._known[entry.path] = _Known(signature, None, is_own=True)

    def _append(self, first: RemoteFolder, entry: Entry, begin: int) -> int:
        """Append what this node's processes have appended to a file; return how far it has been copied. Both nodes may
        write to a file of events, so only whole lines are copied."""
        with (self._run.root / entry.path).open("rb") as file:
            file.seek(begin)
            content = file.read(entry.size - begin)
        if entry.path.endswith(".jsonl"):
            content = content[: content.rfind(b"\n") + 1]
        if content or not begin:  # a worker's log may stay empty
            first.append(f"{RUN}/{entry.path}", content)
        return begin + len(content)

    def _fetch(self, first: RemoteFolder, *, is_first: bool) -> None:
        """Copy what has changed on the first node."""
        theirs = first.list(RUN)
        is_new_start = any(not (self._run.root / path).exists() for path in theirs if path.startswith(LAST))
        for path, known in list(self._known.items()):
            if path in theirs or not is_copied(PurePosixPath(path)):
                continue
            if path.split("/")[0] in OF_A_START or (known.remote is not None and not is_first):
                (self._run.root / path).unlink(missing_ok=True)
                del self._known[path]
            else:
                known.remote = None
        for path in sorted(theirs, key=lambda path: path.startswith(LAST)):
            entry = theirs[path]
            signature = (entry.size, entry.mtime_us)
            known = self._known.setdefault(path, _Known(None, (-1, -1)))
            # Processes that append to a file have it open, so it is not replaced under them. Before a new start, this
            # node also needs the lines that others have written to it.
            is_open = known.is_own and path.endswith(".jsonl")
            has_changed = known.remote not in (None, signature) and not is_open
            if has_changed or (is_open and is_new_start):
                with suppress(FileNotFoundError):  # removed since it was listed
                    self._copy(first, entry, known)
            known.remote = signature

    def _copy(self, first: RemoteFolder, entry: Entry, known: _Known) -> None:
        """Copy a file of the first node: only its new lines, if it has grown since it was the same here."""
        place = self._run.root / entry.path
        place.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        begin = known.local[0] if known.local and known.remote else 0
        if entry.path.endswith(".jsonl") and known.remote and 0 < begin == known.remote[0] <= entry.size:
            with place.open("ab") as file:
                for piece in first.pieces(f"{RUN}/{entry.path}", begin, entry.size - begin):
                    file.write(piece)
            os.utime(place, ns=(entry.mtime_us * 1000, entry.mtime_us * 1000))
        else:
            partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
            try:
                with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_FILE), "wb") as file:
                    for piece in first.pieces(f"{RUN}/{entry.path}", 0, entry.size):
                        file.write(piece)
                os.utime(partial, ns=(entry.mtime_us * 1000, entry.mtime_us * 1000))
                partial.replace(place)
            finally:
                partial.unlink(missing_ok=True)
        known.local = (place.stat().st_size, entry.mtime_us)
        known.is_own = False


def copy_folder(remote: RemoteFolder, path: str, folder: Path) -> int:
    """Copy a served folder, continuing an earlier copy that was interrupted; return the number of bytes copied. The
    folder gets its name once it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    copied = 0
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another run on this node may be copying the same folder
        if folder.exists():
            return 0
        for entry in remote.list(path).values():
            place = partial / entry.path
            place.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            with place.open("ab") as file:
                for piece in remote.pieces(f"{path}/{entry.path}", file.tell()):
                    copied += len(piece)
                    file.write(piece)
        for place in [*partial.rglob("*"), partial]:
            finish(place, place)
        partial.rename(folder)
    finally:
        os.close(descriptor)
    return copied


@contextmanager
def mirrored(
    run: RunDir, node: int, address: tuple[str, int], secret: bytes, report: Callable[[str], None]
) -> Iterator[Mirror]:
    """Keep this node's run folder the same as the first node's during the block."""
    mirror = Mirror(run, node, address, secret, report)
    try:
        yield mirror
    finally:
        mirror.close()
