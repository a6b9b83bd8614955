"""A section that one word stands for: `cluster.accelerator=rtx_4090` is conf/accelerator/rtx_4090.yaml, and
`framework=./mine.yaml` that file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.reading.files import exists, expand
from trainspec_cli.recipe.compose.arguments import Argument, problem_at
from trainspec_cli.recipe.compose.folders import NAMED_SECTIONS, Folders
from trainspec_cli.recipe.compose.origins import Origins, show_path
from trainspec_cli.recipe.compose.selection import SELF, is_own_file
from trainspec_cli.recipe.compose.yaml_file import read_yaml


def choose_sections(
    config: DictConfig, arguments: Sequence[Argument], folders: Folders, cwd: Path
) -> tuple[list[Argument], Origins, list[Problem]]:
    """Put each section that an argument names in its place in `config`, whole; return the other arguments, where the
    sections' values stand, and what is wrong with names and files."""
    others: list[Argument] = []
    origins: Origins = {}
    problems: list[Problem] = []
    for argument in arguments:
        own = is_own_file(argument)
        is_name = (
            isinstance(argument.value, (str, int)) and not argument.deletes
        )  # 4090 is a number, and meant as a name
        if not own and (argument.key not in NAMED_SECTIONS or not is_name):
            others.append(argument)
            continue
        group = NAMED_SECTIONS.get(argument.key, argument.key)
        file = _own_file(argument, cwd) if own else folders.find_config(f"{group}/{argument.value}")
        if file is None:
            problems.append(_no_file(argument, cwd) if own else _unknown(argument, folders.options(group)))
            continue
        try:
            section, places = _read_section(file, group, folders, cwd, ())
        except RecipeError as error:
            problems += error.problems
            continue
        OmegaConf.set_struct(config, False)
        OmegaConf.update(config, argument.key, section, merge=False, force_add=True)
        origins |= {f"{argument.key}.{path}" if path else argument.key: origin for path, origin in places.items()}
    return others, origins, problems


def _unknown(argument: Argument, options: Sequence[str]) -> Problem:
    near = closest(str(argument.value), options)
    hint = f"did you mean {argument.key}={near}? " if near else ""
    message = f"`{argument.key}` has no option `{argument.value}`"
    there_are = f"{'O' if hint else 'o'}ptions: {', '.join(options)}"
    return problem_at(argument.number, "unknown_option", message, hint + there_are, argument.key)


def _own_file(argument: Argument, cwd: Path) -> Path | None:
    path = cwd / expand(str(argument.value))
    return path if exists(path) else None


def _no_file(argument: Argument, cwd: Path) -> Problem:
    message = f"there is no file {show_path(cwd / expand(str(argument.value)), cwd)}"
    hint = f"write it, or choose an option by name: `trainspec explain {argument.key}` lists them"
    return problem_at(argument.number, "missing_file", message, hint, argument.key)


def _read_section(
    file: Path, group: str, folders: Folders, cwd: Path, within: tuple[str, ...]
) -> tuple[DictConfig, Origins]:
    """Return what a file holds on top of the options of its group that its `defaults` name, and where each value
    stands. `within`: the options that lead to it. Raises RecipeError."""
    read = read_yaml(file, cwd)
    whole, places = OmegaConf.create(), Origins()
    for entry in read.defaults:
        if entry.key or entry.value == SELF:
            continue
        parent = folders.find_config(f"{group}/{entry.value}")
        if parent is None or entry.value in within:
            hint = f"options: {', '.join(folders.options(group))}"
            message = (
                f"`{group}` has no option `{entry.value}`" if parent is None else f"`{entry.value}` builds on itself"
            )
            origin = entry.origin
            raise RecipeError(Problem("unknown_option", message, group, hint, origin.file, origin.line, origin.column))
        below, below_places = _read_section(parent, group, folders, cwd, (*within, entry.value))
        whole, places = _merged(whole, below), places | below_places
    own = {key: value for key, value in read.values().items() if key != "defaults"}
    return _merged(whole, OmegaConf.create(own)), places | {"": read.start} | read.origins


def _merged(below: DictConfig, above: DictConfig) -> DictConfig:
    return cast("DictConfig", OmegaConf.merge(below, above))
