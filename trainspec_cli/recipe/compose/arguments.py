"""Parse the command line's `key=value` arguments with Hydra's grammar. All mistakes are collected instead of
raised."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.recipe.compose.folders import COMMAND_LINE, DISTURB, RECIPE, Origin

TEXTS = (RECIPE, DISTURB, "fault")
"""Keys whose value is read as plain text, without Hydra's grammar for brackets."""
TEXTS_OF_DIGITS = ("cluster.slurm.time", "cluster.slurm.mem", "cluster.slurm.gpus_per_node")
"""Text keys whose value sbatch also accepts as a bare number: `time=90` means minutes. In a file these values are
quoted, because YAML reads 2:00:00 as the number 7200."""
MAX_CHARS = 16_384
"""The longest argument. Hydra's grammar parses only some thousand characters per second."""
SHOWN_CHARS = 60
_KEY = re.compile(r"[A-Za-z_][\w-]*([./][A-Za-z_0-9][\w-]*)*")
_BRACKETS = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Argument:
    number: int
    """Counted from 1."""
    text: str
    key: str
    value: JsonValue = None
    deletes: bool = False
    """True for `~key`, which removes the key from the recipe."""

    @property
    def origin(self) -> Origin:
        return Origin(COMMAND_LINE, self.number)


def parse_arguments(texts: Sequence[str]) -> tuple[list[Argument], list[Problem]]:
    """Parse all arguments. If a key is given twice, the last value is kept and a problem names both."""
    arguments: dict[str, Argument] = {}
    given: dict[str, Argument] = {}
    problems: list[Problem] = []
    for number, text in enumerate(texts, start=1):
        read = _parse(number, text)
        if isinstance(read, Problem):
            problems.append(read)
            continue
        whole = isinstance(read.value, dict)
        paths = [path for path in value_paths(read.key, read.value) if not (whole and path == read.key)]
        problems += [_duplicate(path, given[path], read) for path in paths if path in given]
        given.update(dict.fromkeys(paths, read))
        arguments[read.key] = read
    return list(arguments.values()), problems


def find_argument(texts: Sequence[str], key: str) -> Argument | None:
    """Return the argument that sets `key`, or None."""
    return next((argument for argument in parse_arguments(texts)[0] if argument.key == key), None)


def _parse(number: int, text: str) -> Argument | Problem:
    at = Origin(COMMAND_LINE, number)
    key, equals, value = text.partition("=")
    if len(text) > MAX_CHARS:
        shown = key if len(key) <= SHOWN_CHARS else f"{key[:SHOWN_CHARS]}..."
        message = f"the argument `{shown}` has {len(text):,} characters; at most {MAX_CHARS:,} are allowed"
        return at.problem("bad_override", message, "write the value into a recipe: recipe=FILE.yaml")
    if not equals and not text.startswith("~"):
        message = f"`{text}` is not of the form key=value"
        key, colon, value = text.partition(":")
        if not text:
            return at.problem("bad_override", "an argument is empty", "leave it out, or write key=value")
        if text.startswith("-"):
            return at.problem("bad_override", message, "options come before the first `--`")
        if colon and _KEY.fullmatch(key):
            return at.problem("bad_override", message, f"type {key}={value.strip()}", key)
        if "." in text and _KEY.fullmatch(text):
            return at.problem("bad_override", message, f"type {text}=<value>, without spaces", text)
        return at.problem("bad_override", message, f"to choose a recipe, type recipe={text}", RECIPE)
    name = key.strip().lstrip("+~")
    if name in TEXTS:
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        return Argument(number, text, name, value[1:-1] if quoted else value)
    if not _KEY.fullmatch(name):
        message = f"`{key}` is not a key; a key is words joined by dots, such as optim.lr"
        bare = key.strip().lstrip("+~-").strip(".")
        item = re.fullmatch(r"(.+)\[\d+]", bare)
        if "@" in key:
            hint = "write only the key: packages (`@`) are not supported"
        elif item:
            hint = f"give the whole list: {item[1]}=[...]"
        elif _KEY.fullmatch(bare):
            hint = f"did you mean `{bare}`?"
        else:
            hint = "write key=value without spaces"
        return at.problem("bad_override", message, hint)
    if name.partition(".")[0].partition("/")[0] == "hydra":
        message = f"`{name}` belongs to Hydra's own launcher, which trainspec does not use"
        return at.problem("unknown_key", message, "leave it out", name)
    try:
        override = OverridesParser.create().parse_override(text)
        read = cast("JsonValue", None if override.is_sweep_override() else override.value())
    except (HydraException, RecursionError, ValueError):
        return _bad_value(at, name, value)
    if override.is_sweep_override():
        message = f"`{name}` has several values; a run needs one"
        one = shlex.quote(assign(name, value))
        hint = f"for one run per value, type --sweep {shlex.quote(text)}; for one text, type {one}"
        return at.problem("bad_override", message, hint, name)
    if name in TEXTS_OF_DIGITS and type(read) is int:
        read = value.strip()
    if override.is_delete() and read is not None:
        return at.problem("bad_override", f"`~{name}` takes no value", f"type ~{name}, or {name}=...", name)
    return Argument(number, text, name, read, deletes=override.is_delete())


def assign(key: str, text: str) -> str:
    """Return `key="text"`, quoted for Hydra's grammar."""
    return f"{key}={QuotedString(text, Quote.double).with_quotes()}"


def _bad_value(at: Origin, key: str, value: str) -> Problem:
    # Hydra's parser reports only a column, so find the bracket or quote that was left open.
    expected: list[tuple[str, str]] = []
    quote = ""
    for character in value:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _BRACKETS:
            expected.append((character, _BRACKETS[character]))
        elif expected and character == expected[-1][1]:
            expected.pop()
    unclosed = quote or (expected[-1][0] if expected else None)
    if unclosed:
        return at.problem("bad_override", f"`{unclosed}` is not closed in {value}", f"close the {unclosed}", key)
    message = f"the value {value} contains characters that must be quoted"
    return at.problem("bad_override", message, f"type {shlex.quote(assign(key, value))}", key)


def _duplicate(path: str, first: Argument, second: Argument) -> Problem:
    message = f"`{path}` is given twice: {first.text} (argument {first.number}) and {second.text}"
    return second.origin.problem("duplicate_override", message, "keep one of them", path)


def value_paths(key: str, value: JsonValue) -> Iterator[str]:
    """Yield `key`, and every dotted path inside a mapping given as its value (`model={num_layers: 3}`)."""
    yield key
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from value_paths(f"{key}.{inner}", item)
