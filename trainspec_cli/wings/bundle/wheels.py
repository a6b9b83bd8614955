"""The wheels of a bundle: the Python and platforms that they are for, how pip gets them, and whether all are there."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from trainspec_cli import __version__
from trainspec_cli.core.errors import MachineError, Problem, RecipeError, closest
from trainspec_cli.core.reading.files import unreadable

NAME = "trainspec"
CHECKOUT = Path(__file__).resolve().parents[3]
PIP = "pip"
"""A bundle brings pip too, so that a Python without ensurepip can install it."""
OF_SOURCE = ("antlr4-python3-runtime==4.9.*",)
"""What trainspec needs and indexes have as source alone: omegaconf 2.3 needs this one, which is pure Python."""
MAX_ROUNDS = 5
"""pip judges requirements by the machine that it runs on: what another platform needs besides is asked for again."""
MAX_METADATA_BYTES = 2**22

LEGACY = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
"""Older names of glibc versions."""
OLDEST_GLIBC = 5
_LINUX = re.compile(r"manylinux_2_(\d+)_(\w+)")
_MACOS = re.compile(r"macosx_(\d+)_(\d+)_(arm64|x86_64)")
_PYTHON = re.compile(r"3\.\d+")
EXAMPLES = "manylinux_2_28_x86_64, manylinux_2_28_aarch64 or macosx_14_0_arm64"

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class WheelTarget:
    python: str
    """Major and minor version, such as 3.12."""
    platform: str
    """The newest platform tag that the machines take, such as manylinux_2_28_x86_64."""

    @cached_property
    def platforms(self) -> tuple[str, ...]:
        """The tags of all platforms whose wheels run there, the newest first; pip does not add older ones by itself."""
        if found := _MACOS.fullmatch(self.platform):
            return tuple(mac_platforms((int(found[1]), int(found[2])), found[3]))
        found = _LINUX.fullmatch(self.platform)
        assert found, self.platform
        names = []
        for minor in range(int(found[1]), OLDEST_GLIBC - 1, -1):
            names.append(f"manylinux_2_{minor}_{found[2]}")
            if (2, minor) in LEGACY:
                names.append(f"{LEGACY[2, minor]}_{found[2]}")
        return (*names, f"linux_{found[2]}")

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
        found = _LINUX.fullmatch(self.platform) or _MACOS.fullmatch(self.platform)
        assert found, self.platform
        is_mac = self.platform.startswith("macosx")
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "os_name": "posix",
            "sys_platform": "darwin" if is_mac else "linux",
            "platform_system": "Darwin" if is_mac else "Linux",
            "platform_machine": found[found.re.groups],
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


# What a wheel says of itself


@dataclass(frozen=True)
class Wheel:
    file: Path
    name: str
    """In lower case, with dashes, as package indexes have it."""
    version: str
    tags: frozenset[Tag]

    @cached_property
    def metadata(self) -> Message:
        """Raises UnreadableFileError where the file is no wheel."""
        try:
            with zipfile.ZipFile(self.file) as archive:
                names = (name for name in archive.namelist() if name.partition("/")[2] == "METADATA")
                (found,) = (archive.getinfo(name) for name in names if name.endswith(".dist-info/METADATA"))
                if found.file_size > MAX_METADATA_BYTES:
                    raise ValueError("its METADATA is too large")
                return BytesParser().parsebytes(archive.read(found))
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise unreadable(
                self.file, f"is no wheel: {error}", "take it out of the folder, or get it again"
            ) from error

    def requirements(self, extras: Iterable[str], target: WheelTarget) -> list[Requirement]:
        """Return what the wheel needs on the target, with these of its extras."""
        wanted = []
        for text in self.metadata.get_all("Requires-Dist") or ():
            try:
                requirement = Requirement(text)
                marker = requirement.marker
                if not marker or any(marker.evaluate({**target.markers, "extra": extra}) for extra in ("", *extras)):
                    wanted.append(requirement)
            except (InvalidRequirement, UndefinedEnvironmentName) as error:
                raise unreadable(self.file, f"has a requirement that cannot be read: {text}") from error
        return wanted


def read_wheel(file: Path) -> Wheel:
    """Raises UnreadableFileError where the name is not that of a wheel."""
    try:
        name, version, _, tags = parse_wheel_filename(file.name)
    except InvalidWheelFilename as error:
        raise unreadable(file, f"is no wheel: {error}", "take it out of the folder") from error
    return Wheel(file, name, str(version), tags)


def missing_requirements(wheels: Iterable[Wheel], wanted: Requirement, target: WheelTarget) -> list[Requirement]:
    """Return what `wanted` needs on the target, directly or not, and no wheel that fits there provides."""
    fitting: dict[str, list[Wheel]] = {}
    for wheel in wheels:
        if target.takes(wheel.tags):
            fitting.setdefault(wheel.name, []).append(wheel)
    missing = []
    seen: set[str] = set()
    left = [wanted]
    while left:
        requirement = left.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        of_name = fitting.get(canonicalize_name(requirement.name), [])
        found = [wheel for wheel in of_name if requirement.specifier.contains(wheel.version, prereleases=True)]
        if found:
            left += found[0].requirements(requirement.extras, target)
        else:
            missing.append(requirement)
    return missing


# Getting them


def download(
    folder: Path,
    staging: Path,
    targets: Sequence[WheelTarget],
    extras: Sequence[str],
    source: Path | None,
    tell: OnLine,
) -> None:
    """Fill `folder` with the wheels of trainspec and all that it needs on each target.

    pip gets them by its own settings, or from the folder `source` alone; `staging` is an empty folder for what is built
    on the way. Raises RecipeError for a Python or an extra that trainspec does not have, MachineError where wheels
    cannot be got.
    """
    if find_spec(PIP) is None:
        message = f"{sys.executable} has no pip, which gets the wheels"
        raise MachineError(Problem("no_pip", message, hint=f"{sys.executable} -m ensurepip", environment=True))
    own = own_wheel(staging, source, tell)
    _check_wanted(own, targets, extras)
    places = ["--find-links", str(staging)]
    if source is not None:
        places = ["--no-index", "--find-links", str(source.absolute()), *places]
    else:
        tell("what has no wheel")
        _pip(["wheel", "--no-deps", "--wheel-dir", str(staging), *OF_SOURCE], tell)
    of_extras = _bracketed(extras)
    for target in targets:
        platforms = [word for name in target.platforms for word in ("--platform", name)]
        aim = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", target.python, *platforms]
        here = (python_here(), sys.platform, platform.machine())
        is_this_system = here == (target.python, target.markers["sys_platform"], target.markers["platform_machine"])
        asked = [f"{own.file}{of_extras}", PIP]
        # pip judges markers by the machine that it runs on. What the target needs besides is asked for, until no wheel
        # is missing there.
        for _ in range(MAX_ROUNDS):
            tell(f"wheels for {target.platform}")
            _pip(["download", "--dest", str(folder), *aim, *places, *asked], tell, target)
            wheels = [read_wheel(file) for file in folder.glob("*.whl")]
            missing = missing_requirements(wheels, Requirement(f"{NAME}{of_extras}"), target)
            # Without their markers, which hold on the target.
            more = [f"{one.name}{_bracketed(one.extras)}{one.specifier}" for one in missing]
            if not missing or is_this_system or set(more) <= set(asked):
                break
            asked += more
        if missing:
            names = ", ".join(sorted({str(requirement) for requirement in missing}))
            message = f"{folder.name} lacks wheels for {target.platform} with Python {target.python}: {names}"
            hint = (
                f"get them where a network is: pip download --only-binary :all: --platform {target.platform} "
                f"--python-version {target.python} --dest FOLDER NAME; then trainspec bundle OUT --wheels FOLDER"
            )
            raise MachineError(Problem("missing_wheel", message, hint=hint, environment=True))


def _bracketed(extras: Iterable[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


def own_wheel(staging: Path, source: Path | None, tell: OnLine) -> Wheel:
    """Return trainspec's wheel: that of `source`, else the one that pip builds from a checkout, else the one of this
    version that pip gets. Raises RecipeError where `source` has several, MachineError where pip gives none."""
    found = sorted(source.glob(f"{NAME}-*.whl")) if source is not None else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        message = f"--wheels {source} holds several wheels of trainspec: {names}"
        raise RecipeError(Problem("contradiction", message, "--wheels", "leave the one in it that you want"))
    tell("trainspec's own wheel")
    if not found:
        if is_checkout := (CHECKOUT / "pyproject.toml").is_file():
            # hatchling where it is installed; else pip gets it.
            here = ["--no-build-isolation"] if find_spec("hatchling") else []
            order = ["wheel", "--no-deps", *here, "--wheel-dir", str(staging), str(CHECKOUT)]
        else:
            order = ["download", "--no-deps", "--dest", str(staging), f"{NAME}=={__version__}"]
        try:
            _pip(order, tell)
        except MachineError as error:
            what = f"{CHECKOUT} could not be built into a wheel" if is_checkout else f"pip has no {order[-1]}"
            hint = "put a wheel of trainspec into a folder, with all the others, and type --wheels FOLDER"
            message = f"{what}: {error.problems[0].message}"
            raise MachineError(Problem("no_own_wheel", message, hint=hint, environment=True)) from error
        found = sorted(staging.glob(f"{NAME}-*.whl"))
    return read_wheel(found[0])


def _check_wanted(own: Wheel, targets: Sequence[WheelTarget], extras: Sequence[str]) -> None:
    problems = []
    allowed = str(own.metadata["Requires-Python"])
    if not SpecifierSet(allowed).contains(f"{targets[0].python}.0"):
        message = f"--python is {targets[0].python}; trainspec needs Python {allowed}"
        problems.append(Problem("out_of_range", message, "--python", "type --python 3.12"))
    known = [str(name) for name in own.metadata.get_all("Provides-Extra") or ()]
    for extra in extras:
        if extra not in known:
            near = closest(extra, known)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            problems.append(Problem("unknown_value", f"--extra {extra} is none of trainspec's", "--extra", hint))
    if problems:
        raise RecipeError(problems)


def _pip(arguments: Sequence[str], tell: OnLine, target: WheelTarget | None = None) -> None:
    """Run pip, telling each package that it comes to. Raises MachineError in pip's own words."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    command += ["--progress-bar", "off"]
    errors = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if line.startswith("Collecting "):
                    tell(f"wheels: {line.split()[1]}")
                elif line.startswith("ERROR: "):
                    errors.append(line.removeprefix("ERROR: ").strip())
        except BaseException:
            # Else it would continue, and make the folder again that is about to be removed.
            pip.kill()
            pip.wait()
            raise
    if not pip.returncode:
        return
    said = " ".join(errors) or "see pip download"
    if "No space left on device" in said:
        hint = "free some space on the disk of OUT, or choose another folder"
        raise MachineError(Problem("disk_full", f"the wheels do not fit: {said}", hint=hint, environment=True))
    whose = f" for {target.platform} with Python {target.python}" if target else ""
    hint = (
        "give a --platform that has wheels (a newer manylinux), or a folder of wheels: --wheels FOLDER; pip looks "
        "where its settings say (pip config list, PIP_INDEX_URL)"
    )
    message = f"pip did not get the wheels{whose}: {said}"
    raise MachineError(Problem("missing_wheel", message, hint=hint, environment=True))
