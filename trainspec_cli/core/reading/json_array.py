"""Parse a JSON array item by item, each with the line that it begins in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.core.reading.files import TOO_DEEP, check_depth, parse_whole

_SPACE = re.compile(r"[ \t\n\r]*")
SHOWN_CHARS = 30


class JsonArrayError(ValueError):
    """The text is not a JSON array, or holds an item that cannot be parsed; nothing behind it can be read."""

    def __init__(self, why: str, line: int):
        super().__init__(why)
        self.line = line


def parse_items(text: str) -> Iterator[tuple[int, JsonValue]]:
    """Yield (line, item) for each item of the array that is the whole of `text`. Raises JsonArrayError."""
    decoder = json.JSONDecoder(parse_int=parse_whole)
    at, line = _pass(text, 0, "[", 1)
    if text[at : at + 1] == "]":
        _check_end(text, at + 1, line)
        return
    while True:
        try:
            item, end = decoder.raw_decode(text, at)
            check_depth(item)
        except json.JSONDecodeError as error:
            raise JsonArrayError(error.msg, error.lineno) from error
        except RecursionError as error:
            raise JsonArrayError(TOO_DEEP, line) from error
        except ValueError as error:
            raise JsonArrayError(str(error), line) from error
        yield line, item
        # Counted piece by piece, so that a large file is not searched from its start for each item.
        line += text.count("\n", at, end)
        at, line = _skip_space(text, end, line)
        if text[at : at + 1] == "]":
            _check_end(text, at + 1, line)
            return
        at, line = _pass(text, at, ",", line)


def _skip_space(text: str, start: int, line: int) -> tuple[int, int]:
    space = _SPACE.match(text, start)
    assert space is not None, "it matches the empty text"
    return space.end(), line + text.count("\n", start, space.end())


def _pass(text: str, start: int, mark: str, line: int) -> tuple[int, int]:
    """Return the position behind `mark` and the space around it, and its line."""
    at, line = _skip_space(text, start, line)
    if text[at : at + 1] != mark:
        found = _excerpt(text, at) if at < len(text) else "the end of the file"
        raise JsonArrayError(f"`{mark}`{' or `]`' * (mark == ',')} is needed in the place of {found}", line)
    return _skip_space(text, at + 1, line)


def _check_end(text: str, start: int, line: int) -> None:
    at, line = _skip_space(text, start, line)
    if at < len(text):
        raise JsonArrayError(f"{_excerpt(text, at)} stands behind the end of the array", line)


def _excerpt(text: str, at: int) -> str:
    return f"`{text[at : at + SHOWN_CHARS].splitlines()[0]}`"
