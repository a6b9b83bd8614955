"""A user-defined tokenizer (`data.tokenizer.code=FILE.py:NAME`): the user's code converts text to token ids and back.

A token folder stores only its digest and none of its code: text is decoded by the tokenizer that the recipe names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from trainspec_cli.core.errors import Problem, RecipeError, WorkerError
from trainspec_cli.recipe.keys.run import DataSpec
from trainspec_cli.recipe.own_code import TOKENIZER, arguments, find, load, own_errors, source_files, source_sha256
from trainspec_cli.recipe.records import canonical_json

TRIAL_TEXT = "Tokens, and back: 3 + 4 = 7.\n"
LARGEST_VOCABULARY = 2**31


class OwnTokenizer:
    """Calls the user's code and checks its results. Raises RecipeError before a run has begun, then WorkerError."""

    def __init__(self, data: DataSpec, error: type[RecipeError | WorkerError] = RecipeError):
        (self._extension,) = TOKENIZER.named(data.tokenizer.code, data.tokenizer.options)
        self._error = error
        call = load(self._extension)
        with own_errors(self._extension, "when the tokenizer was made", error):
            self._inner: Any = call(**arguments(data.tokenizer.options))
        self.vocab_size = self._number("vocab_size", LARGEST_VOCABULARY)
        self.end_of_document = self._number("end_of_document", self.vocab_size - 1)
        self.decode(self.encode(TRIAL_TEXT))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, without an end of document."""
        with own_errors(self._extension, "in `encode`", self._error):
            ids = [int(one) for one in self._inner.encode(text)]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(one for one in ids if not 0 <= one < self.vocab_size)
            raise self._refuse(f"returns the id {wrong}, but has a `vocab_size` of {self.vocab_size}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        with own_errors(self._extension, "in `decode`", self._error):
            text = self._inner.decode(list(ids))
        if not isinstance(text, str):
            raise self._refuse(f"decodes to {type(text).__name__}; text is needed")
        return text

    def _number(self, name: str, largest: int) -> int:
        value = getattr(self._inner, name, None)
        if not isinstance(value, int) or not 0 <= value <= largest:
            got = "no" if value is None else f"{value!r} as"
            raise self._refuse(f"has {got} `{name}`; a whole number from 0 to {largest} is needed")
        return value

    def _refuse(self, what: str) -> RecipeError | WorkerError:
        message = f"`{self._extension.path}`: {self._extension.text} {what}"
        hint = "a tokenizer has vocab_size, end_of_document (an id), encode(text) and decode(ids)"
        return self._error(Problem("own_code", message, self._extension.path, hint))


def tokenizer_sha256(data: DataSpec) -> str:
    """Return the identity of a user-defined tokenizer: the digest of its name, code and options."""
    (extension,) = TOKENIZER.named(data.tokenizer.code, data.tokenizer.options)
    digests = [source_sha256(file) for file in source_files(find(extension))]
    facts: dict[str, object] = {
        "name": extension.text.rpartition(":")[2],
        "code": " ".join(digests) or extension.text,  # compiled code cannot be read
        "options": data.tokenizer.options,
    }
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()
