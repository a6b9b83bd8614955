"""The registry of plug-ins ("wings"): optional parts of trainspec, each in a separate folder below `wings`.

The core imports no plug-in. A plug-in's module `wing.py` declares in `WING` what it adds, as text ("module:function"),
so that reading the registry does not import the plug-in's code. At an extension point, the core calls `parts_of(POINT)`
or, for a recipe, `parts_for(POINT, spec)` in `recipe.rules.check`. A plug-in whose folder has been deleted contributes
nothing, and its commands do not appear in the help."""

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
"""The error code if something needs a plug-in whose folder was deleted."""
FOLDER = Path(__file__).parents[1] / "wings"


@dataclass(frozen=True)
class Point(Generic[Part]):
    """An extension point for plug-ins, defined by the part of the core that uses it. `Part` is the type of a plug-in's
    contribution, usually a function."""

    name: str


@dataclass(frozen=True)
class Command:
    """A command on the command line, implemented by the function of that name in the module of that name, or by the
    module's typer app."""

    group: str  # the command's heading in the help
    summary: str
    takes_keys: bool = False  # whether it takes `key=value` arguments, which shell completion suggests
    takes_run: bool = False  # whether the command takes a run as its first argument
    takes_command: bool = False  # whether it takes a user's command after `--`
    folder: str = "trainspec_cli.cli"  # the package of the command's module; for a plug-in, its `commands` package
    function: str = ""  # name of the module and function, if it cannot be the command's name


@dataclass(frozen=True)
class Wing:
    commands: Mapping[str, Command] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    """Maps an extension point's name to "module:name" of the plug-in's contribution."""


@cache
def find_wings() -> Mapping[str, Wing]:
    """Return the installed plug-ins by name."""
    return {file.parent.name: _read(file) for file in sorted(FOLDER.glob("*/wing.py"))}


def _read(file: Path) -> Wing:
    """Execute a wing.py outside its package, whose `__init__.py` would import everything."""
    spec = importlib.util.spec_from_file_location(f"trainspec_wing_{file.parent.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Wing, module.WING)


def parts_of(point: Point[Part], wings: Collection[str] | None = None) -> list[Part]:
    """Import and return the contributions at `point`, in the order of the plug-ins' names. `wings`: consider only these
    plug-ins."""
    found = [wing for name, wing in find_wings().items() if wings is None or name in wings]
    return [cast(Part, _load(wing.parts[point.name])) for wing in found if point.name in wing.parts]


def part_named(point: Point[NamedPart], name: str, trunks: NamedPart) -> NamedPart:
    """Return the part with this name: the core's own from `trunks`, without importing anything, or a plug-in's
    contribution at `point`. Raises MachineError if neither has it."""
    if name == trunks.name:
        return trunks
    if (found := next((part for part in parts_of(point) if part.name == name), None)) is None:
        message = f"this installation of trainspec does not support runs of the kind `{name}`"
        hint = f"reinstall trainspec: the plug-in that provides {point.name} is missing from {FOLDER}"
        raise MachineError(Problem(MISSING_WING, message, hint=hint, environment=True))
    return found


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
