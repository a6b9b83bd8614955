"""The registry of wings: parts of trainspec that training does without, each in a folder of its own below `wings`.

The trunk imports no wing. A wing's module `wing.py` says in `WING` what it adds, as text ("module:function"), so that
reading the registry loads nothing of the wing. Where the trunk lets wings in, it asks `parts_of(POINT)`, or for a
recipe `parts_for(POINT, spec)` of `recipe.rules.check`; with the wing's folder deleted, nothing is found there, and its
commands are not in the help.
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
"""The code of the error where something needs a wing whose folder was deleted."""
FOLDER = Path(__file__).parents[1] / "wings"


@dataclass(frozen=True)
class Point(Generic[Part]):
    """A place where wings plug in, defined by the room of the trunk that asks there. `Part` is the type of what a wing
    gives: usually a function."""

    name: str


@dataclass(frozen=True)
class Command:
    """A command of the command line: a function of its name in a module of its name, or that module's typer app."""

    group: str  # under which heading of the help it is listed
    summary: str
    takes_keys: bool = False  # `key=value` arguments, which the shell's completion offers
    takes_run: bool = False  # its first argument is a run
    takes_command: bool = False  # a user's own command follows after `--`
    folder: str = "trainspec_cli.cli"  # the package of the command's module; of a wing, its `commands`
    function: str = ""  # of the module and its function, where they cannot have the command's name


@dataclass(frozen=True)
class Wing:
    commands: Mapping[str, Command] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    """Name of a point -> "module:name" of what the wing gives there."""


@cache
def find_wings() -> Mapping[str, Wing]:
    """Return the wings whose folders are there, by name."""
    return {file.parent.name: _read(file) for file in sorted(FOLDER.glob("*/wing.py"))}


def _read(file: Path) -> Wing:
    """Run a wing.py by itself: as a module of its package it would load what the package's `__init__.py` does."""
    spec = importlib.util.spec_from_file_location(f"trainspec_wing_{file.parent.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Wing, module.WING)


def parts_of(point: Point[Part], wings: Collection[str] | None = None) -> list[Part]:
    """Import and return what the wings give at `point`, in the order of their names; `wings`: those of these names."""
    found = [wing for name, wing in find_wings().items() if wings is None or name in wings]
    return [cast(Part, _load(wing.parts[point.name])) for wing in found if point.name in wing.parts]


def part_named(point: Point[NamedPart], name: str, trunks: NamedPart) -> NamedPart:
    """Return the part of this name: `trunks`, for which nothing is imported, or one that a wing gives at `point`.
    Raises MachineError where no wing gives it."""
    if name == trunks.name:
        return trunks
    if (found := next((part for part in parts_of(point) if part.name == name), None)) is None:
        message = f"this installation of trainspec has no part for runs of the kind `{name}`"
        hint = f"install trainspec whole: the wing that gives {point.name} is missing below {FOLDER}"
        raise MachineError(Problem(MISSING_WING, message, hint=hint, environment=True))
    return found


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
