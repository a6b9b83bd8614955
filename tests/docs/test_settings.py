"""Every key of a recipe is turned by a shipped file, or a page says when to turn it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from trainspec_cli.recipe.json_schema import path_of_group
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.structure import hints_of, key_of, sections_of

ROOT = Path(__file__).parents[2]
PAGES = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]


def defaults_below(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key that is no section, and its default."""
    for field in fields(cls):
        path = f"{prefix}{key_of(field)}"
        sections = sections_of(hints_of(cls)[field.name])
        for section in sections:
            yield from defaults_below(section, f"{path}.")
        if not sections:
            made = MISSING if field.default_factory is MISSING else field.default_factory()
            yield path, field.default if made is MISSING else made


def values_below(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path, tuple(value) if isinstance(value, list) else value
        return
    for key, item in value.items():
        yield from values_below(item, f"{path}.{key}" if path else str(key))


def test_every_key_is_turned_by_a_shipped_file_or_explained_on_a_page() -> None:
    shipped = [("", file) for file in (ROOT / "recipes").glob("*.yaml")]
    shipped += [(path_of_group(file.parent.name), file) for file in (ROOT / "conf").glob("*/*.yaml")]
    given: dict[str, list[Any]] = {}
    for group, file in shipped:
        for path, value in values_below(yaml.safe_load(file.read_text()), group):
            given.setdefault(path, []).append(value)
    unexplained = []
    for path, default in defaults_below(RunSpec):
        section, _, name = path.rpartition(".")
        is_turned = any(value != default for value in given.get(path, ()))
        on_a_page = any(path in page or (f"`{name}`" in page and (not section or section in page)) for page in PAGES)
        if not is_turned and not on_a_page:
            unexplained.append(path)
    assert unexplained == [], "add each to the table of docs/recipes.md, or make it a constant"
