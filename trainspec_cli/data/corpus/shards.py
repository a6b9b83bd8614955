"""Token shards: little-endian files of at most 100M ids, written once and memory-mapped for reading.

Shards of conversations have a document index. `train_documents.npy` contains the position of each document's first
token, and the end of the last document (int64). `train_learnt.npy` contains one byte per token, which is 1 if the token
is trained on."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal, Self, get_args

import numpy as np

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.node import cannot_write
from trainspec_cli.core.reading.files import ANY_DAMAGE, expand, read_object
from trainspec_cli.data.corpus.source_files import source_of
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import read_record, to_plain

# `manifest.json`: the content of a token folder, with sizes and digests for checking it.


SCHEMA = 1
"""Version of the format, incremented when the files, their meaning or the way they are created change. Cached folders
are then prepared again."""

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
SPLITS: tuple[Split, ...] = ("train", "heldout")
Split = Literal["train", "heldout"]
Dtype = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class Shard:
    """One file of little-endian token ids."""

    file: str
    """A name in the folder, or an absolute path if the file belongs to another program."""
    tokens: int
    sha256: str
    """The file's SHA-256; empty if the file belongs to another program."""
    offset_bytes: int = 0
    """Byte offset of the ids in the file (0 in files written here)."""


@dataclass(frozen=True)
class SplitSummary:
    tokens: int
    """Number of tokens, including an end-of-document token after each document."""
    bytes: int
    """Size of the text in UTF-8."""
    documents: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ShardManifest:
    schema: int
    dtype: Dtype
    vocab_size: int
    """The size of the tokenizer's vocabulary; all ids are smaller."""
    vocab_size_asked: int
    """The requested vocabulary size. It is larger than `vocab_size` if the text was too small to fill the
    vocabulary."""
    end_of_document_id: int
    tokenizer_sha256: str
    """The digest of the tokenizer; empty if the ids came without one."""
    source: dict[str, str | int | None]
    """The source of the text, for information only."""
    heldout_fraction: float
    xz_bits_per_byte: float | None
    """Compressed size of the held-out text under `xz -9e`; null if Python was built without lzma."""
    train: SplitSummary
    heldout: SplitSummary
    learns_parts: bool = False
    """True if only some tokens of each document are trained on; if so, the folder has an index of documents."""
    own_tokenizer_sha256: str = ""
    """If a user-defined tokenizer produced the tokens, its digest. The tokenizer's code is not stored in the folder."""

    @property
    def any_tokenizer_sha256(self) -> str:
        """Return the identity of the tokenizer; empty if the ids came without one."""
        return self.tokenizer_sha256 or self.own_tokenizer_sha256

    def split(self, name: Split) -> SplitSummary:
        return self.train if name == "train" else self.heldout

    @property
    def bytes_per_token(self) -> float:
        """Return the mean text bytes per token over both splits."""
        return (self.train.bytes + self.heldout.bytes) / max(1, self.train.tokens + self.heldout.tokens)


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    (folder / MANIFEST_FILE).write_text(json_text(to_plain(manifest)) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> ShardManifest:
    """Read a folder's manifest. Raises RecipeError if it is missing, and MachineError if it is damaged."""
    file = folder / MANIFEST_FILE
    if not file.is_file():
        missing = "is a file" if folder.exists() else "does not exist"
        got = "has no manifest.json" if folder.is_dir() else missing
        message = f"{folder.absolute()} {got}: not a token folder"
        source = source_of(folder)
        given = folder if folder.is_file() else "FILES"
        hint = f"create one: trainspec data prepare --source {source} --path {given} --output FOLDER"
        raise RecipeError(Problem("missing_file", message, "data.path", hint))
    try:
        fields = read_object(file)
        if fields["schema"] != SCHEMA:
            raise _unreadable(folder, f"has schema {fields['schema']}, but this version reads {SCHEMA}")
        manifest = read_record(ShardManifest, fields)
        # The engine maps the shards without further checks, so a wrong number would lead to training on the wrong
        # tokens.
        if manifest.dtype not in get_args(Dtype):
            raise ValueError(f"its ids are of type {manifest.dtype}")
        for name in SPLITS:
            split = manifest.split(name)
            counts = [split.tokens, split.bytes, split.documents, *(shard.tokens for shard in split.shards)]
            counts += [shard.offset_bytes for shard in split.shards] + [manifest.vocab_size]
            if not all(0 <= count < 2**53 for count in counts):
                raise ValueError(f"{name} has a count that is negative or too large to fit on any disk")
            if sum(shard.tokens for shard in split.shards) != split.tokens:
                raise ValueError(f"the shards of {name} do not contain its {split.tokens:,} tokens")
            for shard in split.shards:
                if "\0" in shard.file or len(shard.file) > 4096:
                    raise ValueError(f"a shard of {name} has an invalid file name")
        return manifest
    except (ValueError, KeyError) as error:
        raise _unreadable(folder, f"is damaged ({type(error).__name__}: {error})") from error


def _unreadable(folder: Path, what: str) -> MachineError:
    return MachineError(f"{folder / MANIFEST_FILE} {what}", code="bad_token_folder", hint=prepare_again(folder))


def prepare_again(folder: Path) -> str:
    return f"remove it and prepare it again: rm -r {folder}"


MAX_SHARD_TOKENS = 100_000_000


def choose_dtype(vocab_size: int) -> Dtype:
    """Return the smallest integer type that can hold every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def _on_disk(dtype: Dtype) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")


class ShardWriter:
    """Writes the tokens of one split into `train_00000.bin`, `train_00001.bin`, ..."""

    def __init__(self, folder: Path, split: Split, dtype: Dtype, max_shard_tokens: int = MAX_SHARD_TOKENS):
        self._folder, self._split, self._dtype = folder, split, _on_disk(dtype)
        self._max_shard_tokens = max_shard_tokens
        self._shards: list[Shard] = []
        self._text_bytes = self._documents = 0
        self._file: BinaryIO | None = None
        self._shard_tokens = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._close_shard()

    def append(self, ids: Sequence[int], text_bytes: int, documents: int) -> None:
        """Add ids that encode `text_bytes` bytes of text and complete `documents` documents."""
        self._text_bytes += text_bytes
        self._documents += documents
        tokens = np.asarray(ids, dtype=self._dtype)
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._next_name()).open("wb")
                self._shard_tokens = 0
                self._digest = hashlib.sha256()
            room = self._max_shard_tokens - self._shard_tokens
            self._write(tokens[:room])
            tokens = tokens[room:]

    def finish(self) -> SplitSummary:
        """Close the last shard and return a summary of all shards."""
        self._close_shard()
        tokens = sum(shard.tokens for shard in self._shards)
        return SplitSummary(tokens, self._text_bytes, self._documents, tuple(self._shards))

    def _next_name(self) -> str:
        return f"{self._split}_{len(self._shards):05d}.bin"

    def _write(self, tokens: np.ndarray) -> None:
        assert self._file is not None
        content = tokens.tobytes()  # ndarray.tofile would hide the error code of a full disk
        self._file.write(content)
        self._digest.update(content)
        self._shard_tokens += len(tokens)
        if self._shard_tokens == self._max_shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._shards.append(Shard(self._next_name(), self._shard_tokens, self._digest.hexdigest()))
            self._file = None


class TokenFolder:
    """A folder of token shards, opened for reading."""

    def __init__(self, path: Path, manifest: ShardManifest):
        self.path = path
        self.manifest = manifest
        if manifest.tokenizer_sha256 and not (path / TOKENIZER_FILE).is_file():
            raise self._damaged(TOKENIZER_FILE, "is missing")
        dtype = _on_disk(manifest.dtype)
        self._maps = {split: [self._map_shard(one, dtype) for one in manifest.split(split).shards] for split in SPLITS}
        self._starts = {
            split: np.cumsum([0, *(shard.tokens for shard in manifest.split(split).shards)]) for split in SPLITS
        }

    @classmethod
    def open(cls, path: str | Path) -> TokenFolder:
        """Open a folder and check that every file exists with the right size (with `verify`, also read them).

        Raises RecipeError if it is not a token folder, and MachineError if it is damaged."""
        path = expand(path)
        return cls(path, read_manifest(path))

    def num_tokens(self, split: Split) -> int:
        return self.manifest.split(split).tokens

    def num_bytes(self, split: Split) -> int:
        """Return the number of UTF-8 bytes encoded by the tokens of `split`."""
        return self.manifest.split(split).bytes

    def tokens(self, split: Split, start: int, count: int) -> np.ndarray:
        """Return a copy of `count` ids starting at `start`, as int64, across shards if needed."""
        stop = start + count
        if not 0 <= start <= stop <= self.num_tokens(split):
            raise IndexError(f"tokens {start}:{stop} of {self.num_tokens(split)} in {split} of {self.path}")
        out = np.empty(count, dtype=np.int64)
        starts = self._starts[split]
        shard = int(np.searchsorted(starts, start, side="right")) - 1
        filled = 0
        while filled < count:
            offset = start + filled - starts[shard]
            part = self._maps[split][shard][offset : offset + count - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return out

    def documents(self, split: Split) -> Documents:
        """Return the index of documents and trained tokens. Raises MachineError if its files are damaged."""
        return read_documents(self.path, split, self.num_tokens(split))

    def verify(self) -> None:
        """Read every file and compare its digest. Raises MachineError, naming an altered file."""
        digests = {TOKENIZER_FILE: self.manifest.tokenizer_sha256}
        for split in SPLITS:
            digests |= {shard.file: shard.sha256 for shard in self.manifest.split(split).shards}
        for name, expected in ((name, digest) for name, digest in digests.items() if digest):
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise self._damaged(name, "was altered: its sha256 differs from the manifest's")

    def _map_shard(self, shard: Shard, dtype: np.dtype) -> np.ndarray:
        file = self.path / shard.file
        expected_bytes = shard.tokens * dtype.itemsize
        if not file.is_file():
            raise self._damaged(shard.file, "is missing")
        # For shards from other programs, only a lower bound on the size is known, because they have no digest and may
        # have a header.
        if not shard.sha256:
            if shard.offset_bytes + expected_bytes > file.stat().st_size:
                raise self._damaged(shard.file, f"is shorter than the {expected_bytes:,} bytes of the manifest")
            return np.memmap(file, dtype=dtype, mode="r", offset=shard.offset_bytes, shape=(shard.tokens,))
        if (got_bytes := file.stat().st_size) != expected_bytes:
            raise self._damaged(shard.file, f"has {got_bytes:,} bytes, not the {expected_bytes:,} of the manifest")
        return np.memmap(file, dtype=dtype, mode="r")

    def _damaged(self, name: str, what: str) -> MachineError:
        return MachineError(f"{self.path / name} {what}", code="bad_token_folder", hint=prepare_again(self.path))


@dataclass
class Documents:
    """The index of a split's documents."""

    starts: np.ndarray
    """The first token of each document, and the end of the last: (documents + 1,) of int64."""
    mask: np.ndarray
    """(tokens,) of uint8, memory-mapped; 1 means that the token is trained on."""

    def learnt(self, start: int, count: int) -> np.ndarray:
        """Return, as bool of shape (count,), whether each token starting at `start` is trained on."""
        learnt: np.ndarray = np.asarray(self.mask[start : start + count]) != 0
        return learnt

    def learnt_before(self, tokens: np.ndarray) -> np.ndarray:
        """Return the number of trained tokens before each of `tokens`."""
        before: np.ndarray = self._sums[tokens]
        return before

    @cached_property
    def _sums(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.mask, dtype=np.int64)))


def write_documents(folder: Path, split: str, masks: Sequence[np.ndarray]) -> None:
    """Write the index of documents. `masks` contains an array for each document, with 1 for each token to train on."""
    np.save(folder / f"{split}_documents.npy", np.cumsum([0, *map(len, masks)], dtype=np.int64))
    mask = np.concatenate([np.zeros(0, dtype=np.uint8), *masks])
    np.save(folder / f"{split}_learnt.npy", mask.astype(np.uint8))


def read_documents(folder: Path, split: str, num_tokens: int) -> Documents:
    try:
        starts = np.load(folder / f"{split}_documents.npy", mmap_mode="r")
        mask = np.load(folder / f"{split}_learnt.npy", mmap_mode="r")
        if starts.ndim != 1 or starts.dtype != np.int64 or mask.ndim != 1 or mask.dtype != np.uint8:
            raise ValueError(
                f"its arrays are {starts.dtype} and {mask.dtype}, of {starts.ndim} and {mask.ndim} dimensions"
            )
        if not len(starts) or starts[0] != 0 or (np.diff(starts) < 0).any():
            raise ValueError("its documents are not contiguous")
        if starts[-1] != num_tokens or len(mask) != num_tokens:
            raise ValueError(f"it covers {len(mask):,} tokens, but the shards hold {num_tokens:,}")
    except ANY_DAMAGE as error:
        message = f"{folder}: the index of its documents cannot be read: {error}"
        raise MachineError(message, code="bad_token_folder", hint=f"remove it: rm -r {folder}") from error
    return Documents(starts, mask)


# Create a folder atomically: write it under a temporary name, flush it to disk, and rename it.


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, which is renamed to `folder` when the block succeeds. Raises
    FileExistsError if `folder` was filled in the meantime, and MachineError if the disk is full or not writable; in
    that case, the temporary folder is removed. If a process was killed, the next call removes its temporary folder."""
    temporary = folder.parent / f".trainspec-{os.getpid()}-{secrets.token_hex(4)}{_suffix()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Remove the folders of killed processes. Folders from other nodes stay, because their processes cannot be
        # checked here.
        pattern = re.compile(rf"\.trainspec-(\d+)-\w+{re.escape(_suffix())}")
        for entry in folder.parent.iterdir():
            if match := pattern.fullmatch(entry.name):
                try:
                    os.kill(int(match[1]), 0)
                except ProcessLookupError:
                    shutil.rmtree(entry, ignore_errors=True)
                except PermissionError:
                    pass  # the process is alive and belongs to another user
        temporary.mkdir(0o700)
        yield temporary
        # Flush everything in the folder, then the folder itself, so that a power failure after the rename cannot
        # leave an empty file.
        for path in (*temporary.rglob("*"), temporary):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        mask = os.umask(0)  # the umask can be read only by setting it
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)  # temporary folders are readable only by their owner
        temporary.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(error.errno, "was created by another process", str(folder)) from error
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # on success, the folder has already been renamed


def _suffix() -> str:
    return f"@{socket.gethostname()}.tmp"
