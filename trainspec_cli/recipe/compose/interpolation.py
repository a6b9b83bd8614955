"""Resolve `${...}` in a recipe: each value once, and with a bounded result.

OmegaConf resolves a reference again wherever it occurs, so thirty lines that each double the one before would fill the
memory. `shipped` is the only resolver: a recipe means the same whenever and wherever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import grammar_parser
from omegaconf._utils import split_key
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_visitor import GrammarVisitor

from trainspec_cli.core.json_value import JsonObject, JsonValue

MISSING = "???"
"""Hydra's marker for a value that is left open."""
MAX_CHARS = 100_000
"""The longest text, with its references written out."""
MAX_VALUES = 5_000
"""The most values in a section, with its references written out."""
MAX_DEPTH = 40
"""The deepest chain of references and sections."""

Path = tuple[str | int, ...]


class InterpolationError(ValueError):
    """A value cannot be resolved; the message says why."""


@dataclass(frozen=True)
class _Resolved:
    value: JsonValue
    values: int
    """The number of values it holds, itself included."""


class Resolver:
    """Resolves the references in a recipe's values."""

    def __init__(self, written: JsonObject, resolvers: dict[str, Callable[[str], str]]):
        self._written = written
        self._resolvers = resolvers
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
                raise InterpolationError(f"it leads through more than {MAX_DEPTH} references and sections")
            self._under_way.append(path)
            try:
                self._known[path] = self._resolve_written(path, self._at(path))
            finally:
                self._under_way.pop()
        return self._known[path]

    def _at(self, path: Path) -> JsonValue:
        """Return the value at `path` as written; references on the way there are followed."""
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
        return node

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
        # References double: thirty lines that each name the one before twice would fill the memory.
        if values > MAX_VALUES:
            raise InterpolationError(f"it expands to more than {MAX_VALUES:,} values")
        return _Resolved(value, values)

    def _resolve_text(self, path: Path, written: str) -> _Resolved:
        counts: list[int] = []

        def refer(parsed: Any, memo: object) -> Any:
            key: str = getattr(parsed, "raw", parsed)  # omegaconf 2.4 hands over a NodeInterpolationKey, 2.3 its text
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
            raise InterpolationError("it is nested too deep") from error
        if isinstance(value, str) and len(value) > MAX_CHARS:
            raise InterpolationError(f"it expands to a text of more than {MAX_CHARS:,} characters")
        return _Resolved(value, sum(counts) if isinstance(value, (dict, list)) else 1)

    def _call(self, name: str, args: tuple[object, ...], args_str: tuple[str, ...]) -> str:
        if name not in self._resolvers:
            allowed = ", ".join(f"${{{known}:...}}" for known in self._resolvers)
            raise InterpolationError(f"there is no resolver `{name}` in a recipe, only {allowed} and ${{section.key}}")
        if len(args_str) != 1:
            raise InterpolationError(f"${{{name}:...}} takes one value, not {len(args_str)}")
        return self._resolvers[name](args_str[0])


def _target(key: str, path: Path) -> Path:
    """Return the path of a reference: `optim.lr` is absolute, `.lr` relative to the value at `path`, `..lr` one
    section up."""
    ups = len(key) - len(key.lstrip("."))
    keys: Path = tuple(split_key(key[ups:])) if key[ups:] else ()
    if ups > len(path):
        raise InterpolationError(f"Interpolation key '{key}' not found")
    return (*path[: len(path) - ups], *keys) if ups else keys
