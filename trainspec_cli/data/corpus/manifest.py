"""`manifest.json`: the content of a token folder, with sizes and digests to check it by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.reading.files import read_object
from trainspec_cli.data.corpus.source_files import source_of
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import read_record

SCHEMA = 1
"""Incremented whenever the files, their meaning or their making change; cached folders are then prepared again."""

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
SPLITS: tuple[Split, ...] = ("train", "heldout")
Split = Literal["train", "heldout"]
Dtype = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class Shard:
    """One file of little-endian token ids."""

    file: str
    """A name in the folder, or an absolute path for files of another program."""
    tokens: int
    sha256: str
    """Empty for a file of another program."""
    offset_bytes: int = 0
    """Offset of the ids in the file (0 in files written here)."""


@dataclass(frozen=True)
class SplitSummary:
    tokens: int
    """Includes an end-of-document token after each document."""
    bytes: int
    """Size of the text as UTF-8."""
    documents: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardManifest:
    schema: int
    dtype: Dtype
    vocab_size: int
    """The tokenizer's size; ids are below it."""
    vocab_size_asked: int
    """Larger than `vocab_size` when the text was too small to fill it."""
    end_of_document_id: int
    tokenizer_sha256: str
    """Empty if the ids came without a tokenizer."""
    source: dict[str, str | int | None]
    """Source of the text, for information."""
    heldout_fraction: float
    xz_bits_per_byte: float | None
    """Size of the held-out text under `xz -9e`; null if Python was built without lzma."""
    train: SplitSummary
    heldout: SplitSummary
    learns_parts: bool = False
    """True if only some tokens of each document are learnt; an index of documents then lies beside the shards."""
    own_tokenizer_sha256: str = ""
    """The digest of the user's own tokenizer, where it made the tokens: its code is not kept in the folder."""

    @property
    def any_tokenizer_sha256(self) -> str:
        """Return what identifies the tokenizer; empty if the ids came without one."""
        return self.tokenizer_sha256 or self.own_tokenizer_sha256

    def split(self, name: Split) -> SplitSummary:
        return {"train": self.train, "heldout": self.heldout}[name]

    @property
    def bytes_per_token(self) -> float:
        """Mean over both splits."""
        return (self.train.bytes + self.heldout.bytes) / max(1, self.train.tokens + self.heldout.tokens)


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    (folder / MANIFEST_FILE).write_text(json_text(to_plain(manifest)) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> ShardManifest:
    """Read a folder's manifest. Raises RecipeError if there is none, MachineError if it is damaged."""
    file = folder / MANIFEST_FILE
    if not file.is_file():
        missing = "is a file" if folder.exists() else "does not exist"
        got = "holds no manifest.json" if folder.is_dir() else missing
        message = f"{folder.absolute()} {got}: not a token folder"
        source = source_of(folder)
        given = folder if folder.is_file() else "FILES"
        hint = f"make one: trainspec data prepare --source {source} --path {given} --output FOLDER"
        raise RecipeError(Problem("missing_file", message, "data.path", hint))
    try:
        fields = read_object(file)
        if fields["schema"] != SCHEMA:
            raise _unreadable(folder, f"has schema {fields['schema']}, this version reads {SCHEMA}")
        manifest = read_record(ShardManifest, fields)
        # The engine maps the shards by these figures without reading them, so a wrong one would train on other tokens.
        if manifest.dtype not in get_args(Dtype):
            raise ValueError(f"its ids are of type {manifest.dtype}")
        for name in SPLITS:
            split = manifest.split(name)
            counts = [split.tokens, split.bytes, split.documents, *(shard.tokens for shard in split.shards)]
            counts += [shard.offset_bytes for shard in split.shards] + [manifest.vocab_size]
            if not all(0 <= count < 2**53 for count in counts):
                raise ValueError(f"{name} has a count below 0, or larger than any disk")
            if sum(shard.tokens for shard in split.shards) != split.tokens:
                raise ValueError(f"the shards of {name} do not hold its {split.tokens:,} tokens")
            for shard in split.shards:
                if "\0" in shard.file or len(shard.file) > 4096:
                    raise ValueError(f"a shard of {name} has a name that no file can have")
        return manifest
    except (ValueError, KeyError) as error:
        raise _unreadable(folder, f"is damaged ({type(error).__name__}: {error})") from error


def _unreadable(folder: Path, what: str) -> MachineError:
    return MachineError(f"{folder / MANIFEST_FILE} {what}", code="bad_token_folder", hint=prepare_again(folder))


def prepare_again(folder: Path) -> str:
    return f"remove it and prepare it again: rm -r {folder}"
