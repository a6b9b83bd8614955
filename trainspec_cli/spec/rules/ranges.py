"""The range of each number by itself, as its field's type states it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from trainspec_cli.errors import Problem
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.numbers import Range, ranges_of
from trainspec_cli.spec.unknown import UNKNOWN


def forget_out_of_range(section: Any, prefix: str = "") -> tuple[Any, list[Problem]]:
    """Return `section` with UNKNOWN in the place of each value that is out of its range, and a problem for each.

    null and auto are in every range.
    """
    changes, problems, ranges = {}, [], ranges_of(section.__class__)
    for field in fields(section):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            changes[field.name], found = forget_out_of_range(value, f"{path}.")
            problems += found
        elif value is not UNKNOWN and value is not None and value != AUTO and field.name in ranges:
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(map(ranges[field.name].holds, numbers)):
                changes[field.name] = UNKNOWN
                problems.append(_out_of_range(path, value, ranges[field.name]))
    return replace(section, **changes) if problems else section, problems


def _out_of_range(path: str, value: float | tuple[float, ...], allowed: Range) -> Problem:
    if isinstance(value, tuple):
        message = f"`{path}` is {list(value)}; numbers of {allowed.describe()} are needed"
        return Problem("out_of_range", message, path)
    kind = f"{value}; a whole number" if isinstance(value, int) else f"{value:g}; a number"
    fits = value <= allowed.low and allowed.includes_low
    hint = f"type {path}={allowed.low:g} or more" if fits else ""
    return Problem("out_of_range", f"`{path}` is {kind} of {allowed.describe()} is needed", path, hint)
