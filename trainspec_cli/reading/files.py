"""Read bytes and text of files that other programs wrote: regular files of a bounded size, or a precise error.

A named pipe or a device in place of a file would block the reader, or never end.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.units import format_bytes

MAX_BYTES = 64 * 2**20
"""The default limit for a file that is read whole."""

ANY_DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    SyntaxError,
    TokenError,
    ArithmeticError,
    EOFError,
    MemoryError,
    struct.error,
    zlib.error,
)
"""Errors that parsers raise on damaged files: numpy evaluates a header (SyntaxError, TokenError), Pillow unpacks bytes
(struct.error), nibabel looks up codes (KeyError)."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class UnreadableFileError(MachineError, ValueError):
    """A file exists but cannot be read: its kind, size or content is not what the reader accepts."""


class MissingFileError(UnreadableFileError, FileNotFoundError):
    """The file does not exist."""


class ClosedFileError(UnreadableFileError, PermissionError):
    """This user has no permission to read the file."""


def unreadable(
    path: Path | str, why: str, hint: str = "", *, line: int | None = None, column: int | None = None
) -> UnreadableFileError:
    """Return an error that names `path` and says `why` it cannot be read."""
    return UnreadableFileError(
        Problem(
            code="unreadable_file",
            message=f"{path} {why}",
            hint=hint,
            file=str(path),
            line=line,
            column=column,
            environment=True,
        )
    )


def expand(path: str | Path) -> Path:
    """Expand `~` and `~NAME`; return the path unchanged if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def exists(path: Path) -> bool:
    """Return True if `path` is anything but a folder; False also for a path that no file can have."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file without ever blocking.

    Raises UnreadableFileError, or MissingFileError if it does not exist.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(Problem("missing_file", f"there is no file {path}", file=str(path))) from error
    except PermissionError as error:
        closed = ClosedFileError(Problem("closed_file", f"{path} is closed to this user", environment=True))
        closed.filename = str(path)
        raise closed from error
    except OSError as error:
        raise unreadable(path, f"cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a NUL byte
        raise unreadable(repr(str(path)), f"is no path: {error}") from error
    try:
        _check_regular(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Raise as `open_regular` does. Use it before a library opens the file by name."""
    open_regular(path).close()


def _check_regular(descriptor: int, path: Path) -> None:
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        raise unreadable(path, f"is {_KINDS.get(kind, 'no regular file')}; a regular file is needed")


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file of at most `max_bytes`. Raises as `open_regular` does."""
    try:
        with open_regular(path) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        if isinstance(error, UnreadableFileError):
            raise
        raise unreadable(path, f"cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise unreadable(path, f"is larger than the {format_bytes(max_bytes)} that are read from such a file")
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return UTF-8 text without its byte order mark. Raises as `open_regular` does."""
    content = read_bytes(path, max_bytes)
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        why = f"is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}"
        raise unreadable(path, why, "convert it: iconv -f LATIN1 -t UTF-8", line=line) from error
