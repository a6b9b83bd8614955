"""Read JSON that other programs wrote: bounded in size, depth and digits, with fields of the expected kinds."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainspec_cli.reading.files import MAX_BYTES, read_text, unreadable

MAX_DEPTH = 64
"""The deepest nesting of lists and objects."""
MAX_DIGITS = 30
"""The most digits of a whole number."""

Kind = type | types.UnionType
_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    types.NoneType: "null",
}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError (JSONDecodeError if it is not JSON) that says what is wrong."""
    try:
        content = json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    _check_depth(content)
    return content


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file. Raises UnreadableFileError with file, line and column, MissingFileError if there is no file."""
    text = read_text(path, max_bytes)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        why = f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise unreadable(path, why, line=error.lineno, column=error.colno) from error
    except ValueError as error:
        raise unreadable(path, f"cannot be read: {error}") from error


def read_object(path: Path, fields: Mapping[str, Kind] | None = None, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return a JSON object that has all of `fields`, each of its kind; others are allowed.

    Raises as `read_json` does.
    """
    content = read_json(path, max_bytes)
    if not isinstance(content, dict):
        raise unreadable(path, f"holds {show_kind(content)}; a JSON object is needed")
    for name, kind in (fields or {}).items():
        check_field(path, content, name, kind)
    return content


def check_field(path: Path, content: Mapping[str, Any], name: str, kind: Kind) -> None:
    """Raise UnreadableFileError if `content` of `path` lacks `name`, or holds another kind of value there."""
    if name not in content:
        raise unreadable(path, f"has no `{name}`; {describe_kind(kind)} is needed")
    if not is_kind(content[name], kind):
        raise unreadable(path, f"has {show_kind(content[name])} as `{name}`; {describe_kind(kind)} is needed")


def is_kind(value: Any, kind: Kind) -> bool:
    """Return True if `value` is of `kind` by JSON's rules: a whole number is also a number, and true is not."""
    kinds = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    allowed = (*kinds, int) if float in kinds else kinds
    return type(value) in allowed


def describe_kind(kind: Kind) -> str:
    """`int | None` -> `a whole number or null`."""
    kinds = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    return " or ".join(_KIND_NAMES[one] for one in kinds)


def show_kind(value: Any) -> str:
    """Describe a value briefly: `a list`, `null`, `7`, `'abc'`."""
    if value is None or isinstance(value, (list, dict)):
        return _KIND_NAMES[type(value)]
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a whole number of {len(digits):,} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _check_depth(content: Any) -> None:
    level, depth = [content], 0
    while level := [node for node in level if isinstance(node, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
