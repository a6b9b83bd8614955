"""User-defined code named in a recipe: its source is located and checked, and the workers import it.

For an untrusted recipe, `validate` and `plan` report which code it would run, without running any of it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError, WorkerError, closest, did_you_mean
from trainspec_cli.core.node import why_not_trusted
from trainspec_cli.core.reading.files import exists, expand, read_bytes
from trainspec_cli.recipe.keys.model import OwnModel, TransformersModel
from trainspec_cli.recipe.keys.run import RunSpec

SUFFIX = ".py"
FORM = "FILE.py:NAME or package.module:NAME"
MAX_SOURCE_BYTES = 2**22
SHOWN_NAMES = 8
SHOWN_CHARS = 160
PACKAGE = Path(__file__).parents[1]
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

# The extension points: for each of them, the recipe key, the entry-point group, and how the engine calls the code.


@dataclass(frozen=True)
class ExtensionKind:
    key: str
    """The recipe key that specifies such code."""
    group: str
    """The entry-point group where installed packages register names."""
    positional: tuple[str, ...] = ()
    """The arguments that the engine passes by position."""
    keywords: tuple[str, ...] = ()
    """The arguments that the engine passes by name, in addition to the recipe's options."""
    is_list: bool = False
    """True if the key contains a list of references."""

    def named(self, text: str, options: Collection[str] = ()) -> list[Extension]:
        """Return the code that the key specifies; empty if the key has no value."""
        return [Extension(self, self.key, text, tuple(options))] if text else []


OPTIMIZER = ExtensionKind("optim.name", "trainspec.optimizers", ("groups",), ("lr",))
CALLBACK = ExtensionKind("train.callbacks", "trainspec.callbacks", ("run",), is_list=True)
TRACKER = ExtensionKind("tracking.trackers", "trainspec.trackers", ("run",), is_list=True)
BLOCK = ExtensionKind("model.block", "trainspec.blocks", ("hidden_size", "layer"))
LOSS = ExtensionKind("train.loss", "trainspec.losses", ("logits", "targets"))
TOKENIZER = ExtensionKind("data.tokenizer.code", "trainspec.tokenizers")
SOURCE = ExtensionKind("data.source", "trainspec.datasets")


@dataclass(frozen=True)
class Extension:
    """Code named by a recipe key."""

    kind: ExtensionKind
    path: str
    """The key, such as `optim.name` or `train.callbacks`."""
    text: str
    """The value in the recipe."""
    options: tuple[str, ...] = ()
    """The names of the additional arguments that the recipe passes."""

    def typed(self, text: str) -> str:
        """Return `key=text` for the command line."""
        return f"{self.path}=[{text}]" if self.kind.is_list else f"{self.path}={text}"


KINDS = (SOURCE, TOKENIZER, BLOCK, LOSS, OPTIMIZER, CALLBACK, TRACKER)
"""The extension points, in the order in which a run reaches them."""


def user_code_of(spec: RunSpec) -> Iterator[Extension]:
    """Yield the user-defined code named in the recipe; nothing if everything that it names ships with trainspec."""
    # The sources that are user-defined code, keyed by the recipe key that names them.
    named = {f"data.mixture.{name}.source": part for name, part in spec.data.mixture.items()}
    main = named if spec.data.source == "mixture" else {"data.source": spec.data.parts[""]}
    every = main | {f"data.validation.{name}.source": part for name, part in spec.data.validation.items()}
    for key, part in every.items():
        if part.is_own:
            yield Extension(SOURCE, key, part.source, tuple(part.options))
    yield from worker_code_of(spec)


def worker_code_of(spec: RunSpec) -> Iterator[Extension]:
    """Yield the code that the workers of a run import: all but the data source, which is read before they start."""
    yield from TOKENIZER.named(spec.data.tokenizer.code, spec.data.tokenizer.options)
    if isinstance(spec.model, OwnModel):
        yield from BLOCK.named(spec.model.block, spec.model.options)
    yield from LOSS.named(spec.train.loss, spec.train.loss_options)
    if spec.optim.is_own:
        yield from OPTIMIZER.named(spec.optim.name, spec.optim.options)
    for text in spec.train.callbacks:
        yield from CALLBACK.named(text)
    for text in spec.tracking.trackers:
        yield from TRACKER.named(text)


def describe_code(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each piece of code that a run of the recipe executes. The recipe must already have been
    checked."""
    for extension in user_code_of(spec):
        yield f"{extension.path} runs {find(extension).describe()}"
    if isinstance(spec.model, TransformersModel) and spec.model.trust_remote_code:
        yield f"model.trust_remote_code runs the Python files of {spec.model.folder}"


# Locating code without running any of it.


@dataclass(frozen=True)
class Source:
    """Where a piece of user-defined code is defined."""

    module: str
    """The module's dotted name; empty for a file."""
    file: Path | None
    """Its source file, absolute; None for a compiled module."""
    name: str

    def describe(self) -> str:
        return f"{self.name} of {self.file if self.file is not None else self.module}"


def is_reference(text: str) -> bool:
    """Return whether the text refers to code by file or module instead of by a registered name."""
    return ":" in text


def absolute_reference(text: str, folder: Path) -> str:
    """Return the text with a relative file resolved against `folder`; unchanged if it does not name a file."""
    if not (is_reference(text) and text.rpartition(":")[0].endswith(SUFFIX)):
        return text
    file, _, name = text.rpartition(":")
    return f"{Path(os.path.normpath(folder / expand(file)))}:{name}"


def find(extension: Extension, built_in: Iterable[str] = ()) -> Source:
    """Locate the code without running any of it. Raises RecipeError for a missing file, module or name, a syntax error,
    or an unsuitable signature. `built_in`: other allowed values of the key."""
    text = extension.text
    if not is_reference(text):
        from importlib.metadata import entry_points  # it is slow to load, and few runs have user-defined code

        # The names registered by installed packages, with their targets.
        own = {point.name: point.value for point in entry_points(group=extension.kind.group)}
        if text not in own:
            known = sorted({*built_in, *own})
            shown = f"{', '.join(known)}, " if known else ""
            message = f"`{extension.path}` is {extension.text!r}; expected {shown}{FORM}"
            near = closest(extension.text, known)
            hint = f"a package can register names under {extension.kind.group} (docs/extending.md)"
            if text.endswith(SUFFIX):
                hint = _hint_of_names(extension, _find_file(extension, text), text)
            elif near:
                hint = f"did you mean {extension.typed(near)}?"
            raise _refuse(extension, "wrong_choice", message, hint)
        text = own[text]
    place, _, name = text.rpartition(":")
    if not name.isidentifier():
        got = f"`{extension.path}` is {extension.text}, which does not end in the name of a function or class"
        hint = f"set {extension.typed(f'{place}:NAME' if place else 'FILE.py:NAME')}"
        if place.endswith(SUFFIX):
            hint = _hint_of_names(extension, _find_file(extension, place), place)
        raise _refuse(extension, "wrong_type", got, hint)
    if place.endswith(SUFFIX):
        source = Source("", _find_file(extension, place), name)
    elif _DOTTED.fullmatch(place):
        source = Source(place, _find_module(extension, place, name), name)
    else:
        got = f"`{extension.path}` is {extension.text}; expected {FORM}"
        raise _refuse(extension, "wrong_type", got, f"a Python file ends in {SUFFIX}")
    if source.file is not None:
        # The source must define the name, with a suitable signature.
        names, is_whole = _names_of(_parse(extension, source.file))
        if source.name not in names:
            if is_whole:
                others = [name for name, definition in names.items() if definition is not None]
                defined = ", ".join(sorted(others or names)[:SHOWN_NAMES]) or "nothing"
                message = (
                    f"`{extension.path}` names {source.name}, which {source.file} does not define; it has {defined}"
                )
                raise _refuse(extension, "unknown_name", message, did_you_mean(source.name, others or names))
        else:
            definition = names[source.name]
            if definition is not None and (signature := _signature_of(definition)):
                _check_signature(extension, source, signature)
    return source


def problems_of(extension: Extension, built_in: Iterable[str] = ()) -> Iterator[Problem]:
    """Yield the problems that `find` raises."""
    try:
        find(extension, built_in)
    except RecipeError as error:
        yield from error.problems


def neighbours(file: Path) -> dict[str, tuple[Path, ...]]:
    """Return the modules in the same folder as `file` that it imports directly or indirectly, by top-level name, with
    their source files (for a package, all of them).

    They are found by reading the sources. The standard library and installed packages take precedence, so a file
    `json.py` in the folder does not replace a library. The current folder does not, because it is on the path of only
    some processes."""
    path = [entry for entry in sys.path if entry and Path(entry).resolve() != Path.cwd()]
    found: dict[str, tuple[Path, ...]] = {}
    unread = [file]
    while unread:
        file_read = unread.pop()
        about = file_read.stat()
        for name in _imported_names(file_read, about.st_mtime_ns, about.st_size):
            if name in found or name in sys.stdlib_module_names:
                continue
            package = file.parent / name
            if exists(package / "__init__.py"):
                files = tuple(sorted(each for each in package.rglob(f"*{SUFFIX}") if each.is_file()))
            elif exists(package.with_suffix(SUFFIX)):
                files = (package.with_suffix(SUFFIX),)
            else:
                continue
            installed = PathFinder.find_spec(name, path)
            origin = installed.origin if installed else None
            if origin is None or Path(origin).resolve() in {each.resolve() for each in files}:
                found[name] = files
                unread += [each for each in files if each != file]
    return found


@lru_cache(maxsize=4096)
def _imported_names(file: Path, _mtime_ns: int, _size: int) -> frozenset[str]:
    """Return the top-level names of all modules that a file imports; empty if it is not Python (importing it reports
    that). The result is cached as long as the file's time and size stay the same, because packages can have many
    files."""
    try:
        tree = ast.parse(read_bytes(file, MAX_SOURCE_BYTES), str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return frozenset(names)


def source_files(source: Source) -> list[Path]:
    """Return the files that make up the code: its own file first, then (if it is specified by file) the neighbours that
    it imports. Empty for a compiled module."""
    if source.file is None:
        return []
    beside = () if source.module else neighbours(source.file).values()
    return [source.file, *sorted({file for files in beside for file in files} - {source.file})]


def source_sha256(file: Path) -> str:
    """Return the digest of a source file. Raises UnreadableFileError."""
    return hashlib.sha256(read_bytes(file, MAX_SOURCE_BYTES)).hexdigest()


def _refuse(extension: Extension, code: str, message: str, hint: str = "") -> RecipeError:
    return RecipeError(Problem(code, message, extension.path, hint))


def _find_file(extension: Extension, place: str) -> Path:
    file = expand(place).absolute()
    if not exists(file):
        beside = [found.name for found in file.parent.glob(f"*{SUFFIX}")] if file.parent.is_dir() else []
        hint = did_you_mean(file.name, beside) or f"set {extension.typed(f'<file>{SUFFIX}:NAME')}"
        raise _refuse(extension, "missing_file", f"`{extension.path}` names {file}, which does not exist", hint)
    for each in source_files(Source("", file, "")):
        if reason := why_not_trusted(each.stat()):
            message = f"`{extension.path}` would run {each}, which {reason}"
            raise _refuse(extension, "not_trusted", message, "read it, and use your own copy")
    return file


def _find_module(extension: Extension, module: str, name: str) -> Path | None:
    """Return the source of a module; None for a compiled one. This does not import any package."""
    top, *others = module.split(".")
    spec = None
    with suppress(ImportError, ValueError):  # raised for a partially imported module, which has no spec
        spec = importlib.util.find_spec(top)
    if spec is None:
        message = f"`{extension.path}` names the module {module}, but no package {top} is installed"
        own = f"{module.replace('.', '/')}{SUFFIX}"
        hint = f"run pip install {top}, or {extension.typed('FILE.py:NAME')} for your own file"
        if exists(Path(own)):
            hint = _hint_of_names(extension, Path(own), own, name)
        raise _refuse(extension, "missing_package", message, hint)
    full = top
    for part in others:
        folders = list(spec.submodule_search_locations or ())
        full = f"{full}.{part}"
        found = PathFinder.find_spec(full, folders) if folders else None
        if found is None:
            names = [entry.name for entry in pkgutil.iter_modules(folders)]
            message = f"`{extension.path}` names {module}, but {full.rpartition('.')[0]} has no module {part}"
            raise _refuse(extension, "missing_package", message, did_you_mean(part, names))
        spec = found
    return Path(spec.origin) if spec.origin and spec.origin.endswith(SUFFIX) else None


def _parse(extension: Extension, file: Path) -> ast.Module:
    """Parse a file. Raises RecipeError if it is not Python."""
    try:
        return ast.parse(read_bytes(file, MAX_SOURCE_BYTES), str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        reason = getattr(error, "msg", None) or str(error) or "nested too deeply"
        message = f"{file}, which `{extension.path}` names, is not Python: {reason}"
        problem = Problem("syntax_error", message, extension.path, f"see line {line}", str(file), line)
        raise RecipeError(problem) from error


def _hint_of_names(extension: Extension, file: Path, place: str, name: str = "") -> str:
    """Return what to set in order to name a definition in `file`: the one most similar to `name`, or those that the
    engine could call. `place`: the file as written by the user."""
    names, _ = _names_of(_parse(extension, file))
    callable_names = []
    for own, definition in names.items():
        signature = None if definition is None else _signature_of(definition)
        if definition is not None and not (signature and _why_not_callable(extension, signature)):
            callable_names.append(own)
    near = name if name in names else closest(name, callable_names) if name else None
    if near is None and len(callable_names) == 1:
        near = callable_names[0]
    if near is not None:
        return f"set {extension.typed(f'{place}:{near}')}"
    shown = f"; it has {', '.join(callable_names[:SHOWN_NAMES])}" if callable_names else ""
    return f"set {extension.typed(f'{place}:NAME')}{shown}"


def _why_not_callable(extension: Extension, signature: inspect.Signature) -> TypeError | None:
    """Return the error of the engine's call; None if the signature matches."""
    kind = extension.kind
    try:
        signature.bind(*kind.positional, **dict.fromkeys((*kind.keywords, *extension.options)))
    except TypeError as error:
        return error
    return None


def _check_signature(extension: Extension, source: Source, signature: inspect.Signature) -> None:
    """Raise RecipeError if the signature does not match the engine's call."""
    error = _why_not_callable(extension, signature)
    if error is None:
        return
    kind = extension.kind
    named = (*kind.keywords, *extension.options)
    call = f"({', '.join((*kind.positional, *(('*',) if named else ()), *named))})"  # `(groups, *, lr, alpha)`
    message = f"`{extension.path}`: {source.describe()} takes {signature}, and is called with {call}: {error}"
    hint = f"define it as {extension.text.rpartition(':')[2]}{call}"
    raise _refuse(extension, "wrong_signature", message, hint) from error


Definition = ast.FunctionDef | ast.ClassDef


def _names_of(tree: ast.Module) -> tuple[dict[str, Definition | None], bool]:
    """Return (the names bound at a module's top level, with their definitions if any; whether the list is complete)."""
    names: dict[str, Definition | None] = {}
    is_whole = True
    for node in _top_level_statements(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            is_whole = is_whole and all(alias.name != "*" for alias in node.names)
            names |= {(alias.asname or alias.name).split(".")[0]: None for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            stored = (name for name in ast.walk(node) if isinstance(name, ast.Name))
            names |= {name.id: None for name in stored if isinstance(name.ctx, ast.Store)}
    return names, is_whole and "__getattr__" not in names


def _top_level_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the top-level statements of a module, including those below `if`, `try` and `with`."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for blocks in ("body", "orelse", "finalbody"):
                yield from _top_level_statements(getattr(node, blocks, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level_statements(handler.body)


def _signature_of(definition: Definition) -> inspect.Signature | None:
    """Return the signature of a function or of a class's `__init__`; None if the source does not show it."""
    if definition.decorator_list:
        return None
    if isinstance(definition, ast.FunctionDef):
        return _signature(definition.args)
    own = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if own and not own[0].decorator_list:
        return _signature(own[0].args, skip=1)
    is_plain = not definition.bases and not definition.keywords and not own
    return inspect.Signature() if is_plain else None


def _signature(arguments: ast.arguments, skip: int = 0) -> inspect.Signature | None:
    """Return the signature of `arguments` without the first `skip` arguments, which callers of a method do not pass."""
    by_position = [*arguments.posonlyargs, *arguments.args]
    required = len(by_position) - len(arguments.defaults)
    parameters = []
    for number, argument in enumerate(by_position):
        is_alone = number < len(arguments.posonlyargs)
        kind = inspect.Parameter.POSITIONAL_ONLY if is_alone else inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(_parameter(argument, kind, has_default=number >= required))
    parameters = parameters[skip:]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, inspect.Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, inspect.Parameter.KEYWORD_ONLY, has_default=default is not None))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, inspect.Parameter.VAR_KEYWORD))
    try:
        return inspect.Signature(parameters)
    except ValueError:
        return None


class _Default:
    """Stands for a default value in a displayed signature."""

    def __repr__(self) -> str:
        return "..."


def _parameter(argument: ast.arg, kind: inspect._ParameterKind, *, has_default: bool = False) -> inspect.Parameter:
    default = _Default() if has_default else inspect.Parameter.empty
    return inspect.Parameter(argument.arg, kind, default=default)


# Importing code, with errors reported at the code's own file and line.


def load(extension: Extension) -> Callable[..., Any]:
    """Import the code and return the named function or class, whose signature matches the engine's call. Raises
    RecipeError for any problem with it, including exceptions during the import."""
    source = find(extension)
    with user_code_errors(extension, "while it was imported", RecipeError):
        module = _import(extension, source)
    try:
        found = getattr(module, source.name)
    except AttributeError as error:
        message = f"`{extension.path}` names {source.name}, which {source.file or source.module} does not define"
        hint = did_you_mean(source.name, vars(module))
        raise RecipeError(Problem("unknown_name", message, extension.path, hint)) from error
    if not callable(found):
        message = (
            f"`{extension.path}` names {source.describe()}, a {type(found).__name__}; expected a function or class"
        )
        raise RecipeError(Problem("wrong_type", message, extension.path))
    with suppress(TypeError, ValueError):  # compiled code has no visible signature
        _check_signature(extension, source, inspect.signature(found))
    return found  # type: ignore[no-any-return]


def arguments(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a recipe as arguments; YAML lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


class Neighbours:
    """An import finder for the modules that a file named in a recipe imports from its own folder.

    It serves only those names, which no library uses. Putting the folder on `sys.path` would also serve names that
    libraries optionally try to import, from files that nobody has checked."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self.folders.get(fullname)
        return PathFinder.find_spec(fullname, [str(folder)]) if folder else None

    def add(self, extension: Extension, file: Path) -> None:
        """Serve the neighbours of `file`. Raises RecipeError if a module from another folder has the same name."""
        for name, files in neighbours(file).items():
            first = self.folders.setdefault(name, file.parent)
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if loaded and Path(loaded).resolve() not in {each.resolve() for each in files}:
                first = Path(loaded).parent
            if first != file.parent:
                message = f"`{extension.path}`: {file} imports {name}, but the {name} of {first} is already in use"
                raise RecipeError(Problem("name_taken", message, extension.path, f"rename one {name}"))
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # the current folder may also contain that name


NEIGHBOURS = Neighbours()


def _import(extension: Extension, source: Source) -> ModuleType:
    """Import a module, or a file as a separate module, once for all keys that name it."""
    if source.module:
        return importlib.import_module(source.module)
    assert source.file is not None, "a reference without a module names a file"
    # Files with the same name in different folders are different modules.
    place = hashlib.sha256(str(source.file).encode()).hexdigest()[:8]
    name = f"trainspec_own_{source.file.stem}_{place}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source.file)
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    # Neighbours are registered before the file runs, because its imports are resolved then.
    NEIGHBOURS.add(extension, source.file)
    module = importlib.util.module_from_spec(spec)
    # The module is registered before the file runs, because its dataclasses and pickles look it up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Otherwise, the next key that names the file would use a partially executed module as if it were complete.
        del sys.modules[name]
        raise
    return module


@contextmanager
def user_code_errors(
    extension: Extension,
    when: str,
    kind: type[TrainspecError] = WorkerError,
    passes: Callable[[Exception], bool] = lambda error: False,
) -> Iterator[None]:
    """Convert exceptions raised by user-defined code in the block to an error with its file, line and message, without
    trainspec's traceback. `passes`: errors that are not the code's fault, such as running out of memory."""
    try:
        yield
    except TrainspecError:
        raise
    except Exception as error:
        if passes(error):
            raise
        raise kind(_problem(extension, when, error)) from error


def _problem(extension: Extension, when: str, error: Exception) -> Problem:
    shown = f"{type(error).__name__}: {error}".strip().rstrip(":")  # in Python's own format
    message = f"`{extension.path}`: {extension.text} raised {shown} {when}"
    frame = _user_frame(error)
    hint = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        own = Path(extension.text.rpartition(":")[0])
        is_near = (own.parent / f"{module}.py").is_file() or (own.parent / module).is_dir()
        by_name = f"write `import {module}` in {own.name}: modules next to it are found if it imports them by name"
        hint = by_name if is_near else f"run pip install {module}"
    if frame is None:
        return Problem("own_code", message, extension.path, hint)
    file, line, function = frame
    text = linecache.getline(file, line).strip()
    message += f" ({file}:{line}{f', in {function}' if function else ''}{f': {text[:SHOWN_CHARS]}' if text else ''})"
    return Problem("own_code", message, extension.path, hint, file, line)


def _user_frame(error: Exception) -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost frame in the user's code, as opposed to frames in trainspec or in
    libraries that the code calls, or None."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno, ""
    outside = _frames_outside(error)
    own = [frame for frame in outside if not _is_library(frame.filename)]
    chosen = next(reversed(own or outside), None)
    if chosen is None or chosen.lineno is None:
        return None
    function = "" if chosen.name == "<module>" else chosen.name
    return chosen.filename, chosen.lineno, function


def came_through_user_code(error: BaseException) -> bool:
    """Return whether the error passed through code that belongs neither to trainspec nor to a library."""
    return any(not _is_library(frame.filename) for frame in _frames_outside(error))


def _frames_outside(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the error's frames in files outside trainspec."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE)]


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    if {"site-packages", "dist-packages"} & set(parts):
        return True
    return Path(file).is_relative_to(Path(traceback.__file__).parent)
