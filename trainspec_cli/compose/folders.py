"""Where recipes and groups are found: the user's own ./conf and ./recipes first, then those that ship."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.reading.files import exists

ROOT = "trainspec"
"""conf/trainspec.yaml, the root of every run (no common name: ./conf may belong to another Hydra program)."""
SUFFIX = ".yaml"
_MAY_BE_FILE = re.compile(r"(?!\.{1,2}$)[^\0]{1,200}")
SHIPPED = "shipped"
"""`${shipped:recipes/FILE}` in a recipe is the path of a file that ships with trainspec."""


@dataclass(frozen=True)
class Folders:
    conf: tuple[Path, ...]
    """The first that has a file wins."""
    recipes: tuple[Path, ...]

    def groups(self) -> list[str]:
        """`cluster`, `data`, ...: folders below conf."""
        found = {
            folder.relative_to(conf).as_posix()
            for conf in self.conf
            for folder in conf.rglob("*")
            if folder.is_dir() and any(folder.glob(f"*{SUFFIX}"))
        }
        return sorted(found)

    def options(self, group: str) -> list[str]:
        return _names(conf / group for conf in self.conf)

    def find_config(self, name: str) -> Path | None:
        """`model/llama_6m`, `recipe/tiny` -> the file that wins. A name leads out of no folder."""
        if not _is_name(name):
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
    """`_data` inside an installed wheel, else the checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent


def find_shipped(name: str) -> str:
    return str(shipped_data() / name)


def _is_name(name: str) -> bool:
    """Words that may be files' names, joined by slashes."""
    return all(_MAY_BE_FILE.fullmatch(word) for word in name.split("/"))


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
