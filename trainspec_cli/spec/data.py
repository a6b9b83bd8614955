"""What is read. Raw sources are tokenised once into token shards; the engine reads only shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TokenizerSpec:
    """A byte-level BPE, trained on the data when no file is named."""

    vocab_size: int = 4096
    path: str | None = None
    """A `tokenizer.json` of the `tokenizers` library; `vocab_size` is then that file's."""
    end_of_document: str | None = None
    """The token of that file that closes a document; null looks for a common name (`<|endoftext|>`, `</s>`, ...)."""


@dataclass(frozen=True)
class DataSpec:
    seq_len: int
    """Tokens a sample."""
    source: Literal["python_stdlib", "text", "jsonl", "tokens", "images"]
    """`tokens` is a folder that `trainspec data prepare` wrote; text is prepared on the spot and cached.

    `images` (and volumes) can be planned for; the engine does not read them.
    """
    path: str | None = None
    """File, folder or glob; python_stdlib needs none."""
    text_field: str = "text"
    """The field of each JSON line that holds the text (jsonl only)."""
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    heldout_fraction: float = 0.02
    """Part of the documents (chosen by a hash of each) kept aside to be judged on."""
    max_bytes: int | None = None
    """Read at most this much text."""
