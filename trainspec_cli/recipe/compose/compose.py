"""Compose a recipe and `key=value` arguments into a plain dict, with the origin of every value and all problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainspec_cli.core.errors import Problem, RecipeError, closest, did_you_mean
from trainspec_cli.core.intentions import FORMER_OPTIONS
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import exists, expand
from trainspec_cli.core.reading.spec_version import KEY, find_fault
from trainspec_cli.recipe.compose import defaults_lists
from trainspec_cli.recipe.compose.arguments import Argument, assign, parse_arguments, problem_at, value_paths
from trainspec_cli.recipe.compose.defaults_lists import GroupChoice
from trainspec_cli.recipe.compose.folders import (
    COMMAND_LINE,
    DISTURB,
    NAMED_SECTIONS,
    OWN_FILES,
    RECIPE,
    ROOT,
    SHIPPED,
    SUFFIX,
    Folders,
    Origin,
    Origins,
    find_folders,
    locate,
    shipped_data,
    show_path,
)
from trainspec_cli.recipe.compose.interpolation import MISSING, InterpolationError, Resolver
from trainspec_cli.recipe.compose.yaml_file import YamlEntry, YamlFile, read_yaml

# Keys of which one is given in place of the others: what is given last takes the place of what was given before.


SECTION, NAMES = "train", ("max_steps", "tokens", "epochs")
"""Keys that say how long a run is."""


def section_of(data: JsonObject) -> JsonObject:
    """Return the section of the alternatives; an empty one where something else stands there, which is reported
    elsewhere."""
    section = data.get(SECTION)
    return section if isinstance(section, dict) else {}


def given(data: JsonObject) -> list[str]:
    """Return the names of the alternatives that have a value."""
    return [name for name in NAMES if section_of(data).get(name) not in (None, MISSING)]


def keep_last(config: DictConfig, names: Sequence[str], origins: Origins, files: Sequence[str]) -> None:
    """Remove those of the alternatives `names` in whose place a later file, or the command line, gives another.

    `files`: the configuration's, in the order in which they were merged; a value of none of them comes before them.
    Alternatives of the same file, or the same command line, all stay: whoever reads them refuses more than one.
    """
    rank_of_file = {file: rank for rank, file in enumerate((*files, COMMAND_LINE))}
    found = {name: origins.get(f"{SECTION}.{name}") for name in names}
    ranks = {name: rank_of_file.get(origin.file, -1) if origin else -1 for name, origin in found.items()}
    for name in (name for name, rank in ranks.items() if rank < max(ranks.values())):
        del config[SECTION][name]
        origins.pop(f"{SECTION}.{name}", None)


# The pools of a cluster as they are written: `h100_sxm*8x8` in the place of a pool, a name in that of its values.


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
        hint = _choices(f"did you mean {near}?" if near else "", GROUP, options)
        problems.append(Problem("unknown_option", f"`{path}` has no option `{name}`", path, hint))
        return {}
    try:
        values: JsonObject = read_yaml(file, cwd).values()
    except RecipeError as error:
        problems += error.problems
        return {}
    return values


# Select the files of a composition: the recipe and one option of each group, checked before Hydra reads them.
#
# Hydra stops at the first fault. Here a fault is reported and worked around: an option that does not exist is
# replaced by the previous one, a wrong line of a defaults list is skipped, and composition goes on.


SELF = "_self_"
ALL_OF = "`trainspec list {}` shows all"
"""How the options of a group are listed."""
COUNTED = (
    re.compile(r"(?P<count>\d+)[x*_]+(?P<chip>.+)", re.IGNORECASE),
    re.compile(r"(?P<chip>.+?)(?:_*[x*]_*(?=\d)|_(?=\d$))(?P<count>\d{1,3})", re.IGNORECASE),
    re.compile(r"(?P<chip>.+)(?P<count>)"),
)
"""A number of chips before or behind the name of one, or a name alone: `rtx_4090` ends in no number of chips."""


@dataclass
class Selection:
    folders: Folders
    cwd: Path
    recipe: str = ""
    """The name that Hydra knows; "" if there is none."""
    options: dict[str, list[tuple[str, Origin]]] = field(default_factory=dict)
    """Group -> the options asked for; the last one has priority."""
    forced: dict[str, str] = field(default_factory=dict)
    """Group -> the option to pass to Hydra."""
    skipped: dict[str, set[int]] = field(default_factory=dict)
    """Recipe -> indices of its defaults list to leave out."""
    failed: set[str] = field(default_factory=set)
    """Groups (and `recipe`) that could not be read as asked for."""
    problems: list[Problem] = field(default_factory=list)

    def overrides(self) -> list[str]:
        recipe = assign(RECIPE, self.recipe) if self.recipe else f"~{RECIPE}"
        return [recipe, *(assign(group, option) for group, option in self.forced.items())]


def select(arguments: Sequence[Argument], folders: Folders, cwd: Path) -> Selection:
    selection = Selection(folders, cwd)
    root = selection.folders.find_config(ROOT)
    assert root is not None, "conf/trainspec.yaml ships with the package"
    for entry in read_yaml(root, selection.cwd).defaults:
        if entry.key and entry.key != RECIPE:
            selection.options[entry.key] = [(entry.value, entry.origin)]
    _choose_recipe(selection, next((argument for argument in arguments if argument.key == RECIPE), None))
    # Without a readable recipe the arguments are still checked against the defaults.
    if selection.recipe and not _add_recipe(selection, f"{RECIPE}/{selection.recipe}", seen=set()):
        selection.recipe = ""
    groups = folders.groups
    for argument in arguments:
        if is_choice(argument, groups):
            if argument.key not in selection.options:
                selection.failed.add(argument.key)
                # Some groups fill a named section and are no key of a recipe, as in `accelerator=rtx_4090`.
                section = next((path for path, group in NAMED_SECTIONS.items() if group == argument.key), "")
                message = f"`{argument.key}` is no key of a recipe; it is a group of options"
                hint = f"type {section}={_option_text(argument)}" if section else "name it in the recipe's defaults"
                if section:
                    message += f", and one of them stands for `{section}`"
                selection.problems.append(problem_at(argument.number, "unknown_group", message, hint, argument.key))
                continue
            origin = Origin(COMMAND_LINE, argument.number)
            selection.options.setdefault(argument.key, []).append((_option_text(argument), origin))
            selection.forced[argument.key] = _option_text(argument)
    for group in selection.options:
        # One unreadable option must not hide the errors of the others: fall back to the one before it, and report it.
        options = selection.options[group]
        while options and not _is_whole(selection, group, *options[-1]):
            selection.failed.add(group)
            options.pop()
            if options:
                selection.forced[group] = options[-1][0]
            else:
                selection.forced.pop(group, None)
    return selection


def is_choice(argument: Argument, groups: Sequence[str]) -> bool:
    """Return True for `model=llama_6m`, which chooses a file; `model={num_layers: 2}` and `~model` change values."""
    is_value = argument.deletes or isinstance(argument.value, dict) or is_own_file(argument)
    return argument.key in groups and not is_value


def is_own_file(argument: Argument) -> bool:
    """Return True for `framework=./mine.yaml`, which stands for the section that the file holds."""
    return argument.key in OWN_FILES and str(argument.value).endswith(SUFFIX) and not argument.deletes


def _option_text(argument: Argument) -> str:
    return argument.text.partition("=")[2].strip().strip("\"'")


def _choose_recipe(selection: Selection, argument: Argument | None) -> None:
    """Set `selection.recipe`; a path to a file makes its folder the first of the recipe folders."""
    number, name = (argument.number, str(argument.value)) if argument else (1, "")
    path = expand(name)
    if path.suffix == SUFFIX and exists(selection.cwd / path):
        folder = (selection.cwd / path).parent.resolve()
        folders = selection.folders
        selection.folders = replace(folders, recipes=tuple(dict.fromkeys((folder, *folders.recipes))))
        selection.recipe = path.stem
    elif name and selection.folders.find_config(f"{RECIPE}/{name}"):
        selection.recipe = name
    else:
        selection.failed.add(RECIPE)
        selection.problems.append(_unknown_recipe(selection, name, number, given=argument is not None))


def _unknown_recipe(selection: Selection, name: str, number: int, given: bool) -> Problem:
    names = selection.folders.recipe_names()
    if not name:
        first = "quickstart" if "quickstart" in names else names[0]
        hint = f"type {RECIPE}={first}, or another: {ALL_OF.format(RECIPE)}"
        problem = problem_at(number, "missing_value", "no recipe is named", hint, RECIPE)
        return problem if given else replace(problem, file=None, line=None)
    near = closest(name, names)
    hint = _choices(f"did you mean {RECIPE}={near}?", RECIPE, names)
    if not near:
        hint = f"{_choices('', RECIPE, names)}; or name a .yaml file"
    beside = selection.cwd / f"{name.removesuffix(Path(name).suffix)}.yml"
    if exists(beside) or _has_yml(selection.folders.recipes, name):
        hint = f"its file must end in {SUFFIX}, not .yml: rename it"
    elif Path(name).suffix == SUFFIX:
        hint = f"no such file is in {selection.cwd}; recipes that have a name: {ALL_OF.format(RECIPE)}"
    return problem_at(number, "unknown_recipe", f"there is no recipe `{name}`", hint, RECIPE)


def _has_yml(folders: Sequence[Path], name: str) -> bool:
    return any(exists(folder / f"{name}.yml") for folder in folders)


def _add_recipe(selection: Selection, name: str, seen: set[str]) -> bool:
    """Read a recipe and its parents, and record the options they ask for. Return False if it is unreadable."""
    seen.add(name)
    file = _read(selection, selection.folders.find_config(name))
    if file is None or not _is_of_known_version(selection, file):
        selection.failed.add(RECIPE)
        return False
    repeated = _repeated(selection, file)
    for index, entry in enumerate(file.defaults):
        if entry in repeated or not _add_entry(selection, entry, seen):
            selection.skipped.setdefault(name, set()).add(index)
    return True


def _is_of_known_version(selection: Selection, file: YamlFile) -> bool:
    """Return whether a recipe's version is read; report one that is not."""
    stated = file.version
    if stated is None or (fault := find_fault(stated.value)) is None:
        return True
    origin = stated.origin
    selection.problems.append(
        Problem(fault.code, f"{origin.file} {fault.why}", KEY, fault.hint, origin.file, origin.line, origin.column)
    )
    return False


def _add_entry(selection: Selection, entry: YamlEntry, seen: set[str]) -> bool:
    problem = _check_entry(selection, entry)
    if problem:
        selection.problems.append(problem)
        # Later errors about a group that this line was meant to set would only repeat this one.
        group = entry.key.split()[-1].removeprefix("/") if entry.key else RECIPE
        selection.failed.add(closest(group, selection.folders.groups) or group)
        return False
    if entry.key:
        group = entry.key.split()[-1].removeprefix("/")
        selection.options.setdefault(group, []).append((entry.value, entry.origin))
    elif entry.value != SELF and _parent(entry) not in seen:
        return _add_recipe(selection, _parent(entry), seen)
    return True


def _repeated(selection: Selection, file: YamlFile) -> list[YamlEntry]:
    """Report and return the lines of a defaults list that choose once more what a line before them has chosen."""
    chosen: dict[str, YamlEntry] = {}
    repeated = []
    for entry in file.defaults:
        name = entry.key.split()[-1].removeprefix("/") if entry.key else ""
        first = chosen.setdefault(name, entry)
        if entry.several:
            message = f"`{name}` is given {len(entry.several)} options: {', '.join(entry.several)}"
            hint = f"keep one of them: {entry.key}: {entry.several[0]}"
        elif name and first is not entry:
            message = f"`{name}` is chosen twice: {first.value} in line {first.origin.line}, and {entry.value} here"
            hint = "keep one of the two lines"
        else:
            continue
        selection.problems.append(_entry_problem(entry, "bad_defaults", message, hint))
        repeated.append(entry)
    return repeated


def _parent(entry: YamlEntry) -> str:
    return f"{RECIPE}/{entry.value.removeprefix(f'/{RECIPE}/')}"


def _check_entry(selection: Selection, entry: YamlEntry) -> Problem | None:
    """Check a line of a defaults list: `_self_`, a recipe's name, or `override /group: option`."""
    if not entry.key:
        return None if entry.value == SELF else _check_parent(selection, entry)
    *keywords, group = entry.key.split()
    groups = selection.folders.groups
    name = group.removeprefix("/")
    section = next((path for path, other in NAMED_SECTIONS.items() if other == name), "")
    if section:
        message = f"`{name}` is a group whose options stand for `{section}`; a recipe's defaults take none of it"
        hint = f"leave the line out, and type {section}={entry.value} on the command line"
        return _entry_problem(entry, "unknown_group", message, hint)
    if name not in groups:
        near = closest(name, groups)
        hint = f"did you mean `override /{near}`?" if near else f"groups: {', '.join(groups)}"
        return _entry_problem(entry, "unknown_group", f"there is no group `{name}`", hint)
    if keywords != ["override"] or not group.startswith("/"):
        message = f"`{entry.key}: {entry.value}` would add a second {name}, not replace the first"
        return _entry_problem(entry, "bad_defaults", message, f"write - override /{name}: {entry.value}")
    return None


def _check_parent(selection: Selection, entry: YamlEntry) -> Problem | None:
    if entry.value and selection.folders.find_config(_parent(entry)):
        return None
    names = selection.folders.recipe_names()
    near = closest(entry.value, names)
    hint = f"did you mean `{near}`?" if near else f"there are: {', '.join(names)}"
    return _entry_problem(entry, "unknown_recipe", f"there is no recipe `{entry.value}` to build on", hint)


def _entry_problem(entry: YamlEntry, code: str, message: str, hint: str) -> Problem:
    origin = entry.origin
    return Problem(code, message, "defaults", hint.strip(), origin.file, origin.line, origin.column)


def _is_whole(
    selection: Selection, group: str, option: str, origin: Origin, below: frozenset[str] = frozenset()
) -> bool:
    """Return True if an option and its parents can be read; report what is wrong."""
    path = selection.folders.find_config(f"{group}/{option}") if option else None
    if path is None:
        selection.problems.append(_unknown_option(selection.folders, group, option, origin))
        return False
    file = _read(selection, path)
    if file is None or _repeated(selection, file):
        return False
    below = below | {option, SELF}
    parents = [entry for entry in file.defaults if not entry.key and entry.value not in below]
    whole = [_is_whole(selection, group, parent.value, parent.origin, below) for parent in parents]
    return all(whole)


def _unknown_option(folders: Folders, group: str, option: str, origin: Origin) -> Problem:
    if former := FORMER_OPTIONS.get((group, option)):
        message = f"`{group}` has no option `{option}` any more: {former.why}"
        return Problem("unknown_option", message, group, former.hint, origin.file, origin.line, origin.column)
    options = folders.options(group)
    near = closest(option, options)
    write = f"{group}={near}" if origin.file == COMMAND_LINE else f"`{near}`"
    hint = f"did you mean {write}?" if near else ""
    section = next((path for path in NAMED_SECTIONS if path.startswith(f"{group}.")), "")
    if section and origin.file == COMMAND_LINE and option:
        chips = folders.options(NAMED_SECTIONS[section])
        counted = next(match for pattern in COUNTED if (match := pattern.fullmatch(option)))  # 4x4090, h100x8
        count = counted["count"]
        name = counted["chip"]
        chip = name if name in chips else closest(name, chips)
        near = name if name in options else None if chip == name else closest(name, options)
        if f"{chip}_x{count}" in options:
            hint = f"did you mean {group}={chip}_x{count}?"
        elif chip and near and near.startswith(f"{chip}_x"):  # boxes of it, of which none was named
            hint = f"did you mean {section}={chip}?"
        elif near or chip:
            number = f" cluster.devices_per_node={count}" if count else ""
            hint = f"did you mean {f'{group}={near}' if near else f'{section}={chip}'}{number}?"
    if _has_yml([conf / group for conf in folders.conf], option):
        hint = f"its file must end in {SUFFIX}, not .yml: rename it."
    message = f"`{group}` has no option `{option}`" if option else f"`{group}` is given no option"
    hint = _choices(hint, group, options)
    if group in OWN_FILES:
        hint += f"; or describe your own in a file, and type {group}=./mine{SUFFIX}"
    return Problem("unknown_option", message, group, hint, origin.file, origin.line, origin.column)


def _choices(near: str, group: str, options: Sequence[str]) -> str:
    """Return the hint `near` with what lists the options of its group: all of them would hide the word that was meant.
    Without it, the options."""
    return f"{near} {ALL_OF.format(group)}" if near else f"options: {', '.join(options)}"


def _read(selection: Selection, file: Path | None) -> YamlFile | None:
    """Return the file, or None after reporting its faults."""
    assert file is not None
    try:
        return read_yaml(file, selection.cwd)
    except RecipeError as error:
        selection.problems.extend(error.problems)
        return None


# A section that one word stands for: `cluster.accelerator=rtx_4090` is conf/accelerator/rtx_4090.yaml, and
# `framework=./mine.yaml` that file.


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
    group = NAMED_SECTIONS.get(argument.key, argument.key)
    hint = _choices(f"did you mean {argument.key}={near}?" if near else "", group, options)
    message = f"`{argument.key}` has no option `{argument.value}`"
    return problem_at(argument.number, "unknown_option", message, hint, argument.key)


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
    whole = OmegaConf.create()
    places = Origins()
    for entry in read.defaults:
        if entry.key or entry.value == SELF:
            continue
        parent = folders.find_config(f"{group}/{entry.value}")
        if parent is None or entry.value in within:
            near = closest(entry.value, folders.options(group)) if parent is None else None
            hint = _choices(f"did you mean `{near}`?" if near else "", group, folders.options(group))
            message = (
                f"`{group}` has no option `{entry.value}`" if parent is None else f"`{entry.value}` builds on itself"
            )
            origin = entry.origin
            raise RecipeError(Problem("unknown_option", message, group, hint, origin.file, origin.line, origin.column))
        below, below_places = _read_section(parent, group, folders, cwd, (*within, entry.value))
        whole = _merged(whole, below)
        places = places | below_places
    own = {key: value for key, value in read.values().items() if key != "defaults"}
    return _merged(whole, OmegaConf.create(own)), places | {"": read.start} | read.origins


def _merged(below: DictConfig, above: DictConfig) -> DictConfig:
    return cast("DictConfig", OmegaConf.merge(below, above))


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
    misplaced = [problem for problem in problems if (problem.code, problem.path) == ("bad_override", RECIPE)]
    if misplaced:  # that no recipe is named follows from it
        names = selection.folders.recipe_names()
        words = {problem.line: arguments[(problem.line or 1) - 1] for problem in misplaced}
        problems = [_with_nearest_recipe(one, words[one.line], names) if one in misplaced else one for one in problems]
        selection.problems = [one for one in selection.problems if (one.code, one.path) != ("missing_value", RECIPE)]
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


def _with_nearest_recipe(problem: Problem, word: str, names: Sequence[str]) -> Problem:
    """Return the problem of a word alone, `trainspec launch tiyn`, with the recipe that was meant by it."""
    near = None if word in names else closest(word, names)
    return replace(problem, hint=f"to choose a recipe, type {RECIPE}={near}") if near else problem


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
    resolver = Resolver(written, {SHIPPED: lambda name: str(shipped_data() / name)})
    keys = list(_flatten(written, ""))
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
