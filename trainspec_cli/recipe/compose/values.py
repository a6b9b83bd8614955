"""Operations on a recipe's values as plain dicts: merging them, resolving their references `${...}`, showing them as
YAML, and parsing them from the command line.

Each reference is resolved only once, and the size of its result is limited. OmegaConf resolves a reference again at
every occurrence, so thirty lines that each double the previous one would fill memory. `shipped` is the only resolver,
so that a recipe means the same whenever and wherever it is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import grammar_parser
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_visitor import GrammarVisitor

from trainspec_cli.core.errors import Problem, did_you_mean
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.printable import is_printable, on_one_line
from trainspec_cli.recipe.compose.folders import COMMAND_LINE, DISTURB, RECIPE, Origin, Origins, shipped_data
from trainspec_cli.recipe.field_types import MISSING

SHIPPED = "shipped"
"""The resolver in `${shipped:recipes/FILE}`, which returns the path of a file shipped with trainspec."""
MAX_CHARS = 100_000
"""Maximum length of a text after its references are resolved."""
MAX_VALUES = 5_000
"""Maximum number of values in a section after its references are resolved."""
MAX_DEPTH = 40
"""Maximum depth of nested references and sections."""
SHOWN_CHARS = 200
"""Maximum length of the excerpt shown for a value that cannot be resolved."""
WIDEST_ALIGNED = 44
"""Origins are aligned in one column, except after lines longer than this."""

Path = tuple[str | int, ...]


def overlaid(below: JsonObject, above: JsonObject) -> JsonObject:
    """Return `above` merged over `below`, section by section. A `???` in `above` unsets the value again; otherwise, a
    recipe that requires `init.from` would train from scratch.

    Values from `above` are copied, because YAML aliases place the same object at several paths."""
    whole = dict(below)
    for key, value in above.items():
        known = below.get(key)
        if isinstance(value, dict):
            whole[key] = overlaid(known if isinstance(known, dict) else {}, value)
        elif isinstance(value, list):
            whole[key] = list(overlaid({}, {str(place): item for place, item in enumerate(value)}).values())
        else:
            whole[key] = value
    return whole


def all_paths(data: JsonObject, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of each value and section."""
    for key, value in data.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from all_paths(value, f"{prefix}{key}.")


def resolve(written: JsonObject) -> tuple[JsonObject, list[Problem]]:
    """Return the values with references resolved (`???` for those that are unset or cannot be resolved), and the
    problems."""
    resolver = Resolver(written)
    problems: list[Problem] = []

    def resolve_section(section: JsonObject, above: Path) -> JsonObject:
        plain: JsonObject = {}
        for key, value in section.items():
            path = (*above, key)
            if isinstance(value, dict):
                plain[str(key)] = resolve_section(value, path)
                continue
            try:
                plain[str(key)] = resolver.value(path)
            except InterpolationError as error:
                # Keep checking the other values, so that all mistakes are reported together.
                plain[str(key)] = MISSING
                shown = str(value)
                hint = did_you_mean(shown.strip("${}"), all_paths(written)) if "not found" in str(error) else ""
                shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
                name = ".".join(map(str, path))
                problems.append(Problem("bad_interpolation", f"`{name}` is {shown}: {error}", name, hint))
        return plain

    return resolve_section(written, ()), problems


class InterpolationError(ValueError):
    """A value cannot be resolved; the message states the reason."""


@dataclass(frozen=True)
class _Resolved:
    value: JsonValue
    values: int
    """Number of values in `value`, including nested ones and `value` itself."""


class Resolver:
    """Resolves the references in a recipe's values."""

    def __init__(self, written: JsonObject):
        self._written = written
        self._known: dict[Path, _Resolved] = {}
        self._under_way: list[Path] = []

    def value(self, path: Path) -> JsonValue:
        """Return the resolved value at `path`. Raises InterpolationError."""
        return self._resolve(path).value

    def _resolve(self, path: Path) -> _Resolved:
        if path not in self._known:
            if path in self._under_way:
                raise InterpolationError("Recursive interpolation detected")
            if len(self._under_way) > MAX_DEPTH:
                raise InterpolationError(f"it is a chain of more than {MAX_DEPTH} references and sections")
            self._under_way.append(path)
            try:
                # The value at `path` as written, following references along the way.
                node: JsonValue = self._written
                for depth, key in enumerate(path):
                    if isinstance(node, str) and "${" in node:
                        node = self._resolve(path[:depth]).value
                    if isinstance(node, dict) and key in node:
                        node = node[key]
                    elif isinstance(node, list) and str(key).isdecimal() and int(key) < len(node):
                        node = node[int(key)]
                    else:
                        raise InterpolationError(f"Interpolation key '{'.'.join(map(str, path))}' not found")
                self._known[path] = self._resolve_written(path, node)
            finally:
                self._under_way.pop()
        return self._known[path]

    def _resolve_written(self, path: Path, written: JsonValue) -> _Resolved:
        if isinstance(written, dict):
            items = {key: self._resolve((*path, key)) for key in written}
            return self._section({key: item.value for key, item in items.items()}, items.values())
        if isinstance(written, list):
            parts = [self._resolve((*path, index)) for index in range(len(written))]
            return self._section([part.value for part in parts], parts)
        if isinstance(written, str) and "${" in written:
            return self._resolve_text(path, written)
        return _Resolved(written, 1)

    def _section(self, value: JsonValue, items: Iterable[_Resolved]) -> _Resolved:
        values = 1 + sum(item.values for item in items)
        # References can grow exponentially: thirty lines that each refer twice to the previous one would fill memory.
        if values > MAX_VALUES:
            raise InterpolationError(f"it expands to more than {MAX_VALUES:,} values")
        return _Resolved(value, values)

    def _resolve_text(self, path: Path, written: str) -> _Resolved:
        counts: list[int] = []

        def refer(parsed: Any, memo: object) -> Any:
            key: str = getattr(parsed, "raw", parsed)  # omegaconf 2.4 passes a NodeInterpolationKey, 2.3 its text
            target = self._resolve(_target(key, path))
            if isinstance(target.value, str) and target.value == MISSING:
                raise InterpolationError(f"`{key}` has no value")
            counts.append(target.values)
            return target.value

        try:
            # OmegaConf resolves in place and without these limits, so only its grammar is used.
            visitor = GrammarVisitor(refer, self._call, None)
            value = visitor.visit(grammar_parser.parse(written))
        except OmegaConfBaseException as error:
            raise InterpolationError(str(error).partition("\n")[0]) from error
        except RecursionError as error:
            raise InterpolationError("it is nested too deeply") from error
        if isinstance(value, str) and len(value) > MAX_CHARS:
            raise InterpolationError(f"it expands to a text of more than {MAX_CHARS:,} characters")
        return _Resolved(value, sum(counts) if isinstance(value, (dict, list)) else 1)

    def _call(self, name: str, args: tuple[object, ...], args_str: tuple[str, ...]) -> str:
        if name != SHIPPED:
            allowed = f"${{{SHIPPED}:...}} and ${{section.key}}"
            raise InterpolationError(f"a recipe has no resolver `{name}`, only {allowed}")
        if len(args_str) != 1:
            raise InterpolationError(f"${{{SHIPPED}:...}} takes one value, not {len(args_str)}")
        return str(shipped_data() / args_str[0])


def _target(key: str, path: Path) -> Path:
    """Return the path that a reference points to: `optim.lr` is absolute, `.lr` is relative to the value at `path`, and
    `..lr` is one section up."""
    ups = len(key) - len(key.lstrip("."))
    keys: Path = tuple(filter(None, re.split(r"[.\[\]]", key)))
    if ups > len(path):
        raise InterpolationError(f"Interpolation key '{key}' not found")
    return (*path[: len(path) - ups], *keys) if ups else keys


# The values as YAML, each with the file and line of its origin.


def render_yaml(data: JsonObject, origins: Origins, paint_origin: Callable[[str], str] = str) -> str:
    """Return valid YAML with origins as comments, to which `paint_origin` may add colour."""
    lines = list(_lines(data, origins, ""))
    column = max((len(text) for text, _ in lines if len(text) <= WIDEST_ALIGNED), default=0)
    rendered = [
        f"{text:<{column}}  {paint_origin(on_one_line(f'# {origin}'))}" if origin else text for text, origin in lines
    ]
    return "\n".join(rendered) + "\n"


def render_value(value: JsonValue) -> str:
    """Return a value as one line of YAML, in ASCII if it contains invisible characters."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    if not is_printable(text):
        text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _lines(data: JsonObject, origins: Origins, prefix: str) -> Iterator[tuple[str, Origin | None]]:
    indent = "  " * prefix.count(".")
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{render_value(key)}:", None
            yield from _lines(value, origins, f"{path}.")
        else:
            yield f"{indent}{render_value(key)}: {render_value(value)}", origins.get(path)


# The command line: `key=value` arguments, parsed with Hydra's grammar. All mistakes are collected instead of raised.


TEXTS = (RECIPE, DISTURB, "fault")
"""Keys whose value is read as plain text, without Hydra's grammar for brackets."""
TEXTS_OF_DIGITS = ("cluster.slurm.time", "cluster.slurm.mem", "cluster.slurm.gpus_per_node")
"""Text keys where sbatch also accepts a bare number: `time=90` means minutes. In a file these values are quoted,
because YAML reads 2:00:00 as the number 7200."""
MAX_ARGUMENT_CHARS = 16_384
"""Maximum length of an argument, because Hydra's grammar parses only a few thousand characters per second."""
SHOWN_KEY_CHARS = 60
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
    """True if this is `~key`, which removes the key from the recipe."""

    @property
    def origin(self) -> Origin:
        return Origin(COMMAND_LINE, self.number)


def parse_arguments(texts: Sequence[str]) -> tuple[list[Argument], list[Problem]]:
    """Parse all arguments. If a key occurs twice, the last value is kept and both occurrences are reported as a
    problem."""
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
        for path in (path for path in paths if path in given):
            message = f"`{path}` is given twice: {given[path].text} (argument {given[path].number}) and {read.text}"
            problems.append(read.origin.problem("duplicate_override", message, "keep one of them", path))
        given.update(dict.fromkeys(paths, read))
        arguments[read.key] = read
    return list(arguments.values()), problems


def find_argument(texts: Sequence[str], key: str) -> Argument | None:
    """Return the argument that sets `key`, or None."""
    return next((argument for argument in parse_arguments(texts)[0] if argument.key == key), None)


def _parse(number: int, text: str) -> Argument | Problem:
    at = Origin(COMMAND_LINE, number)
    key, equals, value = text.partition("=")
    if len(text) > MAX_ARGUMENT_CHARS:
        shown = key if len(key) <= SHOWN_KEY_CHARS else f"{key[:SHOWN_KEY_CHARS]}..."
        message = f"the argument `{shown}` has {len(text):,} characters; at most {MAX_ARGUMENT_CHARS:,} are allowed"
        return at.problem("bad_override", message, "write the value into a recipe: recipe=FILE.yaml")
    if not equals and not text.startswith("~"):
        message = f"`{text}` is not of the form key=value"
        key, colon, value = text.partition(":")
        if not text:
            return at.problem("bad_override", "an argument is empty", "leave it out, or write key=value")
        if text.startswith("-"):
            return at.problem("bad_override", message, "options come before the first `--`")
        if colon and _KEY.fullmatch(key):
            return at.problem("bad_override", message, f"set {key}={value.strip()}", key)
        if "." in text and _KEY.fullmatch(text):
            return at.problem("bad_override", message, f"set {text}=<value>, without spaces", text)
        return at.problem("bad_override", message, f"to choose a recipe, set recipe={text}", RECIPE)
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
            hint = f"write the complete list: {item[1]}=[...]"
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
        hint = f"for one run per value, pass --sweep {shlex.quote(text)}; for one text, set {one}"
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
    # Hydra's parser reports only a column, so find the unclosed bracket or quote.
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
    return at.problem("bad_override", message, f"set {shlex.quote(assign(key, value))}", key)


def value_paths(key: str, value: JsonValue) -> Iterator[str]:
    """Yield `key` and every dotted path inside a mapping that is its value (`model={num_layers: 3}`)."""
    yield key
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from value_paths(f"{key}.{inner}", item)
