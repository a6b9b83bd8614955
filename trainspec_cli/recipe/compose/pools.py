"""The pools of a cluster as they are written: `h100_sxm*8x8` in the place of a pool, a name in that of its values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.compose.folders import Folders
from trainspec_cli.recipe.compose.yaml_file import read_yaml

POOLS = "cluster.pools"
GROUP = "accelerator"
SHORT = re.compile(r"(?P<accelerator>[^*\s]+)\s*\*\s*(?P<num_nodes>\d+)(?:\s*x\s*(?P<devices_per_node>\d+))?")
"""accelerator*nodes, or accelerator*nodes x devices of a node."""


def write_out_pools(config: DictConfig, folders: Folders, cwd: Path) -> list[Problem]:
    """Put the values of each pool in the place of its short form, and those of its accelerator in that of its name;
    return what is wrong with them."""
    written = OmegaConf.select(config, POOLS)
    if written is None or not OmegaConf.is_list(written):
        return []
    problems: list[Problem] = []
    pools = cast("list[JsonValue]", OmegaConf.to_container(written, resolve=False))
    whole = [_write_out(pool, f"{POOLS}.{place}", folders, cwd, problems) for place, pool in enumerate(pools)]
    OmegaConf.update(config, POOLS, [] if problems else whole, merge=False)  # no problems that follow from these
    return problems


def _write_out(pool: JsonValue, path: str, folders: Folders, cwd: Path, problems: list[Problem]) -> JsonValue:
    if isinstance(pool, str):
        short = SHORT.fullmatch(pool.strip())
        if short is None:
            message = f"`{path}` is {pool}; accelerator*nodes, or accelerator*nodes x devices of a node, is needed"
            problems.append(Problem("wrong_type", message, path, "write it as h100_sxm*8x8, without spaces"))
            return {}
        numbers = {key: int(text) for key, text in short.groupdict().items() if key != GROUP and text}
        pool = {GROUP: short[GROUP], **numbers}
    if not isinstance(pool, dict) or not isinstance(pool.get(GROUP), str):
        return pool
    return {**pool, GROUP: _accelerator(str(pool[GROUP]), f"{path}.{GROUP}", folders, cwd, problems)}


def _accelerator(name: str, path: str, folders: Folders, cwd: Path, problems: list[Problem]) -> JsonValue:
    """Return the values of an accelerator by its name in conf/accelerator."""
    file = folders.find_config(f"{GROUP}/{name}")
    if file is None:
        options = folders.options(GROUP)
        near = closest(name, options)
        hint = f"did you mean {near}? " if near else ""
        there_are = f"{'O' if hint else 'o'}ptions: {', '.join(options)}"
        problems.append(Problem("unknown_option", f"`{path}` has no option `{name}`", path, hint + there_are))
        return {}
    try:
        values: JsonObject = read_yaml(file, cwd).values()
    except RecipeError as error:
        problems += error.problems
        return {}
    return values
