"""From text to tokens and back, with the tokenizer that a token folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainspec_cli.corpus.bpe import load
from trainspec_cli.corpus.manifest import TOKENIZER_FILE


def encode(token_folder: str | Path, text: str) -> list[int]:
    """The tokens of `text`, without an end of document."""
    return load(Path(token_folder, TOKENIZER_FILE)).encode(text, add_special_tokens=False).ids


def encode_template(token_folder: str | Path, text: str) -> list[int]:
    """The tokens of what a chat template wrote, whose special tokens are meant."""
    tokenizer = load(Path(token_folder, TOKENIZER_FILE))
    tokenizer.encode_special_tokens = False
    return tokenizer.encode(text, add_special_tokens=False).ids


def until_special(token_folder: str | Path, ids: Sequence[int]) -> Sequence[int]:
    """Up to the first special token, which ends a reply."""
    added = load(Path(token_folder, TOKENIZER_FILE)).get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    return ids[: next((place for place, token_id in enumerate(ids) if token_id in special), len(ids))]


def decode(token_folder: str | Path, ids: Sequence[int]) -> str:
    """The text of `ids`; special tokens are spelt out, and bytes that are no UTF-8 become U+FFFD."""
    return load(Path(token_folder, TOKENIZER_FILE)).decode(list(ids), skip_special_tokens=False)
