"""Read one YAML file with its positions: the line of each key, the defaults list, and syntax errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import UnreadableFileError, exists, read_text
from trainspec_cli.core.reading.spec_version import KEY as VERSION_KEY
from trainspec_cli.core.reading.yaml_file import MAX_BYTES, YamlLimitError, compose_yaml, construct_yaml
from trainspec_cli.recipe.compose.folders import Origin, Origins, shipped_data, show_path

SYNTAX_HINTS = {
    "mapping values are not allowed": "indent it like its neighbours, and quote text that holds `: `",
    "could not find expected ':'": "write `key: value`, with a space after the colon",
    "that cannot start any token": "quote text that starts with this character",
    "expected ',' or ']'": "close the list with `]`",
    "expected ',' or '}'": "close the mapping with `}`",
    "found unexpected end of stream": "close the quotes",
    "expected <block end>": "give keys of one level the same indentation",
}
"""Fragment of PyYAML's message -> what to do."""

ABOUT_FILE = ("defaults", VERSION_KEY)
"""Keys that say something of the file, and are no values of the recipe."""

UNFINISHED = ("could not find expected ':'", "end of stream", "expected ',' or")
"""Fragments of messages about something unfinished, whose start is in PyYAML's context mark."""

_NO_SPACE = re.compile(r"\s*[\w-]+:[^\s:]")


@dataclass(frozen=True)
class YamlEntry:
    """One line of a defaults list: `override /model: llama_6m`, or a bare name."""

    key: str
    """`override /model`; "" for a bare name."""
    value: str
    origin: Origin
    several: tuple[str, ...] = ()
    """The options of a list of more than one, which Hydra would merge into one section."""


@dataclass(frozen=True)
class StatedVersion:
    """`spec_version: "1.0"`"""

    value: object
    """As YAML reads it: text, where it is written right."""
    origin: Origin


@dataclass(frozen=True)
class YamlFile:
    start: Origin
    """The first key, or the first line."""
    origins: Origins
    """Dotted path, as written in this file -> position of its key."""
    defaults: tuple[YamlEntry, ...]
    description: str
    root: yaml.MappingNode | None
    """None in an empty file."""
    version: StatedVersion | None = None
    """The version of the training spec that the file states; None where it states none."""

    def values(self) -> JsonObject:
        """Return what the file holds as plain values. Raises RecipeError where a value is of no type that YAML has."""
        if self.root is None:
            return {}
        with _syntax_checked(self.start.file):
            content: JsonObject = construct_yaml(self.root)
            return content


def read_yaml(path: Path, cwd: Path) -> YamlFile:
    """Read a file; one that ships with trainspec once in a process, unless it changes. Raises RecipeError with
    everything that is wrong with its syntax."""
    shown = show_path(path, cwd)
    if not path.is_relative_to(shipped_data()) or not exists(path):
        return _read(path, shown)
    about = path.stat()
    return _read_shipped(path, shown, about.st_mtime_ns, about.st_size)


@cache
def _read_shipped(path: Path, shown: str, _modified_ns: int, _size_bytes: int) -> YamlFile:
    return _read(path, shown)


def _read(path: Path, shown: str) -> YamlFile:
    root = _parse(path, shown)
    if root is None:
        return YamlFile(Origin(shown, 1, 1), {}, (), "", None)
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(_problem(root, shown, "a file of `key: value` lines is needed"))
    problems = list(_check_keys(root, shown))
    if problems:
        raise RecipeError(problems)
    top = {key.value: value for key, value in root.value}
    stated = next((pair for pair in root.value if pair[0].value == VERSION_KEY), None)
    version = StatedVersion(construct_yaml(stated[1]), _origin(stated[0], shown)) if stated else None
    return YamlFile(
        start=_origin(root.value[0][0], shown) if root.value else Origin(shown, 1, 1),
        origins={path: origin for path, origin in _walk(root, "", shown) if path.split(".")[0] not in ABOUT_FILE},
        defaults=tuple(_entries(top.get("defaults"), shown)),
        description=_scalar(top.get("description")),
        root=root,
        version=version,
    )


def _parse(path: Path, shown: str) -> yaml.Node | None:
    try:
        text = read_text(path, MAX_BYTES)
    except UnreadableFileError as error:
        found = error.problems[0]
        message = f"{shown} cannot be read as text: it {found.message.removeprefix(f'{path} ')}"
        problem = Problem("bad_yaml", message, hint=found.hint, file=shown, line=found.line or 1, column=1)
        raise RecipeError(problem) from error
    with _syntax_checked(shown, text):
        return compose_yaml(text)


@contextmanager
def _syntax_checked(shown: str, text: str = "") -> Iterator[None]:
    """Turn what PyYAML raises into a RecipeError with its line."""
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
    # Of something unfinished PyYAML marks where it gave up, far below the line that has to be closed.
    mark = (error.context_mark if unfinished else None) or error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    if "'\\t'" in reason:
        # PyYAML calls a tab a character "that cannot start any token", which nobody can see.
        message = "this line is indented by a tab; YAML allows only spaces"
        hint = "replace the tab with two spaces"
    else:
        context = f" {error.context}" if error.context and error.context != reason else ""
        what = "this is more than a recipe may hold" if isinstance(error, YamlLimitError) else "this is not YAML"
        message = f"{what}: {reason}{context}"
        hint = _syntax_hint(reason, lines, line)
    return Problem(code="bad_yaml", message=message, hint=hint, file=shown, line=line, column=column)


def _syntax_hint(reason: str, lines: list[str], line: int) -> str:
    for number in (line, line - 1):
        if 1 <= number <= len(lines) and _NO_SPACE.match(lines[number - 1]):
            return f"put a space after the colon in line {number}"
    return next((hint for fragment, hint in SYNTAX_HINTS.items() if fragment in reason), "")


def _check_keys(node: yaml.Node, shown: str) -> Iterator[Problem]:
    """Yield a problem for each key that is not a word, or occurs twice (YAML would silently take the last)."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _check_keys(item, shown)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            yield _problem(key, shown, "a key must be a word")
            continue
        if key.value in first:
            line = first[key.value].start_mark.line + 1
            yield _problem(key, shown, f"the key `{key.value}` occurs twice, first in line {line}", "keep one")
        first[key.value] = key
        yield from _check_keys(value, shown)


def _problem(node: yaml.Node, shown: str, message: str, hint: str = "") -> Problem:
    origin = _origin(node, shown)
    return Problem(code="bad_yaml", message=message, hint=hint, file=shown, line=origin.line, column=origin.column)


def _walk(node: yaml.Node, prefix: str, shown: str) -> Iterator[tuple[str, Origin]]:
    """Yield every path below a mapping or a list of mappings, which are numbered from 0, and its position."""
    if isinstance(node, yaml.MappingNode):
        below = [(f"{prefix}{key.value}", key, value) for key, value in node.value]
    else:
        items = enumerate(node.value if isinstance(node, yaml.SequenceNode) else [])
        below = [(f"{prefix}{number}", item, item) for number, item in items if isinstance(item, yaml.MappingNode)]
    for path, at, value in below:
        yield path, _origin(at, shown)
        yield from _walk(value, f"{path}.", shown)


def _entries(defaults: yaml.Node | None, shown: str) -> Iterator[YamlEntry]:
    for node in defaults.value if isinstance(defaults, yaml.SequenceNode) else []:
        if isinstance(node, yaml.MappingNode) and node.value:
            key, value = node.value[0]
            options = [_scalar(item) for item in value.value] if isinstance(value, yaml.SequenceNode) else []
            chosen = options[0] if len(options) == 1 else _scalar(value)
            yield YamlEntry(key.value, chosen, _origin(key, shown), tuple(options if len(options) > 1 else ()))
        else:
            yield YamlEntry("", _scalar(node), _origin(node, shown))


def _origin(node: yaml.Node, shown: str) -> Origin:
    return Origin(shown, node.start_mark.line + 1, node.start_mark.column + 1)


def _scalar(node: yaml.Node | None) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
