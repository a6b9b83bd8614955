"""Read the records of JSON files: one object a line, or an array of objects in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import open_regular, parse_json
from trainspec_cli.core.reading.json_array import JsonArrayError, parse_items
from trainspec_cli.core.units import format_bytes
from trainspec_cli.data.corpus.mistakes import Mistakes, bad_document, decode
from trainspec_cli.data.corpus.source_files import cannot_read
from trainspec_cli.recipe.json_text import json_text

MAX_ARRAY_BYTES = 4 * 2**30
"""An array is read whole, which takes some times its size of memory."""
_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\S)")


@dataclass(frozen=True)
class JsonRecord:
    fields: JsonObject
    line: int
    """The line that it begins in, from 1."""
    name: str = ""
    """`record 7` in an array, whose records may share a line."""


def json_records(file: Path, shape: str, mistakes: Mistakes) -> Iterator[JsonRecord]:
    """Yield the objects of a file that is one array, or has an object a line. `shape` says what each must be."""
    if _is_array(file):
        try:
            for number, (line, item) in enumerate(parse_items(_whole_text(file)), 1):
                name = f"record {number}"
                with mistakes.passing_over():
                    if not isinstance(item, dict):
                        sample = json_text(item, indent=None)
                        raise bad_document(file, line, "not a JSON object", shape, sample=sample, record=name)
                    yield JsonRecord(item, line, name)
        except JsonArrayError as error:
            with mistakes.passing_over():
                raise bad_document(file, error.line, f"not a JSON array of objects: {error}", "") from error
    else:
        yield from json_lines(file, shape, mistakes)


def _is_array(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            first = _FIRST.match(opened.read(64 * 2**10))
    except OSError as error:
        raise cannot_read(file, error) from error
    return first is not None and first[1] == b"["


def json_lines(file: Path, shape: str, mistakes: Mistakes) -> Iterator[JsonRecord]:
    """Yield the objects of lines numbered from 1; blank ones are skipped. `shape` says what a line must be."""
    try:
        with open_regular(file) as lines:
            start = 0
            for number, line in enumerate(lines, 1):
                if line.strip():
                    with mistakes.passing_over():
                        yield JsonRecord(_parse(decode(line, file, number, start), file, number, shape), number)
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
        got = f"a JSON array of more than {format_bytes(MAX_ARRAY_BYTES)}, which is read whole"
        raise bad_document(file, None, got, f"write an object a line: jq -c '.[]' {file.name} > {file.stem}.jsonl")
    return decode(content, file, None, 0)
