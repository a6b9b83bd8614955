"""Origins: the file and line of each value, and their addition to problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.reading.files import UnreadableFileError, read_text

COMMAND_LINE = "command line"
RECIPE = "recipe"
"""The key that names a recipe."""


@dataclass(frozen=True)
class Origin:
    file: str
    """The path relative to the working directory, or `command line`."""
    line: int
    """Counted from 1; on the command line, the number of the argument."""
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


Origins = dict[str, Origin]
"""Dotted path -> position of its key (the last writer's)."""


def show_path(path: Path, cwd: Path) -> str:
    """Return `path` relative to `cwd` if it lies below, else unchanged."""
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def locate(problems: Iterable[Problem], origins: Origins, arguments: Sequence[str], cwd: Path) -> list[Problem]:
    """Add to each problem its file, line and column (by its path), and that line's text."""

    @lru_cache(maxsize=1)  # many lines of one large file may be wrong
    def lines_of(file: str) -> Sequence[str]:
        return arguments if file == COMMAND_LINE else _read_lines(cwd / file)

    return [_with_excerpt(_with_origin(problem, origins), lines_of) for problem in problems]


def find_origin(path: str, origins: Origins) -> Origin | None:
    """Return the origin of `path`, else of a value below it, else of its parent."""
    if path in origins:
        return origins[path]
    below = [origin for key, origin in origins.items() if path and key.startswith(f"{path}.")]
    if below:
        return below[0]
    parent = path.rpartition(".")[0]
    return find_origin(parent, origins) if parent else None


def _with_origin(problem: Problem, origins: Origins) -> Problem:
    origin = None if problem.file else find_origin(problem.path, origins)
    if origin is None:
        return problem
    return replace(problem, file=origin.file, line=origin.line, column=origin.column)


def _with_excerpt(problem: Problem, lines_of: Callable[[str], Sequence[str]]) -> Problem:
    if problem.excerpt or problem.file is None or problem.line is None:
        return problem
    lines = lines_of(problem.file)
    if problem.line > len(lines):
        return problem
    return replace(problem, excerpt=lines[problem.line - 1])


def _read_lines(path: Path) -> list[str]:
    try:
        return read_text(path).splitlines()
    except UnreadableFileError:
        return []
