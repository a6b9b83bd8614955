"""Problems as tests compare them: by their codes and places, and by the values and commands that their texts hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from trainspec_cli.core.errors import Problem, TrainspecError


def assert_problems(problems: Iterable[Problem], *expected: tuple[str, ...]) -> None:
    """Compare problems in order with tuples of (code, place, *parts).

    The place is the dotted key or the position in a file; each part stands in the message or in the hint."""
    found = list(problems)
    assert [problem.code for problem in found] == [code for code, *_ in expected], found
    for problem, (_, place, *parts) in zip(found, expected, strict=True):
        assert place in (problem.path, problem.where()), problem
        assert [part for part in parts if part not in f"{problem.message}\n{problem.hint}"] == [], problem


@contextmanager
def refused(kind: type[TrainspecError], code: str, place: str = "", *parts: str) -> Iterator[None]:
    """Expect an error with one problem of this code and place, with these parts in its message or hint."""
    with pytest.raises(kind) as raised:
        yield
    assert_problems(raised.value.problems, (code, place, *parts))


@contextmanager
def raises(
    kind: type[TrainspecError], code: str, *values: object, path: str | None = None
) -> Iterator[pytest.ExceptionInfo[TrainspecError]]:
    """Expect an error with one problem of this code and key (None: any key), whose message contains all the values."""
    with pytest.raises(kind) as raised:
        yield raised
    (problem,) = raised.value.problems
    assert_problems([problem], (code, problem.path if path is None else path))
    assert [value for value in values if str(value) not in problem.message] == [], problem


def codes(output: str) -> list[tuple[str, str]]:
    """Return the code and the key of each error that a command with --json has printed."""
    return [(error["code"], error["path"]) for error in json.loads(output)["errors"]]


def words(problems: Iterable[Problem]) -> str:
    """Return what people read of problems: each message, and its hint below."""
    lines = (line for problem in problems for line in (problem.message, problem.hint and f"  {problem.hint}"))
    return "\n".join(filter(None, lines))


def in_order(message: str, *parts: str) -> bool:
    """Return whether the message contains these parts, each after the one before it."""
    for part in parts:
        found, message = message.partition(part)[1:]
        if not found:
            return False
    return True
