"""What the fuzzers share: the command line in this process, and an alarm for what would not end."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.cli.main import EXIT_FAULT
from trainspec_cli.core.errors import EXIT_CODES

ALARM_S = 60
"""A safety net alone: one command line of a fuzzer takes milliseconds."""

Told = tuple[int, str]
"""(exit code, what was printed)"""


class NoEndError(BaseException):
    """The command did not end; no `except Exception` of the program may catch it."""


@contextlib.contextmanager
def ends(seconds: int = ALARM_S) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise NoEndError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tell(*arguments: str) -> Told:
    """Run a command line in this process; fails where the program itself is at fault."""
    out = io.StringIO()
    with ends(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run(arguments)
    said = out.getvalue()
    assert code in EXIT_CODES and code != EXIT_FAULT, f"trainspec {' '.join(arguments)[:500]}\n{said[-3000:]}"
    assert "Traceback" not in said, said[-3000:]
    return code, said


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path


STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**18,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "abc",
    "\x00",
    "\ud800",  # half a surrogate pair
    "é" * 300,
    "x" * 5000,
    "${now:%Y}",
    [],
    {},
    [[]],
    {"a": {"b": None}},
    [None],
    "../..",
    "/dev/zero",
)
"""Values that belong nowhere in particular."""
TAKEN_OUT = object()


def strange_variants(content: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one of its values taken out or another in its place."""
    for path in list(_paths(content)):
        for value in (TAKEN_OUT, *STRANGE):
            yield _changed(content, path, value)
    yield from STRANGE


def some_variants(content: Any, count: int, seed: int = 0) -> Iterator[Any]:
    """Yield `count` of the strange variants of a JSON value. A plan has 10,000, too many to make them all first."""
    chance = random.Random(seed)
    paths = [(), *_paths(content)]
    for _ in range(count):
        path = chance.choice(paths)
        value = chance.choice((TAKEN_OUT, *STRANGE) if path else STRANGE)
        yield _changed(content, path, value) if path else value


def _paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(content))
    node = copy
    for key in path[:-1]:
        node = node[key]
    if value is TAKEN_OUT:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return copy


def damaged_bytes(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Copies with bytes flipped, cut, doubled or written over."""
    chance = random.Random(seed)
    for _ in range(count):
        yield _DAMAGES[chance.randrange(len(_DAMAGES))](bytearray(content), chance)


def _flip(content: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 4)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return bytes(content)


def _cut(content: bytearray, chance: random.Random) -> bytes:
    return bytes(content[: chance.randrange(len(content))])


def _double(content: bytearray, chance: random.Random) -> bytes:
    start, stop = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return bytes(content[:stop] + content[start:])


def _overwrite(content: bytearray, chance: random.Random) -> bytes:
    word = chance.choice([b"\x00", b"\xff\xff\xff\xff", b"[" * 2000, b"9" * 5000, b"NaN", b'"', b"-1", b"1e999", b"\n"])
    start = chance.randrange(len(content))
    content[start : start + len(word)] = word
    return bytes(content)


_DAMAGES: tuple[Callable[[bytearray, random.Random], bytes], ...] = (_flip, _cut, _double, _overwrite)
