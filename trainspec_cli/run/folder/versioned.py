"""Files that state the version of the training spec that they keep to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import read_object, unreadable
from trainspec_cli.core.reading.spec_version import CURRENT, KEY, UNSTATED, check_version, without_version
from trainspec_cli.recipe.records import FieldError, read_record
from trainspec_cli.run.folder.files import write_json

Record = TypeVar("Record")


def write_versioned(path: Path, content: Mapping[str, object]) -> None:
    """Write a file of the current version. Raises as `write_json`."""
    write_json(path, {KEY: CURRENT, **content})


def read_versioned(path: Path) -> JsonObject:
    """Return the object in a file of any version that this trainspec reads, without its version. Raises
    UnreadableFileError as `read_object`, and where a newer trainspec wrote it."""
    content = read_object(path)
    check_version(path, content.get(KEY, UNSTATED))
    return without_version(content)


def read_versioned_record(path: Path, record_type: type[Record], name: str) -> Record:
    """Read the record, which is a `name`. Raises as `read_versioned`, and where it is damaged."""
    try:
        return read_record(record_type, read_versioned(path))
    except FieldError as fault:
        raise unreadable(path, f"is no {name}: {fault}") from fault
