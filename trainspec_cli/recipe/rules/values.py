"""Rules on a value by itself: a number's range, and text that becomes a line of a batch script or a folder's path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.printable import is_printable, on_one_line
from trainspec_cli.recipe.field_types import AUTO, Range, ranges_of
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.unknown import UNKNOWN


def forget_out_of_range(section: Any, prefix: str = "") -> tuple[Any, list[Problem]]:
    """Return `section` with UNKNOWN in the place of each value that is out of its range, and a problem for each.

    null and auto are in every range. The sections of a list are looked through one by one.
    """
    changes: dict[str, object] = {}
    problems: list[Problem] = []
    ranges = ranges_of(section.__class__)
    for field in fields(section):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            changes[field.name], found = forget_out_of_range(value, f"{path}.")
            problems += found
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            items = [forget_out_of_range(item, f"{path}.{place}.") for place, item in enumerate(value)]
            changes[field.name] = tuple(item for item, _ in items)
            problems += [problem for _, found in items for problem in found]
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


def slurm_text(spec: RunSpec) -> Iterator[Problem]:
    """A line break would begin a line of its own in job.sbatch; other control characters could hide what stands there.

    `setup` is shell, which may have several lines.
    """
    slurm = spec.cluster.slurm
    for field in fields(slurm):
        value, path = getattr(slurm, field.name), f"cluster.slurm.{field.name}"
        for text in value if isinstance(value, tuple) else (value,):
            yield from _check_text(path, text, may_have_lines=field.name == "setup")


def run_folder(spec: RunSpec) -> Iterator[Problem]:
    yield from _check_text("run.dir", spec.run.dir)


def _check_text(path: str, text: object, *, may_have_lines: bool = False) -> Iterator[Problem]:
    if not isinstance(text, str):  # a number, or of a wrong type, which is reported elsewhere
        return
    if is_printable(text) if may_have_lines else text == on_one_line(text):
        return
    what = "control characters" if may_have_lines else "line breaks or other control characters"
    message = f"`{path}` is `{on_one_line(text)}`; it cannot hold {what}"
    yield Problem("bad_text", message, path, "take out what is shown with a backslash")


TEXT_RULES = (slurm_text, run_folder)
