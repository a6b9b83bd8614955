"""Compose a recipe and `key=value` arguments into a plain dict, with the origin of every value and all problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainspec_cli.compose import hydra_session
from trainspec_cli.compose.arguments import Argument, parse_arguments, value_paths
from trainspec_cli.compose.folders import find_folders
from trainspec_cli.compose.hydra_session import GroupChoice
from trainspec_cli.compose.origins import COMMAND_LINE, RECIPE, Origin, Origins, locate, show_path
from trainspec_cli.compose.selection import Selection, is_choice, select
from trainspec_cli.compose.values import apply_arguments, resolve
from trainspec_cli.compose.yaml_file import read_yaml
from trainspec_cli.errors import Problem


@dataclass(frozen=True)
class Composed:
    recipe: str
    """The recipe's name, or "" if it could not be found or read."""
    data: dict[str, Any]
    """The values, with interpolations resolved; `???` if a value is left open."""
    origins: Origins
    arguments: tuple[str, ...]
    cwd: Path
    problems: tuple[Problem, ...] = ()
    """All problems that show without knowing what the values mean, with their locations."""
    failed: frozenset[str] = frozenset()
    """Groups (and `recipe`) that could not be read as asked for; other problems there may be consequences."""

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Add to problems that are known by path alone the location of the value."""
        return locate(problems, self.origins, self.arguments, self.cwd)


@dataclass(frozen=True)
class Completion:
    """Values that a recipe takes from something it names, such as a checkpoint's config.json."""

    values: dict[str, Any]
    source: str
    """The file that they come from."""
    replaced: frozenset[str] = frozenset()
    """Groups whose written values are all discarded."""
    problems: tuple[Problem, ...] = ()
    failed: frozenset[str] = frozenset()
    """Groups that could not be completed."""


Complete = Callable[[dict[str, Any], frozenset[str]], Completion]
"""Takes the composed values, interpolated as far as possible, and the groups left at their defaults."""


def compose(recipe: str, overrides: Sequence[str] = (), cwd: Path | None = None) -> Composed:
    return compose_arguments([f"{RECIPE}={recipe}", *overrides], cwd)


def compose_arguments(arguments: Sequence[str], cwd: Path | None = None, complete: Complete | None = None) -> Composed:
    """Compose a command line, of which `recipe=NAME` is one argument.

    User errors are not raised: they are listed in `problems`, and `data` holds the rest.
    """
    cwd = (cwd or Path.cwd()).resolve()
    parsed, problems = parse_arguments(arguments)
    selection = select(parsed, find_folders(cwd), cwd)
    groups = selection.folders.groups()
    values = [argument for argument in parsed if argument.key != RECIPE and not is_choice(argument, groups)]
    config, parts, unforeseen = _compose_files(selection)
    problems += selection.problems + unforeseen + apply_arguments(config, values)
    origins = _origins(selection, parts, values)
    unchosen = frozenset(group for group in groups if _is_default(group, selection, origins))
    completion = complete(resolve(config)[0], unchosen) if complete else Completion({}, "")
    config = _apply(completion, config, origins)
    data, unresolved = resolve(config)
    problems += completion.problems
    return Composed(
        recipe=selection.recipe,
        data=data,
        origins=origins,
        arguments=tuple(arguments),
        cwd=cwd,
        problems=tuple(locate(problems + unresolved, origins, arguments, cwd)),
        failed=completion.failed | frozenset(selection.failed | ({RECIPE} if unforeseen else set())),
    )


def amend(recipe: str, values: Mapping[str, Any], arguments: Sequence[str]) -> Composed:
    """Apply `key=value` arguments to values that were composed before, such as a run's own.

    Groups and recipes are not looked up: `model=x` is a value here.
    """
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


def _is_default(group: str, selection: Selection, origins: Origins) -> bool:
    """Return True if neither a recipe nor the command line chose the group's option or any of its values."""
    options = selection.options.get(group, [])
    files = {origin.file for path, origin in origins.items() if path.partition(".")[0] == group}
    return len(options) == 1 and len(files) == 1


def _apply(completion: Completion, config: DictConfig, origins: Origins) -> DictConfig:
    for group in completion.replaced:
        config[group] = {}
    for path in (path for key, item in completion.values.items() for path in value_paths(key, item)):
        origins[path] = Origin(completion.source, 1)
    return OmegaConf.merge(config, _without_references(completion.values))  # type: ignore[return-value]


def _without_references(value: Any) -> Any:
    """Escape `${` in values of another program's file, so that they are read as plain text."""
    if isinstance(value, dict):
        return {key: _without_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_references(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _compose_files(selection: Selection) -> tuple[DictConfig, list[GroupChoice], list[Problem]]:
    """Compose by Hydra. Faults that `select` did not foresee (defaults lists inside a user's groups) keep Hydra's
    message."""
    try:
        return *hydra_session.load(selection.folders, selection.overrides(), selection.skipped), []
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        return DictConfig({}), [], [_hydra_problem(error, selection)]


def _hydra_problem(error: Exception, selection: Selection) -> Problem:
    if isinstance(error, RecursionError):
        error = ValueError("defaults lists name one another in a circle")
    messages = [str(error), *(str(cause) for cause in (error.__cause__,) if cause)]
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    shown = [line for line in lines if "search path" not in line.lower() and not line.startswith("provider=")]
    named = re.search(r"In '([^']+)'", " ".join(lines))
    file = selection.folders.find_config(named[1]) if named else None
    message = "; ".join(shown[:3]) or type(error).__name__
    if file is None:
        return Problem("bad_defaults", message, "defaults")
    return Problem("bad_defaults", message, "defaults", "see its defaults list", show_path(file, selection.cwd))


def _origins(selection: Selection, parts: Sequence[GroupChoice], values: Sequence[Argument]) -> Origins:
    origins: Origins = {}
    for part in parts:
        file = selection.folders.find_config(part.name)
        if file is not None:
            origins.update(_origins_of(file, part.package, selection.cwd))
    for argument in values:
        if argument.deletes:
            below = f"{argument.key}."
            origins = {path: origin for path, origin in origins.items() if not path.startswith(below)}
        for path in value_paths(argument.key, argument.value):
            origins[path] = Origin(COMMAND_LINE, argument.number)
    return origins


def _origins_of(file: Path, package: str, cwd: Path) -> Origins:
    read = read_yaml(file, cwd)
    if not package:
        return read.origins
    return {package: read.start, **{f"{package}.{path}": origin for path, origin in read.origins.items()}}
