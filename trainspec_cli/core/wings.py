"""The registry of wings: optional parts of trainspec, each in its own folder below `wings`.

The trunk imports no wing. A wing's module `wing.py` declares in `WING` what it adds, as text ("module:function"), so
that reading the registry does not load any of the wing. Where the trunk has an extension point, it calls
`parts_of(POINT)`, or for a recipe `parts_for(POINT, spec)` of `recipe.rules.check`. Without the wing's folder nothing
is found there, and its commands do not appear in the help.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from trainspec_cli.core.errors import MachineError, Problem


class Named(Protocol):
    @property
    def name(self) -> str: ...


Part = TypeVar("Part")
NamedPart = TypeVar("NamedPart", bound=Named)
MISSING_WING = "missing_wing"
"""The code of the error if something needs a wing whose folder was deleted."""
FOLDER = Path(__file__).parents[1] / "wings"


@dataclass(frozen=True)
class Point(Generic[Part]):
    """An extension point for wings, defined by the part of the trunk that uses it. `Part` is the type of a wing's
    contribution, usually a function."""

    name: str


@dataclass(frozen=True)
class Command:
    """A command of the command line: a function named like it in a module named like it, or that module's typer app."""

    group: str  # heading in the help
    summary: str
    takes_keys: bool = False  # takes `key=value` arguments, which the shell's completion offers
    takes_run: bool = False  # takes a run as its first argument
    takes_command: bool = False  # takes a user's command after `--`
    folder: str = "trainspec_cli.cli"  # the package of the command's module; for a wing, its `commands`
    function: str = ""  # module and function, if they cannot be named like the command


@dataclass(frozen=True)
class Wing:
    commands: Mapping[str, Command] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    """Name of a point -> "module:name" of the wing's contribution."""


@cache
def find_wings() -> Mapping[str, Wing]:
    """Return the installed wings, by name."""
    return {file.parent.name: _read(file) for file in sorted(FOLDER.glob("*/wing.py"))}


def _read(file: Path) -> Wing:
    """Execute a wing.py on its own: as a module of its package it would load what the package's `__init__.py`
    imports."""
    spec = importlib.util.spec_from_file_location(f"trainspec_wing_{file.parent.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Wing, module.WING)


def parts_of(point: Point[Part], wings: Collection[str] | None = None) -> list[Part]:
    """Import and return the contributions at `point`, in the order of the wings' names; `wings`: only of these
    wings."""
    found = [wing for name, wing in find_wings().items() if wings is None or name in wings]
    return [cast(Part, _load(wing.parts[point.name])) for wing in found if point.name in wing.parts]


def part_named(point: Point[NamedPart], name: str, trunks: NamedPart) -> NamedPart:
    """Return the part of this name: `trunks`, for which nothing is imported, or a wing's contribution at `point`.
    Raises MachineError if no wing has it."""
    if name == trunks.name:
        return trunks
    if (found := next((part for part in parts_of(point) if part.name == name), None)) is None:
        message = f"this installation of trainspec has no part for runs of the kind `{name}`"
        hint = f"install all of trainspec: the wing that provides {point.name} is missing in {FOLDER}"
        raise MachineError(Problem(MISSING_WING, message, hint=hint, environment=True))
    return found


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
