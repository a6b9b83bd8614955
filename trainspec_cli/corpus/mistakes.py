"""Mistakes in documents: lines, rows and records that hold none, kept so that those after them are read too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainspec_cli.errors import Problem, RecipeError

MAX_MISTAKES = 20
"""Lines that are wrong are reported together, up to so many of them."""
BAD_DOCUMENT = "bad_document"


class Mistakes:
    """Lines, rows and files that hold no document."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Keep what is wrong with one document, so that those after it are read too."""
        try:
            yield
        except RecipeError as error:
            self._problems += error.problems
            if len(self._problems) >= MAX_MISTAKES or any(problem.code != BAD_DOCUMENT for problem in error.problems):
                self.check()

    def check(self) -> None:
        """Raise RecipeError where something was wrong."""
        if len(self._problems) >= MAX_MISTAKES:
            *_, last = self._problems
            stopped = f"reading stopped at the {MAX_MISTAKES}th mistake"
            self._problems[-1] = replace(last, hint=f"{last.hint}; {stopped}" if last.hint else stopped)
        if self._problems:
            raise RecipeError(self._problems)


def bad_document(file: Path, line: int | None, got: str, hint: str) -> RecipeError:
    return RecipeError(Problem(BAD_DOCUMENT, got, path="data.path", hint=hint, file=str(file), line=line))


def excerpt(text: str, max_chars: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def decode(content: bytes, file: Path, line: int | None, start: int) -> str:
    """Decode UTF-8 without its byte order mark; `start` is the offset of `content` in the file, in bytes."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"byte {start + error.start} (0x{content[error.start]:02x}) is not UTF-8"
        hint = "convert it (iconv -f LATIN1 -t UTF-8), or leave it out by a glob: data.path='FOLDER/**/*.txt'"
        raise bad_document(file, line, got, hint) from error
