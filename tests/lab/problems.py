"""The parts of an error that programs read: its code, its key, and the values in its message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainspec_cli.core.errors import TrainspecError


@contextmanager
def raises(
    kind: type[TrainspecError], code: str, *values: object, path: str | None = None
) -> Iterator[pytest.ExceptionInfo[TrainspecError]]:
    """Expect an error with one problem of this code and key (None: any key), whose message contains all the values."""
    with pytest.raises(kind) as caught:
        yield caught
    (problem,) = caught.value.problems
    shown = f"expected {code} {path or ''} {values}, got {problem}"
    assert problem.code == code, shown
    assert path in (None, problem.path), shown
    assert all(str(value) in problem.message for value in values), shown


def codes(output: str) -> list[tuple[str, str]]:
    """Return the code and the key of each error that a command with --json has printed."""
    return [(error["code"], error["path"]) for error in json.loads(output)["errors"]]


def in_order(message: str, *parts: str) -> bool:
    """Return whether the message contains these parts, each after the one before it."""
    for part in parts:
        found, message = message.partition(part)[1:]
        if not found:
            return False
    return True
