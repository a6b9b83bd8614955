"""Find the code that a recipe names, and check it, without importing anything: by its source alone.

So `validate` and `plan` of a stranger's recipe say which code it would run, and run none of it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError, closest, did_you_mean
from trainspec_cli.core.reading.files import exists, expand, read_bytes
from trainspec_cli.core.trust import why_not_trusted
from trainspec_cli.recipe.extensions.kinds import ExtensionKind

SUFFIX = ".py"
FORM = "FILE.py:NAME or package.module:NAME"
MAX_SOURCE_BYTES = 2**22
SHOWN_NAMES = 8
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Extension:
    """Code that a key of a recipe names."""

    kind: ExtensionKind
    path: str
    """The key, such as `optim.name` or `train.callbacks`."""
    text: str
    """The value as the recipe has it."""
    options: tuple[str, ...] = ()
    """The names of the further arguments that the recipe gives."""

    def typed(self, text: str) -> str:
        """Return `key=text`, as it is typed."""
        return f"{self.path}=[{text}]" if self.kind.is_list else f"{self.path}={text}"


@dataclass(frozen=True)
class Source:
    """The place where code lies."""

    module: str
    """The module's dotted name; empty for a file."""
    file: Path | None
    """Its source, absolute; None for a module that is compiled."""
    name: str

    def describe(self) -> str:
        return f"{self.name} of {self.file if self.file is not None else self.module}"


def is_reference(text: str) -> bool:
    """Return whether the text names code by its file or module, and not by a registered name."""
    return ":" in text


def absolute_reference(text: str, folder: Path) -> str:
    """Return the text with a relative file sought in `folder`; unchanged if it names no file."""
    if not (is_reference(text) and text.rpartition(":")[0].endswith(SUFFIX)):
        return text
    file, _, name = text.rpartition(":")
    return f"{Path(os.path.normpath(folder / expand(file)))}:{name}"


def registered(kind: ExtensionKind) -> dict[str, str]:
    """Return the names that installed packages have registered, with what they stand for."""
    from importlib.metadata import entry_points  # takes long to load, and few runs have code of their own

    return {point.name: point.value for point in entry_points(group=kind.group)}


def find(extension: Extension, built_in: Iterable[str] = ()) -> Source:
    """Find the code without running any. Raises RecipeError with what is wrong: no such file, module or name, a syntax
    error, a signature that does not fit. `built_in`: other values that the key may have."""
    text = extension.text
    own = dict[str, str]()
    if not is_reference(text):
        own = registered(extension.kind)
        if text not in own:
            known = sorted({*built_in, *own})
            shown = f"{', '.join(known)}, " if known else ""
            message = f"`{extension.path}` is {extension.text!r}; {shown}{FORM} is needed"
            near = closest(extension.text, known)
            hint = f"a package that brings it registers it as {extension.kind.group} (docs/extending.md)"
            if text.endswith(SUFFIX):
                hint = _hint_of_names(extension, _find_file(extension, text), text)
            elif near:
                hint = f"did you mean {extension.typed(near)}?"
            raise _refuse(extension, "wrong_choice", message, hint)
        text = own[text]
    place, _, name = text.rpartition(":")
    if not name.isidentifier():
        got = f"`{extension.path}` is {extension.text}, which ends in no name of a function or class"
        hint = f"type {extension.typed(f'{place}:NAME' if place else 'FILE.py:NAME')}"
        if place.endswith(SUFFIX):
            hint = _hint_of_names(extension, _find_file(extension, place), place)
        raise _refuse(extension, "wrong_type", got, hint)
    if place.endswith(SUFFIX):
        source = Source("", _find_file(extension, place), name)
    elif _DOTTED.fullmatch(place):
        source = Source(place, _find_module(extension, place, name), name)
    else:
        got = f"`{extension.path}` is {extension.text}; {FORM} is needed"
        raise _refuse(extension, "wrong_type", got, f"a file of Python ends in {SUFFIX}")
    if source.file is not None:
        _check_source(extension, source, source.file)
    return source


def problems_of(extension: Extension, built_in: Iterable[str] = ()) -> Iterator[Problem]:
    """Yield what `find` raises."""
    try:
        find(extension, built_in)
    except RecipeError as error:
        yield from error.problems


def neighbours(file: Path) -> dict[str, tuple[Path, ...]]:
    """Return the modules in the folder of `file` that it imports, itself or through one of them, by their top-level
    name, with their source files: of a package all of them.

    Found by reading. What Python has itself and what is installed comes first, so that a file `json.py` in the folder
    takes the place of no library. The current folder, which is on the path of some processes alone, does not.
    """
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
    """Return the top-level names of the modules that a file imports anywhere in it; none where it is not Python, which
    its import reports. Kept while the file's time and size stay, since packages can have many files."""
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
    """Return the files that make up the code: its own, first, and of a file the neighbours that it imports. Empty for a
    module that is compiled."""
    if source.file is None:
        return []
    beside = () if source.module else neighbours(source.file).values()
    return [source.file, *sorted({file for files in beside for file in files} - {source.file})]


def source_sha256(file: Path) -> str:
    """Return the digest of a source file. Raises UnreadableFileError."""
    return hashlib.sha256(read_bytes(file, MAX_SOURCE_BYTES)).hexdigest()


def _refuse(extension: Extension, code: str, message: str, hint: str = "") -> RecipeError:
    return RecipeError(Problem(code, message, extension.path, hint))


# Files and modules


def _find_file(extension: Extension, place: str) -> Path:
    file = expand(place).absolute()
    if not exists(file):
        beside = [found.name for found in file.parent.glob(f"*{SUFFIX}")] if file.parent.is_dir() else []
        hint = did_you_mean(file.name, beside) or f"type {extension.typed(f'<file>{SUFFIX}:NAME')}"
        raise _refuse(extension, "missing_file", f"`{extension.path}` names {file}, which does not exist", hint)
    for each in source_files(Source("", file, "")):
        if reason := why_not_trusted(each.stat()):
            message = f"`{extension.path}` would run {each}, which {reason}"
            raise _refuse(extension, "not_trusted", message, "read it, and use a copy of your own")
    return file


def _find_module(extension: Extension, module: str, name: str) -> Path | None:
    """Return the source of a module; None of one that is compiled. Packages are not imported for that."""
    top, *others = module.split(".")
    spec = _top_level(top)
    if spec is None:
        message = f"`{extension.path}` names the module {module}, and no package {top} is installed"
        own = f"{module.replace('.', '/')}{SUFFIX}"
        hint = f"type pip install {top}, or {extension.typed('FILE.py:NAME')} for a file of your own"
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
            message = f"`{extension.path}` names {module}, and {full.rpartition('.')[0]} has no module {part}"
            raise _refuse(extension, "missing_package", message, did_you_mean(part, names))
        spec = found
    return Path(spec.origin) if spec.origin and spec.origin.endswith(SUFFIX) else None


def _top_level(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that is half imported has no spec
        return None


# The source


def _check_source(extension: Extension, source: Source, file: Path) -> None:
    tree = _parse(extension, file)
    names, is_whole = _names_of(tree)
    if source.name not in names:
        if not is_whole:
            return
        own = [name for name, definition in names.items() if definition is not None]
        found = ", ".join(sorted(own or names)[:SHOWN_NAMES]) or "nothing"
        message = f"`{extension.path}` names {source.name}, which {file} does not define; it has {found}"
        raise _refuse(extension, "unknown_name", message, did_you_mean(source.name, own or names))
    definition = names[source.name]
    signature = None if definition is None else _signature_of(definition)
    if signature is None:
        return
    if reason := extension.kind.why_not_callable(signature, extension.options):
        raise _refuse(extension, "wrong_signature", *describe_mismatch(extension, source.describe(), signature, reason))


def _hint_of_names(extension: Extension, file: Path, place: str, name: str = "") -> str:
    """Return what to type to name something that `file` defines: what is nearest to `name`, or else what the engine
    could call. `place`: the file, as it is typed."""
    names, _ = _names_of(_parse(extension, file))
    callable_names = []
    for own, definition in names.items():
        signature = None if definition is None else _signature_of(definition)
        if definition is not None and not (signature and extension.kind.why_not_callable(signature, extension.options)):
            callable_names.append(own)
    near = name if name in names else closest(name, callable_names) if name else None
    if near is None and len(callable_names) == 1:
        near = callable_names[0]
    if near is not None:
        return f"type {extension.typed(f'{place}:{near}')}"
    shown = f"; it has {', '.join(callable_names[:SHOWN_NAMES])}" if callable_names else ""
    return f"type {extension.typed(f'{place}:NAME')}{shown}"


def describe_mismatch(extension: Extension, what: str, signature: inspect.Signature, reason: str) -> tuple[str, str]:
    """Return the message and the hint for a signature that does not fit the engine's call."""
    call = extension.kind.describe_call(extension.options)
    message = f"`{extension.path}`: {what} takes {signature}, and is called with {call}: {reason}"
    name = extension.text.rpartition(":")[2]
    return message, f"define it as {name}{call}"


def _parse(extension: Extension, file: Path) -> ast.Module:
    content = read_bytes(file, MAX_SOURCE_BYTES)
    try:
        return ast.parse(content, str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        reason = getattr(error, "msg", None) or str(error) or "nested too deeply"
        message = f"{file}, which `{extension.path}` names, is not Python: {reason}"
        problem = Problem("syntax_error", message, extension.path, f"look at line {line}", str(file), line)
        raise RecipeError(problem) from error


Definition = ast.FunctionDef | ast.ClassDef


def _names_of(tree: ast.Module) -> tuple[dict[str, Definition | None], bool]:
    """Return (what a module binds at its top level, with its definition if it is one; whether that is all of it)."""
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
    """Yield the statements of a module, also those below `if`, `try` and `with`."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for blocks in ("body", "orelse", "finalbody"):
                yield from _top_level_statements(getattr(node, blocks, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level_statements(handler.body)


def _signature_of(definition: Definition) -> inspect.Signature | None:
    """Return what a function, or a class's `__init__`, takes; None where the source does not say."""
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
    """Return the signature that arguments amount to, without the first `skip`, which a method's call does not give."""
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
    """A default as it is shown: its value does not matter."""

    def __repr__(self) -> str:
        return "..."


def _parameter(argument: ast.arg, kind: inspect._ParameterKind, *, has_default: bool = False) -> inspect.Parameter:
    default = _Default() if has_default else inspect.Parameter.empty
    return inspect.Parameter(argument.arg, kind, default=default)
