"""All that a run reads and is judged on: one token folder, or several of one tokenizer under a `collection.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspec_cli.corpus.cache import cache_dir, make_cache
from trainspec_cli.corpus.manifest import TOKENIZER_FILE
from trainspec_cli.corpus.order import Mixed, SampleOrder, Shuffled
from trainspec_cli.corpus.publish import publishing
from trainspec_cli.corpus.rows import JoinedRows, Packed, Rows, open_rows
from trainspec_cli.corpus.shards import TokenFolder
from trainspec_cli.errors import MachineError, Problem, RecipeError
from trainspec_cli.reading.files import expand
from trainspec_cli.reading.json_file import check_field, read_object
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.recipe.data import DataSpec

COLLECTION = "collection.json"


@dataclass(frozen=True)
class CorpusPart:
    folder: TokenFolder
    weight: float


@dataclass(frozen=True)
class Judged:
    """A text to judge on."""

    rows: Rows
    bytes: int
    """0 where they are not known."""


@dataclass(frozen=True)
class Collection:
    parts: Mapping[str, CorpusPart]
    """What is trained on, by name; a single one has none."""
    validation: Mapping[str, TokenFolder]

    @classmethod
    def open(cls, folder: Path | str) -> Collection:
        """Raises RecipeError and MachineError as `TokenFolder.open`."""
        file = expand(folder) / COLLECTION
        if not file.is_file():
            return cls({"": CorpusPart(TokenFolder.open(folder), 1.0)}, {})
        told = _read(file)
        parts = {
            name: CorpusPart(TokenFolder.open(part["folder"]), part["weight"]) for name, part in told["parts"].items()
        }
        return cls(parts, {name: TokenFolder.open(path) for name, path in told["validation"].items()})

    @property
    def main(self) -> TokenFolder:
        """The first part, whose tokenizer is that of all."""
        return next(iter(self.parts.values())).folder

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.main.path if (self.main.path / TOKENIZER_FILE).is_file() else None

    def check(self, data: DataSpec, vocab_size: int) -> list[str]:
        """-> what should be known of how `data` is read. Raises RecipeError where ids have no row in the embedding."""
        ids = self.main.manifest.vocab_size
        if ids > vocab_size:
            message = f"the tokenizer has {ids:,} ids, and the model {vocab_size:,} rows (`model.vocab_size`)"
            path = "data.tokenizer.path" if data.tokenizer.path else "data.path"
            raise RecipeError(Problem("out_of_range", message, path, f"type model.vocab_size={ids}"))
        packed = [open_rows(part.folder, "train", data) for part in self.parts.values()]
        cut = sum(rows.cut for rows in packed if isinstance(rows, Packed))
        if not cut:
            return []
        return [f"{cut:,} conversations are longer than data.seq_len={data.seq_len:,}, and lose their ends"]

    def order(self, data: DataSpec, seed: int) -> SampleOrder:
        """The stream that is trained on."""
        streams = [Shuffled(open_rows(part.folder, "train", data), seed) for part in self.parts.values()]
        return streams[0] if len(streams) == 1 else Mixed(streams, [part.weight for part in self.parts.values()], seed)

    def judged(self, data: DataSpec) -> dict[str, Judged]:
        """What was held out of each part, and the validation sets whole; empty ones are left out."""
        found = {name: _heldout(part.folder, data) for name, part in self.parts.items()}
        found |= {name: _whole(folder, data) for name, folder in self.validation.items()}
        return {name: judged for name, judged in found.items() if len(judged.rows)}


def _heldout(folder: TokenFolder, data: DataSpec) -> Judged:
    return Judged(open_rows(folder, "heldout", data), folder.num_bytes("heldout"))


def _whole(folder: TokenFolder, data: DataSpec) -> Judged:
    rows = JoinedRows([open_rows(folder, split, data, keeps_rest=True) for split in ("train", "heldout")])
    return Judged(rows, folder.num_bytes("train") + folder.num_bytes("heldout"))


def write_collection(parts: Mapping[str, tuple[Path, float]], validation: Mapping[str, Path]) -> Path:
    """-> its folder in the cache. Raises RecipeError where the parts are not of one tokenizer."""
    _check_tokenizers([folder for folder, _ in parts.values()] + list(validation.values()))
    told = {
        "parts": {
            name: {"folder": str(folder.absolute()), "weight": weight} for name, (folder, weight) in parts.items()
        },
        "validation": {name: str(folder.absolute()) for name, folder in validation.items()},
    }
    text = json_text(told) + "\n"
    folder = cache_dir() / "tokens" / f"collection-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not folder.exists():
        make_cache()
        try:
            with publishing(folder) as temporary:
                (temporary / COLLECTION).write_text(text, encoding="utf-8")
        except FileExistsError:
            return folder  # another process made the same folder meanwhile
    return folder


def _check_tokenizers(folders: list[Path]) -> None:
    digests = {TokenFolder.open(folder).manifest.tokenizer_sha256: folder for folder in folders}
    if len(digests) > 1:
        message = f"{' and '.join(map(str, digests.values()))} are of different tokenizers"
        hint = "data.tokenizer.path=FILE names one for all; token folders of another must be prepared again"
        raise RecipeError(Problem("contradiction", message, "data.tokenizer.path", hint))


def _read(file: Path) -> dict[str, Any]:
    try:
        told = read_object(file, {"parts": dict, "validation": dict})
        for name, part in told["parts"].items():
            check_field(file, {name: part}, name, dict)
            check_field(file, part, "folder", str)
            check_field(file, part, "weight", float)
        for name in told["validation"]:
            check_field(file, told["validation"], name, str)
        if not told["parts"]:
            raise ValueError("it has no parts")
        return told
    except ValueError as error:
        message = f"{file} is damaged: {error}"
        raise MachineError(message, code="bad_token_folder", hint=f"remove it: rm -r {file.parent}") from error
