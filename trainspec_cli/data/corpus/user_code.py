"""User-defined code for data: sources of documents (`data.source=FILE.py:NAME`) and tokenizers. A source is called only
once, and its documents are written to a file, because preparation reads the text three times."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trainspec_cli.core.errors import Problem, RecipeError, WorkerError
from trainspec_cli.data.corpus.records import excerpt
from trainspec_cli.data.corpus.samples import hold_out
from trainspec_cli.data.corpus.shards import (
    SCHEMA,
    Dtype,
    ShardManifest,
    ShardWriter,
    write_manifest,
)
from trainspec_cli.data.corpus.sources import check_encodable
from trainspec_cli.recipe.keys.run import DataSpec
from trainspec_cli.recipe.records import canonical_json
from trainspec_cli.recipe.user_code import (
    SOURCE,
    TOKENIZER,
    Extension,
    arguments,
    find,
    load,
    source_sha256,
    user_code_errors,
)
from trainspec_cli.recipe.user_code import source_files as files_of

ALLOWED = "expected text, {'text': text} or a list of token ids"
ID_TYPE: Dtype = "uint32"
MAX_ID = 2**31 - 1
TextWriter = Callable[[DataSpec, Path], None]
"""A function that tokenises a JSON Lines file, given the settings for reading it and the file."""


@dataclass(frozen=True)
class OwnDocument:
    """One document, either as text or as ids."""

    number: int
    """The document's number, counted from 1."""
    text: str | None = None
    ids: np.ndarray | None = None


def source_files(data: DataSpec) -> list[Path]:
    """Return the source files of the code, to the extent that they can be read."""
    return files_of(find(SOURCE.named(data.source, data.options)[0]))


def source_facts(data: DataSpec) -> dict[str, object]:
    """Return everything that the prepared data depends on: the code's digest, its options, and the field that is
    read."""
    files = [source_sha256(file) for file in source_files(data)]
    name = data.source.rpartition(":")[2]
    return {"name": name, "code": files, "options": data.options, "text_field": data.text_field}


def write_own(data: DataSpec, folder: Path, write_text: TextWriter) -> None:
    """Write the documents that the code yields to `folder`, as tokens. `write_text` tokenises a JSON Lines file. Raises
    RecipeError for exceptions in the code, and for invalid documents."""
    (extension,) = SOURCE.named(data.source, data.options)
    documents = _limited(_documents(extension, data), data.max_bytes)
    first = next(documents, None)
    if first is None:
        raise RecipeError(Problem("empty_data", f"`data.source`: {data.source} yielded no document", "data.source"))
    every = chain([first], documents)
    if first.text is None:
        _write_ids(extension, data, every, folder)
        return
    aside = folder / "documents.jsonl"
    has_text = False
    with aside.open("w", encoding="utf-8") as file:
        for document in every:
            if document.text is None:
                raise _mixed(extension, document)
            has_text = has_text or bool(document.text)
            file.write(json.dumps({"text": document.text}, allow_nan=False) + "\n")
    if not has_text:
        message = f"`{extension.path}`: all documents of {data.source} are empty"
        raise RecipeError(Problem("empty_data", message, extension.path, "yield text"))
    write_text(replace(data, source="jsonl", path=str(aside), text_field="text"), aside)
    aside.unlink()


def _documents(extension: Extension, data: DataSpec) -> Iterator[OwnDocument]:
    call = load(extension)
    number = 0
    with user_code_errors(extension, "when it was called", RecipeError):
        made = call(**data.options)
    if not isinstance(made, Iterable) or isinstance(made, (str, bytes, Mapping)):
        message = f"`{extension.path}`: {extension.text} returned {type(made).__name__}; expected documents"
        raise RecipeError(Problem("wrong_type", message, extension.path, "yield documents one by one"))
    given: Iterator[Any] = iter(made)
    while True:
        number += 1
        with user_code_errors(extension, f"at document {number}", RecipeError):
            try:
                document = next(given)
            except StopIteration:
                return
        yield _read(extension, data, document, number)


def _read(extension: Extension, data: DataSpec, given: object, number: int) -> OwnDocument:
    value = given
    if isinstance(given, Mapping):
        if data.text_field not in given:
            fields = excerpt(", ".join(map(str, given))) or "none"
            raise _refuse(extension, number, f"has no field `{data.text_field}`; it has: {fields}")
        value = given[data.text_field]
    if isinstance(value, str):
        try:
            check_encodable(value, "it")
        except ValueError as error:
            raise _refuse(extension, number, f"cannot be written: {error}") from error
        return OwnDocument(number, text=value)
    ids = np.asarray(value) if isinstance(value, (list, tuple, np.ndarray)) else None
    if ids is None or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise _refuse(extension, number, f"is {excerpt(repr(given))}; {ALLOWED}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_ID:
        raise _refuse(extension, number, f"has ids from {ids.min()} to {ids.max()}; 0 to {MAX_ID} are allowed")
    return OwnDocument(number, ids=ids.astype(np.int64))


def _refuse(extension: Extension, number: int, what: str) -> RecipeError:
    message = f"`{extension.path}`: document {number} of {extension.text} {what}"
    return RecipeError(Problem("bad_document", message, extension.path, f"{ALLOWED} for each document"))


def _mixed(extension: Extension, document: OwnDocument) -> RecipeError:
    kinds = ("text", "token ids") if document.text is not None else ("token ids", "text")
    return _refuse(extension, document.number, f"is {kinds[0]}, but the first one is {kinds[1]}")


def _limited(documents: Iterable[OwnDocument], max_bytes: int | None) -> Iterator[OwnDocument]:
    """Yield documents until `max_bytes` of text are reached, so the code may be an infinite generator."""
    left_bytes = sys.maxsize if max_bytes is None else max_bytes
    for document in documents:
        yield document
        left_bytes -= len((document.text or "").encode())
        if left_bytes <= 0:
            return


def _write_ids(extension: Extension, data: DataSpec, documents: Iterable[OwnDocument], folder: Path) -> None:
    """Write the ids in the order in which the code yields them. Documents are held out by a hash of their ids. The text
    of the ids is unknown, because no tokenizer comes with them."""
    given = {
        "data.max_bytes": data.max_bytes is not None,
        "data.tokenizer.path": data.tokenizer.path is not None,
        "data.tokenizer.code": data.tokenizer.code != "",
    }
    for path in (path for path, is_given in given.items() if is_given):
        message = f"`{path}` is set, but {extension.text} yields token ids, whose text is unknown"
        raise RecipeError(Problem("unsupported", message, path, f"leave it out: ~{path}"))
    aside = folder / "documents.bin"
    lengths = list[int]()
    names = list[str]()
    largest = 0
    with aside.open("wb") as file:
        for document in documents:
            if document.ids is None:
                raise _mixed(extension, document)
            content = document.ids.astype("<u4").tobytes()
            file.write(content)
            lengths.append(len(document.ids))
            names.append(hashlib.sha256(content).hexdigest())
            largest = max(largest, int(document.ids.max(initial=0)))
    chosen = hold_out(names, data.heldout_fraction)
    is_heldout = [name in chosen for name in names]
    if not chosen:  # if all documents are equal, the end of the last one is held out
        rest = min(max(round(lengths[-1] * data.heldout_fraction), 1), lengths[-1])
        lengths[-1:], is_heldout[-1:] = [lengths[-1] - rest, rest], [False, True]
    every = np.memmap(aside, dtype="<u4", mode="r")
    start = 0
    with ShardWriter(folder, "train", ID_TYPE) as train, ShardWriter(folder, "heldout", ID_TYPE) as heldout:
        for length, held in zip(lengths, is_heldout, strict=True):
            writer = heldout if held else train
            writer.append(every[start : start + length], text_bytes=0, documents=1)  # type: ignore[arg-type]
            start += length
        summaries = {"train": train.finish(), "heldout": heldout.finish()}
    aside.unlink()
    manifest = ShardManifest(
        schema=SCHEMA,
        dtype=ID_TYPE,
        vocab_size=largest + 1,
        vocab_size_asked=largest + 1,
        end_of_document_id=-1,
        tokenizer_sha256="",
        source={"source": data.source},
        heldout_fraction=data.heldout_fraction,
        xz_bits_per_byte=None,
        train=summaries["train"],
        heldout=summaries["heldout"],
    )
    write_manifest(folder, manifest)


# A user-defined tokenizer (`data.tokenizer.code=FILE.py:NAME`): the user's code converts text to token ids and back. A
# token folder stores only its digest, not its code. Text is decoded by the tokenizer named in the recipe.


TRIAL_TEXT = "Tokens, and back: 3 + 4 = 7.\n"
LARGEST_VOCABULARY = 2**31


class OwnTokenizer:
    """Calls the user's code and checks its results. Errors are RecipeErrors before a run has started, and WorkerErrors
    afterwards."""

    def __init__(self, data: DataSpec, error: type[RecipeError | WorkerError] = RecipeError):
        (self._extension,) = TOKENIZER.named(data.tokenizer.code, data.tokenizer.options)
        self._error = error
        call = load(self._extension)
        with user_code_errors(self._extension, "when the tokenizer was created", error):
            self._inner: Any = call(**arguments(data.tokenizer.options))
        self.vocab_size = self._number("vocab_size", LARGEST_VOCABULARY)
        self.end_of_document = self._number("end_of_document", self.vocab_size - 1)
        self.decode(self.encode(TRIAL_TEXT))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, without an end-of-document token."""
        with user_code_errors(self._extension, "in `encode`", self._error):
            ids = [int(one) for one in self._inner.encode(text)]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(one for one in ids if not 0 <= one < self.vocab_size)
            raise self._refuse(f"returns the id {wrong}, but has a `vocab_size` of {self.vocab_size}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        with user_code_errors(self._extension, "in `decode`", self._error):
            text = self._inner.decode(list(ids))
        if not isinstance(text, str):
            raise self._refuse(f"decodes to {type(text).__name__}; expected text")
        return text

    def _number(self, name: str, largest: int) -> int:
        value = getattr(self._inner, name, None)
        if not isinstance(value, int) or not 0 <= value <= largest:
            got = "no" if value is None else f"{value!r} as"
            raise self._refuse(f"has {got} `{name}`; expected a whole number from 0 to {largest}")
        return value

    def _refuse(self, what: str) -> RecipeError | WorkerError:
        message = f"`{self._extension.path}`: {self._extension.text} {what}"
        hint = "a tokenizer has vocab_size, end_of_document (an id), encode(text) and decode(ids)"
        return self._error(Problem("own_code", message, self._extension.path, hint))


def tokenizer_sha256(data: DataSpec) -> str:
    """Return the identity of a user-defined tokenizer: the digest of its name, code and options."""
    (extension,) = TOKENIZER.named(data.tokenizer.code, data.tokenizer.options)
    digests = [source_sha256(file) for file in files_of(find(extension))]
    facts: dict[str, object] = {
        "name": extension.text.rpartition(":")[2],
        "code": " ".join(digests) or extension.text,  # compiled code has no readable source
        "options": data.tokenizer.options,
    }
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()
