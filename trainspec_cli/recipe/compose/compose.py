"""Compose a recipe and `key=value` arguments into a plain dict, with the origin of every value and all problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainspec_cli.core.errors import Problem, RecipeError, did_you_mean
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.spec_version import KEY
from trainspec_cli.recipe.compose import defaults_lists
from trainspec_cli.recipe.compose.alternatives import given, keep_last
from trainspec_cli.recipe.compose.arguments import Argument, parse_arguments, problem_at, value_paths
from trainspec_cli.recipe.compose.defaults_lists import GroupChoice
from trainspec_cli.recipe.compose.folders import DISTURB, NAMED_SECTIONS, OWN_FILES, SHIPPED, find_folders, shipped_data
from trainspec_cli.recipe.compose.interpolation import MISSING, InterpolationError, Resolver
from trainspec_cli.recipe.compose.named_sections import choose_sections
from trainspec_cli.recipe.compose.origins import COMMAND_LINE, RECIPE, Origin, Origins, locate, show_path
from trainspec_cli.recipe.compose.pools import write_out_pools
from trainspec_cli.recipe.compose.selection import Selection, is_choice, select

SHOWN_CHARS = 200
"""The longest excerpt of a value that cannot be resolved."""

NOT_HERE = {
    DISTURB: (
        "describes what `trainspec plan` simulates; a run meets what it meets",
        "leave it out, or type trainspec plan",
    ),
    KEY: (
        "says for which version of the training spec a file was written; a command line is of this one",
        "leave it out; trainspec migrate brings a recipe to this version",
    ),
}
"""Keys that a command line cannot set: (what they are, what to type)."""


@dataclass(frozen=True)
class Composed:
    recipe: str
    """The recipe's name, or "" if it could not be found or read."""
    data: JsonObject
    """The values, with interpolations resolved; `???` if a value is left open."""
    origins: Origins
    arguments: tuple[str, ...]
    cwd: Path
    problems: tuple[Problem, ...] = ()
    """All problems that show without knowing what the values mean, with their locations."""
    failed: frozenset[str] = frozenset()
    """Groups (and `recipe`, and keys) that could not be read as asked for; other problems there may be consequences."""

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Add the location of the value to problems that are known by path alone."""
        return locate(problems, self.origins, self.arguments, self.cwd)


@dataclass(frozen=True)
class Completion:
    """Values that a recipe takes from something it names, such as a checkpoint's config.json."""

    values: JsonObject
    source: str
    """The file that they come from, or the key that they follow from."""
    replaced: frozenset[str] = frozenset()
    """Groups whose written values are all discarded."""
    problems: tuple[Problem, ...] = ()
    failed: frozenset[str] = frozenset()
    """Groups, and keys, that could not be completed."""


Complete = Callable[[JsonObject, frozenset[str]], Completion]
"""Takes the composed values, interpolated as far as possible, and the groups left at their defaults."""


def compose(recipe: str, overrides: Sequence[str] = (), cwd: Path | None = None) -> Composed:
    return compose_arguments([f"{RECIPE}={recipe}", *overrides], cwd)


def compose_arguments(
    arguments: Sequence[str],
    cwd: Path | None = None,
    completions: Iterable[Complete] = (),
    aside: Collection[str] = (),
) -> Composed:
    """Compose a command line, of which `recipe=NAME` is one argument; each of `completions` fills in what it knows.

    User errors are not raised: they are listed in `problems`, and `data` holds the rest. `aside`: keys that are the
    command's own, and not the recipe's.
    """
    cwd = (cwd or Path.cwd()).resolve()
    parsed, problems = parse_arguments(arguments)
    parsed = [argument for argument in parsed if argument.key not in aside]
    problems += [_not_here(argument) for argument in parsed if argument.key in NOT_HERE]
    parsed = [argument for argument in parsed if argument.key not in NOT_HERE]
    selection = select(parsed, find_folders(cwd), cwd)
    groups = selection.folders.groups
    values = [argument for argument in parsed if argument.key != RECIPE and not is_choice(argument, groups)]
    # Hydra runs after `select`, which has found and reported what Hydra would stop at: it reports only its first
    # error.
    config, parts, unforeseen = _compose_files(selection)
    values, of_named, misnamed = choose_sections(config, values, selection.folders, cwd)
    problems += selection.problems + unforeseen + misnamed + apply_arguments(config, values)
    problems += write_out_pools(config, selection.folders, cwd)
    files = {show_path(part.file, cwd): _origins_of(part) for part in parts}
    origins = _origins(files, of_named, values)
    # A later file that gives one alternative of a key replaces the other, which an earlier file gave.
    keep_last(config, given(_as_written(config)), origins, list(files))
    unchosen = frozenset(group for group in groups if _is_default(group, selection, origins))
    # Last: a checkpoint's config.json is found through the values, interpolations included.
    data, more, incomplete = _complete(config, completions, unchosen, origins)
    return Composed(
        recipe=selection.recipe,
        data=data,
        origins=origins,
        arguments=tuple(arguments),
        cwd=cwd,
        problems=tuple(locate([*problems, *more], origins, arguments, cwd)),
        failed=frozenset(selection.failed | incomplete | ({RECIPE} if unforeseen else set())),
    )


def _not_here(argument: Argument) -> Problem:
    message, hint = NOT_HERE[argument.key]
    return problem_at(argument.number, "unknown_key", f"`{argument.key}` {message}", hint, argument.key)


def amend(recipe: str, values: JsonObject, arguments: Sequence[str], completions: Iterable[Complete]) -> Composed:
    """Apply `key=value` arguments to values that were composed before, such as a run's own; each of `completions` fills
    in what follows from them.

    Groups and recipes are not looked up: `model=x` is a value here.
    """
    parsed, problems = parse_arguments(arguments)
    config = OmegaConf.create(dict(values))
    problems += apply_arguments(config, parsed)
    origins = {
        path: Origin(COMMAND_LINE, argument.number)
        for argument in parsed
        for path in value_paths(argument.key, argument.value)
    }
    keep_last(config, given(_as_written(config)), origins, ())
    data, more, failed = _complete(config, completions, frozenset(), origins)
    cwd = Path.cwd()
    located = tuple(locate([*problems, *more], origins, arguments, cwd))
    return Composed(recipe, data, origins, tuple(arguments), cwd, located, failed)


def _is_default(group: str, selection: Selection, origins: Origins) -> bool:
    """Return True if neither a recipe nor the command line chose the group's option or any of its values."""
    options = selection.options.get(group, [])
    files = {origin.file for path, origin in origins.items() if path.partition(".")[0] == group}
    return len(options) == 1 and len(files) == 1


def _complete(
    config: DictConfig, completions: Iterable[Complete], unchosen: frozenset[str], origins: Origins
) -> tuple[JsonObject, list[Problem], frozenset[str]]:
    """Return the values with what each of `completions` fills in, all problems of theirs, and what could not be
    completed."""
    data, unresolved = resolve(config)
    problems: list[Problem] = []
    failed: frozenset[str] = frozenset()
    for complete in completions:
        completion = complete(data, unchosen)
        problems += completion.problems
        failed |= completion.failed
        # Interpolations may refer to completed values, so these are resolved again.
        if completion.values or completion.replaced:
            config = _apply(completion, config, origins)
            data, unresolved = resolve(config)
    return data, [*problems, *unresolved], failed


def _apply(completion: Completion, config: DictConfig, origins: Origins) -> DictConfig:
    for group in completion.replaced:
        config[group] = {}
    origin = origins.get(completion.source, Origin(completion.source, 1))
    for path in (path for key, item in completion.values.items() for path in value_paths(key, item)):
        origins[path] = origin
    return OmegaConf.merge(config, _without_references(completion.values))  # type: ignore[return-value]


def _without_references(value: JsonValue) -> JsonValue:
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
        return *defaults_lists.load(selection.folders, selection.overrides(), selection.skipped, selection.cwd), []
    except RecipeError as error:
        return DictConfig({}), [], list(error.problems)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        return DictConfig({}), [], [_hydra_problem(error, selection)]


def _hydra_problem(error: Exception, selection: Selection) -> Problem:
    if isinstance(error, RecursionError):
        error = ValueError("defaults lists name one another in a circle")
    messages = [str(error), *(str(cause) for cause in (error.__cause__,) if cause)]
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    # Hydra prints its search path with most errors; those folders mean nothing to the reader.
    shown = [line for line in lines if "search path" not in line.lower() and not line.startswith("provider=")]
    named = re.search(r"In '([^']+)'", " ".join(lines))
    file = selection.folders.find_config(named[1]) if named else None
    message = "; ".join(shown[:3]) or type(error).__name__
    if file is None:
        return Problem("bad_defaults", message, "defaults")
    return Problem("bad_defaults", message, "defaults", "see its defaults list", show_path(file, selection.cwd))


def _origins(files: Mapping[str, Origins], of_named: Origins, values: Sequence[Argument]) -> Origins:
    named = tuple(
        f"{key}." for key in (*NAMED_SECTIONS, *OWN_FILES) if key in of_named
    )  # nothing of the section before is left
    of_files = {path: origin for found in files.values() for path, origin in found.items()}
    origins = {path: origin for path, origin in of_files.items() if not path.startswith(named)} | of_named
    for argument in values:
        if argument.deletes:
            below = f"{argument.key}."
            origins = {path: origin for path, origin in origins.items() if not path.startswith(below)}
        for path in value_paths(argument.key, argument.value):
            origins[path] = Origin(COMMAND_LINE, argument.number)
    return origins


def _origins_of(part: GroupChoice) -> Origins:
    if not part.package:
        return part.read.origins
    below = {f"{part.package}.{path}": origin for path, origin in part.read.origins.items()}
    return {part.package: part.read.start, **below}


def apply_arguments(config: DictConfig, arguments: Iterable[Argument]) -> list[Problem]:
    """Set and delete values in order. Unknown keys are added; they are checked later."""
    # Hydra locks the config against new keys, and would report an unknown one without its place.
    OmegaConf.set_struct(config, False)
    found = (_delete(config, argument) if argument.deletes else _set(config, argument) for argument in arguments)
    return [problem for problem in found if problem]


def _set(config: DictConfig, argument: Argument) -> Problem | None:
    scalar = _scalar_above(config, argument.key)
    if scalar:
        message = f"`{scalar}` is a single value: it has no key `{argument.key.removeprefix(f'{scalar}.')}`"
        return problem_at(argument.number, "unknown_key", message, f"type {scalar}=<value>", argument.key)
    if isinstance(argument.value, list) and isinstance(OmegaConf.select(config, argument.key), DictConfig):
        message = f"`{argument.key}` is a section of keys, and a list is given"
        hint = f"type {argument.key}.<key>=<value>, or name one option where it has names"
        return problem_at(argument.number, "wrong_type", message, hint, argument.key)
    try:
        OmegaConf.update(config, argument.key, argument.value, merge=True, force_add=True)
    except (OmegaConfBaseException, RecursionError) as error:
        return problem_at(argument.number, "bad_override", str(error).partition("\n")[0], path=argument.key)
    return None


def _delete(config: DictConfig, argument: Argument) -> Problem | None:
    parent_path, _, name = argument.key.rpartition(".")
    parent = OmegaConf.select(config, parent_path) if parent_path else config
    if not isinstance(parent, DictConfig) or name not in parent:
        hint = did_you_mean(argument.key, _flatten(_as_written(config), ""))
        message = f"there is no `{argument.key}` to delete"
        return problem_at(argument.number, "unknown_key", message, hint, argument.key)
    del parent[name]
    return None


def _scalar_above(config: DictConfig, key: str) -> str | None:
    """Return the prefix of `key` that names a single value, if there is one."""
    node = _as_written(config)
    names = key.split(".")
    for depth, name in enumerate(names[:-1], start=1):
        if name not in node:
            return None
        below = node[name]
        if not isinstance(below, dict):
            return ".".join(names[:depth])
        node = below
    return None


def resolve(config: DictConfig) -> tuple[JsonObject, list[Problem]]:
    """Return a plain dict, with `???` for values that are open or failed to resolve, and the problems."""
    written = _as_written(config)
    resolver, keys = Resolver(written, {SHIPPED: lambda name: str(shipped_data() / name)}), list(_flatten(written, ""))
    problems: list[Problem] = []

    def resolve_section(section: JsonObject, above: tuple[str, ...]) -> JsonObject:
        plain: JsonObject = {}
        for key, value in section.items():
            path = (*above, key)
            if isinstance(value, dict):
                plain[str(key)] = resolve_section(value, path)
                continue
            try:
                plain[str(key)] = resolver.value(path)
            except InterpolationError as error:
                # The other values are still checked, so that all mistakes are reported together.
                plain[str(key)] = MISSING
                problems.append(_bad_interpolation(value, ".".join(map(str, path)), str(error), keys))
        return plain

    return resolve_section(written, ()), problems


def _bad_interpolation(value: JsonValue, path: str, reason: str, keys: Iterable[str]) -> Problem:
    shown = str(value)
    hint = did_you_mean(shown.strip("${}"), keys) if "not found" in reason else ""
    shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
    return Problem(code="bad_interpolation", path=path, message=f"`{path}` is {shown}: {reason}", hint=hint)


def _flatten(plain: JsonObject, prefix: str) -> Iterator[str]:
    for key, value in plain.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")


def _as_written(config: DictConfig) -> JsonObject:
    """Return a plain dict with interpolations unresolved."""
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]
