"""The wheels of a bundle: select their Python version and platforms, download them with pip, and find missing ones."""

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
"""A bundle also contains pip, because some Pythons lack ensurepip."""
SOURCE_ONLY = ("antlr4-python3-runtime==4.9.*",)
"""Dependencies that are available only as source. omegaconf 2.3 needs antlr4, which is pure Python."""
MAX_ROUNDS = 5
"""Maximum number of download rounds. More than one is needed because pip evaluates markers for the machine that it runs
on, while other platforms have different requirements."""
MAX_METADATA_BYTES = 2**22

LEGACY = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
"""Older manylinux names by glibc version."""
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
    """The newest platform tag that the machines support, such as manylinux_2_28_x86_64."""

    @cached_property
    def platforms(self) -> tuple[str, ...]:
        """The tags of all platforms whose wheels run on the target, newest first. pip itself does not add older
        tags."""
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

    def supports(self, tags: frozenset[Tag]) -> bool:
        """Return whether a wheel with these tags can be installed on the target."""
        return not tags.isdisjoint(self._tags)

    @cached_property
    def _tags(self) -> frozenset[Tag]:
        major, minor = map(int, self.python.split("."))
        native = cpython_tags((major, minor), platforms=self.platforms)
        pure = compatible_tags((major, minor), f"cp{major}{minor}", self.platforms)
        return frozenset((*native, *pure))

    @cached_property
    def markers(self) -> dict[str, str]:
        """The environment where requirement markers are evaluated."""
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
    """Return the target. Raises RecipeError for a Python version or platform that has no wheels."""
    problems = []
    if not _PYTHON.fullmatch(python):
        message = f"--python is {python}, not a version such as {python_here()}"
        problems.append(Problem("wrong_type", message, "--python", f"pass --python {python_here()}"))
    if not (_LINUX.fullmatch(name) or _MACOS.fullmatch(name)):
        message = f"no bundle can be created for --platform {name}"
        hint = f"specify one such as {EXAMPLES}; python3 -m pip debug --verbose lists a machine's platforms"
        problems.append(Problem("unknown_value", message, "--platform", hint))
    if problems:
        raise RecipeError(problems)
    return WheelTarget(python, name)


def python_here() -> str:
    return "{}.{}".format(*sys.version_info[:2])


# Wheel metadata


@dataclass(frozen=True)
class Wheel:
    file: Path
    name: str
    """The package name in lower case with dashes, as in package indexes."""
    version: str
    tags: frozenset[Tag]

    @cached_property
    def metadata(self) -> Message:
        """Return the wheel's metadata. Raises UnreadableFileError if the file is not a wheel."""
        try:
            with zipfile.ZipFile(self.file) as archive:
                names = (name for name in archive.namelist() if name.partition("/")[2] == "METADATA")
                (found,) = (archive.getinfo(name) for name in names if name.endswith(".dist-info/METADATA"))
                if found.file_size > MAX_METADATA_BYTES:
                    raise ValueError("its METADATA is too large")
                return BytesParser().parsebytes(archive.read(found))
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise unreadable(
                self.file, f"is not a wheel: {error}", "remove it from the folder, or download it again"
            ) from error

    def requirements(self, extras: Iterable[str], target: WheelTarget) -> list[Requirement]:
        """Return the wheel's requirements on the target with these extras."""
        wanted = []
        for text in self.metadata.get_all("Requires-Dist") or ():
            try:
                requirement = Requirement(text)
                marker = requirement.marker
                if not marker or any(marker.evaluate({**target.markers, "extra": extra}) for extra in ("", *extras)):
                    wanted.append(requirement)
            except (InvalidRequirement, UndefinedEnvironmentName) as error:
                raise unreadable(self.file, f"has an unreadable requirement: {text}") from error
        return wanted


def read_wheel(file: Path) -> Wheel:
    """Return a description of the wheel in a file. Raises UnreadableFileError if the file's name is not that of a
    wheel."""
    try:
        name, version, _, tags = parse_wheel_filename(file.name)
    except InvalidWheelFilename as error:
        raise unreadable(file, f"is not a wheel: {error}", "remove it from the folder") from error
    return Wheel(file, name, str(version), tags)


def missing_requirements(wheels: Iterable[Wheel], wanted: Requirement, target: WheelTarget) -> list[Requirement]:
    """Return the direct and indirect requirements of `wanted` on the target that no wheel satisfies."""
    fitting: dict[str, list[Wheel]] = {}
    for wheel in wheels:
        if target.supports(wheel.tags):
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


# Downloading wheels


def download(
    folder: Path,
    staging: Path,
    targets: Sequence[WheelTarget],
    extras: Sequence[str],
    source: Path | None,
    on_step: OnLine,
) -> None:
    """Fill `folder` with the wheels of trainspec and its dependencies for each target.

    pip downloads them according to its settings, or only takes them from the folder `source`. Newly built wheels are
    written to the empty folder `staging`. Raises RecipeError for an unsupported Python or extra, and MachineError for
    missing wheels."""
    if find_spec(PIP) is None:
        message = f"{sys.executable} has no pip, which is needed to download wheels"
        raise MachineError(Problem("no_pip", message, hint=f"{sys.executable} -m ensurepip", environment=True))
    own = own_wheel(staging, source, on_step)
    # Check the Python version and the extras against the wheel's own metadata.
    problems = []
    allowed = str(own.metadata["Requires-Python"])
    if not SpecifierSet(allowed).contains(f"{targets[0].python}.0"):
        message = f"--python is {targets[0].python}; trainspec needs Python {allowed}"
        problems.append(Problem("out_of_range", message, "--python", "pass --python 3.12"))
    known = [str(name) for name in own.metadata.get_all("Provides-Extra") or ()]
    for extra in extras:
        if extra not in known:
            near = closest(extra, known)
            hint = f"did you mean {near}?" if near else f"choose from {', '.join(known)}"
            problems.append(Problem("unknown_value", f"trainspec has no extra {extra}", "--extra", hint))
    if problems:
        raise RecipeError(problems)
    sources = ["--find-links", str(staging)]
    if source is not None:
        sources = ["--no-index", "--find-links", str(source.absolute()), *sources]
    else:
        on_step("dependencies without wheels")
        _pip(["wheel", "--no-deps", "--wheel-dir", str(staging), *SOURCE_ONLY], on_step)
    of_extras = _bracketed(extras)
    for target in targets:
        platforms = [word for name in target.platforms for word in ("--platform", name)]
        aim = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", target.python, *platforms]
        here = (python_here(), sys.platform, platform.machine())
        is_this_system = here == (target.python, target.markers["sys_platform"], target.markers["platform_machine"])
        requested = [f"{own.file}{of_extras}", PIP]
        # pip evaluates markers for the machine that it runs on, so download again whatever is still missing for the
        # target.
        for _ in range(MAX_ROUNDS):
            on_step(f"wheels for {target.platform}")
            _pip(["download", "--dest", str(folder), *aim, *sources, *requested], on_step, target)
            wheels = [read_wheel(file) for file in folder.glob("*.whl")]
            missing = missing_requirements(wheels, Requirement(f"{NAME}{of_extras}"), target)
            # Drop the markers, which are true on the target but may be false on this machine.
            more = [f"{one.name}{_bracketed(one.extras)}{one.specifier}" for one in missing]
            if not missing or is_this_system or set(more) <= set(requested):
                break
            requested += more
        if missing:
            names = ", ".join(sorted({str(requirement) for requirement in missing}))
            message = f"{names}: no wheels for {target.platform} with Python {target.python}"
            hint = (
                f"with a network, download them: pip download --only-binary :all: --platform {target.platform} "
                f"--python-version {target.python} --dest FOLDER NAME; then trainspec bundle OUT --wheels FOLDER"
            )
            raise MachineError(Problem("missing_wheel", message, hint=hint, environment=True))


def _bracketed(extras: Iterable[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


def own_wheel(staging: Path, source: Path | None, on_step: OnLine) -> Wheel:
    """Return trainspec's wheel: from `source`, built from this checkout, or this version as downloaded by pip. Raises
    RecipeError if `source` has several, and MachineError if pip finds none."""
    found = sorted(source.glob(f"{NAME}-*.whl")) if source is not None else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        message = f"--wheels {source} contains several wheels of trainspec: {names}"
        raise RecipeError(Problem("contradiction", message, "--wheels", "remove all but one of them"))
    on_step("the wheel of trainspec")
    if not found:
        if is_checkout := (CHECKOUT / "pyproject.toml").is_file():
            # Use an installed hatchling; otherwise pip downloads it.
            here = ["--no-build-isolation"] if find_spec("hatchling") else []
            order = ["wheel", "--no-deps", *here, "--wheel-dir", str(staging), str(CHECKOUT)]
        else:
            order = ["download", "--no-deps", "--dest", str(staging), f"{NAME}=={__version__}"]
        try:
            _pip(order, on_step)
        except MachineError as error:
            what = f"building a wheel failed in {CHECKOUT}" if is_checkout else f"pip has no {order[-1]}"
            hint = "put a trainspec wheel into a folder with all other wheels, and pass --wheels FOLDER"
            message = f"{what}: {error.problems[0].message}"
            raise MachineError(Problem("no_own_wheel", message, hint=hint, environment=True)) from error
        found = sorted(staging.glob(f"{NAME}-*.whl"))
    return read_wheel(found[0])


def _pip(arguments: Sequence[str], on_step: OnLine, target: WheelTarget | None = None) -> None:
    """Run pip, and report each package that it collects. Raises MachineError with pip's own error messages."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    command += ["--progress-bar", "off"]
    errors = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if line.startswith("Collecting "):
                    on_step(f"wheels: {line.split()[1]}")
                elif line.startswith("ERROR: "):
                    errors.append(line.removeprefix("ERROR: ").strip())
        except BaseException:
            # A pip process that is still running would recreate the removed folder.
            pip.kill()
            pip.wait()
            raise
    if not pip.returncode:
        return
    reason = " ".join(errors) or "see pip download"
    if "No space left on device" in reason:
        hint = "free up some space on the disk of OUT, or choose another folder"
        raise MachineError(
            Problem("disk_full", f"the disk is too small for the wheels: {reason}", hint=hint, environment=True)
        )
    of_target = f" for {target.platform} with Python {target.python}" if target else ""
    hint = (
        "choose a --platform that has wheels (a newer manylinux), or pass a folder of wheels: --wheels FOLDER; "
        "pip config list and PIP_INDEX_URL show pip's index"
    )
    message = f"pip could not download the wheels{of_target}: {reason}"
    raise MachineError(Problem("missing_wheel", message, hint=hint, environment=True))
