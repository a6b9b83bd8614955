"""The folders of recipes and groups: the user's own ./conf and ./recipes first, then the shipped ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainspec_cli.core.reading.files import exists

ROOT = "trainspec"
"""conf/trainspec.yaml, the root of every run (a distinctive name: ./conf may belong to another Hydra program)."""
SUFFIX = ".yaml"
_MAY_BE_FILE = re.compile(r"(?!\.{1,2}$)[^\0]{1,200}")
DISTURB = "disturb"
"""The folder of disturbances, which `trainspec plan` simulates: no part of a recipe, and so no group."""
NAMED_SECTIONS = {"cluster.accelerator": "accelerator"}
"""A section that one word may stand for -> the group whose options are its names."""
OWN_FILES = ("framework",)
"""Groups whose option may also be a file by its path, `framework=./mine.yaml`."""
SHIPPED = "shipped"
"""The resolver in `${shipped:recipes/FILE}`, the path of a file that ships with trainspec."""


@dataclass(frozen=True)
class Folders:
    conf: tuple[Path, ...]
    """Searched in order; the first match wins."""
    recipes: tuple[Path, ...]

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The group names, `cluster`, `data`, ...: folders below conf."""
        found = {
            folder.relative_to(conf).as_posix()
            for conf in self.conf
            for folder in conf.rglob("*")
            if folder.is_dir() and any(folder.glob(f"*{SUFFIX}"))
        }
        return tuple(sorted(found - {DISTURB}))

    def options(self, group: str) -> list[str]:
        return _names(conf / group for conf in self.conf)

    def find_config(self, name: str) -> Path | None:
        """Return the file of `model/llama_6m` or `recipe/tiny`; None if there is none, or the name leaves the
        folder."""
        if not all(_MAY_BE_FILE.fullmatch(word) for word in name.split("/")):
            return None
        if name.startswith("recipe/"):
            return _first_file(self.recipes, name.removeprefix("recipe/"))
        return _first_file(self.conf, name)

    def recipe_names(self) -> list[str]:
        return _names(self.recipes)


def find_folders(cwd: Path) -> Folders:
    shipped = shipped_data()
    return Folders(
        conf=_existing(cwd / "conf", shipped / "conf"),
        recipes=_existing(cwd / "recipes", shipped / "recipes"),
    )


def shipped_data() -> Path:
    """Return `_data` inside an installed wheel, else the checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent


def _existing(*folders: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def _names(folders: Iterable[Path]) -> list[str]:
    return sorted(
        {
            file.relative_to(folder).with_suffix("").as_posix()
            for folder in folders
            for file in folder.rglob(f"*{SUFFIX}")
            if exists(file)
        }
    )


def _first_file(folders: tuple[Path, ...], name: str) -> Path | None:
    files = (folder / f"{name}{SUFFIX}" for folder in folders)
    return next((file for file in files if exists(file)), None)
