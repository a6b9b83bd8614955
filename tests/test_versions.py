"""The versions that are tested, and the ranges that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
WANTED = [Requirement(text) for text in [*PROJECT["dependencies"], *EXTRAS["test"], *EXTRAS["hf"]]]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_tested_set_pins_every_direct_dependency_within_its_range() -> None:
    pinned = pins()
    assert sorted(pinned) == sorted({wanted.name for wanted in WANTED})
    for wanted in WANTED:
        assert wanted.specifier.contains(pinned[wanted.name]), wanted


def test_both_commands_of_the_readme_install_the_tested_set_and_so_does_ci() -> None:
    commands = re.findall(r"^pip install -e .*(?= && )", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 2
    installs = [*commands, *re.findall(r"pip install -e [^\"\n]*", (ROOT / ".ci/run").read_text(encoding="utf-8"))[-1:]]
    assert all("-c constraints.txt" in command for command in installs), installs


def test_the_corners_are_those_of_the_ranges() -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / ".ci/versions", "--dry-run"], capture_output=True, text=True, check=True
    )
    corners = re.findall(r"^== Python ([\d.]+), torch==([\d.]+)\.\*", shown.stdout, re.MULTILINE)
    pythons = sorted({python for python, _ in corners})
    torches = sorted({torch for _, torch in corners})
    assert len(corners) == len(set(corners)) == 4
    assert (len(pythons), len(torches)) == (2, 2)
    torch = next(wanted for wanted in WANTED if wanted.name == "torch")
    for allowed, oldest, newest in (
        (Requirement(f"python{PROJECT['requires-python']}").specifier, *pythons),
        (torch.specifier, *torches),
    ):
        assert allowed.contains(oldest) and allowed.contains(newest)
        assert not allowed.contains(before(oldest)) and not allowed.contains(after(newest)), allowed


def before(minor: str) -> str:
    return f"{minor.split('.')[0]}.{int(minor.split('.')[1]) - 1}"


def after(minor: str) -> str:
    return f"{minor.split('.')[0]}.{int(minor.split('.')[1]) + 1}"


def test_what_is_installed_is_within_the_ranges() -> None:
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(version(wanted.name)), wanted
