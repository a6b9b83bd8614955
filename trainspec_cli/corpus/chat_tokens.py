"""Encode conversations into token shards, with a mark on each token that is learnt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainspec_cli.corpus import bpe
from trainspec_cli.corpus.chat import SHAPES, Conversation
from trainspec_cli.corpus.manifest import SPLITS, Split, SplitSummary
from trainspec_cli.corpus.shards import ShardWriter, choose_dtype, write_documents
from trainspec_cli.corpus.split import HeldoutRule
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.huggingface.chat_template import Span

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

BATCH = 512
"""Conversations encoded in one call, over all cores."""


@dataclass
class _Written:
    """The shards and learnt-token masks of a split so far."""

    writer: ShardWriter
    masks: list[np.ndarray] = field(default_factory=list)


def write_conversations(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, end_id: int, rule: HeldoutRule, folder: Path
) -> dict[Split, SplitSummary]:
    """Write shards and document indices of both splits. Raises RecipeError if no token is to be learnt."""
    tokenizer.encode_special_tokens = False  # the template's own special tokens are meant
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    dtype = choose_dtype(bpe.count_vocab(tokenizer))
    with ShardWriter(folder, "train", dtype) as train, ShardWriter(folder, "heldout", dtype) as heldout:
        written: dict[Split, _Written] = {"train": _Written(train), "heldout": _Written(heldout)}
        rest = iter(conversations)
        while batch := list(islice(rest, BATCH)):
            for conversation, encoding in zip(batch, _encode(batch, tokenizer), strict=True):
                train_text, _ = rule.parts(conversation.text)
                _write(written["train" if train_text else "heldout"], conversation, encoding, end_id, special)
        for split in SPLITS:
            write_documents(folder, split, written[split].masks)
        if not any(mask.any() for mask in written["train"].masks):
            raise RecipeError(Problem("empty_data", "no conversation holds a reply to learn", "data.path", SHAPES))
        return {split: written[split].writer.finish() for split in SPLITS}


def _encode(batch: Sequence[Conversation], tokenizer: Tokenizer) -> list[Encoding]:
    """Encode a batch with offsets. Templates already contain special tokens; completions get the tokenizer's own."""
    encodings = {
        is_chat: iter(
            tokenizer.encode_batch(
                [conversation.text for conversation in batch if conversation.is_chat == is_chat],
                add_special_tokens=not is_chat,
            )
        )
        for is_chat in (True, False)
    }
    return [next(encodings[conversation.is_chat]) for conversation in batch]


def _write(
    written: _Written, conversation: Conversation, encoding: Encoding, end_id: int, special: frozenset[int]
) -> None:
    ids, learnt = list(encoding.ids), _learnt(conversation.spans, encoding)
    if conversation.is_chat:
        learnt = _with_ends(learnt, ids, special)
    elif ids[-1:] != [end_id]:
        ids.append(end_id)
        learnt = np.append(learnt, True)
    else:
        learnt[-1] = True
    num_bytes = sum(len(conversation.text[start:end].encode()) for start, end in conversation.spans)
    written.writer.append(ids, text_bytes=num_bytes, documents=1)
    written.masks.append(learnt.astype(np.uint8))


def _learnt(spans: Sequence[Span], encoding: Encoding) -> np.ndarray:
    """Mark the tokens that overlap a span."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    learnt = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        learnt |= (offsets[:, 1] > start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
    return learnt


def _with_ends(learnt: np.ndarray, ids: Sequence[int], special: frozenset[int]) -> np.ndarray:
    """Also mark a special token right after a reply: it ends the turn, which the model must learn."""
    is_special = np.array([token in special for token in ids], dtype=bool)
    marked: np.ndarray = learnt | (np.concatenate(([False], learnt[:-1])) & is_special)
    return marked
