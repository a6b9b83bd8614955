"""Deeper looks: the supervisor writes RUN/looks.json when a verdict is new, the ranks that it names look at themselves.

What they find is an event of their own (`LookEvent`), and a trace in RUN/looks.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.results.look import LookOrder
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.versioned import read_versioned_record, write_versioned

TRACE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LooksRecord:
    """looks.json: all looks that were asked for, over all starts of the run."""

    orders: tuple[LookOrder, ...] = ()


def write_looks(run: RunDir, record: LooksRecord) -> None:
    write_versioned(run.looks_json, to_plain(record))


def read_looks(run: RunDir) -> LooksRecord:
    """Return the looks that were asked for; none where there is no file. Raises UnreadableFileError where it is damaged
    or of a later version."""
    path = run.looks_json
    return read_versioned_record(path, LooksRecord, "list of looks") if path.exists() else LooksRecord()
