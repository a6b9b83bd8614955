"""Mistakes in documents: lines, rows and records that hold none, kept so that those after them are read too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError

MAX_KINDS, MAX_MISTAKES = 20, 1000
"""Reading stops at this many kinds of mistakes, or this many mistakes: a file of another form has one in each line."""
SHOWN_PLACES = 5
BAD_DOCUMENT = "bad_document"
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")


class BadDocument(RecipeError):  # noqa: N818 - it names what is wrong, as the others do
    """A document cannot be read. `kind` is what it has in common with others that are wrong in the same way."""

    def __init__(self, problem: Problem, kind: str):
        super().__init__(problem)
        self.kind = kind


@dataclass
class _Kind:
    """All mistakes of one kind in one file: the first, and the places of the others."""

    first: Problem
    others: list[str] = field(default_factory=list)

    def as_problem(self) -> Problem:
        if not self.others:
            return self.first
        shown = ", ".join(self.others[:SHOWN_PLACES])
        rest = len(self.others) - SHOWN_PLACES
        places = f"{shown} and {rest:,} more" if rest > 0 else shown
        what = "files" if self.first.line is None else "lines"
        message = f"{self.first.message}; the same is wrong in {len(self.others):,} other {what}: {places}"
        return replace(self.first, message=message)


class Mistakes:
    """Lines, rows and files that hold no document, each kind of mistake once with all its places."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str | None, str], _Kind] = {}
        self._count = 0

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Keep what is wrong with one document, so that those after it are read too."""
        try:
            yield
        except BadDocument as error:
            (problem,) = error.problems
            self._count += 1
            key = (None if problem.line is None else problem.file, error.kind)
            if key in self._kinds:
                place = str(problem.file if problem.line is None else problem.line)
                self._kinds[key].others.append(place)
            else:
                self._kinds[key] = _Kind(problem)
            if len(self._kinds) >= MAX_KINDS or self._count >= MAX_MISTAKES:
                self.check()
        except RecipeError as error:  # not of one document alone
            raise RecipeError([*self._problems(), *error.problems]) from error

    def check(self) -> None:
        """Raise RecipeError where something was wrong."""
        if problems := self._problems():
            raise RecipeError(problems)

    def _problems(self) -> list[Problem]:
        problems = [kind.as_problem() for kind in self._kinds.values()]
        if len(self._kinds) >= MAX_KINDS or self._count >= MAX_MISTAKES:
            last = problems[-1]
            stopped = f"reading stopped after {self._count:,} mistakes"
            problems[-1] = replace(last, hint=f"{last.hint}; {stopped}" if last.hint else stopped)
        return problems


def bad_document(
    file: Path, line: int | None, got: str, hint: str, *, sample: str = "", record: str = ""
) -> BadDocument:
    """Return the error for a document; `record` names it in front of what is wrong, `sample` shows its beginning."""
    name = f"{record}: " if record else ""
    message = f"{name}{got}: {excerpt(sample)}" if sample else f"{name}{got}"
    problem = Problem(BAD_DOCUMENT, message, path="data.path", hint=hint, file=str(file), line=line)
    return BadDocument(problem, _VARIES.sub("N", got))


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
