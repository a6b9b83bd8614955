"""Read documents from each raw source: Python's standard library, text, JSON Lines, tables and conversations.

The order is fixed (by path, then by line), so the same files always result in the same documents. Reading tables
requires the extra `hf`."""

from __future__ import annotations

import hashlib
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.node import cache_dir, make_cache
from trainspec_cli.core.reading.files import expand, open_regular, read_object
from trainspec_cli.data.corpus.chat import (
    ANY_SHAPE,
    COLUMNS,
    ChatFormat,
    Conversation,
    FormatError,
    Record,
    find_format,
    format_in_file,
    parse_record,
    template_of,
)
from trainspec_cli.data.corpus.records import (
    Mistakes,
    bad_document,
    decode,
    excerpt,
    json_lines,
    json_records,
    table_rows,
)
from trainspec_cli.data.corpus.rows import JoinedRows, Packed, Rows, open_rows
from trainspec_cli.data.corpus.samples import Mixed, SampleOrder, Shuffled
from trainspec_cli.data.corpus.shards import TOKENIZER_FILE, TokenFolder, publishing
from trainspec_cli.data.corpus.source_files import TABLE_SUFFIXES, cannot_read
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import DataSpec
from trainspec_cli.recipe.records import read_record, to_plain

CHOOSE_FIELD = "set data.text_field=NAME to choose one"


@dataclass(frozen=True)
class Document:
    name: str
    """The origin of the document: the file, or `file:line`."""
    text: str
    """The text, which is never empty and can always be encoded as UTF-8."""
    conversation: Conversation | None = None
    """The spans to train on, if only part of the text is trained on."""


def documents(data: DataSpec, files: list[Path]) -> Iterator[Document]:
    """Yield every non-empty document in `files`. The document in which `max_bytes` is reached is truncated there.

    Raises a RecipeError that lists all kinds of mistakes, at the end or as soon as there are `MAX_MISTAKES` of them,
    and MachineError for a file that cannot be read."""
    mistakes = Mistakes()
    left_bytes = sys.maxsize if data.max_bytes is None else data.max_bytes
    for document in chain.from_iterable(_read(file, data, mistakes) for file in files):
        text = document.text
        if 4 * len(text) > left_bytes:  # a character takes at most four bytes in UTF-8
            text = text.encode()[:left_bytes].decode(errors="ignore")
        left_bytes -= len(text.encode())
        if text:
            yield replace(document, text=text)
        if len(text) < len(document.text) or left_bytes == 0:
            break
    mistakes.check()


def _read(file: Path, data: DataSpec, mistakes: Mistakes) -> Iterator[Document]:
    """Yield the documents of one file."""
    if data.source == "python_stdlib":
        try:
            with tokenize.open(file) as source:  # decodes the file with the encoding that it declares
                yield Document(str(file), source.read())
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            raise bad_document(file, None, f"not in the encoding it declares: {error}", "") from error
        except OSError as error:
            raise cannot_read(file, error) from error
    elif data.source == "text":
        try:
            with open_regular(file) as opened:
                content = opened.read()
        except OSError as error:
            raise cannot_read(file, error) from error
        with mistakes.passing_over():
            yield Document(str(file), decode(content, file, None, 0))
    elif data.source == "chat":
        yield from _read_chat(file, data, mistakes)
    else:
        records: Iterable[tuple[int, Mapping[str, object]]]  # (line or row, record)
        if data.source == "jsonl":
            shape = f'each line must be one JSON object, such as {{"{data.text_field}": "..."}}'
            records = ((line, record) for line, _, record in json_lines(file, shape, mistakes))
        else:
            records = enumerate(table_rows(file, [data.text_field], CHOOSE_FIELD), 1)
        for number, record in records:
            with mistakes.passing_over():
                yield Document(f"{file}:{number}", _text_of(record, file, number, data))


def _read_chat(file: Path, data: DataSpec, mistakes: Mistakes) -> Iterator[Document]:
    """Yield one conversation per record, rendered by its template. The first record with a recognised format determines
    the format of all records."""
    find = partial(template_of, data.tokenizer.path, data.chat_template)
    first: ChatFormat | None = None
    records: Iterable[tuple[int, str, Record]]  # (line or row, the record's name or "", record)
    if file.suffix in TABLE_SUFFIXES:
        records = ((number, "", row) for number, row in enumerate(table_rows(file, COLUMNS, ANY_SHAPE), 1))
    else:
        records = json_records(file, ANY_SHAPE, mistakes)
    for number, name, record in records:
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


def _text_of(record: Mapping[str, object], file: Path, number: int, data: DataSpec) -> str:
    """Return the text field of one line or row."""
    if data.text_field not in record:
        # If the first record does not have the field, the entire file has another format, and all other records would
        # have the same mistake.
        fields = excerpt(", ".join(map(str, record)), 200) or "none"
        try:
            hint = f"set data=chat: these are conversations ({find_format(record)})"
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
    """Raise ValueError for text that cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} contains half a surrogate pair, \\u{ord(text[error.start]):04x}") from error


READ_HERE = ("python_stdlib", "text", "jsonl", "parquet", "arrow", "chat")
"""The sources whose documents this module reads."""


# A run's training and evaluation text: one token folder, or several with the same tokenizer under a `collection.json`.


COLLECTION = "collection.json"


@dataclass(frozen=True)
class CollectionPart:
    """An entry of collection.json: one training text."""

    folder: str
    weight: float


@dataclass(frozen=True)
class CollectionRecord:
    """The content of collection.json: absolute paths of token folders by name."""

    parts: dict[str, CollectionPart]
    validation: dict[str, str]


@dataclass(frozen=True)
class CorpusPart:
    folder: TokenFolder
    weight: float


@dataclass(frozen=True)
class EvaluationText:
    rows: Rows
    bytes: int
    """Size in UTF-8 bytes; 0 if unknown."""


@dataclass(frozen=True)
class Collection:
    parts: Mapping[str, CorpusPart]
    """The training texts by name. A single text has the name ""."""
    validation: Mapping[str, TokenFolder]

    @classmethod
    def open(cls, folder: Path | str) -> Collection:
        """Open a token folder or a collection. Raises RecipeError and MachineError in the same cases as
        `TokenFolder.open`."""
        file = expand(folder) / COLLECTION
        if not file.is_file():
            return cls({"": CorpusPart(TokenFolder.open(folder), 1.0)}, {})
        try:
            record = read_record(CollectionRecord, read_object(file))
            if not record.parts:
                raise ValueError("it has no parts")
        except ValueError as error:
            message = f"{file} is damaged: {error}"
            raise MachineError(message, code="bad_token_folder", hint=f"remove it: rm -r {file.parent}") from error
        parts = {name: CorpusPart(TokenFolder.open(part.folder), part.weight) for name, part in record.parts.items()}
        return cls(parts, {name: TokenFolder.open(path) for name, path in record.validation.items()})

    @property
    def main(self) -> TokenFolder:
        """Return the first part, whose tokenizer all parts share."""
        return next(iter(self.parts.values())).folder

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.main.path if (self.main.path / TOKENIZER_FILE).is_file() else None

    def check(self, data: DataSpec, vocab_size: int) -> list[str]:
        """Return warnings about the way `data` will be read. Raises RecipeError if token ids exceed the number of rows
        in the embedding."""
        ids = self.main.manifest.vocab_size
        if ids > vocab_size:
            message = f"the tokenizer has {ids:,} ids, but the model has {vocab_size:,} rows (`model.vocab_size`)"
            given = [key for key in ("path", "code") if getattr(data.tokenizer, key)]
            path = f"data.tokenizer.{given[0]}" if given else "data.path"
            raise RecipeError(Problem("out_of_range", message, path, f"set model.vocab_size={ids}"))
        packed = [open_rows(part.folder, "train", data) for part in self.parts.values()]
        cut = sum(rows.cut for rows in packed if isinstance(rows, Packed))
        silenced = sum(rows.silenced for rows in packed if isinstance(rows, Packed))
        if not cut:
            return []
        note = f"{cut:,} conversations are longer than data.seq_len={data.seq_len:,} and are truncated"
        return [f"{note}; {silenced:,} of them lose every reply and are omitted" if silenced else note]

    def order(self, data: DataSpec, seed: int) -> SampleOrder:
        """Return the stream of training samples. Raises RecipeError for a part without samples."""
        streams = [Shuffled(open_rows(part.folder, "train", data), seed) for part in self.parts.values()]
        for part, stream in zip(self.parts.values(), streams, strict=True):
            if not len(stream.source):  # there are no samples at all
                message = f"{part.folder.path} has no training sample of data.seq_len={data.seq_len:,}"
                raise RecipeError(Problem("too_little_data", message, "data.seq_len", "choose another data.seq_len"))
        return streams[0] if len(streams) == 1 else Mixed(streams, [part.weight for part in self.parts.values()], seed)

    def evaluation_texts(self, data: DataSpec) -> dict[str, EvaluationText]:
        """Return the texts for evaluation, except empty ones: the held-out split of each part, and the complete
        validation sets."""
        found = {
            name: EvaluationText(open_rows(part.folder, "heldout", data), part.folder.num_bytes("heldout"))
            for name, part in self.parts.items()
        }
        for name, folder in self.validation.items():
            rows = JoinedRows([open_rows(folder, split, data, keeps_rest=True) for split in ("train", "heldout")])
            found[name] = EvaluationText(rows, folder.num_bytes("train") + folder.num_bytes("heldout"))
        return {name: text for name, text in found.items() if len(text.rows)}


def write_collection(parts: Mapping[str, tuple[Path, float]], validation: Mapping[str, Path]) -> Path:
    """Write a collection to the cache and return its folder. Raises RecipeError if the tokenizers differ."""
    check_tokenizers([folder for folder, _ in parts.values()] + list(validation.values()))
    record = CollectionRecord(
        parts={name: CollectionPart(str(folder.absolute()), weight) for name, (folder, weight) in parts.items()},
        validation={name: str(folder.absolute()) for name, folder in validation.items()},
    )
    text = json_text(to_plain(record)) + "\n"
    folder = cache_dir() / "tokens" / f"collection-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not folder.exists():
        make_cache()
        # Write the folder, unless another process has created it.
        with suppress(FileExistsError), publishing(folder) as temporary:
            (temporary / COLLECTION).write_text(text, encoding="utf-8")
    return folder


def check_tokenizers(folders: list[Path]) -> None:
    """Raise RecipeError if token folders were created with different tokenizers."""
    digests = {TokenFolder.open(folder).manifest.any_tokenizer_sha256: folder for folder in folders}
    if len(digests) > 1:
        message = f"{' and '.join(map(str, digests.values()))} were prepared with different tokenizers"
        hint = "set data.tokenizer.path=FILE to use one for all; prepare token folders made with another one again"
        raise RecipeError(Problem("contradiction", message, "data.tokenizer.path", hint))
