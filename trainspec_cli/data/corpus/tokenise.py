"""Convert documents to a token folder in three passes over the text: scan, train the tokenizer, encode.

In conversations, each token to train on is marked."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.corpus.chat import ANY_SHAPE, ChatFormat, Conversation, describe_formats
from trainspec_cli.data.corpus.samples import HeldoutRule, SplitScan, pieces
from trainspec_cli.data.corpus.shards import (
    SCHEMA,
    SPLITS,
    TOKENIZER_FILE,
    ShardManifest,
    ShardWriter,
    Split,
    SplitSummary,
    choose_dtype,
    write_documents,
    write_manifest,
)
from trainspec_cli.data.corpus.sources import Document, documents
from trainspec_cli.data.corpus.user_code import OwnTokenizer, tokenizer_sha256
from trainspec_cli.data.huggingface.chat_template import CHATML_TOKENS, Span
from trainspec_cli.recipe.keys.run import DataSpec

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

OnProgress = Callable[[str, float, int], None]
"""Reports progress: the phase, the completed fraction of all work (0 to 1), and the number of documents processed so
far in the phase."""

PHASES = {"reading": (0.0, 0.1), "learning the tokenizer": (0.1, 0.5), "encoding": (0.5, 1.0)}
REPORTED_S = 1.0
TOKENIZER_SAMPLE_BYTES = 64 * 2**20
"""Size of the text on which the tokenizer is trained, sampled evenly from all text. More text hardly changes the
vocabulary."""
BATCH_CHARS = 2 * 2**20
"""Number of characters encoded per call, by all cores together."""
BATCH_CONVERSATIONS = 512
"""Number of conversations encoded per call, by all cores together."""


def write_tokens(
    data: DataSpec,
    files: list[Path],
    folder: Path,
    on_progress: OnProgress,
    described: dict[str, str | int | None] | None = None,
) -> None:
    """Write shards, tokenizer and manifest to `folder`. Raises RecipeError if the text is empty or malformed.
    `described`: the manifest's description of the source; if None, it is derived from `data`."""
    scan = _scan(data, files, on_progress)
    rule = HeldoutRule.from_scan(scan, data.heldout_fraction)
    if data.tokenizer.code:
        own = OwnTokenizer(data)
        encoder = Encoder(lambda texts: [own.encode(text) for text in texts], own.vocab_size, own.end_of_document, None)
    else:
        tokenizer = _build_tokenizer(data, files, scan, rule, on_progress)

        def encode_batch(texts: list[str]) -> list[list[int]]:
            return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

        end_id = bpe.find_end_of_document(tokenizer, data.tokenizer)
        encoder = Encoder(encode_batch, bpe.count_vocab(tokenizer), end_id, tokenizer)
    if encoder.tokenizer is not None:
        (folder / TOKENIZER_FILE).write_text(encoder.tokenizer.to_str(), encoding="utf-8")
    read = _read(data, files, "encoding", scan.bytes, on_progress)
    formats: set[ChatFormat] = set()
    if data.source == "chat":
        assert encoder.tokenizer is not None, "a user-defined tokenizer is rejected for conversations"
        conversations = (document.conversation for document in read if document.conversation)
        summaries, formats = write_conversations(conversations, encoder.tokenizer, encoder.end_id, rule, folder)
        xz_bits_per_byte = None
    else:
        texts = (document.text for document in read)
        summaries, xz_bits_per_byte = _encode(_cut(texts, rule), encoder, folder)
    if described is None:
        described = {"source": data.source, "python": platform.python_version(), "max_bytes": data.max_bytes}
        if data.source != "python_stdlib":
            path = str(expand(data.path or "").absolute())
            described = {"source": data.source, "path": path, "max_bytes": data.max_bytes}
        if formats:
            described["format"] = describe_formats(formats)
    manifest = ShardManifest(
        schema=SCHEMA,
        dtype=choose_dtype(encoder.vocab_size),
        vocab_size=encoder.vocab_size,
        vocab_size_asked=data.tokenizer.vocab_size if data.tokenizer.is_trained else encoder.vocab_size,
        end_of_document_id=encoder.end_id,
        tokenizer_sha256=bpe.digest(encoder.tokenizer) if encoder.tokenizer is not None else "",
        own_tokenizer_sha256=tokenizer_sha256(data) if encoder.tokenizer is None else "",
        source=described,
        heldout_fraction=data.heldout_fraction,
        xz_bits_per_byte=xz_bits_per_byte,
        train=summaries["train"],
        heldout=summaries["heldout"],
        learns_parts=data.source == "chat",
    )
    write_manifest(folder, manifest)


def _read(data: DataSpec, files: list[Path], phase: str, num_bytes: int, on_progress: OnProgress) -> Iterator[Document]:
    """Yield each document. Report progress after every hundredth of the phase, and at least every `REPORTED_S` seconds.
    A compressed file contains more text than its size suggests, so the fraction is only an estimate."""
    begin, end = PHASES[phase]
    done_bytes = count = 0
    reported = -1.0
    reported_s = time.monotonic()
    for count, document in enumerate(documents(data, files), 1):
        yield document
        done_bytes += len(document.text.encode())
        done = min(1.0, done_bytes / max(1, num_bytes))
        if done - reported >= 0.01 or time.monotonic() - reported_s >= REPORTED_S:
            on_progress(phase, begin + done * (end - begin), count)
            reported = done
            reported_s = time.monotonic()
    on_progress(phase, end, count)


def _scan(data: DataSpec, files: list[Path], on_progress: OnProgress) -> SplitScan:
    scan = SplitScan()
    for document in _read(data, files, "reading", sum(file.stat().st_size for file in files), on_progress):
        scan.add(document.text)
    if not scan.documents:
        message = f"no text in {data.path or data.source} ({len(files)} files, all empty)"
        raise RecipeError(Problem("empty_data", message, "data.path", "name files with text"))
    return scan


@dataclass(frozen=True)
class Encoder:
    """The tokenizer for text, and the size of its vocabulary."""

    encode_batch: Callable[[list[str]], list[list[int]]]
    vocab_size: int
    end_id: int
    tokenizer: Tokenizer | None
    """The library's tokenizer; None for a user-defined one."""


def _build_tokenizer(
    data: DataSpec, files: list[Path], scan: SplitScan, rule: HeldoutRule, on_progress: OnProgress
) -> Tokenizer:
    if data.tokenizer.path is not None:
        return bpe.load(expand(data.tokenizer.path))
    documents = _read(data, files, "learning the tokenizer", scan.bytes, on_progress)
    to_learn_from = (piece for document in documents for piece in pieces(rule.parts(document.text)[0]))
    sample = _take_evenly(to_learn_from, TOKENIZER_SAMPLE_BYTES / scan.bytes)
    return bpe.train(sample, data.tokenizer.vocab_size, CHATML_TOKENS if data.source == "chat" else ())


def _take_evenly(texts: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield about `fraction` of the text, evenly distributed, always including the first text."""
    seen = taken = 0
    for text in texts:
        # Texts are taken from all files, because the first texts alone would yield the vocabulary of a single file.
        # `<=` includes the first text, so that there is always one.
        if taken <= seen * fraction:
            taken += len(text)
            yield text
        seen += len(text)


@dataclass(frozen=True)
class _Piece:
    """A text to encode in one call."""

    split: Split
    text: str
    ends_document: bool


def _cut(texts: Iterable[str], rule: HeldoutRule) -> Iterator[_Piece]:
    for text in texts:
        for split, part in zip(SPLITS, rule.parts(text), strict=True):
            if part:
                *before, last = pieces(part)
                yield from (_Piece(split, piece, False) for piece in before)
                yield _Piece(split, last, True)


def _batches(cut: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    num_chars = 0
    for piece in cut:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch = []
            num_chars = 0
    yield batch


def _encode(cut: Iterable[_Piece], encoder: Encoder, folder: Path) -> tuple[dict[Split, SplitSummary], float | None]:
    """Write the shards of both splits. Return them together with the xz bits per byte of the held-out text."""
    dtype = choose_dtype(encoder.vocab_size)
    xz = XzMeter()
    with ShardWriter(folder, "train", dtype) as train, ShardWriter(folder, "heldout", dtype) as heldout:
        writers: dict[Split, ShardWriter] = {"train": train, "heldout": heldout}
        for batch in _batches(cut):
            encoded = encoder.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                text = piece.text.encode()
                ids = [*ids, encoder.end_id] if piece.ends_document else ids
                writers[piece.split].append(ids, text_bytes=len(text), documents=int(piece.ends_document))
                # Only held-out text is compressed, because bits per byte are compared on it.
                if piece.split == "heldout":
                    xz.add(text)
        return {split: writer.finish() for split, writer in writers.items()}, xz.finish()


class XzMeter:
    """Measures the compressed size of a text under `xz -9e`, as a baseline for the model's bits per byte."""

    def __init__(self) -> None:
        try:
            import lzma
        except ImportError:  # Python was built without liblzma; the manifest records null
            self._compressor = None
        else:
            # Use the strongest setting, because a weaker one would make the model look better in the comparison.
            self._compressor = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
        self._text_bytes = self._xz_bytes = 0

    def add(self, text: bytes) -> None:
        if self._compressor is not None:
            self._text_bytes += len(text)
            self._xz_bytes += len(self._compressor.compress(text))

    def finish(self) -> float | None:
        """Return the bits per byte of all text added so far; None if Python was built without lzma, or if nothing was
        added."""
        if self._compressor is None or not self._text_bytes:
            return None
        self._xz_bytes += len(self._compressor.flush())
        return 8 * self._xz_bytes / self._text_bytes


def write_conversations(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, end_id: int, rule: HeldoutRule, folder: Path
) -> tuple[dict[Split, SplitSummary], set[ChatFormat]]:
    """Write the shards and document indices of both splits. Return them together with the conversation formats. Raises
    RecipeError if there are no tokens to train on."""
    tokenizer.encode_special_tokens = False  # keeps the special tokens that the template writes
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    dtype = choose_dtype(bpe.count_vocab(tokenizer))
    masks: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
    formats: set[ChatFormat] = set()
    with ShardWriter(folder, "train", dtype) as train, ShardWriter(folder, "heldout", dtype) as heldout:
        rest = iter(conversations)
        while batch := list(islice(rest, BATCH_CONVERSATIONS)):
            for conversation, encoding in zip(batch, _encode_conversations(batch, tokenizer), strict=True):
                formats.add(conversation.format)
                ids = list(encoding.ids)
                learnt = _learnt(conversation.spans, encoding)
                if conversation.is_chat:
                    # A special token right after a reply ends the turn, so it is trained on too.
                    is_special = np.array([token in special for token in ids], dtype=bool)
                    learnt = learnt | (np.concatenate(([False], learnt[:-1])) & is_special)
                # Some tokenizers append the end token themselves. A second one would teach the model to end twice.
                elif ids[-1:] != [end_id]:
                    ids.append(end_id)
                    learnt = np.append(learnt, True)
                else:
                    learnt[-1] = True
                num_bytes = sum(len(conversation.text[start:end].encode()) for start, end in conversation.spans)
                # A conversation is not split, because half a reply cannot be trained on. It goes to the split that the
                # rule chooses for its first part.
                is_train = bool(rule.parts(conversation.text)[0])
                (train if is_train else heldout).append(ids, text_bytes=num_bytes, documents=1)
                masks["train" if is_train else "heldout"].append(learnt.astype(np.uint8))
        for split in SPLITS:
            write_documents(folder, split, masks[split])
        if not any(mask.any() for mask in masks["train"]):
            raise RecipeError(Problem("empty_data", "no conversation has a reply to train on", "data.path", ANY_SHAPE))
        return {"train": train.finish(), "heldout": heldout.finish()}, formats


def tokens_before_reply(conversation: Conversation, tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens before the first one to train on, or None."""
    tokenizer.encode_special_tokens = False
    (encoding,) = _encode_conversations([conversation], tokenizer)
    learnt = _learnt(conversation.spans, encoding)
    return int(learnt.argmax()) if learnt.any() else None


def _encode_conversations(batch: Sequence[Conversation], tokenizer: Tokenizer) -> list[Encoding]:
    """Encode a batch, with character offsets. Rendered templates already contain special tokens; completions get those
    of the tokenizer."""
    encodings = {}
    for is_chat in (True, False):
        texts = [conversation.text for conversation in batch if conversation.is_chat == is_chat]
        encodings[is_chat] = iter(tokenizer.encode_batch(texts, add_special_tokens=not is_chat))
    return [next(encodings[conversation.is_chat]) for conversation in batch]


def _learnt(spans: Sequence[Span], encoding: Encoding) -> np.ndarray:
    """Mark the tokens that overlap a span."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    learnt = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        # A token that crosses the edge of a reply is marked, because otherwise its text would not be trained on. Tokens
        # without text are not marked.
        learnt |= (offsets[:, 1] > start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
    return learnt
