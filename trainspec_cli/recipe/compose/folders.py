"""The folders of recipes and groups: the user's own ./conf and ./recipes first, then the shipped ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.reading.files import UnreadableFileError, exists, read_text

ROOT = "trainspec"
"""conf/trainspec.yaml, the root of every run (a distinctive name: ./conf may belong to another Hydra program)."""
SUFFIX = ".yaml"
_MAY_BE_FILE = re.compile(r"(?!\.{1,2}$)[^\0]{1,200}")
DISTURB = "disturb"
"""The folder of disturbances, which `trainspec plan` simulates: no part of a recipe, and so no group."""
NAMED_SECTIONS = {"cluster.accelerator": "accelerator"}
"""A section that one word may stand for -> the group whose options are its names."""
OWN_FILES = ("framework",)
"""Groups whose option may also be a file by its path, `framework=./mine.yaml`."""
SHIPPED = "shipped"
"""The resolver in `${shipped:recipes/FILE}`, the path of a file that ships with trainspec."""


@dataclass(frozen=True)
class Folders:
    conf: tuple[Path, ...]
    """Searched in order; the first match wins."""
    recipes: tuple[Path, ...]

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The group names, `cluster`, `data`, ...: folders below conf."""
        found = {
            folder.relative_to(conf).as_posix()
            for conf in self.conf
            for folder in conf.rglob("*")
            if folder.is_dir() and any(folder.glob(f"*{SUFFIX}"))
        }
        return tuple(sorted(found - {DISTURB}))

    def options(self, group: str) -> list[str]:
        return _names(conf / group for conf in self.conf)

    def find_config(self, name: str) -> Path | None:
        """Return the file of `model/llama_6m` or `recipe/tiny`; None if there is none, or the name leaves the
        folder."""
        if not all(_MAY_BE_FILE.fullmatch(word) for word in name.split("/")):
            return None
        if name.startswith("recipe/"):
            return _first_file(self.recipes, name.removeprefix("recipe/"))
        return _first_file(self.conf, name)

    def recipe_names(self) -> list[str]:
        return _names(self.recipes)


def find_folders(cwd: Path) -> Folders:
    shipped = shipped_data()
    return Folders(
        conf=_existing(cwd / "conf", shipped / "conf"),
        recipes=_existing(cwd / "recipes", shipped / "recipes"),
    )


def shipped_data() -> Path:
    """Return `_data` inside an installed wheel, else the checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent


def _existing(*folders: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def _names(folders: Iterable[Path]) -> list[str]:
    return sorted(
        {
            file.relative_to(folder).with_suffix("").as_posix()
            for folder in folders
            for file in folder.rglob(f"*{SUFFIX}")
            if exists(file)
        }
    )


def _first_file(folders: tuple[Path, ...], name: str) -> Path | None:
    files = (folder / f"{name}{SUFFIX}" for folder in folders)
    return next((file for file in files if exists(file)), None)


# Origins: the file and line of each value, and their addition to problems.


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
