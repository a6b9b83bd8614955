"""A section that one word stands for: `cluster.accelerator=rtx_4090` is conf/accelerator/rtx_4090.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainspec_cli.composer.arguments import Argument, problem_at
from trainspec_cli.composer.folders import NAMED_SECTIONS, Folders
from trainspec_cli.composer.origins import Origins
from trainspec_cli.composer.yaml_file import read_yaml
from trainspec_cli.errors import Problem, RecipeError, closest


def choose_sections(
    config: DictConfig, arguments: Sequence[Argument], folders: Folders, cwd: Path
) -> tuple[list[Argument], Origins, list[Problem]]:
    """Put each section that an argument names in its place in `config`, whole; return the other arguments, where the
    sections' values stand, and what is wrong with names and files."""
    others: list[Argument] = []
    origins: Origins = {}
    problems: list[Problem] = []
    for argument in arguments:
        if argument.key not in NAMED_SECTIONS or argument.deletes or not isinstance(argument.value, str):
            others.append(argument)
            continue
        group = NAMED_SECTIONS[argument.key]
        file = folders.find_config(f"{group}/{argument.value}")
        if file is None:
            problems.append(_unknown(argument, folders.options(group)))
            continue
        try:
            read = read_yaml(file, cwd)
        except RecipeError as error:
            problems += error.problems
            continue
        OmegaConf.set_struct(config, False)
        OmegaConf.update(config, argument.key, read.values(), merge=False, force_add=True)
        origins |= {argument.key: read.start}
        origins |= {f"{argument.key}.{path}": origin for path, origin in read.origins.items()}
    return others, origins, problems


def _unknown(argument: Argument, options: Sequence[str]) -> Problem:
    near = closest(str(argument.value), options)
    hint = f"did you mean {argument.key}={near}? " if near else ""
    message = f"`{argument.key}` has no option `{argument.value}`"
    there_are = f"{'O' if hint else 'o'}ptions: {', '.join(options)}"
    return problem_at(argument.number, "unknown_option", message, hint + there_are, argument.key)
