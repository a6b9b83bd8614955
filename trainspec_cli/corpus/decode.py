"""From text to tokens and back, with the tokenizer that a token folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainspec_cli.corpus.bpe import load
from trainspec_cli.corpus.manifest import TOKENIZER_FILE


def encode(token_folder: str | Path, text: str) -> list[int]:
    """The tokens of `text`, without an end of document."""
    return load(Path(token_folder, TOKENIZER_FILE)).encode(text, add_special_tokens=False).ids


def decode(token_folder: str | Path, ids: Sequence[int]) -> str:
    """The text of `ids`; special tokens are spelt out, and bytes that are no UTF-8 become U+FFFD."""
    return load(Path(token_folder, TOKENIZER_FILE)).decode(list(ids), skip_special_tokens=False)
