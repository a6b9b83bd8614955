"""Import the code that a recipe names, and say in its own file and line what goes wrong in it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError, WorkerError, did_you_mean
from trainspec_cli.recipe.extensions.source import Extension, Source, describe_mismatch, find, neighbours

PACKAGE = Path(__file__).parents[2]
SHOWN_CHARS = 160


def load(extension: Extension) -> Callable[..., Any]:
    """Import the code and return what it names, which can be called as the engine does. Raises RecipeError, for people,
    for all that is wrong with it: also what it raises while it is imported."""
    source = find(extension)
    with own_errors(extension, "while it was imported", RecipeError):
        module = _import(extension, source)
    try:
        found = getattr(module, source.name)
    except AttributeError as error:
        message = f"`{extension.path}` names {source.name}, which {source.file or source.module} does not define"
        hint = did_you_mean(source.name, vars(module))
        raise RecipeError(Problem("unknown_name", message, extension.path, hint)) from error
    if not callable(found):
        message = (
            f"`{extension.path}` names {source.describe()}, a {type(found).__name__}; a function or class is needed"
        )
        raise RecipeError(Problem("wrong_type", message, extension.path))
    _check_signature(extension, source, found)
    return found  # type: ignore[no-any-return]


def arguments(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a recipe as arguments: YAML has lists where Python's code takes tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _check_signature(extension: Extension, source: Source, found: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # compiled code does not say
        return
    if reason := extension.kind.why_not_callable(signature, extension.options):
        message, hint = describe_mismatch(extension, source.describe(), signature, reason)
        raise RecipeError(Problem("wrong_signature", message, extension.path, hint))


class Neighbours:
    """A finder of the modules that lie next to a file which a recipe names, and that this file imports.

    It serves those names alone, of which no library has one. The folder on `sys.path` would also serve what libraries
    try to import and do without, from files that nobody has checked.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self.folders.get(fullname)
        return PathFinder.find_spec(fullname, [str(folder)]) if folder else None

    def add(self, extension: Extension, file: Path) -> None:
        """Serve the neighbours of `file`. Raises RecipeError where a module of another folder has the name."""
        for name, files in neighbours(file).items():
            first = self.folders.setdefault(name, file.parent)
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if loaded and Path(loaded).resolve() not in {each.resolve() for each in files}:
                first = Path(loaded).parent
            if first != file.parent:
                message = f"`{extension.path}`: {file} imports {name}, and the {name} of {first} is in use already"
                raise RecipeError(Problem("name_taken", message, extension.path, f"rename one {name}"))
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # the current folder may have such a name too


NEIGHBOURS = Neighbours()


def _import(extension: Extension, source: Source) -> ModuleType:
    """Import a module, or a file as a module of its own: once, for all keys that name it."""
    if source.module:
        return importlib.import_module(source.module)
    assert source.file is not None, "a reference without a module names a file"
    # Two files of one name in different folders are two modules.
    place = hashlib.sha256(str(source.file).encode()).hexdigest()[:8]
    name = f"trainspec_own_{source.file.stem}_{place}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source.file)
    assert spec is not None and spec.loader is not None, "a file of Python has a loader"
    # Before the file runs, since its imports run first.
    NEIGHBOURS.add(extension, source.file)
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickles of the file look their module up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # A half-run module would be taken for a whole one by the next key that names the file.
        del sys.modules[name]
        raise
    return module


@contextmanager
def own_errors(
    extension: Extension,
    when: str,
    kind: type[TrainspecError] = WorkerError,
    passes: Callable[[Exception], bool] = lambda error: False,
) -> Iterator[None]:
    """Turn what one's own code raises in the block into an error with its file, line and message, without a traceback
    of trainspec. `passes`: errors that are no fault of the code, such as memory that runs out."""
    try:
        yield
    except TrainspecError:
        raise
    except Exception as error:
        if passes(error):
            raise
        raise kind(_problem(extension, when, error)) from error


def _problem(extension: Extension, when: str, error: Exception) -> Problem:
    message = f"`{extension.path}`: {extension.text} raised {describe_error(error)} {when}"
    frame = _own_frame(error)
    hint = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        hint = _missing_module_hint(extension, error.name.partition(".")[0])
    if frame is None:
        return Problem("own_code", message, extension.path, hint)
    file, line, function = frame
    text = linecache.getline(file, line).strip()
    message += f" ({file}:{line}{f', in {function}' if function else ''}{f': {text[:SHOWN_CHARS]}' if text else ''})"
    return Problem("own_code", message, extension.path, hint, file, line)


def describe_error(error: Exception) -> str:
    """Return the error as Python shows it: `ValueError: the message`."""
    return f"{type(error).__name__}: {error}".strip().rstrip(":")


def _missing_module_hint(extension: Extension, module: str) -> str:
    file = Path(extension.text.rpartition(":")[0])
    if (file.parent / f"{module}.py").is_file() or (file.parent / module).is_dir():
        return f"write `import {module}` in {file.name}: modules beside it are found where it imports them by name"
    return f"type pip install {module}"


def _own_frame(error: Exception) -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost frame that is the user's: neither trainspec's nor of a library
    that the user's code calls, where there is such a frame."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno, ""
    outside = _frames_outside(error)
    own = [frame for frame in outside if not _is_library(frame.filename)]
    chosen = next(reversed(own or outside), None)
    if chosen is None or chosen.lineno is None:
        return None
    function = "" if chosen.name == "<module>" else chosen.name
    return chosen.filename, chosen.lineno, function


def came_through_own_code(error: BaseException) -> bool:
    """Return whether the error came through code that is neither trainspec's nor a library's."""
    return any(not _is_library(frame.filename) for frame in _frames_outside(error))


def _frames_outside(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the error that lie in files outside of trainspec."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE)]


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    if {"site-packages", "dist-packages"} & set(parts):
        return True
    return Path(file).is_relative_to(Path(traceback.__file__).parent)
