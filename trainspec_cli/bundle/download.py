"""Get the wheels of a bundle by pip, which reads its own settings: from an index, or from a folder of wheels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trainspec_cli.bundle.own_wheel import NAME, own_wheel
from trainspec_cli.bundle.target import WheelTarget, is_this_system
from trainspec_cli.bundle.wheel import Wheel, lacking, missing_requirements, read_wheel
from trainspec_cli.errors import MachineError, Problem, RecipeError, closest

OF_SOURCE = ("antlr4-python3-runtime==4.9.*",)
"""What trainspec needs and indexes have as source alone: omegaconf 2.3 needs this one, which is pure Python."""
PIP = "pip"
"""A bundle brings pip too, so that a Python without ensurepip can install it."""
MAX_ROUNDS = 5
"""pip judges requirements by the machine that it runs on: what another platform needs besides is asked for again."""

OnLine = Callable[[str], None]


def download(
    folder: Path,
    staging: Path,
    targets: Sequence[WheelTarget],
    extras: Sequence[str],
    source: Path | None,
    tell: OnLine,
) -> None:
    """Fill `folder` with the wheels of trainspec and all that it needs on each target.

    `source`: take them from this folder alone; `staging`: an empty folder for what is built on the way. Raises
    RecipeError for a Python or an extra that trainspec does not have, MachineError where wheels cannot be got.
    """
    _check_pip()
    own = _own_wheel(staging, source, tell)
    _check_wanted(own, targets, extras)
    places = ["--find-links", str(staging)]
    if source is not None:
        places = ["--no-index", "--find-links", str(source.absolute()), *places]
    else:
        tell("what has no wheel")
        _pip(["wheel", "--no-deps", "--wheel-dir", str(staging), *OF_SOURCE], tell)
    wanted = f"{own.file}[{','.join(extras)}]" if extras else str(own.file)
    for target in targets:
        _download(folder, target, [wanted, PIP], places, tell)
        _complete(folder, target, own, [wanted, PIP], extras, places, tell)


def _check_pip() -> None:
    if find_spec(PIP) is None:
        message = f"{sys.executable} has no pip, which gets the wheels"
        raise MachineError(Problem("no_pip", message, hint=f"{sys.executable} -m ensurepip", environment=True))


def _own_wheel(staging: Path, source: Path | None, tell: OnLine) -> Wheel:
    """Return the newest of `source`, else that of this trainspec."""
    found = sorted(source.glob(f"{NAME}-*.whl")) if source is not None else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        message = f"--wheels {source} holds several wheels of trainspec: {names}"
        raise RecipeError(Problem("contradiction", message, "--wheels", "leave the one in it that you want"))
    tell("trainspec's own wheel")
    return read_wheel(found[0] if found else own_wheel(staging))


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


def _download(folder: Path, target: WheelTarget, wanted: Sequence[str], places: Sequence[str], tell: OnLine) -> None:
    platforms = [word for name in target.platforms for word in ("--platform", name)]
    aim = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", target.python, *platforms]
    tell(f"wheels for {target.platform}")
    _pip(["download", "--dest", str(folder), *aim, *places, *wanted], tell, target)


def _complete(
    folder: Path,
    target: WheelTarget,
    own: Wheel,
    wanted: Sequence[str],
    extras: Sequence[str],
    places: Sequence[str],
    tell: OnLine,
) -> None:
    """Ask for what the target needs besides. Raises MachineError where something is still missing."""
    root = Requirement(f"{NAME}[{','.join(extras)}]" if extras else NAME)
    asked = list(wanted)
    for _ in range(MAX_ROUNDS):
        missing = missing_requirements([read_wheel(file) for file in folder.glob("*.whl")], root, target)
        more = [_bare(requirement) for requirement in missing]
        if not missing:
            return
        if is_this_system(target) or set(more) <= set(asked):
            break
        asked += more
        _download(folder, target, asked, places, tell)
    raise lacking(missing, target, str(folder.name))


def _bare(requirement: Requirement) -> str:
    """Return the requirement without its marker, which holds on the target."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


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
            pip.kill()  # it would go on, and make the folder anew that is to be removed
            pip.wait()
            raise
    if pip.returncode:
        raise _failed(errors, target)


def _failed(errors: Sequence[str], target: WheelTarget | None) -> MachineError:
    said = " ".join(errors) or "see pip download"
    if "No space left on device" in said:
        hint = "free some space on the disk of OUT, or choose another folder"
        return MachineError(Problem("disk_full", f"the wheels do not fit: {said}", hint=hint, environment=True))
    whose = f" for {target.platform} with Python {target.python}" if target else ""
    hint = (
        "give a --platform that has wheels (a newer manylinux), or a folder of wheels: --wheels FOLDER; pip looks "
        "where its settings say (pip config list, PIP_INDEX_URL)"
    )
    return MachineError(
        Problem("missing_wheel", f"pip did not get the wheels{whose}: {said}", hint=hint, environment=True)
    )
