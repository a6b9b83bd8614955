"""nanoGPT's and Megatron's token files, which are read in place. Like a shard, they contain consecutive ids, so it
suffices to write a manifest that names them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.reading.files import expand, open_regular, read_bytes
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.corpus.shards import (
    SCHEMA,
    TOKENIZER_FILE,
    Dtype,
    Shard,
    ShardManifest,
    SplitSummary,
    write_manifest,
)
from trainspec_cli.recipe.keys.run import DataSpec

LLMC_MAGIC, LLMC_HEADER_BYTES = 20240520, 1024
"""llm.c's files are like nanoGPT's, but start with a header of 256 int32 values."""
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES: dict[int, Dtype] = {4: "uint32", 8: "uint16"}
"""Maps Megatron's dtype codes to types on disk (4 is int32; ids are never negative)."""
MAX_INDEX_BYTES = 2**33
TOKEN_BYTES = {"uint16": 2, "uint32": 4}


def write_foreign(data: DataSpec, files: Sequence[Path], folder: Path) -> None:
    """Write a manifest of `files` to `folder`, and the tokenizer if the spec names one. Raises TrainspecError."""
    dtype, train, heldout = _READERS[data.source](data, files)
    tokenizer = None
    end_id = -1
    vocab_size = 0
    if data.tokenizer.path is not None:
        tokenizer = bpe.load(expand(data.tokenizer.path))
        (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(), encoding="utf-8")
        end_id = bpe.find_end_of_document(tokenizer, data.tokenizer)
        vocab_size = bpe.count_vocab(tokenizer)
    manifest = ShardManifest(
        schema=SCHEMA,
        dtype=dtype,
        vocab_size=vocab_size,
        vocab_size_asked=vocab_size,
        end_of_document_id=end_id,
        tokenizer_sha256="" if tokenizer is None else bpe.digest(tokenizer),
        source={"source": data.source, "path": data.path},
        heldout_fraction=data.heldout_fraction,
        xz_bits_per_byte=None,
        train=_summary(train),
        heldout=_summary(heldout),
    )
    write_manifest(folder, manifest)


def _summary(shards: Sequence[Shard]) -> SplitSummary:
    return SplitSummary(sum(shard.tokens for shard in shards), 0, 0, tuple(shards))


def _read_nanogpt(data: DataSpec, files: Sequence[Path]) -> tuple[Dtype, list[Shard], list[Shard]]:
    """Hold out the files with `val` in their name or, if there are none, the end of the last file."""
    heldout: list[Shard] = []
    train: list[Shard] = []
    for file in files:
        with open_regular(file) as content:
            begin = content.read(4)
        # llm.c and nanoGPT both name their files .bin, so only the first bytes distinguish them.
        header = LLMC_HEADER_BYTES if begin == struct.pack("<i", LLMC_MAGIC) else 0
        size = file.stat().st_size - header
        if size % TOKEN_BYTES["uint16"]:
            raise MachineError(f"{file} has {size:,} bytes, not a whole number of uint16 ids", code="bad_token_file")
        shard = Shard(str(file.absolute()), size // TOKEN_BYTES["uint16"], "", header)
        (heldout if "val" in file.stem else train).append(shard)
    if not train:
        raise RecipeError(Problem("missing_file", f"{data.path} has no file to train on", "data.path"))
    if not heldout:
        *train, last = train
        at = round(last.tokens * (1 - data.heldout_fraction))
        first, rest = _split(last, at, "uint16")
        train = [*train, first]
        heldout = [rest]
    return "uint16", train, heldout


def _split(shard: Shard, at: int, dtype: Dtype) -> tuple[Shard, Shard]:
    offset = shard.offset_bytes + at * TOKEN_BYTES[dtype]
    return Shard(shard.file, at, "", shard.offset_bytes), Shard(shard.file, shard.tokens - at, "", offset)


def _read_megatron(data: DataSpec, files: Sequence[Path]) -> tuple[Dtype, list[Shard], list[Shard]]:
    """Read each NAME.bin together with its NAME.idx. The last documents are held out."""
    read = [_read_index(file.with_suffix(".idx")) for file in files]
    dtypes = {dtype for dtype, _ in read}
    if len(dtypes) > 1:
        message = f"{data.path} has ids of different sizes ({', '.join(sorted(dtypes))})"
        raise RecipeError(Problem("unsupported", message, "data.path", "mix them as separate sources"))
    dtype = dtypes.pop()
    shards = []
    for file, (_, ends) in zip(files, read, strict=True):
        tokens = int(ends[-1])
        if (size := file.stat().st_size) != tokens * TOKEN_BYTES[dtype]:
            message = f"{file} has {size:,} bytes, but its index lists {tokens:,} {dtype} ids"
            raise MachineError(message, code="bad_token_file")
        shards.append(Shard(str(file.absolute()), tokens, ""))
    *train, last = shards
    ends = read[-1][1]
    # Split between documents, so that no document is in both splits.
    cut = int(np.searchsorted(ends, last.tokens * (1 - data.heldout_fraction)))
    first, rest = _split(last, int(ends[min(cut, len(ends) - 2)]), dtype)
    return dtype, [*train, first], [rest]


def _read_index(file: Path) -> tuple[Dtype, np.ndarray]:
    """Return the dtype of the ids, and the end of each document as a token position."""
    if not file.is_file():
        raise RecipeError(Problem("missing_file", f"{file} is missing: a .bin file needs its index", "data.path"))
    content = read_bytes(file, MAX_INDEX_BYTES)
    try:
        version, code, sequences, documents = struct.unpack_from("<QBQQ", content, len(MEGATRON_MAGIC))
        if not content.startswith(MEGATRON_MAGIC) or version != 1 or code not in MEGATRON_DTYPES:
            raise ValueError(f"version {version}, type {code}")
        start = len(MEGATRON_MAGIC) + struct.calcsize("<QBQQ")
        lengths = np.frombuffer(content, "<i4", sequences, start).astype(np.int64)
        bounds = np.frombuffer(content, "<i8", documents, start + 12 * sequences)
        if lengths.size and lengths.min() < 0:
            raise ValueError("a sequence has a length below 0")
        ends = np.concatenate(([0], np.cumsum(lengths)))[bounds[1:]]
        if len(ends) < 2 or (np.diff(ends) < 0).any() or (bounds < 0).any():
            raise ValueError("its documents are not contiguous")
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        raise MachineError(f"{file} is not a Megatron index: {error}", code="bad_token_file") from error
    return MEGATRON_DTYPES[code], ends


_READERS = {"nanogpt": _read_nanogpt, "megatron": _read_megatron}
SOURCES = tuple(_READERS)
