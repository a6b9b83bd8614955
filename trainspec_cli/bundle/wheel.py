"""What a wheel says of itself: its name, version, tags, licence and requirements."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from functools import cached_property
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from trainspec_cli.bundle.installer import WHEELS
from trainspec_cli.bundle.target import WheelTarget
from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.reading.files import unreadable

MAX_METADATA_BYTES = 2**22
MAX_LICENCE_LETTERS = 100
"""A longer text in the field `License` is a licence, not its name."""
_OSI = "License :: OSI Approved :: "


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
                (found,) = (info for info in archive.infolist() if _is_metadata(info.filename))
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
                if any(_holds(requirement, {**target.markers, "extra": extra}) for extra in ("", *extras)):
                    wanted.append(requirement)
            except (InvalidRequirement, UndefinedEnvironmentName) as error:
                raise unreadable(self.file, f"has a requirement that cannot be read: {text}") from error
        return wanted

    @property
    def licence(self) -> str:
        """An SPDX expression, or the name that the wheel gives; empty where it gives none."""
        if expression := self.metadata.get("License-Expression"):
            return str(expression)
        given = str(self.metadata.get("License") or "").strip()
        if given and given != "UNKNOWN" and "\n" not in given and len(given) <= MAX_LICENCE_LETTERS:
            return given
        classifiers = map(str, self.metadata.get_all("Classifier") or ())
        return ", ".join(text.removeprefix(_OSI) for text in classifiers if text.startswith(_OSI))


def _is_metadata(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder.endswith(".dist-info") and file == "METADATA"


def _holds(requirement: Requirement, environment: Mapping[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(dict(environment))


def read_wheel(file: Path) -> Wheel:
    """Raises UnreadableFileError where the name is not that of a wheel."""
    try:
        name, version, _, tags = parse_wheel_filename(file.name)
    except InvalidWheelFilename as error:
        raise unreadable(file, f"is no wheel: {error}", "take it out of the folder") from error
    return Wheel(file, name, str(version), tags)


def wheels_in(folder: Path) -> list[Wheel]:
    """Return the wheels of a bundle, sorted by their files' names."""
    return [read_wheel(file) for file in sorted((folder / WHEELS).glob("*.whl"))]


def missing_requirements(wheels: Iterable[Wheel], wanted: Requirement, target: WheelTarget) -> list[Requirement]:
    """Return what `wanted` needs on the target, directly or not, and no wheel that fits there provides."""
    fitting: dict[str, list[Wheel]] = {}
    for wheel in wheels:
        if target.takes(wheel.tags):
            fitting.setdefault(wheel.name, []).append(wheel)
    missing, seen, left = [], set[str](), [wanted]
    while left:
        requirement = left.pop()
        if (text := str(requirement)) in seen:
            continue
        seen.add(text)
        found = [one for one in fitting.get(canonicalize_name(requirement.name), []) if _provides(one, requirement)]
        if found:
            left += found[0].requirements(requirement.extras, target)
        else:
            missing.append(requirement)
    return missing


def _provides(wheel: Wheel, requirement: Requirement) -> bool:
    return requirement.specifier.contains(wheel.version, prereleases=True)


def unfit_wheels(wheels: Iterable[Wheel], targets: Iterable[WheelTarget]) -> list[Problem]:
    """Return the wheels that fit none of the targets."""
    every = list(targets)
    return [
        Problem(
            "wrong_platform",
            f"{wheel.file} fits none of {', '.join(target.platform for target in every)} with Python {every[0].python}",
            hint=f"get it for that platform: pip download --only-binary :all: --no-deps {wheel.name}=={wheel.version} "
            f"--python-version {every[0].python} --platform {every[0].platform}; or take it out",
            environment=True,
        )
        for wheel in wheels
        if not any(target.takes(wheel.tags) for target in every)
    ]


def lacking(missing: Iterable[Requirement], target: WheelTarget, where: str) -> MachineError:
    """Return the error of a set of wheels that is not whole."""
    names = ", ".join(sorted({str(requirement) for requirement in missing}))
    message = f"{where} lacks wheels for {target.platform} with Python {target.python}: {names}"
    hint = (
        f"get them where a network is: pip download --only-binary :all: --platform {target.platform} "
        f"--python-version {target.python} --dest FOLDER NAME; then trainspec bundle OUT --wheels FOLDER"
    )
    return MachineError(Problem("missing_wheel", message, hint=hint, environment=True))
