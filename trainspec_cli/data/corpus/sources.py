"""Read documents from each raw source: Python's standard library, text, JSON lines, tables and conversations.

The order is fixed (by path, then by line), so the same files always give the same documents. Tables need extra `hf`.
"""

from __future__ import annotations

import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.reading.files import open_regular
from trainspec_cli.data.corpus.chat import Conversation, parse_record, template_of
from trainspec_cli.data.corpus.chat_formats import (
    ANY_SHAPE,
    COLUMNS,
    ChatFormat,
    FormatError,
    Record,
    find_format,
    format_in_file,
)
from trainspec_cli.data.corpus.json_records import json_lines, json_records
from trainspec_cli.data.corpus.mistakes import Mistakes, bad_document, decode, excerpt
from trainspec_cli.data.corpus.source_files import TABLE_SUFFIXES, cannot_read
from trainspec_cli.data.corpus.tables import table_rows
from trainspec_cli.recipe.keys.data import DataSpec

CHOOSE_FIELD = "type data.text_field=NAME to choose one"


@dataclass(frozen=True)
class Document:
    name: str
    """The file, or `file:line`."""
    text: str
    """Never empty, and always encodable as UTF-8."""
    conversation: Conversation | None = None
    """Set if only a part of the text is learnt."""


def documents(data: DataSpec, files: list[Path]) -> Iterator[Document]:
    """Yield every document of `files` that is not empty; the one that crosses `max_bytes` is cut there.

    Raises RecipeError at the end with each kind of mistake, or once there are `MAX_MISTAKES`; MachineError for a
    file that cannot be read.
    """
    mistakes = Mistakes()
    yield from _documents(data, files, mistakes)
    mistakes.check()


def _documents(data: DataSpec, files: list[Path], mistakes: Mistakes) -> Iterator[Document]:
    read = READERS[data.source]
    left_bytes = sys.maxsize if data.max_bytes is None else data.max_bytes
    for file in files:
        for document in read(file, data, mistakes):
            text = _cut_to_bytes(document.text, left_bytes)
            left_bytes -= len(text.encode())
            if text:
                yield replace(document, text=text)
            if len(text) < len(document.text) or left_bytes == 0:
                return


def _cut_to_bytes(text: str, max_bytes: int) -> str:
    """Return the longest prefix of whole characters that fits."""
    if 4 * len(text) <= max_bytes:  # a character takes at most four bytes of UTF-8
        return text
    return text.encode()[:max_bytes].decode(errors="ignore")


def _read_python(file: Path, data: DataSpec, mistakes: Mistakes) -> Iterator[Document]:
    """Read a Python source file in the encoding that it declares."""
    try:
        with tokenize.open(file) as source:
            yield Document(str(file), source.read())
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise bad_document(file, None, f"not in the encoding it declares: {error}", "") from error
    except OSError as error:
        raise cannot_read(file, error) from error


def _read_text(file: Path, data: DataSpec, mistakes: Mistakes) -> Iterator[Document]:
    try:
        with open_regular(file) as opened:
            content = opened.read()
    except OSError as error:
        raise cannot_read(file, error) from error
    with mistakes.passing_over():
        yield Document(str(file), decode(content, file, None, 0))


def _read_jsonl(file: Path, data: DataSpec, mistakes: Mistakes) -> Iterator[Document]:
    """Yield one document per line."""
    shape = f'each line must be one JSON object, such as {{"{data.text_field}": "..."}}'
    for record in json_lines(file, shape, mistakes):
        with mistakes.passing_over():
            yield Document(f"{file}:{record.line}", _text_of(record.fields, file, record.line, data))


def _read_table(file: Path, data: DataSpec, mistakes: Mistakes) -> Iterator[Document]:
    """Yield one document per row."""
    for number, record in enumerate(table_rows(file, [data.text_field], CHOOSE_FIELD), 1):
        with mistakes.passing_over():
            yield Document(f"{file}:{number}", _text_of(record, file, number, data))


def _read_chat(file: Path, data: DataSpec, mistakes: Mistakes) -> Iterator[Document]:
    """Yield one conversation per record, rendered by its template. The first that has a format decides that of all."""
    find = partial(template_of, data.tokenizer.path, data.chat_template)
    first: ChatFormat | None = None
    for number, name, record in _chat_records(file, mistakes):
        with mistakes.passing_over():
            try:
                of = format_in_file(record, first)
                first = first or of
                found = parse_record(record, of, find, learn_all=data.loss_on == "all")
                check_encodable(found.text, "it")
            except ValueError as error:
                allowed = error.allowed if isinstance(error, FormatError) else ""
                sample = repr(record)
                raise bad_document(file, number, str(error), allowed, sample=sample, record=name) from error
            yield Document(f"{file}:{number}", found.text, found)


def _chat_records(file: Path, mistakes: Mistakes) -> Iterator[tuple[int, str, Record]]:
    """Yield (line or row, the record's name or "", record)."""
    if file.suffix in TABLE_SUFFIXES:
        for number, row in enumerate(table_rows(file, COLUMNS, ANY_SHAPE), 1):
            yield number, "", row
    else:
        for record in json_records(file, ANY_SHAPE, mistakes):
            yield record.line, record.name, record.fields


def _text_of(record: Mapping[str, object], file: Path, number: int, data: DataSpec) -> str:
    """Return the text field of one line or row."""
    if data.text_field not in record:
        # A first record without the field means that the whole file has another form; reading on would only repeat it.
        fields = excerpt(", ".join(map(str, record)), 200) or "none"
        try:
            hint = f"type data=chat: these are conversations ({find_format(record)})"
        except FormatError:
            hint = CHOOSE_FIELD
        error = bad_document(file, number, f"no field `{data.text_field}`; it has: {fields}", hint)
        raise RecipeError(replace(error.problems[0], code="other_form")) if number == 1 else error
    text = record[data.text_field]
    if not isinstance(text, str):
        raise bad_document(file, number, f"field `{data.text_field}` is not a string", "", sample=repr(text))
    try:
        check_encodable(text, f"field `{data.text_field}`")
    except ValueError as error:
        raise bad_document(file, number, str(error), "") from error
    return text


def check_encodable(text: str, name: str) -> None:
    """Raise ValueError for a text that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a surrogate pair, \\u{ord(text[error.start]):04x}") from error


READERS: dict[str, Callable[[Path, DataSpec, Mistakes], Iterator[Document]]] = {
    "python_stdlib": _read_python,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_table,
    "arrow": _read_table,
    "chat": _read_chat,
}
