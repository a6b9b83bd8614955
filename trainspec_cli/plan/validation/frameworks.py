"""The framework of a table's row, by the names that the files of conf/framework list: whole words, nothing guessed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from trainspec_cli.plan.hardware.catalogue import load_group, without_defaults
from trainspec_cli.recipe.canonical import from_plain
from trainspec_cli.recipe.keys.framework import FrameworkSpec

GROUP = "framework"
UNSTATED = "pytorch"
"""The file that is taken where a row names no framework at all: its facts are those of PyTorch alone."""


class UnknownFramework(ValueError):  # noqa: N818 - an answer, not a fault
    """No file has the framework's name; the message says which there are and what to write."""


@lru_cache(maxsize=1)
def frameworks() -> dict[str, FrameworkSpec]:
    """Return every framework of conf/framework by the name of its file."""
    return load_group(GROUP, lambda values: from_plain(FrameworkSpec, without_defaults(values)))


def framework_of(row: Mapping[str, str]) -> tuple[FrameworkSpec, bool]:
    """-> (framework, in its version of the row's year; whether nothing names it). Raises UnknownFramework.

    Tables that a file claims whole come first, then the column `framework`, and where that is empty what `source` says.
    """
    stated, source = (row.get("framework") or "").strip(), (row.get("source") or "").strip()
    claimed = [
        (one, table)
        for one in frameworks().values()
        for table in one.tables
        if table.source.casefold() == source.casefold()
    ]
    year = round(float(row["year"])) if row.get("year") else claimed[0][1].year if claimed else None
    if claimed:
        return of_year([one for one, _ in claimed], year), False
    named = named_in(stated or source)
    if named:
        return of_year(named, year), False
    if stated:
        there_are = ", ".join(sorted(frameworks()))
        raise UnknownFramework(
            f"unknown framework {stated[:40]}: write conf/framework/NAME.yaml ({there_are} are there)"
        )
    return frameworks()[UNSTATED], True


def named_in(text: str) -> list[FrameworkSpec]:
    """Return the versions of the framework that a text names first; of two that begin at one word, the longer name."""
    words = words_of(text)
    for start in range(len(words)):
        found: dict[tuple[str, ...], list[FrameworkSpec]] = {}
        for one in frameworks().values():
            for name in set(map(words_of, one.names)):
                if name and words[start : start + len(name)] == name:
                    found.setdefault(name, []).append(one)
        if found:
            return found[max(found, key=len)]
    return []


@lru_cache(maxsize=1024)
def words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9.]+", text.casefold()))


def of_year(versions: list[FrameworkSpec], year: int | None) -> FrameworkSpec:
    """Return the version that a run of that year had; the newest where the year is not known."""
    latest = 10**4
    reach = [one for one in versions if year is None or (one.until_year or latest) >= year]
    order = sorted(reach or versions, key=lambda one: one.until_year or latest)
    return order[-1] if year is None or not reach else order[0]
