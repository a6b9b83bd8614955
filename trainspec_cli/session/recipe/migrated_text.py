"""What a file is to begin with once it is of the current version of the training spec; comments and layout stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import open_regular, parse_json, read_bytes, read_object
from trainspec_cli.core.reading.spec_version import CURRENT, KEY, UNSTATED, VERSION_LINE, find_fault, without_version
from trainspec_cli.core.reading.yaml_file import compose_yaml, construct_yaml, read_yaml
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.profile import ClusterProfile
from trainspec_cli.recipe.structure import key_of
from trainspec_cli.run.folder.events import MAX_LINE_BYTES
from trainspec_cli.run.folder.forms import PROFILE, RECIPE, Form, bring_to_current

RECIPE_KEYS = {"defaults", KEY, *(key_of(one) for one in fields(RunSpec))}
PROFILE_KEYS = {key_of(one) for one in fields(ClusterProfile)}
BOM = "\ufeff"


@dataclass(frozen=True)
class Head:
    """The beginning of a file, up to which a migration changes it."""

    version: str
    old: bytes
    new: bytes
    """As `old` where nothing is to be done."""


def migrated_head(path: Path, form: Form) -> Head:
    """Return the beginning of a file as it is and as it is to be. Raises RecipeError for a version that cannot be
    migrated, UnreadableFileError for a damaged file."""
    if form.notation == "jsonl":
        return _head_of_events(path, form)
    return _head_of_yaml(path) if form.notation == "yaml" else _head_of_json(path, form)


def _head_of_json(path: Path, form: Form) -> Head:
    content, old = read_object(path), read_bytes(path)
    version = _checked(path, content.get(KEY, UNSTATED))
    if missing := next((key for key in form.needs if key not in content), None):
        raise RecipeError(Problem("no_form", f"{path} is no {form.kind} file: it has no `{missing}`", file=str(path)))
    new = old if version == CURRENT else (json_text(bring_to_current(form, content)) + "\n").encode()
    return Head(version, old, new)


def _head_of_events(path: Path, form: Form) -> Head:
    """The head reaches up to the first whole event, which is the one that states the version."""
    old = b""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if (event := _event(line)) is not None:
                version = _checked(path, event.get(KEY, UNSTATED))
                new = json_text(bring_to_current(form, event), indent=None).encode() + b"\n"
                return Head(version, old + line, old + (line if version == CURRENT else new))
            old += line
            if len(old) > MAX_LINE_BYTES:
                break
    return Head(CURRENT, b"", b"")  # it holds no event, and nothing to migrate


def _event(line: bytes) -> JsonObject | None:
    try:
        plain = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else None


def yaml_form(path: Path) -> Form:
    """Return whether a file is a recipe or a profile, by its keys. Raises RecipeError where it is neither."""
    content = read_yaml(path)
    keys: Collection[str] = content.keys() if isinstance(content, dict) else ()
    if {*keys} >= PROFILE_KEYS:
        return PROFILE
    strangers = [key for key in keys if key not in RECIPE_KEYS]
    if strangers or not keys:
        what = f"it has the key `{strangers[0]}`, which no recipe has" if strangers else "it has no keys"
        hint = "options of groups state no version: they are read as of the recipe that chooses them"
        raise RecipeError(Problem("no_form", f"{path} is no recipe: {what}", hint=hint, file=str(path)))
    return RECIPE


def _head_of_yaml(path: Path) -> Head:
    """The version's line is put before the first key, or takes the place of the older version's: no other byte is
    changed."""
    yaml_form(path)
    old = read_bytes(path)
    text = old.decode()
    root = compose_yaml(text.removeprefix(BOM))
    values = _values(text)
    version = _checked(path, values.get(KEY, UNSTATED))
    if version == CURRENT:
        return Head(version, old, old)
    assert root is not None, "`yaml_form` has seen its keys"
    new = "" if root.flow_style else _with_version_line(text, root)
    if root.flow_style or repr(without_version(_values(new))) != repr(without_version(values)):
        hint = f"write its keys on lines of their own, and {VERSION_LINE.strip()} above them"
        raise RecipeError(Problem("no_form", f"{path} has no line of its own for each key", hint=hint, file=str(path)))
    return Head(version, old, new.encode())


def _with_version_line(text: str, root: yaml.MappingNode) -> str:
    before = len(text) - len(text.removeprefix(BOM))
    stated = next((value for key, value in root.value if key.value == KEY), None)
    if stated is not None:
        start, end = before + stated.start_mark.index, before + stated.end_mark.index
        return f'{text[:start]}"{CURRENT}"{text[end:]}'
    mark = root.value[0][0].start_mark
    at, newline = before + mark.index, "\r\n" if "\r\n" in text else "\n"
    return f"{text[:at]}{VERSION_LINE.strip()}{newline}{' ' * mark.column}{text[at:]}"


def _values(text: str) -> JsonObject:
    root = compose_yaml(text.removeprefix(BOM))
    values: JsonObject = construct_yaml(root)
    return values


def _checked(path: Path, stated: JsonValue) -> str:
    """Return the version that a file states. Raises RecipeError where this trainspec does not know it."""
    if fault := find_fault(stated):
        raise RecipeError(Problem(fault.code, f"{path} {fault.why}", KEY, fault.hint, file=str(path)))
    return str(stated)
