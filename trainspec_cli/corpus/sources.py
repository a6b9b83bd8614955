"""Documents, one after another, from each raw source: Python's standard library, text files, JSON lines.

The order is fixed (sorted by path, then by line), so that the same files always give the same documents.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainspec_cli.corpus.chat import FIELDS, Conversation, parse_record, template_of
from trainspec_cli.corpus.tables import SUFFIXES, table_rows
from trainspec_cli.errors import MachineError, Problem, RecipeError
from trainspec_cli.reading.files import UnreadableFileError, exists, expand, open_regular
from trainspec_cli.reading.json_file import parse_json
from trainspec_cli.spec.recipe.data import DataSpec

STDLIB_LEFT_OUT = frozenset({
    "site-packages", "dist-packages",  # not the standard library
    "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo",  # packaged apart by some systems
    "encodings", "pydoc_data",  # tables, not programs
})  # fmt: skip


_SUFFIXES: dict[str, str | tuple[str, ...]] = {
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "chat": (".jsonl", *SUFFIXES),
    "nanogpt": ".bin",
    "megatron": ".bin",
}
"""Of the files that count below a folder."""


@dataclass(frozen=True)
class Document:
    name: str
    """Its file, or `file:line`."""
    text: str
    """Never empty, and always expressible as UTF-8."""
    conversation: Conversation | None = None
    """What is learnt of it, where not all is."""


def find_files(data: DataSpec) -> list[Path]:
    """The files that `data` is read from, in reading order; raises RecipeError if there is none."""
    if data.source == "python_stdlib":
        files = _stdlib_files()
    elif data.path:
        files = _files_at(data.path, suffix=_SUFFIXES.get(data.source, ""))
    else:
        raise _path_error(f"source {data.source} needs a path", "data.path=FILE, FOLDER or 'FOLDER/**/*.txt'")
    for file in files:
        if not file.is_file():
            raise MachineError(f"{file} is no regular file (a broken link, a pipe?)", code="unreadable_file")
    return files


def documents(data: DataSpec, files: list[Path]) -> Iterator[Document]:
    """Every document of `files` that is not empty; the one that crosses `max_bytes` is cut there."""
    read = _READERS[data.source]
    left_bytes = sys.maxsize if data.max_bytes is None else data.max_bytes
    for file in files:
        for document in read(file, data):
            text = _cut_to_bytes(document.text, left_bytes)
            left_bytes -= len(text.encode())
            if text:
                yield replace(document, text=text)
            if len(text) < len(document.text) or left_bytes == 0:
                return


def _cut_to_bytes(text: str, max_bytes: int) -> str:
    """The longest beginning of whole characters that fits."""
    if 4 * len(text) <= max_bytes:  # a character takes at most four bytes of UTF-8
        return text
    return text.encode()[:max_bytes].decode(errors="ignore")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, ".py", STDLIB_LEFT_OUT) if not file.name.startswith("_sysconfigdata")]
    if not files:
        raise MachineError(
            f"{root} holds no Python source: this Python came without its standard library as files",
            code="no_python_stdlib",
            hint="train on text of your own: data=text data.path=FOLDER",
        )
    return files


def _files_at(path: str, suffix: str | tuple[str, ...]) -> list[Path]:
    """The file, the files below the folder (hidden ones left out), or those the glob matches."""
    place = expand(path)
    if exists(place):
        return [place]
    if _is_folder(place):
        files = list(_walk(place, suffix))
    elif glob.has_magic(path):
        matches = sorted(glob.glob(str(place), recursive=True))  # noqa: PTH207 - pathlib's takes no absolute pattern
        files = [file for file in map(Path, matches) if not file.is_dir()]
    else:
        raise _path_error(f"{place.absolute()} does not exist", "data.path takes a file, a folder or a glob")
    if not files:
        kind = suffix if isinstance(suffix, str) else " or ".join(suffix)
        got = f"{place.absolute()} holds no {kind or 'visible'} file"
        raise _path_error(got, "name the files by a glob: data.path='FOLDER/**/*.txt'")
    return files


def _is_folder(place: Path) -> bool:
    """False too for a name that no folder can have."""
    try:
        return place.is_dir()
    except OSError:
        return False


def _walk(root: Path, suffix: str | tuple[str, ...], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in left_out and name[0] != ".")
        for name in sorted(names):
            if name.endswith(suffix) and name[0] != ".":
                yield Path(folder, name)


def _path_error(message: str, hint: str) -> RecipeError:
    return RecipeError(Problem(code="missing_file", message=message, path="data.path", hint=hint))


def _read_python(file: Path, data: DataSpec) -> Iterator[Document]:
    """Honours the encoding that the source file declares."""
    try:
        with tokenize.open(file) as source:
            yield Document(str(file), source.read())
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise _bad_document(file, None, f"not in the encoding it declares: {error}", "") from error
    except OSError as error:
        raise _unreadable(file, error) from error


def _read_text(file: Path, data: DataSpec) -> Iterator[Document]:
    try:
        with open_regular(file) as opened:
            content = opened.read()
    except OSError as error:
        raise _unreadable(file, error) from error
    yield Document(str(file), _decode(content, file, None, 0))


def _read_jsonl(file: Path, data: DataSpec) -> Iterator[Document]:
    """One document a line."""
    for number, line in _lines(file):
        yield Document(f"{file}:{number}", _text_of(_parse(line, file, number), file, number, data))


def _read_table(file: Path, data: DataSpec) -> Iterator[Document]:
    """One document a row."""
    for number, record in enumerate(table_rows(file, [data.text_field]), 1):
        yield Document(f"{file}:{number}", _text_of(record, file, number, data))


def _read_chat(file: Path, data: DataSpec) -> Iterator[Document]:
    """One conversation a line, as its template writes it."""
    find = partial(template_of, data.tokenizer.path, data.chat_template)
    for number, record in _records(file):
        try:
            found = parse_record(record, find, learn_all=data.loss_on == "all")
        except ValueError as error:
            raise _bad_document(file, number, f"{error}: {_excerpt(repr(record))}", "") from error
        yield Document(f"{file}:{number}", found.text, found)


def _records(file: Path) -> Iterator[tuple[int, Any]]:
    """What conversations are read from: JSON lines or tables."""
    if file.suffix in SUFFIXES:
        yield from enumerate(table_rows(file, FIELDS), 1)
        return
    yield from ((number, _parse(line, file, number)) for number, line in _lines(file))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered from 1; blank ones are skipped."""
    try:
        with open_regular(file) as lines:
            start = 0
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _decode(line, file, number, start)
                start += len(line)
    except OSError as error:
        raise _unreadable(file, error) from error


def _parse(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        hint = 'each line must be one JSON object, such as {"text": "..."}'
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise _bad_document(file, number, f"not JSON ({why}): {_excerpt(line)}", hint) from error
    if not isinstance(record, dict):
        raise _bad_document(file, number, f"not a JSON object: {_excerpt(line)}", "")
    return record


def _text_of(record: dict[str, Any], file: Path, number: int, data: DataSpec) -> str:
    """The text that one line or row holds."""
    if data.text_field not in record:
        fields = ", ".join(map(str, record)) or "none"
        raise _bad_document(
            file, number, f"no field `{data.text_field}`; it has: {fields}", "data.text_field=NAME says which to read"
        )
    text = record[data.text_field]
    if not isinstance(text, str):
        raise _bad_document(file, number, f"field `{data.text_field}` is not a string: {_excerpt(repr(text))}", "")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"field `{data.text_field}` holds half a surrogate pair, \\u{ord(text[error.start]):04x}"
        raise _bad_document(file, number, got, "") from error
    return text


def _decode(content: bytes, file: Path, line: int | None, start: int) -> str:
    """UTF-8 without its byte order mark; `start` is where in the file `content` begins, in bytes."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"byte {start + error.start} (0x{content[error.start]:02x}) is not UTF-8"
        hint = "convert it (iconv -f LATIN1 -t UTF-8), or leave it out by a glob: data.path='FOLDER/**/*.txt'"
        raise _bad_document(file, line, got, hint) from error


def _bad_document(file: Path, line: int | None, got: str, hint: str) -> RecipeError:
    return RecipeError(Problem("bad_document", got, path="data.path", hint=hint, file=str(file), line=line))


def _unreadable(file: Path, error: OSError) -> MachineError:
    if isinstance(error, UnreadableFileError):
        return error
    return MachineError(f"{file} cannot be read: {error.strerror}", code="unreadable_file")


def _excerpt(text: str, max_chars: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


_READERS: dict[str, Callable[[Path, DataSpec], Iterator[Document]]] = {
    "python_stdlib": _read_python,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_table,
    "arrow": _read_table,
    "chat": _read_chat,
}
