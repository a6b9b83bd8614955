"""Keys of a recipe that belong to a wing: the recipe is a protocol, so they are known and checked although the wing's
folder may be deleted; what they mean is in the wing alone.

A recipe uses a wing where the wing's key has the wing's value. Parts of other wings are not loaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.wings import MISSING_WING, Part, Point, find_wings, parts_of
from trainspec_cli.recipe.keys.resilience import SitesSpec
from trainspec_cli.recipe.keys.run import RunSpec

RULES: Point[Iterable[Callable[[RunSpec], Iterable[Problem]]]] = Point("rules")
"""Rules for recipes that use the wing."""
PACKAGES: Point[Iterable[tuple[str, str, str, str]]] = Point("packages")
"""(key, its value, the package that it needs, the extra of trainspec that brings it)"""


@dataclass(frozen=True)
class WingKeys:
    wing: str
    key: str
    value: str
    """The recipe uses the wing where `key` is `value`."""
    otherwise: str
    """What to type where the wing is not to be used."""
    section: str
    """Settings, which mean nothing without the wing."""
    defaults: object
    of_one_start: tuple[str, ...]
    """Keys of `section` that differ from start to start: refused without the wing, and in a sweep."""
    files: tuple[str, ...]
    """Those of them that name a file, which every process of the run finds: a relative path is made absolute."""

    @property
    def paths_of_one_start(self) -> list[str]:
        return [f"{self.section}.{name}" for name in self.of_one_start]


WING_KEYS = (
    WingKeys(
        "sites",
        "resilience.mode",
        "sites",
        "resilience=restart",
        "resilience.sites",
        SitesSpec(),
        of_one_start=("site", "endpoint", "listen", "secret"),
        files=("secret",),
    ),
)


def parts_for(point: Point[Part], spec: RunSpec) -> list[Part]:
    """Return what the wings that a recipe uses give at `point`."""
    used = [keys.wing for keys in WING_KEYS if attrgetter(keys.key)(spec) == keys.value]
    return parts_of(point, used) if used else []


def keys_of_wings(spec: RunSpec) -> Iterator[Problem]:
    """Keys of a wing are set where the wing is there and used."""
    for keys in WING_KEYS:
        is_used = attrgetter(keys.key)(spec) == keys.value
        section = attrgetter(keys.section)(spec)
        if keys.wing not in find_wings():
            path = keys.key if is_used else keys.section
            if is_used or section != keys.defaults:
                message = f"`{path}` is set, and this installation lacks its part trainspec_cli/wings/{keys.wing}"
                yield Problem(MISSING_WING, message, path, f"install all of trainspec, or type {keys.otherwise}")
            continue
        for name in keys.of_one_start if not is_used else ():
            if (value := getattr(section, name)) is not None:
                path = f"{keys.section}.{name}"
                message = f"`{path}` is {value}, and `{keys.key}` is {attrgetter(keys.key)(spec)}, not {keys.value}"
                yield Problem(
                    "usage", message, path, f"type {keys.key.partition('.')[0]}={keys.value}, or leave it out"
                )
