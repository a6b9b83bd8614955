"""Every key of a recipe is turned by a shipped file, or a page says when to turn it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from trainspec_cli.core.reading.yaml_file import read_yaml
from trainspec_cli.recipe.json_schema import path_of_group
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import hints_of, key_of, sections_of

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "recipes.md"
# What a person reads to decide; the spec and the tables of other engines' keys name keys and give no reason.
PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
AS_IN = {"scheduler.changes": "layout"}
"""A section whose keys mean what those of another one mean."""


@dataclass
class Setting:
    """A field of a section, which may stand at several paths: accelerators are sections of pools too."""

    paths: list[str]
    default: Any


def settings_below(cls: type, prefix: str = "") -> Iterator[tuple[tuple[str, str], str, Any]]:
    """Yield ((section's class, field), path, default) of each key that is no section; of lists and of sections by name
    the keys of an item."""
    for field in fields(cls):
        path = f"{prefix}{key_of(field)}"
        wanted = hints_of(cls)[field.name]
        below = sections_of(wanted) or [one for item in get_args(wanted) for one in sections_of(item)]
        for section in below:
            yield from settings_below(section, f"{path}.")
        if not below:
            made = MISSING if field.default_factory is MISSING else field.default_factory()
            yield (cls.__name__, field.name), path, field.default if made is MISSING else made


def settings() -> dict[tuple[str, str], Setting]:
    found: dict[tuple[str, str], Setting] = {}
    for name, path, default in settings_below(RunSpec):
        setting = found.setdefault(name, Setting([], default))
        setting.paths.append(path)
        section, _, key = path.rpartition(".")
        setting.paths += [f"{AS_IN[section]}.{key}"] if section in AS_IN and key != "step" else []
    return found


def values_below(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from values_below(item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from values_below(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, tuple(value) if isinstance(value, list) else value


def read_table() -> dict[str, str]:
    """Return path -> when to set it, from the list of keys that no shipped file changes.

    An item is "- SECTIONS: KEYS when to set them"; sections and keys are in backquotes.
    """
    unwrapped = TABLE.read_text().replace("\n  ", " ")
    rows = re.findall(r"^- (`[^:]+`): ((?:`\w+`(?:, )?)+) (.+)$", unwrapped, re.MULTILINE)
    quoted = re.compile(r"`([^`]+)`")
    return {
        f"{section}.{key}": reason.strip()
        for sections, keys, reason in rows
        for section in quoted.findall(sections)
        for key in quoted.findall(keys)
    }


def is_explained(path: str, chapters: list[str]) -> bool:
    """Return whether a chapter of a page names the key in full, or its last word and its section."""
    section, _, name = path.rpartition(".")
    whole = re.compile(rf"(?<![\w.]){re.escape(path)}(?![\w.]*\w)")
    near = [text for text in chapters if path in text or (section and f"`{name}`" in text)]
    return any(whole.search(text) or (section and f"`{name}`" in text and section in text) for text in near)


def test_every_key_is_turned_by_a_shipped_file_or_explained_on_a_page() -> None:
    shipped = [("", file) for file in (ROOT / "recipes").glob("*.yaml")]
    shipped += [(path_of_group(file.parent.name), file) for file in (ROOT / "conf").glob("*/*.yaml")]
    given: dict[str, list[Any]] = {}
    for group, file in shipped:
        for path, value in values_below(read_yaml(file), group):
            given.setdefault(path, []).append(value)
    chapters = [text for page in PAGES for text in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)]
    table = read_table()
    unexplained = []
    for setting in settings().values():
        is_turned = any(value != setting.default for path in setting.paths for value in given.get(path, ()))
        if is_turned or any(table.get(path) or is_explained(path, chapters) for path in setting.paths):
            continue
        unexplained.append(setting.paths[0])
    assert unexplained == [], f"state in the list of {TABLE.name} when to set it, or make it a constant"


def test_the_table_names_keys_that_there_are_and_a_reason_for_each() -> None:
    paths = {path for setting in settings().values() for path in setting.paths}
    table = read_table()
    assert set(table) <= paths
    assert all(table.values())
    assert len(table) > 70
