"""Records of the run folder that carry the version of their form."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

from trainspec_cli.reading.files import read_object, unreadable
from trainspec_cli.spec.records import FieldError, read_record


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


Record = TypeVar("Record", bound=Versioned)


def read_versioned(path: Path, record_type: type[Record], version: int, name: str) -> Record:
    """Read the record, which is a `name`. Raises UnreadableFileError where it is damaged or of another version."""
    try:
        record = read_record(record_type, read_object(path))
    except FieldError as fault:
        raise unreadable(path, f"is no {name}: {fault}") from fault
    if record.version != version:
        raise unreadable(path, f"is of version {record.version}; this trainspec reads version {version}")
    return record
