"""Files that a recipe names, of the user's own code and of wings, become absolute, so that every process finds them."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import expand
from trainspec_cli.recipe.compose.compose import Complete, Completion
from trainspec_cli.recipe.rules.check import WING_KEYS
from trainspec_cli.recipe.user_code import KINDS, absolute_reference

GROUPS = ("mixture", "validation")
"""Sections of the data with several sources by name."""


def absolute_code(cwd: Path | None = None) -> list[Complete]:
    """Return what names files absolutely, for each key that may name one of the user's own code or of a wing; relative
    ones are sought in `cwd`, as other paths of a recipe are."""
    folder = cwd or Path.cwd()
    files = [f"{wing.section}.{name}" for wing in WING_KEYS for name in wing.files]
    of_keys = [*(_of_key(kind.key, folder) for kind in KINDS), *(_of_key(path, folder, is_file=True) for path in files)]
    return [*of_keys, *(_of_parts(group, folder) for group in GROUPS)]


def _of_key(path: str, cwd: Path, *, is_file: bool = False) -> Complete:
    def complete(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
        value: JsonValue = data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        whole = _absolute(value, cwd)
        if is_file and isinstance(value, str):
            whole = str(cwd / expand(value))
        return Completion({} if whole == value else _nested(path, whole), path)

    return complete


def _nested(path: str, value: JsonValue) -> JsonObject:
    section, _, inside = path.partition(".")
    return {section: _nested(inside, value) if inside else value}


def _of_parts(group: str, cwd: Path) -> Complete:
    """Do the same for the sources of a mixture, or of the validation sets."""

    def complete(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
        section = data.get("data")
        parts = section.get(group) if isinstance(section, dict) else None
        found: JsonObject = {}
        for name, part in parts.items() if isinstance(parts, dict) else ():
            source = part.get("source") if isinstance(part, dict) else None
            if (whole := _absolute(source, cwd)) != source:
                found[name] = {"source": whole}
        return Completion({"data": {group: found}} if found else {}, f"data.{group}")

    return complete


def _absolute(value: JsonValue, cwd: Path) -> JsonValue:
    if isinstance(value, list):
        return [_absolute(item, cwd) for item in value]
    return absolute_reference(value, cwd) if isinstance(value, str) else value
