"""Keep a copy of a run's user-defined code next to its recipe, and detect later changes to the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.reading.files import exists, read_bytes
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.user_code import (
    MAX_SOURCE_BYTES,
    SOURCE,
    find,
    source_files,
    source_sha256,
    user_code_of,
    worker_code_of,
)
from trainspec_cli.run.folder.files import (
    read_versioned,
    write_versioned,
)
from trainspec_cli.run.folder.paths import RunDir

DIGEST_CHARS = 12


@dataclass(frozen=True)
class KeptFile:
    """A file of user-defined code, as it was when the run started."""

    sha256: str
    copy: str
    """The copy's name in the run's `code` folder."""
    keys: dict[str, str] = field(default_factory=dict)
    """Recipe keys that name the file, each with the object that it refers to. Empty for a file that is only imported by
    such files."""


@dataclass(frozen=True)
class KeptCode:
    """code.json: the files of user-defined code, by path."""

    files: dict[str, KeptFile] = field(default_factory=dict)


def keep_code(spec: RunSpec, run: RunDir) -> None:
    """Copy the source files named in the recipe to the run's folder, and record their digests. Older copies stay."""
    files: dict[str, KeptFile] = {}
    before = read_code(run).files
    for extension in user_code_of(spec):
        if extension.kind is SOURCE and before:  # the file may have been deleted since the run read it
            files |= {path: file for path, file in before.items() if extension.path in file.keys}
            continue
        source = find(extension)
        for file in source_files(source):
            sha256 = source_sha256(file)
            copy = f"{file.stem}-{sha256[:DIGEST_CHARS]}{file.suffix}"
            run.code.mkdir(exist_ok=True)
            (run.code / copy).write_bytes(read_bytes(file, MAX_SOURCE_BYTES))
            known = files[str(file)].keys if str(file) in files else {}
            name = source.name if file == source.file else known.get(extension.path, "")
            files[str(file)] = KeptFile(sha256, copy, {**known, extension.path: name})
    if files or run.code_json.exists():
        write_versioned(run.code_json, to_plain(KeptCode(files)))


def read_code(run: RunDir) -> KeptCode:
    """Return what `keep_code` wrote; empty if the run has no user-defined code. Raises UnreadableFileError."""
    return from_plain(KeptCode, read_versioned(run.code_json)) if run.code_json.exists() else KeptCode()


def describe_changed_code(run: RunDir) -> Iterator[str]:
    """Yield a line for each file that has changed since the last start of the run."""
    for path, kept in read_code(run).files.items():
        file = Path(path)
        if exists(file) and source_sha256(file) != kept.sha256:
            yield f"{path} has changed since the last start, which ran {run.code / kept.copy}"


def check_code(spec: RunSpec, run: RunDir) -> None:
    """Raise MachineError if the code that a worker is about to run differs from the code recorded at the start, because
    the file has changed or because this node has a different file at that path."""
    noted = read_code(run).files
    for extension in worker_code_of(spec):
        for file in source_files(find(extension)):
            kept = noted.get(str(file))
            if kept is None or source_sha256(file) != kept.sha256:
                before = f" {run.code / kept.copy}" if kept else ""
                message = (
                    f"{file}, which `{extension.path}` runs, differs from the code that this start of the run has "
                    f"recorded{before}"
                )
                hint = f"to continue with the changed code: trainspec resume {run.root}"
                raise MachineError(Problem("changed_code", message, extension.path, hint, environment=True))
