"""The files named in a recipe's `data`, in a fixed order: sorted by path."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.reading.files import UnreadableFileError, exists, expand, how_to_copy
from trainspec_cli.recipe.keys.run import DataSpec

TABLE_SUFFIXES = (".parquet", ".arrow")
STDLIB_LEFT_OUT = frozenset({
    "site-packages", "dist-packages",  # not part of the standard library
    "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo",  # packaged separately on some systems
    "encodings", "pydoc_data",  # tables, not programs
})  # fmt: skip


_SUFFIXES: dict[str, str | tuple[str, ...]] = {
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "chat": (".jsonl", *TABLE_SUFFIXES),
    "nanogpt": ".bin",
    "megatron": ".bin",
}
"""The suffixes of the files that are read in a folder."""


def source_of(file: Path) -> str:
    """Return the source that reads files with this name: the first one that supports its suffix, or text."""
    return next((source for source, suffix in _SUFFIXES.items() if file.name.endswith(suffix)), "text")


def find_files(data: DataSpec) -> list[Path]:
    """Return the files of `data`, in reading order. Raises RecipeError if none exist."""
    if data.source == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, ".py", STDLIB_LEFT_OUT) if not file.name.startswith("_sysconfigdata")]
        if not files:
            raise MachineError(
                f"{root} has no Python source: this installation does not include the standard library's source files",
                code="no_python_stdlib",
                hint="train on your own text: data=text data.path=FOLDER",
            )
    elif data.path:
        # Read the file itself, the files below the folder (except hidden ones), or those that match the glob.
        suffix = _SUFFIXES.get(data.source, "")
        place = expand(data.path)
        if exists(place):
            files = [place]
        elif os.path.isdir(place):  # noqa: PTH112 - False for a name that no folder can have
            files = list(_walk(place, suffix))
        elif glob.has_magic(data.path):
            matches = sorted(glob.glob(str(place), recursive=True))  # noqa: PTH207 - pathlib's takes no absolute pattern
            files = [file for file in map(Path, matches) if not file.is_dir()]
        else:
            remote = how_to_copy(data.path)
            got = f"{data.path} is not on this machine" if remote else f"{place.absolute()} does not exist"
            raise _path_error(got, remote or "data.path takes a file, a folder or a glob")
        if not files:
            kind = suffix if isinstance(suffix, str) else " or ".join(suffix)
            got = f"{place.absolute()} has no {kind or 'visible'} file"
            example = ".json" if ".jsonl" in suffix else ".txt"
            raise _path_error(got, f"name the files with a glob: data.path='FOLDER/**/*{example}'")
    else:
        raise _path_error(f"source {data.source} needs a path", "data.path=FILE, FOLDER or 'FOLDER/**/*.txt'")
    for file in files:
        if not file.is_file():
            raise MachineError(f"{file} is not a regular file (a broken link, a pipe?)", code="unreadable_file")
    return files


def _walk(root: Path, suffix: str | tuple[str, ...], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise cannot_read(Path(error.filename), error)

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        # Sort in place, so that os.walk visits folders in the same order on every file system.
        subfolders[:] = sorted(name for name in subfolders if name not in left_out and name[0] != ".")
        for name in sorted(names):
            if name.endswith(suffix) and name[0] != ".":
                yield Path(folder, name)


def _path_error(message: str, hint: str) -> RecipeError:
    return RecipeError(Problem(code="missing_file", message=message, path="data.path", hint=hint))


def cannot_read(file: Path, error: OSError) -> MachineError:
    if isinstance(error, UnreadableFileError):
        return error
    return MachineError(f"{file} cannot be read: {error.strerror}", code="unreadable_file")
