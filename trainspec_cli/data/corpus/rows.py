"""Rows: the tokens and targets of one training sample, whatever its source.

A row has `seq_len` tokens and as many targets. Text is cut into windows one after another; conversations are packed
whole, several into a row, and only the targets that are to be learnt count. Both are pure functions of the files on
disk, so a row's number identifies it.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.core.reading.files import check_regular, open_regular, parse_json
from trainspec_cli.core.reading.json_array import JsonArrayError, parse_items
from trainspec_cli.data.corpus.shards import Split, TokenFolder
from trainspec_cli.data.corpus.source_files import cannot_read
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import DataSpec

IGNORED = -1
"""The target value that is left out of the loss."""
PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class Row:
    """The arrays of a sample, each of `seq_len` (int64)."""

    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None = None
    """The document of each token, if attention must stay within documents."""


class Rows(Protocol):
    @property
    def seq_len(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Row: ...

    def counted(self, index: int) -> int:
        """Return the number of the row's targets that count, without reading it."""


def empty_row(seq_len: int, *, documents: bool) -> Row:
    """Return a row with nothing to learn, which fills up a batch."""
    tokens = np.zeros(seq_len, dtype=np.int64)
    targets = np.full(seq_len, IGNORED, dtype=np.int64)
    return Row(tokens, targets, np.full(seq_len, PADDING_DOCUMENT, dtype=np.int64) if documents else None)


@dataclass(frozen=True)
class Windows:
    """A split of text in windows without overlap; each one's last target is the next one's first token."""

    folder: TokenFolder
    split: Split
    seq_len: int
    keeps_rest: bool = False
    """If True, the rest at the end makes a padded row too: in evaluation every token counts."""
    masks_documents: bool = False

    def __len__(self) -> int:
        windows = max(0, self.folder.num_tokens(self.split) - 1) / self.seq_len
        return math.ceil(windows) if self.keeps_rest else math.floor(windows)

    def counted(self, index: int) -> int:
        return min(self.seq_len, self.folder.num_tokens(self.split) - 1 - index * self.seq_len)

    def read(self, index: int) -> Row:
        length = self.counted(index)
        text = self.folder.tokens(self.split, index * self.seq_len, length + 1)
        row = empty_row(self.seq_len, documents=self.masks_documents)
        row.tokens[:length], row.targets[:length] = text[:-1], text[1:]
        if row.documents is not None:
            ends = np.cumsum(text[:-1] == self.folder.manifest.end_of_document_id)
            row.documents[0], row.documents[1:length] = 0, ends[: length - 1]
        return row


class Packed:
    """Documents of a split, whole, several to a row: best fit, the longest first (arXiv:2404.10830).

    A document longer than a row loses its end; one with nothing left to learn is left out.
    """

    def __init__(self, folder: TokenFolder, split: Split, seq_len: int):
        self.folder = folder
        self.split = split
        self.seq_len = seq_len
        index = folder.documents(split)
        self._starts = index.starts
        whole = np.diff(index.starts) - 1
        self._lengths = np.minimum(whole, seq_len)
        """Targets per document: all its tokens but the first."""
        first_targets = index.starts[:-1] + 1
        before = index.learnt_before(first_targets)
        self._counts = index.learnt_before(first_targets + self._lengths) - before
        self._learnt = index
        self.cut = int((whole > seq_len).sum())
        """The number of documents that lost their end."""
        self.silenced = int(((self._counts == 0) & (index.learnt_before(first_targets + whole) > before)).sum())
        """The number of those that lost all that is to be learnt, and are left out."""

    @property
    def is_empty(self) -> bool:
        """Return True if no document has anything to learn within `seq_len`."""
        return not self._counts.any()

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The documents of each row."""
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []
        """(tokens left, row), sorted."""
        # Ties keep the order of the files, so that rows are the same on every machine.
        order = np.lexsort((np.arange(len(self._lengths)), -self._lengths))
        for document in (int(d) for d in order if self._counts[d] > 0):
            length = int(self._lengths[document])
            # The fullest row that still has room.
            fit = bisect.bisect_left(room, (length, -1))
            left, row = room.pop(fit) if fit < len(room) else (self.seq_len, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(document)
            if left > length:
                bisect.insort(room, (left - length, row))
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def counted(self, index: int) -> int:
        return int(self._counts[self._rows[index]].sum())

    def read(self, index: int) -> Row:
        row = empty_row(self.seq_len, documents=True)
        assert row.documents is not None
        filled = 0
        for number, document in enumerate(self._rows[index]):
            start = int(self._starts[document])
            length = int(self._lengths[document])
            span = slice(filled, filled + length)
            text = self.folder.tokens(self.split, start, length + 1)
            learnt = self._learnt.learnt(start + 1, length)
            row.tokens[span], row.targets[span] = text[:-1], np.where(learnt, text[1:], IGNORED)
            row.documents[span] = number
            filled += length
        return row


class JoinedRows:
    """The rows of several sources, one after another."""

    def __init__(self, sources: Sequence[Rows]):
        self._sources = [source for source in sources if len(source)]
        self._starts = np.cumsum([0, *map(len, self._sources)])
        self.seq_len = sources[0].seq_len

    def __len__(self) -> int:
        return int(self._starts[-1])

    def counted(self, index: int) -> int:
        source, within = self._locate(index)
        return source.counted(within)

    def read(self, index: int) -> Row:
        source, within = self._locate(index)
        return source.read(within)

    def _locate(self, index: int) -> tuple[Rows, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[number], index - int(self._starts[number])


def open_rows(folder: TokenFolder, split: Split, data: DataSpec, *, keeps_rest: bool | None = None) -> Rows:
    """Open a split as `data` asks for; by default `keeps_rest` holds for held-out text alone."""
    if folder.manifest.learns_parts:
        return Packed(folder, split, data.seq_len)
    rest = split == "heldout" if keeps_rest is None else keeps_rest
    return Windows(folder, split, data.seq_len, rest, data.masks_documents)


def first_text(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a row's first document, or of the whole row where all of it is learnt, and the mask of those
    that are targets; the first token, which nothing predicts, has the mask of the second."""
    within = np.ones(len(row.tokens), dtype=bool)
    if row.documents is not None and (row.targets == IGNORED).any():
        within = row.documents == row.documents[0]
    targets = row.targets[within]
    learnt = targets != IGNORED
    last = targets[-1:][learnt[-1:]]  # a last target that is left out is not known
    tokens = np.concatenate((row.tokens[within], last))
    return tokens, np.concatenate((learnt[:1], learnt))[: len(tokens)]


# Mistakes in documents: lines, rows and records that hold none, kept so that those after them are read too.


MAX_KINDS, MAX_MISTAKES = 20, 1000
"""Reading stops at this many kinds of mistakes, or this many mistakes: a file of another form has one in each line."""
SHOWN_PLACES = 5
BAD_DOCUMENT = "bad_document"
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")


class BadDocument(RecipeError):  # noqa: N818 - it names what is wrong, as the others do
    """A document cannot be read. `kind` is what it has in common with others that are wrong in the same way."""

    def __init__(self, problem: Problem, kind: str):
        super().__init__(problem)
        self.kind = kind


@dataclass
class _Kind:
    """All mistakes of one kind in one file: the first, and the places of the others."""

    first: Problem
    others: list[str] = field(default_factory=list)

    def as_problem(self) -> Problem:
        if not self.others:
            return self.first
        shown = ", ".join(self.others[:SHOWN_PLACES])
        rest = len(self.others) - SHOWN_PLACES
        places = f"{shown} and {rest:,} more" if rest > 0 else shown
        what = "files" if self.first.line is None else "lines"
        message = f"{self.first.message}; the same is wrong in {len(self.others):,} other {what}: {places}"
        return replace(self.first, message=message)


class Mistakes:
    """Lines, rows and files that hold no document, each kind of mistake once with all its places."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str | None, str], _Kind] = {}
        self._count = 0

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Keep what is wrong with one document, so that those after it are read too."""
        try:
            yield
        except BadDocument as error:
            (problem,) = error.problems
            self._count += 1
            key = (None if problem.line is None else problem.file, error.kind)
            if key in self._kinds:
                place = str(problem.file if problem.line is None else problem.line)
                self._kinds[key].others.append(place)
            else:
                self._kinds[key] = _Kind(problem)
            # A file of another form would otherwise be read to its end, with a mistake in each line.
            if len(self._kinds) >= MAX_KINDS or self._count >= MAX_MISTAKES:
                self.check()
        except RecipeError as error:  # not of one document alone
            raise RecipeError([*self._problems(), *error.problems]) from error

    def check(self) -> None:
        """Raise RecipeError where something was wrong."""
        if problems := self._problems():
            raise RecipeError(problems)

    def _problems(self) -> list[Problem]:
        problems = [kind.as_problem() for kind in self._kinds.values()]
        if len(self._kinds) >= MAX_KINDS or self._count >= MAX_MISTAKES:
            last = problems[-1]
            stopped = f"reading stopped after {self._count:,} mistakes"
            problems[-1] = replace(last, hint=f"{last.hint}; {stopped}" if last.hint else stopped)
        return problems


def bad_document(
    file: Path, line: int | None, got: str, hint: str, *, sample: str = "", record: str = ""
) -> BadDocument:
    """Return the error for a document; `record` names it in front of what is wrong, `sample` shows its beginning."""
    name = f"{record}: " if record else ""
    message = f"{name}{got}: {excerpt(sample)}" if sample else f"{name}{got}"
    problem = Problem(BAD_DOCUMENT, message, path="data.path", hint=hint, file=str(file), line=line)
    return BadDocument(problem, _VARIES.sub("N", got))


def excerpt(text: str, max_chars: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def decode(content: bytes, file: Path, line: int | None, start: int) -> str:
    """Decode UTF-8 without its byte order mark; `start` is the offset of `content` in the file, in bytes."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"byte {start + error.start} (0x{content[error.start]:02x}) is not UTF-8"
        hint = "convert it (iconv -f LATIN1 -t UTF-8), or leave it out by a glob: data.path='FOLDER/**/*.txt'"
        raise bad_document(file, line, got, hint) from error


# Read the rows of Parquet and Arrow tables. Needs extra `hf`.


ROWS_AT_ONCE = 1024


def table_rows(file: Path, wanted: Sequence[str], hint: str) -> Iterator[Mapping[str, object]]:
    """Yield rows with the columns of `wanted` that the file has.

    Raises RecipeError with `hint` if it has none, MachineError on damage.
    """
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
    """Yield batches of the stream format (which `datasets` writes) or of the file format, which ends in an index."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        # The suffix is the same for both formats; the file format alone begins with this word.
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


# Read the records of JSON files: one object a line, or an array of objects in one file.


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
                    yield JsonRecord(item, line, name)
        except JsonArrayError as error:
            with mistakes.passing_over():
                raise bad_document(file, error.line, f"not a JSON array of objects: {error}", "") from error
    else:
        yield from json_lines(file, shape, mistakes)


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
