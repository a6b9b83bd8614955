"""Access to the run folders of other nodes, for nodes that share no file system.

The first node, and every node that has its own copy of the run folder, serves that folder (`FolderServer`) to processes
that know the secret in `$TRAINSPEC_NODES_SECRET`, a file that the user has put on every node. A request and its answer
are each a line of JSON; after it come the bytes of a file. Large files therefore do not pass through the hub, whose
messages are limited to a few MiB and must not be delayed.

The first node's server also knows the addresses of the others: a node registers over a connection that it keeps open,
and is removed when that connection ends."""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self, TypeVar

from trainspec_cli.core.environment_names import NODES_SECRET
from trainspec_cli.core.node import PRIVATE_FILE, PRIVATE_FOLDER
from trainspec_cli.core.reading.files import parse_json
from trainspec_cli.core.wire.handshake import ANSWER_BYTES, TIMEOUT_S, Challenge, HandshakeError, connect
from trainspec_cli.recipe.records import canonical_json, read_record, to_plain
from trainspec_cli.run.folder.generations import read_secret
from trainspec_cli.run.folder.paths import CHECKPOINTS, RunDir
from trainspec_cli.run.folder.record import read_data_dir

PURPOSE = "folder"
MARK = ".shared_"
RUN, DATA = "run", "data"
"""The first part of every path: the run folder, or the folder of the run's prepared data."""
PIECE_BYTES = 2**20
WHOLE = 2**50
"""Asks for all bytes of a file."""
LINE_BYTES = 2**26
"""Maximum length of a line; a list of a checkpoint's files takes a few MiB on thousands of ranks."""
SILENCE_S = 60.0
"""A connection that makes no progress for this many seconds is closed."""
REPLY_S = 600.0
"""A server may flush this long before it answers, because it writes large files to slow disks."""
RETRY_S = 0.2
FAREWELL_S = 10.0
"""Maximum time for which a closing server waits until the other nodes have copied the newest files."""
MAX_UNPROVED = 256
"""Maximum number of simultaneous connections that have not proved yet that they know the secret."""
NOT_COPIED = frozenset({
    CHECKPOINTS, "own_checkpoints", "secrets", "pid.json", "progress", "wandb", "mlflow", "mlflow.db", "tensorboard",
})  # fmt: skip
"""Names in the run folder that stay on their node. Checkpoints are copied by the workers."""
READ_BY_ALL = frozenset({"events/rank00000.jsonl", "events/supervisor.jsonl"})


def nodes_secret() -> bytes | None:
    """Return the secret of the nodes; None if the user has not set `$TRAINSPEC_NODES_SECRET`, so that the nodes must
    share the run folder. Raises MachineError if the file is missing or not private."""
    path = os.environ.get(NODES_SECRET)
    return read_secret(Path(path).absolute()) if path else None


def secret_of_start(secret: bytes, launch_id: str, generation: int) -> bytes:
    """Return the secret that the processes of one start use. Each node derives it, so it is never sent."""
    return hmac.digest(secret, f"{launch_id} {generation}".encode(), "sha256")


def is_copied(path: PurePosixPath) -> bool:
    """Return whether a file of the run folder is copied from the first node to all others."""
    if path.parts[0] in NOT_COPIED or any(part.startswith(".") for part in path.parts):
        return False
    return path.parts[0] != "logs" and (path.parts[0] != "events" or str(path) in READ_BY_ALL)


@dataclass(frozen=True)
class Entry:
    """A file in a served folder."""

    path: str
    """Relative to the listed folder."""
    size: int
    mtime_us: int


@dataclass(frozen=True)
class NodeAddress:
    """A node with its own copy of the run folder."""

    node: int
    host: str
    port: int
    silent_s: float = 0.0
    """Time since its last request to the first node; it makes several per second."""


@dataclass(frozen=True)
class Request:
    kind: str
    """The name of an operation (`FolderServer.operations`)."""
    path: str = ""
    to: str = ""
    offset: int = 0
    size: int = 0
    """Number of bytes to read, or of the bytes after this line."""
    mtime_us: int = 0
    node: int = 0


@dataclass(frozen=True)
class Reply:
    errno: int = 0
    """The system's error number, or 0."""
    size: int = 0
    """Size of the file or, after `read`, number of the bytes after this line."""
    mark: str = ""
    entries: tuple[Entry, ...] = ()
    nodes: tuple[NodeAddress, ...] = ()


ReceivedT = TypeVar("ReceivedT", Request, Reply)


class _Connection:
    """Lines of JSON, and bytes, over a connected socket. Raises OSError if the connection is lost."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._reader = connection.makefile("rb", PIECE_BYTES)

    def send(self, record: Request | Reply) -> None:
        self.socket.sendall(canonical_json(to_plain(record)).encode() + b"\n")

    def receive(self, kind: type[ReceivedT]) -> ReceivedT:
        line = self._reader.readline(LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was closed")
        try:
            plain = parse_json(line)
            if not isinstance(plain, dict):
                raise ValueError("not an object")
            return read_record(kind, plain)
        except ValueError as error:
            raise ConnectionAbortedError("the other end sent an invalid line") from error

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes."""
        while size:
            piece = self._reader.read(min(size, PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("the connection was closed")
            size -= len(piece)
            yield piece

    def send_file(self, file: BinaryIO, size: int) -> None:
        """Send the next `size` bytes of a file. Raises ConnectionAbortedError if it has become shorter."""
        while size:
            # One call may take as long as the socket's timeout, so a slow network needs small pieces.
            sent = self.socket.sendfile(file, file.tell(), min(size, PIECE_BYTES))
            if not sent:
                raise ConnectionAbortedError("the file has become shorter")
            size -= sent

    def close(self) -> None:
        # Without `shutdown`, a thread that is reading would keep the connection open.
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self.socket.close()


@dataclass(eq=False)
class _Client:
    """The server's end of one connection."""

    connection: _Connection
    host: str
    lists: int = 0
    """Number of times that it has listed the run folder."""
    heard_s: float = 0.0
    """Monotonic time of its last request."""
    body: int = 0
    """Number of bytes of the current request that have not been read yet."""


@dataclass
class _Registered:
    address: NodeAddress
    client: _Client = field(repr=False)


class FolderServer:
    """Serves the run folder and the folder of its prepared data, each connection in its own thread."""

    def __init__(self, run: RunDir, secret: bytes, listener: socket.socket):
        self._run = run
        self._secret = secret
        self._listener = listener
        self._lock = threading.Lock()
        self._clients: list[_Client] = []
        self._registered: dict[int, _Registered] = {}
        self._unproved = threading.BoundedSemaphore(MAX_UNPROVED)
        self._mark = f"{MARK}{secrets.token_hex(16)}"
        """A file by which a node sees whether it shares the run folder with this one. Nobody has looked for its name
        before, so no network file system answers from its cache."""
        for left in run.root.glob(f"{MARK}*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        (run.root / self._mark).touch(PRIVATE_FILE)
        self.operations: dict[str, Callable[[_Client, Request], Reply]] = {
            "mark": lambda _client, _request: Reply(mark=self._mark),
            "register": self._register,
            "nodes": lambda _client, _request: Reply(nodes=self.nodes),
            "list": self._list,
            "read": self._read,
            "write": self._write,
            "finish": self._finish,
            "remove": self._remove,
        }
        threading.Thread(target=self._accept, name="folder server", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def nodes(self) -> tuple[NodeAddress, ...]:
        """Return the registered nodes, by number."""
        now_s = time.monotonic()
        with self._lock:
            by_node = sorted(self._registered.items())
            return tuple(replace(one.address, silent_s=now_s - one.client.heard_s) for _, one in by_node)

    def close(self) -> None:
        """Let the registered nodes copy the newest files, then close all connections."""
        with self._lock:
            waiting = {id(one.client): one.client.lists + 2 for one in self._registered.values()}
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline:
            with self._lock:
                # A node that lists the folder for the second time has copied what the first list named.
                left = [one for one in self._clients if one.lists < waiting.get(id(one), 0)]
            if not left:
                break
            time.sleep(0.05)
        with suppress(OSError):  # wakes the thread that accepts connections
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.connection.close()
        (self._run.root / self._mark).unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # the peer is gone, no descriptors are left, or the server is being closed
                continue
            if self._unproved.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection, address[0]), daemon=True).start()
            else:
                connection.close()

    def _serve(self, accepted: socket.socket, host: str) -> None:
        try:
            self._prove(accepted)
        except OSError:
            accepted.close()
            return
        finally:
            self._unproved.release()
        client = _Client(_Connection(accepted), host)
        with self._lock:
            self._clients.append(client)
        try:
            while True:
                request = client.connection.receive(Request)
                client.heard_s = time.monotonic()
                client.body = request.size if request.kind == "write" else 0
                try:
                    reply = self.operations[request.kind](client, request)
                except ConnectionError:
                    raise
                except OSError as error:
                    reply = Reply(errno=error.errno or errno.EIO)
                for _ in client.connection.pieces(client.body):  # after a full disk, for example
                    pass
                if request.kind != "read" or reply.errno:
                    client.connection.send(reply)
        except (OSError, KeyError, ValueError):
            pass
        finally:
            client.connection.close()
            with self._lock:
                self._clients.remove(client)
                for node in [node for node, one in self._registered.items() if one.client is client]:
                    del self._registered[node]

    def _prove(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        challenge = Challenge(self._secret, PURPOSE)
        connection.sendall(challenge.nonce)
        answer = b""
        while len(answer) < ANSWER_BYTES:
            piece = connection.recv(ANSWER_BYTES - len(answer))
            if not piece:
                raise HandshakeError("the connection was closed")
            answer += piece
        connection.sendall(challenge.accept(answer))
        connection.settimeout(SILENCE_S)

    def _place(self, path: str) -> Path:
        """Return the place of a path on this node. Raises PermissionError for one outside of the served folders."""
        top, *parts = PurePosixPath(path).parts
        root = self._run.root if top == RUN else None
        if top == DATA and (data := read_data_dir(self._run)):
            root = Path(data)
        if root is None or ".." in parts:
            raise PermissionError(errno.EACCES, "not a served folder", path)
        place = root.joinpath(*parts)
        if not place.resolve().is_relative_to(root.resolve()):
            raise PermissionError(errno.EACCES, "it leads out of the served folder", path)
        return place

    # Each operation answers one request. Raises OSError, whose number the client receives.

    def _register(self, client: _Client, request: Request) -> Reply:
        with self._lock:
            address = NodeAddress(request.node, client.host, request.offset)
            self._registered[request.node] = _Registered(address, client)
        return Reply()

    def _list(self, client: _Client, request: Request) -> Reply:
        folder = self._place(request.path)
        # The newest start's file comes last into the other nodes' folders, so it must be listed first: it is written
        # after all files that the start needs.
        if request.path != RUN:
            return Reply(entries=tuple(list_files(folder)))
        client.lists += 1
        starts = list_files(self._run.generations, "generations")
        others = list_files(folder, skip=NOT_COPIED | {"logs", "generations"})
        return Reply(entries=tuple(entry for entry in (*starts, *others) if is_copied(PurePosixPath(entry.path))))

    def _read(self, client: _Client, request: Request) -> Reply:
        with _open(self._place(request.path), os.O_RDONLY) as file:
            size = max(0, min(request.size, os.fstat(file.fileno()).st_size - request.offset))
            client.connection.send(Reply(size=size))
            file.seek(request.offset)
            client.connection.send_file(file, size)
        return Reply()

    def _write(self, client: _Client, request: Request) -> Reply:
        """Write at `offset`, or append if it is negative."""
        place = self._place(request.path)
        place.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        at_end = os.O_APPEND if request.offset < 0 else 0
        with _open(place, os.O_WRONLY | os.O_CREAT | at_end) as file:
            if not at_end:
                file.truncate(request.offset)
                file.seek(request.offset)
            for piece in client.connection.pieces(request.size):
                client.body -= len(piece)
                file.write(piece)
            file.flush()
            return Reply(size=os.fstat(file.fileno()).st_size)

    def _finish(self, _client: _Client, request: Request) -> Reply:
        """Flush a file to disk or, for a folder, its list of files, and rename it, replacing what is there."""
        finish(self._place(request.path), self._place(request.to), request.mtime_us)
        return Reply()

    def _remove(self, _client: _Client, request: Request) -> Reply:
        remove(self._place(request.path))
        return Reply()


def list_files(folder: Path, prefix: str = "", skip: frozenset[str] = frozenset()) -> list[Entry]:
    """Return the regular files below a folder, except for those in `skip`; empty if the folder does not exist."""
    found: list[Entry] = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.name in skip:
            continue
        with suppress(FileNotFoundError):  # removed in the meantime
            if entry.is_dir(follow_symlinks=False):
                found += list_files(Path(entry.path), path)
            elif entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append(Entry(path, status.st_size, status.st_mtime_ns // 1000))
    return found


@contextmanager
def _open(place: Path, flags: int) -> Iterator[BinaryIO]:
    descriptor = os.open(place, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE_FILE)
    with os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "wb") as file:
        yield file


def finish(partial: Path, place: Path, mtime_us: int = 0) -> None:
    """Flush a file or a folder to disk, and rename it, replacing what is at `place`."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if mtime_us:
            os.utime(descriptor, ns=(mtime_us * 1000, mtime_us * 1000))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if place != partial:
        place.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        is_folder = partial.is_dir()
        if is_folder:
            remove(place)
        partial.replace(place)
        if is_folder:
            finish(place.parent, place.parent)


def remove(place: Path) -> None:
    """Remove a file or a folder, which may be missing."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


@contextmanager
def _naming_loss() -> Iterator[None]:
    """Raise a ConnectionError for all errors of a connection, such as a timeout or a missing route."""
    try:
        yield
    except ConnectionError:
        raise
    except (OSError, ValueError) as error:  # a closed connection's reader raises ValueError
        number = getattr(error, "errno", None) or errno.ECONNRESET
        raise ConnectionAbortedError(number, getattr(error, "strerror", None) or str(error)) from error


class RemoteFolder:
    """A client of another node's `FolderServer`. Raises ConnectionError if the node cannot be reached, otherwise
    OSError with the error number of that node's system. One thread uses it at a time."""

    def __init__(self, address: tuple[str, int], secret: bytes):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                with _naming_loss():
                    self._connection = _Connection(connect(address, secret, PURPOSE))
                break
            except ConnectionResetError:  # too many clients are connecting at the same time
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
        self._connection.socket.settimeout(SILENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @property
    def own_address(self) -> str:
        """Return this node's address on the connection."""
        return str(self._connection.socket.getsockname()[0])

    def shares(self, root: Path) -> bool:
        """Return whether the run folder `root` of this node is the one that the server serves."""
        mark = self._ask(Request("mark")).mark
        return mark.startswith(MARK) and "/" not in mark and (root / mark).is_file()

    def register(self, node: int, port: int) -> None:
        """State that this node serves its own copy at `port`, as long as this connection is open."""
        self._ask(Request("register", node=node, offset=port))

    def nodes(self) -> tuple[NodeAddress, ...]:
        return self._ask(Request("nodes")).nodes

    def list(self, path: str) -> dict[str, Entry]:
        return {entry.path: entry for entry in self._ask(Request("list", path)).entries}

    def read(self, path: str, offset: int = 0, size: int = WHOLE) -> bytes:
        return b"".join(self.pieces(path, offset, size))

    def pieces(self, path: str, offset: int = 0, size: int = WHOLE) -> Iterator[bytes]:
        """Yield the bytes of a file from `offset` on."""
        reply = self._ask(Request("read", path, offset=offset, size=size))
        pieces = self._connection.pieces(reply.size)
        while True:
            with _naming_loss():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def append(self, path: str, content: bytes) -> int:
        """Return the file's new size."""
        request = Request("write", path, offset=-1, size=len(content))
        return self._ask(request, lambda: self._connection.socket.sendall(content)).size

    def put(self, path: str, content: bytes, mtime_us: int = 0) -> None:
        """Write a file, so that no reader ever sees a part of it."""
        partial = str(PurePosixPath(path).with_name(f".{PurePosixPath(path).name}.{secrets.token_hex(4)}.partial"))
        request = Request("write", partial, size=len(content))
        self._ask(request, lambda: self._connection.socket.sendall(content))
        self.finish(partial, path, mtime_us)

    def send_file(self, source: Path, path: str) -> int:
        """Copy a local file and flush it to the other node's disk; return its size in bytes."""
        with source.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._ask(Request("write", path, size=size), lambda: self._connection.send_file(file, size))
        self.finish(path, path)
        return size

    def finish(self, partial: str, path: str, mtime_us: int = 0) -> None:
        self._ask(Request("finish", partial, to=path, mtime_us=mtime_us))

    def remove(self, path: str) -> None:
        self._ask(Request("remove", path))

    def _ask(self, request: Request, send_content: Callable[[], None] = lambda: None) -> Reply:
        with _naming_loss():
            try:
                self._connection.send(request)
                send_content()
                self._connection.socket.settimeout(REPLY_S if request.kind in ("finish", "remove") else SILENCE_S)
                reply = self._connection.receive(Reply)
            except (OSError, ValueError):  # the rest of an answer must not be taken for the next one
                self._connection.close()
                raise
        if reply.errno:
            raise OSError(reply.errno, os.strerror(reply.errno), request.path)
        return reply
