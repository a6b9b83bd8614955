"""One's own code in a recipe: its files are named absolutely, so that every process of the run finds them."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.composer.compose import Complete, Completion
from trainspec_cli.extensions.source import absolute_reference
from trainspec_cli.json_value import JsonObject, JsonValue
from trainspec_cli.spec.own_code import KINDS


def absolute_code(cwd: Path | None = None) -> list[Complete]:
    """Return what names the files of one's own code absolutely, for each key that may name one; relative ones are
    sought in `cwd`, as other paths of a recipe are."""
    return [_of_key(kind.key, cwd or Path.cwd()) for kind in KINDS]


def _of_key(path: str, cwd: Path) -> Complete:
    def complete(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
        value: JsonValue = data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        whole = _absolute(value, cwd)
        return Completion({} if whole == value else _nested(path, whole), path)

    return complete


def _nested(path: str, value: JsonValue) -> JsonObject:
    section, _, inside = path.partition(".")
    return {section: _nested(inside, value) if inside else value}


def _absolute(value: JsonValue, cwd: Path) -> JsonValue:
    if isinstance(value, list):
        return [_absolute(item, cwd) for item in value]
    return absolute_reference(value, cwd) if isinstance(value, str) else value
