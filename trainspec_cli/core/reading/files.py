"""Read files written by other programs. Only regular files of limited size and known version are read; anything else
raises a precise error. A named pipe or a device could block the reader, or never end."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import struct
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO, TypeVar, get_origin, overload

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.printable import format_bytes

MAX_BYTES = 64 * 2**20
"""The default size limit for a file."""

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
"""Errors that parsers raise for damaged files: numpy evaluates a header (SyntaxError, TokenError), Pillow unpacks bytes
(struct.error), nibabel looks up codes (KeyError)."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects."""
MAX_DIGITS = 30
"""Maximum number of digits in an integer; a longer one is read as a float."""

_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.+)")

T = TypeVar("T")
Kind = type | types.UnionType
_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    types.NoneType: "null",
}


class UnreadableFileError(MachineError, ValueError):
    """A file exists but cannot be read, because of its type, size or content."""


class MissingFileError(UnreadableFileError, FileNotFoundError):
    """The file does not exist."""


class ClosedFileError(UnreadableFileError, PermissionError):
    """This user has no permission to read the file."""


def unreadable(
    path: Path | str, why: str, hint: str = "", *, line: int | None = None, column: int | None = None
) -> UnreadableFileError:
    """Return an error stating that `path` cannot be read; `why` states the reason."""
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
    """Expand `~` and `~NAME`; return the path unchanged if the user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def how_to_copy(path: str) -> str:
    """Return the command that copies a remote path (`s3://...`) to this machine; "" for a local path."""
    found = _REMOTE.fullmatch(path)
    if found is None:
        return ""
    scheme = found[1].lower()
    place = found[2]
    recursive = "" if Path(place).suffix else "--recursive "
    if scheme in ("http", "https") and place.startswith("huggingface.co/"):
        scheme = "hf"
        place = place.removeprefix("huggingface.co/")
    if scheme == "file":
        return f"leave out file://: {place}"
    if scheme == "hf":
        repository = shlex.quote("/".join(place.removeprefix("datasets/").split("/")[:2]))
        of_data = " --repo-type dataset" if place.startswith("datasets/") else ""
        command = f"hf download {repository}{of_data} --local-dir FOLDER"
    elif scheme == "s3":
        command = f"aws s3 cp {recursive}{shlex.quote(path)} FOLDER"
    elif scheme in ("gs", "gcs"):
        command = f"gcloud storage cp {recursive}{shlex.quote(path)} FOLDER"
    elif scheme in ("http", "https"):
        command = f"curl -LO {shlex.quote(path)}"
    else:
        command = f"with a program that supports {scheme}://"
    return f"remote paths cannot be read: copy it to this machine first ({command}), and specify the copy"


def exists(path: Path) -> bool:
    """Return True if `path` exists and is not a folder; False also for an invalid path."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, without blocking if it is something else.

    Raises UnreadableFileError, or MissingFileError if it does not exist.
    """
    try:
        # Opening a named pipe would wait forever for a writer, and the type is known only after opening.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(Problem("missing_file", f"no such file: {path}", file=str(path))) from error
    except PermissionError as error:
        closed = ClosedFileError(Problem("closed_file", f"no permission to read {path}", environment=True))
        closed.filename = str(path)
        raise closed from error
    except OSError as error:
        raise unreadable(path, f"cannot be opened: {error.strerror}") from error
    except ValueError as error:  # for example, a NUL byte
        raise unreadable(repr(str(path)), f"is not a path: {error}") from error
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise unreadable(path, f"is {_KINDS.get(kind, 'not a regular file')}; expected a regular file")
        return os.fdopen(descriptor, "rb")
    # Close the descriptor even after an interrupt.
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Raise the same errors as `open_regular`, if any. Called before a library opens the file by name."""
    open_regular(path).close()


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file of at most `max_bytes`. Raises the same errors as `open_regular`."""
    try:
        with open_regular(path) as file:
            # The reported size cannot be trusted: files below /proc report 0, and other files may grow in the meantime.
            content = file.read(max_bytes + 1)
    except OSError as error:
        if isinstance(error, UnreadableFileError):
            raise
        raise unreadable(path, f"cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise unreadable(path, f"is larger than {format_bytes(max_bytes)}, the limit for such a file")
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return a file's UTF-8 text without the byte order mark. Raises the same errors as `open_regular`."""
    content = read_bytes(path, max_bytes)
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        why = f"is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}"
        raise unreadable(path, why, "convert it: iconv -f LATIN1 -t UTF-8", line=line) from error


def parse_json(text: str | bytes) -> JsonValue:
    """Parse JSON. Raises a ValueError that describes the mistake (a JSONDecodeError if the input is not JSON)."""
    try:
        content: JsonValue = json.loads(text, parse_int=parse_whole)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    check_depth(content)
    return content


TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def read_json(path: Path) -> JsonValue:
    """Read a JSON file. Raises UnreadableFileError, which states file, line and column, and MissingFileError if the
    file does not exist."""
    text = read_text(path)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        why = f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise unreadable(path, why, line=error.lineno, column=error.colno) from error
    except ValueError as error:
        raise unreadable(path, f"cannot be read: {error}") from error


def read_object(path: Path) -> JsonObject:
    """Return the JSON object in `path`. Raises the same errors as `read_json`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise unreadable(path, f"holds {show_kind(content)}; expected a JSON object")
    return content


@overload
def read_field(path: Path, content: JsonObject, name: str, kind: type[JsonObject]) -> JsonObject: ...
@overload
def read_field(path: Path, content: JsonObject, name: str, kind: type[T]) -> T: ...
def read_field(path: Path, content: JsonObject, name: str, kind: type) -> object:
    """Return a field of an object in `path`. Raises UnreadableFileError if it is missing or has the wrong type."""
    if name not in content:
        raise unreadable(path, f"has no `{name}`; expected {describe_kind(kind)}")
    if not is_kind(content[name], kind):
        raise unreadable(path, f"has {show_kind(content[name])} as `{name}`; expected {describe_kind(kind)}")
    return content[name]


def is_kind(value: object, kind: Kind) -> bool:
    """Return True if `value` has type `kind` according to JSON's rules: an integer is also a number, but true is
    not."""
    kinds = _members(kind)
    allowed = (*kinds, int) if float in kinds else kinds
    return type(value) in allowed


def describe_kind(kind: Kind) -> str:
    """Describe a type: `int | None` -> `a whole number or null`."""
    return " or ".join(_KIND_NAMES[one] for one in _members(kind))


def _members(kind: Kind) -> tuple[type, ...]:
    """Return the types of a union: `int | None` -> (int, NoneType); `dict[str, object]` -> (dict,)."""
    kinds = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    return tuple(get_origin(one) or one for one in kinds)


def show_kind(value: object) -> str:
    """Describe a value briefly: `a list`, `null`, `7`, `'abc'`."""
    if value is None or isinstance(value, (list, dict)):
        return _KIND_NAMES[type(value)]
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def parse_whole(digits: str) -> int | float:
    """Return an integer in JSON, or the nearest float if it has more than `MAX_DIGITS` digits.

    For a tokenizer without a limit, transformers writes int(1e30), which has 31 digits, as `model_max_length`. So a
    file with a long number must not be rejected. A float never overflows in arithmetic, and integer fields reject
    it."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def check_depth(content: JsonValue) -> None:
    """Raise ValueError for lists and objects that are nested too deeply."""
    # Go level by level, because recursion could exceed Python's limit.
    level = [content]
    depth = 0
    while level := [node for node in level if isinstance(node, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]


# Read a JSON array item by item, each with the line on which it starts.


_SPACE = re.compile(r"[ \t\n\r]*")
SHOWN_CHARS = 30


class JsonArrayError(ValueError):
    """The text is not a JSON array, or contains an item that cannot be parsed. Nothing after that item can be read."""

    def __init__(self, why: str, line: int):
        super().__init__(why)
        self.line = line


def parse_items(text: str) -> Iterator[tuple[int, JsonValue]]:
    """Yield (line, item) for each item of the JSON array in `text`. Raises JsonArrayError."""
    decoder = json.JSONDecoder(parse_int=parse_whole)
    at, line = _pass(text, 0, "[", 1)
    if text[at : at + 1] == "]":
        _check_end(text, at + 1, line)
        return
    while True:
        try:
            item, end = decoder.raw_decode(text, at)
            check_depth(item)
        except json.JSONDecodeError as error:
            raise JsonArrayError(error.msg, error.lineno) from error
        except RecursionError as error:
            raise JsonArrayError(TOO_DEEP, line) from error
        except ValueError as error:
            raise JsonArrayError(str(error), line) from error
        yield line, item
        # Count lines only from the previous item on; otherwise, a large file would be searched from the start for each
        # item.
        line += text.count("\n", at, end)
        at, line = _skip_space(text, end, line)
        if text[at : at + 1] == "]":
            _check_end(text, at + 1, line)
            return
        at, line = _pass(text, at, ",", line)


def _skip_space(text: str, start: int, line: int) -> tuple[int, int]:
    space = _SPACE.match(text, start)
    assert space is not None, "the pattern matches empty text"
    return space.end(), line + text.count("\n", start, space.end())


def _pass(text: str, start: int, mark: str, line: int) -> tuple[int, int]:
    """Return the position after `mark` and the space around it, and the line of that position."""
    at, line = _skip_space(text, start, line)
    if text[at : at + 1] != mark:
        found = _excerpt(text, at) if at < len(text) else "the end of the file"
        raise JsonArrayError(f"expected `{mark}`{' or `]`' * (mark == ',')}, found {found}", line)
    return _skip_space(text, at + 1, line)


def _check_end(text: str, start: int, line: int) -> None:
    at, line = _skip_space(text, start, line)
    if at < len(text):
        raise JsonArrayError(f"{_excerpt(text, at)} follows the end of the array", line)


def _excerpt(text: str, at: int) -> str:
    return f"`{text[at : at + SHOWN_CHARS].splitlines()[0]}`"


# The version of the training spec that a file follows, stated in the file as `spec_version`. A file without this key
# follows version 0.1, which did not define the key.


VERSION_KEY = "spec_version"
CURRENT_VERSION = "1.0"
UNSTATED_VERSION = "0.1"
VERSIONS = (UNSTATED_VERSION, CURRENT_VERSION)
"""All readable versions, oldest first."""
VERSION_LINE = f'{VERSION_KEY}: "{CURRENT_VERSION}"\n'
"""The line with the version, which precedes all other keys of a recipe."""
NEWER_VERSION, UNKNOWN_VERSION = "newer_version", "unknown_version"
"""The error codes of problems with a version."""
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")


@dataclass(frozen=True)
class VersionFault:
    """The reason why a file's stated version cannot be read."""

    code: str
    why: str
    """The problem, as the rest of a sentence that starts with the name of the file."""
    hint: str


def find_fault(stated: object) -> VersionFault | None:
    """Return the problem with the version stated in a file; None if the file can be read."""
    if isinstance(stated, str) and stated in VERSIONS:
        return None
    known = " and ".join(VERSIONS)
    shown = repr(stated)[:40]
    # A newer file needs a different remedy than a misspelled version: upgrading instead of editing.
    if is_newer(stated):
        why = f"was written by a newer trainspec: it has version {stated} of the training spec; this one reads {known}"
        return VersionFault(NEWER_VERSION, why, "upgrade: pip install --upgrade trainspec")
    if isinstance(stated, str):
        why = f"has an unknown `{VERSION_KEY}`, {shown} (known: {known})"
    else:
        why = f"has {shown} as `{VERSION_KEY}`; expected text"
    return VersionFault(UNKNOWN_VERSION, why, f'write {VERSION_KEY}: "{CURRENT_VERSION}"')


def check_version(path: Path, stated: object, line: int | None = None) -> None:
    """Raise UnreadableFileError for a version that cannot be read. `line`: the line in the file that states the
    version."""
    if fault := find_fault(stated):
        problem = Problem(fault.code, f"{path} {fault.why}", "", fault.hint, str(path), line, environment=True)
        raise UnreadableFileError(problem)


def is_newer(stated: object, than: str = CURRENT_VERSION) -> bool:
    """Return whether `version` is later than another version."""
    found = _VERSION.fullmatch(stated) if isinstance(stated, str) else None
    return found is not None and _order(found[0]) > _order(than)


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def with_version(content: JsonObject) -> JsonObject:
    """Return the content of a file in the current version, with the version as the first key."""
    return {VERSION_KEY: CURRENT_VERSION, **content}


def without_version(content: JsonObject) -> JsonObject:
    return {key: value for key, value in content.items() if key != VERSION_KEY}
