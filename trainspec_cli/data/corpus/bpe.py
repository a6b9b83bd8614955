"""The tokenizer, which converts text to tokens and back: a byte-level BPE trained on the data, or the user's
`tokenizer.json`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import exists, read_text
from trainspec_cli.data.corpus.shards import TOKENIZER_FILE
from trainspec_cli.recipe.keys.run import TokenizerSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>")
"""Names of the end-of-document token in published tokenizers."""

MAX_FILE_BYTES = 256 * 2**20
"""Maximum size of an accepted tokenizer.json. A vocabulary of 900,000 entries (XLM-V) takes about 60 MiB."""

MAX_WORD_CHARS = 256
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARS}}}|\s{{{MAX_WORD_CHARS}}}")

MIN_VOCAB_SIZE = 257
"""The smallest vocabulary: 256 bytes and the end-of-document token."""

WORD_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the space or punctuation mark before it
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+ *)?"  # punctuation, followed by the line end and the next line's indentation
    r"|[\r\n]+ *"
    r"|\s+(?!\S)|\s+"
)
"""Merges stay within one match of this pattern. Keeping line endings together with indentation yields 8% fewer tokens
for Python code than GPT-2's pattern does."""


def train(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE with at most `vocab_size` entries (fewer if the text is too small to fill it).

    The same texts always yield the same tokenizer, regardless of the number of threads."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in cut_long_words(text)), trainer)
    return _as_plain_text(tokenizer)


def cut_long_words(text: str) -> Iterator[str]:
    """Split words that are longer than `MAX_WORD_CHARS`, because training time grows with the square of a word's
    length."""
    start = 0
    for long in _LONG_WORD.finditer(text):
        yield text[start : long.end()]
        start = long.end()
    yield text[start:]


def load(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`. Raises RecipeError if it is missing or invalid."""
    if not exists(file):
        raise _tokenizer_error("missing_file", f"{file.absolute()} does not exist")
    try:
        tokenizer = _read_tokenizer(file)
        empty = not tokenizer.get_vocab_size()
    except ValueError as error:  # the library does not raise a more specific error
        raise _tokenizer_error("bad_tokenizer", f"{file} is not a tokenizer.json: {error}") from error
    if empty:
        raise _tokenizer_error("bad_tokenizer", f"{file} is a tokenizer without tokens")
    # Disable truncation: tokenizer files of published models truncate texts to the model's maximum length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _as_plain_text(tokenizer)


def _read_tokenizer(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    text = read_text(file, MAX_FILE_BYTES)
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # the library's exceptions
            raise ValueError(str(error)) from error
        raise


def _as_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Make the tokenizer treat the spelling of a special token like any other text."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def digest(tokenizer: Tokenizer) -> str:
    """Return a sha256 that identifies the tokenizer."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def count_vocab(tokenizer: Tokenizer) -> int:
    """Return the highest id plus one, which is the number of rows that an embedding needs (including rows for unused
    ids)."""
    # This may exceed the number of entries, because published vocabularies have gaps. An id beyond the embedding would
    # crash the run.
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def find_end_of_document(tokenizer: Tokenizer, spec: TokenizerSpec) -> int:
    """Return the id that ends each document: the token named by the spec or, by default, the first known name in the
    vocabulary."""
    for name in (spec.end_of_document,) if spec.end_of_document else KNOWN_ENDS:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return token_id
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    asked = spec.end_of_document or "a known end of document"
    raise _tokenizer_error(
        "no_end_of_document",
        f"{spec.path} has no token for {asked}; its special tokens: {' '.join(special[:20]) or 'none'}",
        hint="data.tokenizer.end_of_document='TOKEN' names the token that ends a document",
    )


def _tokenizer_error(code: str, message: str, hint: str = "") -> RecipeError:
    hint = hint or "data.tokenizer.path=FILE names a tokenizer.json; null trains one on the data"
    return RecipeError(Problem(code, message, path="data.tokenizer.path", hint=hint))


def _load_from(token_folder: str | Path) -> Tokenizer:
    return load(Path(token_folder, TOKENIZER_FILE))


def encode(token_folder: str | Path, text: str) -> list[int]:
    """Return the tokens of `text`, without an end-of-document token."""
    return _load_from(token_folder).encode(text, add_special_tokens=False).ids


def encode_template(token_folder: str | Path, text: str) -> list[int]:
    """Return the tokens of a rendered chat template, with its special tokens encoded as such."""
    tokenizer = _load_from(token_folder)
    tokenizer.encode_special_tokens = False
    return tokenizer.encode(text, add_special_tokens=False).ids


def until_special(token_folder: str | Path, ids: Sequence[int]) -> Sequence[int]:
    """Truncate `ids` before the first special token, because it ends a reply."""
    added = _load_from(token_folder).get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    return ids[: next((index for index, token_id in enumerate(ids) if token_id in special), len(ids))]


def decode(token_folder: str | Path, ids: Sequence[int]) -> str:
    """Return the text of `ids`. Special tokens are spelled out, and bytes that are not valid UTF-8 become U+FFFD."""
    return _load_from(token_folder).decode(list(ids), skip_special_tokens=False)


def decode_parts(token_folder: str | Path, parts: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each part of a token sequence. Parts are not decoded separately, because a decoder may treat
    the first token of a text differently."""
    tokenizer = _load_from(token_folder)
    texts: list[str] = []
    ids: list[int] = []
    length = 0
    for part in parts:
        ids += part
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        texts.append(whole[length:])
        length = len(whole)
    return texts
