"""A run's training and evaluation text: one token folder, or several with one tokenizer under a `collection.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.cache import cache_dir, make_cache
from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.reading.files import expand, read_object
from trainspec_cli.data.corpus.manifest import TOKENIZER_FILE
from trainspec_cli.data.corpus.publish import publishing
from trainspec_cli.data.corpus.rows import JoinedRows, Packed, Rows, open_rows
from trainspec_cli.data.corpus.samples import Mixed, SampleOrder, Shuffled
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.data import DataSpec
from trainspec_cli.recipe.records import read_record

COLLECTION = "collection.json"


@dataclass(frozen=True)
class CollectionPart:
    """A training text as collection.json names it."""

    folder: str
    weight: float


@dataclass(frozen=True)
class CollectionRecord:
    """The content of collection.json: absolute paths of token folders, by name."""

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
    """Bytes of UTF-8, or 0 if unknown."""


@dataclass(frozen=True)
class Collection:
    parts: Mapping[str, CorpusPart]
    """The training texts by name; a single one is named ""."""
    validation: Mapping[str, TokenFolder]

    @classmethod
    def open(cls, folder: Path | str) -> Collection:
        """Open a token folder or a collection. Raises RecipeError and MachineError as `TokenFolder.open` does."""
        file = expand(folder) / COLLECTION
        if not file.is_file():
            return cls({"": CorpusPart(TokenFolder.open(folder), 1.0)}, {})
        record = _read(file)
        parts = {name: CorpusPart(TokenFolder.open(part.folder), part.weight) for name, part in record.parts.items()}
        return cls(parts, {name: TokenFolder.open(path) for name, path in record.validation.items()})

    @property
    def main(self) -> TokenFolder:
        """The first part; all parts share its tokenizer."""
        return next(iter(self.parts.values())).folder

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.main.path if (self.main.path / TOKENIZER_FILE).is_file() else None

    def check(self, data: DataSpec, vocab_size: int) -> list[str]:
        """Return warnings about how `data` is read. Raises RecipeError if token ids exceed the embedding's rows."""
        ids = self.main.manifest.vocab_size
        if ids > vocab_size:
            message = f"the tokenizer has {ids:,} ids, and the model {vocab_size:,} rows (`model.vocab_size`)"
            given = [key for key in ("path", "code") if getattr(data.tokenizer, key)]
            path = f"data.tokenizer.{given[0]}" if given else "data.path"
            raise RecipeError(Problem("out_of_range", message, path, f"type model.vocab_size={ids}"))
        packed = [open_rows(part.folder, "train", data) for part in self.parts.values()]
        cut = sum(rows.cut for rows in packed if isinstance(rows, Packed))
        silenced = sum(rows.silenced for rows in packed if isinstance(rows, Packed))
        if not cut:
            return []
        note = f"{cut:,} conversations are longer than data.seq_len={data.seq_len:,}, and lose their ends"
        return [f"{note}; {silenced:,} of them lose every reply, and are left out" if silenced else note]

    def order(self, data: DataSpec, seed: int) -> SampleOrder:
        """Return the stream of training samples. Raises RecipeError for a part that has none."""
        streams = [Shuffled(open_rows(part.folder, "train", data), seed) for part in self.parts.values()]
        for part, stream in zip(self.parts.values(), streams, strict=True):
            if not len(stream.source):  # a position has no sample to be mapped to
                message = f"{part.folder.path} has no training sample of data.seq_len={data.seq_len:,}"
                raise RecipeError(Problem("too_little_data", message, "data.seq_len", "choose another data.seq_len"))
        return streams[0] if len(streams) == 1 else Mixed(streams, [part.weight for part in self.parts.values()], seed)

    def evaluation_texts(self, data: DataSpec) -> dict[str, EvaluationText]:
        """Return the held-out split of each part and all of each validation set; empty ones are left out."""
        found = {
            name: EvaluationText(open_rows(part.folder, "heldout", data), part.folder.num_bytes("heldout"))
            for name, part in self.parts.items()
        }
        found |= {name: _whole(folder, data) for name, folder in self.validation.items()}
        return {name: text for name, text in found.items() if len(text.rows)}


def _whole(folder: TokenFolder, data: DataSpec) -> EvaluationText:
    rows = JoinedRows([open_rows(folder, split, data, keeps_rest=True) for split in ("train", "heldout")])
    return EvaluationText(rows, folder.num_bytes("train") + folder.num_bytes("heldout"))


def write_collection(parts: Mapping[str, tuple[Path, float]], validation: Mapping[str, Path]) -> Path:
    """Write a collection into the cache and return its folder. Raises RecipeError if the tokenizers differ."""
    check_tokenizers([folder for folder, _ in parts.values()] + list(validation.values()))
    record = CollectionRecord(
        parts={name: CollectionPart(str(folder.absolute()), weight) for name, (folder, weight) in parts.items()},
        validation={name: str(folder.absolute()) for name, folder in validation.items()},
    )
    text = json_text(to_plain(record)) + "\n"
    folder = cache_dir() / "tokens" / f"collection-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not folder.exists():
        make_cache()
        with suppress(FileExistsError), publishing(folder) as temporary:  # unless another process made it meanwhile
            (temporary / COLLECTION).write_text(text, encoding="utf-8")
    return folder


def check_tokenizers(folders: list[Path]) -> None:
    """Raises RecipeError where token folders were made with different tokenizers."""
    digests = {TokenFolder.open(folder).manifest.any_tokenizer_sha256: folder for folder in folders}
    if len(digests) > 1:
        message = f"{' and '.join(map(str, digests.values()))} were made with different tokenizers"
        hint = "type data.tokenizer.path=FILE to use one for all; prepare token folders made with another one again"
        raise RecipeError(Problem("contradiction", message, "data.tokenizer.path", hint))


def _read(file: Path) -> CollectionRecord:
    try:
        record = read_record(CollectionRecord, read_object(file))
        if not record.parts:
            raise ValueError("it has no parts")
        return record
    except ValueError as error:
        message = f"{file} is damaged: {error}"
        raise MachineError(message, code="bad_token_folder", hint=f"remove it: rm -r {file.parent}") from error
