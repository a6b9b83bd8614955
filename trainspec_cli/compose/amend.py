"""Change values that were composed before (a run's own) by `key=value` arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainspec_cli.compose.arguments import parse_arguments, value_paths
from trainspec_cli.compose.compose import Composed
from trainspec_cli.compose.origins import COMMAND_LINE, Origin, locate
from trainspec_cli.compose.values import apply_arguments, resolve


def amend(recipe: str, values: Mapping[str, Any], arguments: Sequence[str]) -> Composed:
    """`values` with the arguments applied. Groups and recipes are not looked up: `model=x` is a value here."""
    parsed, problems = parse_arguments(arguments)
    config = OmegaConf.create(dict(values))
    problems += apply_arguments(config, parsed)
    data, unresolved = resolve(config)
    origins = {
        path: Origin(COMMAND_LINE, argument.number)
        for argument in parsed
        for path in value_paths(argument.key, argument.value)
    }
    cwd = Path.cwd()
    located = tuple(locate([*problems, *unresolved], origins, arguments, cwd))
    return Composed(recipe, data, origins, tuple(arguments), cwd, located)
