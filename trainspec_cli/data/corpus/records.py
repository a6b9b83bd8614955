"""The records of document files (table rows and JSON objects), and mistakes in them.

An invalid record is stored as a mistake and reading continues, so that all mistakes are reported together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.core.reading.files import JsonArrayError, check_regular, open_regular, parse_items, parse_json
from trainspec_cli.data.corpus.source_files import cannot_read
from trainspec_cli.recipe.json_text import json_text

MAX_KINDS, MAX_MISTAKES = 20, 1000
"""Reading stops after this many kinds of mistakes, or this many mistakes in total, because a file in the wrong format
has a mistake on each line."""
SHOWN_PLACES = 5
BAD_DOCUMENT = "bad_document"
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")


class BadDocument(RecipeError):  # noqa: N818 - it names what is wrong, like the others
    """A document that cannot be read. `kind` is the same for documents with the same mistake."""

    def __init__(self, problem: Problem, kind: str):
        super().__init__(problem)
        self.kind = kind


class Mistakes:
    """Collects the lines, rows and files without a valid document. Each kind of mistake is listed once, with all of its
    locations."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str | None, str], tuple[Problem, list[str]]] = {}
        """All mistakes of one kind in one file: the first one, and the locations of the others."""
        self._count = 0

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Record the mistake in one document, so that the following documents are read as well."""
        try:
            yield
        except BadDocument as error:
            (problem,) = error.problems
            self._count += 1
            key = (None if problem.line is None else problem.file, error.kind)
            if key in self._kinds:
                self._kinds[key][1].append(str(problem.file if problem.line is None else problem.line))
            else:
                self._kinds[key] = problem, []
            # Stop, because a file in the wrong format would have a mistake on each line, all the way to its end.
            if len(self._kinds) >= MAX_KINDS or self._count >= MAX_MISTAKES:
                self.check()
        except RecipeError as error:  # the error does not concern a single document
            raise RecipeError([*self._problems(), *error.problems]) from error

    def check(self) -> None:
        """Raise RecipeError if there were any mistakes."""
        if problems := self._problems():
            raise RecipeError(problems)

    def _problems(self) -> list[Problem]:
        problems = []
        for first, others in self._kinds.values():
            shown = ", ".join(others[:SHOWN_PLACES])
            rest = len(others) - SHOWN_PLACES
            places = f"{shown} and {rest:,} more" if rest > 0 else shown
            what = "files" if first.line is None else "lines"
            same = f"; the same mistake is in {len(others):,} other {what}: {places}" if others else ""
            problems.append(replace(first, message=f"{first.message}{same}"))
        if len(self._kinds) >= MAX_KINDS or self._count >= MAX_MISTAKES:
            last = problems[-1]
            stopped = f"reading stopped after {self._count:,} mistakes"
            problems[-1] = replace(last, hint=f"{last.hint}; {stopped}" if last.hint else stopped)
        return problems


def bad_document(
    file: Path, line: int | None, got: str, hint: str, *, sample: str = "", record: str = ""
) -> BadDocument:
    """Return the error for a document. `record` precedes the mistake, and `sample` shows the start of the document."""
    name = f"{record}: " if record else ""
    message = f"{name}{got}: {excerpt(sample)}" if sample else f"{name}{got}"
    problem = Problem(BAD_DOCUMENT, message, path="data.path", hint=hint, file=str(file), line=line)
    return BadDocument(problem, _VARIES.sub("N", got))


def excerpt(text: str, max_chars: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def decode(content: bytes, file: Path, line: int | None, start: int) -> str:
    """Decode UTF-8, removing the byte order mark; `start` is the byte offset of `content` in the file."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"byte {start + error.start} (0x{content[error.start]:02x}) is not UTF-8"
        hint = "convert it (iconv -f LATIN1 -t UTF-8), or exclude it with a glob: data.path='FOLDER/**/*.txt'"
        raise bad_document(file, line, got, hint) from error


# Read the rows of Parquet and Arrow tables. This requires the extra `hf`.


ROWS_AT_ONCE = 1024


def table_rows(file: Path, wanted: Sequence[str], hint: str) -> Iterator[Mapping[str, object]]:
    """Yield rows containing only the columns in `wanted` that are present in the file. Raises RecipeError with `hint`
    if the file has none of these columns, and MachineError if the file is damaged."""
    import pyarrow

    check_regular(file)
    try:
        batches = _parquet(file, wanted, hint) if file.suffix == ".parquet" else _arrow(file, wanted, hint)
        for batch in batches:
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise MachineError(f"{file} cannot be read: {error}", code="unreadable_file") from error


def _parquet(file: Path, wanted: Sequence[str], hint: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as content:
        columns = _present(file, content.schema_arrow.names, wanted, hint)
        yield from content.iter_batches(ROWS_AT_ONCE, columns=columns)


def _arrow(file: Path, wanted: Sequence[str], hint: str) -> Iterator[Any]:
    """Yield batches from the stream format (written by `datasets`) or the file format, which ends with an index."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        # Both formats have the same suffix, but only the file format starts with this word.
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        columns = _present(file, reader.schema.names, wanted, hint)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield batch.select(columns)


def _present(file: Path, names: Sequence[str], wanted: Sequence[str], hint: str) -> list[str]:
    present = [name for name in wanted if name in names]
    if not present:
        message = f"no column `{wanted[0]}`; it has: {excerpt(', '.join(names), 200)}"
        raise RecipeError(Problem(BAD_DOCUMENT, message, "data.path", hint, file=str(file)))
    return present


# Read the records of JSON files: one object per line, or an array of objects in a file.


MAX_ARRAY_BYTES = 4 * 2**30
"""Maximum size of a file with a JSON array. The array is read all at once, and takes several times its size in
memory."""
_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\S)")


JsonRecord = tuple[int, str, JsonObject]
"""(first line, name, fields). Lines are counted from 1. The name, such as `record 7`, is empty except in arrays, whose
records may share a line."""


def json_records(file: Path, shape: str, mistakes: Mistakes) -> Iterator[JsonRecord]:
    """Yield the objects in a file that is a single array or has one object per line. `shape`: the required form of
    each, for messages."""
    try:
        with open_regular(file) as opened:
            first = _FIRST.match(opened.read(64 * 2**10))
    except OSError as error:
        raise cannot_read(file, error) from error
    if first is not None and first[1] == b"[":
        try:
            for number, (line, item) in enumerate(parse_items(_whole_text(file)), 1):
                name = f"record {number}"
                with mistakes.passing_over():
                    if not isinstance(item, dict):
                        sample = json_text(item, indent=None)
                        raise bad_document(file, line, "not a JSON object", shape, sample=sample, record=name)
                    yield line, name, item
        except JsonArrayError as error:
            with mistakes.passing_over():
                raise bad_document(file, error.line, f"not a JSON array of objects: {error}", "") from error
    else:
        yield from json_lines(file, shape, mistakes)


def json_lines(file: Path, shape: str, mistakes: Mistakes) -> Iterator[JsonRecord]:
    """Yield the objects in the lines, numbered from 1; blank lines are skipped. `shape`: the required form of a line,
    for messages."""
    try:
        with open_regular(file) as lines:
            start = 0
            for number, line in enumerate(lines, 1):
                if line.strip():
                    with mistakes.passing_over():
                        yield number, "", _parse(decode(line, file, number, start), file, number, shape)
                start += len(line)
    except OSError as error:
        raise cannot_read(file, error) from error


def _parse(line: str, file: Path, number: int, shape: str) -> JsonObject:
    try:
        record = parse_json(line)
    except ValueError as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise bad_document(file, number, f"not JSON ({why})", shape, sample=line) from error
    if not isinstance(record, dict):
        raise bad_document(file, number, "not a JSON object", shape, sample=line)
    return record


def _whole_text(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            content = opened.read(MAX_ARRAY_BYTES + 1)
    except OSError as error:
        raise cannot_read(file, error) from error
    if len(content) > MAX_ARRAY_BYTES:
        got = f"a JSON array of more than {format_bytes(MAX_ARRAY_BYTES)}, which is read as a whole"
        raise bad_document(file, None, got, f"write one object per line: jq -c '.[]' {file.name} > {file.stem}.jsonl")
    return decode(content, file, None, 0)
