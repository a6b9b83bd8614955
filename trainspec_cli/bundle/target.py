"""The Python and the platform that a bundle is for: which wheels fit, and which requirements hold there."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms

from trainspec_cli.bundle.installer import platform_here
from trainspec_cli.errors import Problem, RecipeError

LEGACY = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
"""Older names of glibc versions."""
OLDEST_GLIBC = 5
_LINUX = re.compile(r"manylinux_2_(\d+)_(\w+)")
_MACOS = re.compile(r"macosx_(\d+)_(\d+)_(arm64|x86_64)")
_PYTHON = re.compile(r"3\.\d+")
EXAMPLES = "manylinux_2_28_x86_64, manylinux_2_28_aarch64 or macosx_14_0_arm64"


@dataclass(frozen=True)
class WheelTarget:
    python: str
    """Major and minor version, such as 3.12."""
    platform: str
    """The newest platform tag that the machines take, such as manylinux_2_28_x86_64."""

    @cached_property
    def platforms(self) -> tuple[str, ...]:
        """The tags of all platforms whose wheels run there, the newest first."""
        return tuple(_older(self.platform))

    def takes(self, tags: frozenset[Tag]) -> bool:
        """Return whether a wheel with these tags can be installed there."""
        return not tags.isdisjoint(self._tags)

    @cached_property
    def _tags(self) -> frozenset[Tag]:
        major, minor = map(int, self.python.split("."))
        native = cpython_tags((major, minor), platforms=self.platforms)
        pure = compatible_tags((major, minor), f"cp{major}{minor}", self.platforms)
        return frozenset((*native, *pure))

    @cached_property
    def markers(self) -> dict[str, str]:
        """The environment that a requirement's markers are judged by."""
        is_mac = self.platform.startswith("macosx")
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "os_name": "posix",
            "sys_platform": "darwin" if is_mac else "linux",
            "platform_system": "Darwin" if is_mac else "Linux",
            "platform_machine": _machine(self.platform),
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }


def check_target(python: str, name: str) -> WheelTarget:
    """Raises RecipeError where the Python's version or the platform is none that wheels are made for."""
    problems = []
    if not _PYTHON.fullmatch(python):
        message = f"--python is {python}; a version such as {python_here()} is needed"
        problems.append(Problem("wrong_type", message, "--python", f"type --python {python_here()}"))
    if not (_LINUX.fullmatch(name) or _MACOS.fullmatch(name)):
        message = f"--platform {name} is none that a bundle can be made for"
        hint = f"type one such as {EXAMPLES}; python3 -m pip debug --verbose lists a machine's"
        problems.append(Problem("unknown_value", message, "--platform", hint))
    if problems:
        raise RecipeError(problems)
    return WheelTarget(python, name)


def python_here() -> str:
    return "{}.{}".format(*sys.version_info[:2])


def default_platform() -> str:
    return platform_here()


def is_this_system(target: WheelTarget) -> bool:
    """Return whether pip, which judges markers by the machine that it runs on, judges them as the target does."""
    here = (python_here(), sys.platform, platform.machine())
    return here == (target.python, target.markers["sys_platform"], target.markers["platform_machine"])


def _older(name: str) -> Iterator[str]:
    """Yield the platform and all older ones, which pip does not add by itself."""
    if found := _MACOS.fullmatch(name):
        yield from mac_platforms((int(found[1]), int(found[2])), found[3])
        return
    found = _LINUX.fullmatch(name)
    assert found, name
    for minor in range(int(found[1]), OLDEST_GLIBC - 1, -1):
        yield f"manylinux_2_{minor}_{found[2]}"
        if (2, minor) in LEGACY:
            yield f"{LEGACY[2, minor]}_{found[2]}"
    yield f"linux_{found[2]}"


def _machine(name: str) -> str:
    found = _LINUX.fullmatch(name) or _MACOS.fullmatch(name)
    assert found, name
    return found[found.re.groups]
