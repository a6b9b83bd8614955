"""The version of the training spec that a file follows, which the file states as `spec_version`.

A file without this key has version 0.1, which did not have it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import UnreadableFileError

KEY = "spec_version"
CURRENT = "1.0"
UNSTATED = "0.1"
VERSIONS = (UNSTATED, CURRENT)
"""All versions, oldest first; each of them can be read."""
VERSION_LINE = f'{KEY}: "{CURRENT}"\n'
"""The first line of a recipe's keys."""
NEWER, UNKNOWN = "newer_version", "unknown_version"
"""The codes of problems with a version."""
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
SHOWN_CHARS = 40


@dataclass(frozen=True)
class VersionFault:
    """The reason why a file with a stated version cannot be read."""

    code: str
    why: str
    """Completes a sentence that begins with the file's name."""
    hint: str


def find_fault(stated: object) -> VersionFault | None:
    """Return the problem of the version that a file states; None if the file can be read."""
    if isinstance(stated, str) and stated in VERSIONS:
        return None
    known = " and ".join(VERSIONS)
    shown = repr(stated)[:SHOWN_CHARS]
    # A newer file needs another remedy than a misspelled version: upgrade instead of editing.
    if is_newer(stated):
        why = f"was made by a newer trainspec: it has version {stated} of the training spec; this one reads {known}"
        return VersionFault(NEWER, why, "upgrade: pip install --upgrade trainspec")
    if not isinstance(stated, str):
        return VersionFault(UNKNOWN, f"has {shown} as `{KEY}`; text is needed", f'write {KEY}: "{CURRENT}"')
    why = f"has an unknown `{KEY}`, {shown} (known: {known})"
    return VersionFault(UNKNOWN, why, f'write {KEY}: "{CURRENT}"')


def check_version(path: Path, stated: object, line: int | None = None) -> None:
    """Raise UnreadableFileError for a version that cannot be read. `line`: its line in the file."""
    if fault := find_fault(stated):
        problem = Problem(fault.code, f"{path} {fault.why}", "", fault.hint, str(path), line, environment=True)
        raise UnreadableFileError(problem)


def is_newer(stated: object, than: str = CURRENT) -> bool:
    """Return whether a version is later than another."""
    found = _VERSION.fullmatch(stated) if isinstance(stated, str) else None
    return found is not None and _order(found[0]) > _order(than)


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def with_version(content: JsonObject) -> JsonObject:
    """Return the content of a file of the current version, with the version first."""
    return {KEY: CURRENT, **content}


def without_version(content: JsonObject) -> JsonObject:
    return {key: value for key, value in content.items() if key != KEY}
