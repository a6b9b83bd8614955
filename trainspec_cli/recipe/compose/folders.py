"""Recipe and group files: their paths, the position of each value in them, and mistakes in their YAML.

The user's own ./conf and ./recipes take precedence over the shipped folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path

import yaml

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import VERSION_KEY, UnreadableFileError, exists, read_text
from trainspec_cli.core.reading.yaml_file import MAX_BYTES, YamlLimitError, compose_yaml, construct_yaml

ROOT = "trainspec"
"""conf/trainspec.yaml, the root configuration of every run. The name is distinctive because a ./conf folder may belong
to another Hydra program."""
SUFFIX = ".yaml"
_MAY_BE_FILE = re.compile(r"(?!\.{1,2}$)[^\0]{1,200}")
DISTURB = "disturb"
"""The folder of disturbances that `trainspec plan` can simulate. They are not part of a recipe, so they are not a
group."""
NAMED_SECTIONS = {"cluster.accelerator": "accelerator"}
"""A section that a single name may replace -> the group whose options are the valid names."""
SECTION_NAMED_BY = {group: section for section, group in NAMED_SECTIONS.items()}
OWN_FILES = ("framework",)
"""Groups for which the option may also be the path of a file, as in `framework=./mine.yaml`."""


@dataclass(frozen=True)
class Folders:
    conf: tuple[Path, ...]
    """These are searched in order; the first match wins."""
    recipes: tuple[Path, ...]

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The group names (`cluster`, `data`, ...), which are the folders below conf."""
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
        """Return the file of `model/llama_6m` or `recipe/tiny`; None if it does not exist, or if its path would leave
        the folder."""
        if not all(_MAY_BE_FILE.fullmatch(word) for word in name.split("/")):
            return None
        of_recipe = name.startswith(f"{RECIPE}/")
        folders = self.recipes if of_recipe else self.conf
        file_name = f"{name.removeprefix(f'{RECIPE}/') if of_recipe else name}{SUFFIX}"
        return next((folder / file_name for folder in folders if exists(folder / file_name)), None)

    def recipe_names(self) -> list[str]:
        return _names(self.recipes)


def find_folders(cwd: Path) -> Folders:
    shipped = shipped_data()
    return Folders(
        conf=_existing(cwd / "conf", shipped / "conf"),
        recipes=_existing(cwd / "recipes", shipped / "recipes"),
    )


def shipped_data() -> Path:
    """Return the folder of shipped files: `_data` in an installed wheel, otherwise the root of the checkout."""
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


# Origins: the file and line of each value, and how they are added to problems.


COMMAND_LINE = "command line"
RECIPE = "recipe"
"""The key that specifies a recipe."""


@dataclass(frozen=True)
class Origin:
    file: str
    """The path relative to the working directory, or `command line`."""
    line: int
    """Counted from 1; on the command line, the number of the argument."""
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def problem(self, code: str, message: str, hint: str = "", path: str = "") -> Problem:
        """Return a problem at this position."""
        return Problem(code, message, path, hint, self.file, self.line, self.column)


Origins = dict[str, Origin]
"""Dotted path -> position of its key (as last set)."""


def show_path(path: Path, cwd: Path) -> str:
    """Return `path` relative to `cwd` if it is below it, otherwise unchanged."""
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def locate(
    problems: Iterable[Problem],
    origins: Origins,
    arguments: Sequence[str],
    cwd: Path,
    chosen_at: Origins | None = None,
) -> list[Problem]:
    """Add file, line and column (found by its path), and the text of that line, to each problem. `chosen_at`: where an
    entire section was selected by naming an option."""

    @lru_cache(maxsize=1)  # cached, because a large file may have mistakes on many lines
    def lines_of(file: str) -> Sequence[str]:
        if file == COMMAND_LINE:
            return arguments
        try:
            return read_text(cwd / file).splitlines()
        except UnreadableFileError:
            return []

    located = []
    for problem in problems:
        origin = None if problem.file else (chosen_at or {}).get(problem.path) or find_origin(problem.path, origins)
        if origin is not None:
            problem = replace(problem, file=origin.file, line=origin.line, column=origin.column)
        if problem.file is not None and problem.line is not None and not problem.excerpt:
            shown = lines_of(problem.file)[problem.line - 1 : problem.line]
            problem = replace(problem, excerpt="".join(shown))
        located.append(problem)
    return located


def find_origin(path: str, origins: Origins) -> Origin | None:
    """Return the origin of `path`, of a value below it, or of its parent."""
    if path in origins:
        return origins[path]
    below = [origin for key, origin in origins.items() if path and key.startswith(f"{path}.")]
    if below:
        return below[0]
    parent = path.rpartition(".")[0]
    return find_origin(parent, origins) if parent else None


# One YAML file with its positions: the line of each key, the defaults list, and syntax errors.


SYNTAX_HINTS = {
    "mapping values are not allowed": "indent it like its neighbours, and quote text that holds `: `",
    "could not find expected ':'": "write `key: value`, with a space after the colon",
    "that cannot start any token": "quote text that starts with this character",
    "expected ',' or ']'": "close the list with `]`",
    "expected ',' or '}'": "close the mapping with `}`",
    "found unexpected end of stream": "close the quotes",
    "expected <block end>": "give keys of one level the same indentation",
}
"""Part of PyYAML's message -> what to do."""

ABOUT_FILE = ("defaults", VERSION_KEY)
"""Keys that describe the file itself instead of containing recipe values."""

UNFINISHED = ("could not find expected ':'", "end of stream", "expected ',' or")
"""Parts of messages about an unclosed element, whose start is in PyYAML's context mark."""

_NO_SPACE = re.compile(r"\s*[\w-]+:[^\s:]")
_PACKAGE = re.compile(r"(?:#.*\n|\s)*?#\s*@package:?[ \t]+([\w.]+)[ \t]*(?:\n|\Z)")


@dataclass(frozen=True)
class YamlEntry:
    """One line of a defaults list: `override /model: llama_6m`, or a bare name."""

    key: str
    """`override /model`; "" for a bare name."""
    value: str
    origin: Origin
    several: tuple[str, ...] = ()
    """The options, if the line lists more than one. This is reported as a mistake, because Hydra would merge them into
    one section."""


@dataclass(frozen=True)
class YamlFile:
    start: Origin
    """The position of the first key or, if there is none, of the first line."""
    origins: Origins
    """Dotted path, as written in this file -> position of its key."""
    defaults: tuple[YamlEntry, ...]
    description: str
    root: yaml.MappingNode | None
    """None for an empty file."""
    version: tuple[object, Origin] | None = None
    """The training-spec version stated in the file, as YAML reads it (text, if written correctly); None if the file
    does not state one."""
    package: str | None = None
    """The section that the file's values fill, as stated in its first lines (`# @package cluster.fabric`). None means
    the section with the same name as its folder."""

    def values(self) -> JsonObject:
        """Return the file's content as plain values. Raises RecipeError if a value has a type that plain YAML does not
        have."""
        if self.root is None:
            return {}
        with _syntax_checked(self.start.file):
            content: JsonObject = construct_yaml(self.root)
            return content


def read_yaml(path: Path, cwd: Path) -> YamlFile:
    """Read a file; a shipped file is read only once per process unless it changes. Raises RecipeError with all syntax
    errors."""
    shown = show_path(path, cwd)
    if not path.is_relative_to(shipped_data()) or not exists(path):
        return _read(path, shown)
    about = path.stat()
    return _read_shipped(path, shown, about.st_mtime_ns, about.st_size)


@cache
def _read_shipped(path: Path, shown: str, _modified_ns: int, _size_bytes: int) -> YamlFile:
    return _read(path, shown)


def _read(path: Path, shown: str) -> YamlFile:
    try:
        text = read_text(path, MAX_BYTES)
    except UnreadableFileError as error:
        found = error.problems[0]
        message = f"{shown} cannot be read as text: it {found.message.removeprefix(f'{path} ')}"
        problem = Problem("bad_yaml", message, hint=found.hint, file=shown, line=found.line or 1, column=1)
        raise RecipeError(problem) from error
    with _syntax_checked(shown, text):
        root = compose_yaml(text)
    if root is None:
        return YamlFile(Origin(shown, 1, 1), {}, (), "", None)
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(_origin(root, shown).problem("bad_yaml", "expected a file of `key: value` lines"))
    problems = list(_check_keys(root, shown))
    if problems:
        raise RecipeError(problems)
    top = {key.value: value for key, value in root.value}
    stated = next((pair for pair in root.value if pair[0].value == VERSION_KEY), None)
    package = _PACKAGE.match(text)
    defaults = top.get("defaults")
    entries = []
    for node in defaults.value if isinstance(defaults, yaml.SequenceNode) else []:
        if isinstance(node, yaml.MappingNode) and node.value:
            key, value = node.value[0]
            options = [_scalar(item) for item in value.value] if isinstance(value, yaml.SequenceNode) else []
            chosen = options[0] if len(options) == 1 else _scalar(value)
            entries.append(
                YamlEntry(key.value, chosen, _origin(key, shown), tuple(options if len(options) > 1 else ()))
            )
        else:
            entries.append(YamlEntry("", _scalar(node), _origin(node, shown)))
    return YamlFile(
        start=_origin(root.value[0][0], shown) if root.value else Origin(shown, 1, 1),
        origins={path: origin for path, origin in _walk(root, "", shown) if path.split(".")[0] not in ABOUT_FILE},
        defaults=tuple(entries),
        description=_scalar(top.get("description")),
        root=root,
        version=(construct_yaml(stated[1]), _origin(stated[0], shown)) if stated else None,
        package=package[1].replace("_global_", "") if package else None,
    )


@contextmanager
def _syntax_checked(shown: str, text: str = "") -> Iterator[None]:
    """Convert PyYAML's exceptions to a RecipeError with the line."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_syntax_problem(error, shown, text.splitlines())) from error
    except (yaml.YAMLError, ValueError) as error:
        message = f"{shown} cannot be read as text: {str(error).partition(chr(10))[0]}"
        raise RecipeError(Problem(code="bad_yaml", message=message, file=shown, line=1, column=1)) from error


def _syntax_problem(error: yaml.MarkedYAMLError, shown: str, lines: list[str]) -> Problem:
    reason = error.problem or error.context or "unreadable"
    unfinished = any(fragment in reason for fragment in UNFINISHED)
    # For an unclosed element, PyYAML marks the line where it gave up, far below the one that must be closed.
    mark = (error.context_mark if unfinished else None) or error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    if "'\\t'" in reason:
        # PyYAML reports a tab as a character "that cannot start any token", but a tab is invisible.
        message = "this line is indented with a tab; YAML allows only spaces"
        hint = "replace the tab with two spaces"
    else:
        context = f" {error.context}" if error.context and error.context != reason else ""
        what = "this exceeds the limits of a recipe" if isinstance(error, YamlLimitError) else "this is not YAML"
        message = f"{what}: {reason}{context}"
        near = [number for number in (line, line - 1) if 1 <= number <= len(lines)]
        colon = next((number for number in near if _NO_SPACE.match(lines[number - 1])), None)
        known = next((hint for fragment, hint in SYNTAX_HINTS.items() if fragment in reason), "")
        hint = known if colon is None else f"put a space after the colon in line {colon}"
    return Problem(code="bad_yaml", message=message, hint=hint, file=shown, line=line, column=column)


def _check_keys(node: yaml.Node, shown: str) -> Iterator[Problem]:
    """Yield a problem for each key that is not a plain word or that occurs twice (YAML would silently keep the last
    value)."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _check_keys(item, shown)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            yield _origin(key, shown).problem("bad_yaml", "a key must be a word")
            continue
        if key.value in first:
            line = first[key.value].start_mark.line + 1
            message = f"the key `{key.value}` occurs twice, first in line {line}"
            yield _origin(key, shown).problem("bad_yaml", message, "keep one")
        first[key.value] = key
        yield from _check_keys(value, shown)


def _walk(node: yaml.Node, prefix: str, shown: str) -> Iterator[tuple[str, Origin]]:
    """Yield every path below a mapping or a list of mappings (numbered from 0), with its position."""
    if isinstance(node, yaml.MappingNode):
        below = [(f"{prefix}{key.value}", key, value) for key, value in node.value]
    else:
        items = enumerate(node.value if isinstance(node, yaml.SequenceNode) else [])
        below = [(f"{prefix}{number}", item, item) for number, item in items if isinstance(item, yaml.MappingNode)]
    for path, at, value in below:
        yield path, _origin(at, shown)
        yield from _walk(value, f"{path}.", shown)


def _origin(node: yaml.Node, shown: str) -> Origin:
    return Origin(shown, node.start_mark.line + 1, node.start_mark.column + 1)


def _scalar(node: yaml.Node | None) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
