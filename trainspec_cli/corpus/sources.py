"""Read documents from each raw source: Python's standard library, text, JSON lines, Parquet and Arrow tables.

The order is fixed (by path, then by line), so the same files always give the same documents. Tables need extra `hf`.
"""

from __future__ import annotations

import json
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainspec_cli.corpus.chat import FIELDS, Conversation, parse_record, template_of
from trainspec_cli.corpus.source_files import TABLE_SUFFIXES, cannot_read
from trainspec_cli.errors import MachineError, Problem, RecipeError
from trainspec_cli.reading.files import check_regular, open_regular, parse_json
from trainspec_cli.spec.recipe.data import DataSpec

TABLE_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Document:
    name: str
    """The file, or `file:line`."""
    text: str
    """Never empty, and always encodable as UTF-8."""
    conversation: Conversation | None = None
    """Set if only a part of the text is learnt."""


def documents(data: DataSpec, files: list[Path]) -> Iterator[Document]:
    """Yield every document of `files` that is not empty; the one that crosses `max_bytes` is cut there."""
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
    """Return the longest prefix of whole characters that fits."""
    if 4 * len(text) <= max_bytes:  # a character takes at most four bytes of UTF-8
        return text
    return text.encode()[:max_bytes].decode(errors="ignore")


def _read_python(file: Path, data: DataSpec) -> Iterator[Document]:
    """Read a Python source file in the encoding that it declares."""
    try:
        with tokenize.open(file) as source:
            yield Document(str(file), source.read())
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise _bad_document(file, None, f"not in the encoding it declares: {error}", "") from error
    except OSError as error:
        raise cannot_read(file, error) from error


def _read_text(file: Path, data: DataSpec) -> Iterator[Document]:
    try:
        with open_regular(file) as opened:
            content = opened.read()
    except OSError as error:
        raise cannot_read(file, error) from error
    yield Document(str(file), _decode(content, file, None, 0))


def _read_jsonl(file: Path, data: DataSpec) -> Iterator[Document]:
    """Yield one document per line."""
    for number, line in _lines(file):
        yield Document(f"{file}:{number}", _text_of(_parse(line, file, number), file, number, data))


def _read_table(file: Path, data: DataSpec) -> Iterator[Document]:
    """Yield one document per row."""
    for number, record in enumerate(table_rows(file, [data.text_field]), 1):
        yield Document(f"{file}:{number}", _text_of(record, file, number, data))


def _read_chat(file: Path, data: DataSpec) -> Iterator[Document]:
    """Yield one conversation per line or row, rendered by its template."""
    find = partial(template_of, data.tokenizer.path, data.chat_template)
    for number, record in _records(file):
        try:
            found = parse_record(record, find, learn_all=data.loss_on == "all")
        except ValueError as error:
            raise _bad_document(file, number, f"{error}: {_excerpt(repr(record))}", "") from error
        yield Document(f"{file}:{number}", found.text, found)


def _records(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield numbered records from JSON lines or a table."""
    if file.suffix in TABLE_SUFFIXES:
        yield from enumerate(table_rows(file, FIELDS), 1)
        return
    yield from ((number, _parse(line, file, number)) for number, line in _lines(file))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield lines numbered from 1; blank ones are skipped."""
    try:
        with open_regular(file) as lines:
            start = 0
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _decode(line, file, number, start)
                start += len(line)
    except OSError as error:
        raise cannot_read(file, error) from error


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
    """Return the text field of one line or row."""
    if data.text_field not in record:
        fields = ", ".join(map(str, record)) or "none"
        raise _bad_document(
            file, number, f"no field `{data.text_field}`; it has: {fields}", "type data.text_field=NAME to choose one"
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
    """Decode UTF-8 without its byte order mark; `start` is the offset of `content` in the file, in bytes."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"byte {start + error.start} (0x{content[error.start]:02x}) is not UTF-8"
        hint = "convert it (iconv -f LATIN1 -t UTF-8), or leave it out by a glob: data.path='FOLDER/**/*.txt'"
        raise _bad_document(file, line, got, hint) from error


def _bad_document(file: Path, line: int | None, got: str, hint: str) -> RecipeError:
    return RecipeError(Problem("bad_document", got, path="data.path", hint=hint, file=str(file), line=line))


def _excerpt(text: str, max_chars: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def table_rows(file: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns of `wanted` that the file has.

    Raises RecipeError if it has none, MachineError on damage.
    """
    import pyarrow

    check_regular(file)
    try:
        batches = _parquet(file, wanted) if file.suffix == ".parquet" else _arrow(file, wanted)
        for batch in batches:
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise MachineError(f"{file} cannot be read: {error}", code="unreadable_file") from error


def _parquet(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as content:
        columns = _present(file, content.schema_arrow.names, wanted)
        yield from content.iter_batches(TABLE_ROWS_AT_ONCE, columns=columns)


def _arrow(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    """Yield batches of the stream format (which `datasets` writes) or of the file format, which ends in an index."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        columns = _present(file, reader.schema.names, wanted)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield batch.select(columns)


def _present(file: Path, names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    present = [name for name in wanted if name in names]
    if not present:
        message = f"no column `{wanted[0]}`; it has: {', '.join(names)}"
        hint = "type data.text_field=NAME to choose one"
        raise RecipeError(Problem("bad_document", message, "data.path", hint, file=str(file)))
    return present


_READERS: dict[str, Callable[[Path, DataSpec], Iterator[Document]]] = {
    "python_stdlib": _read_python,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_table,
    "arrow": _read_table,
    "chat": _read_chat,
}
