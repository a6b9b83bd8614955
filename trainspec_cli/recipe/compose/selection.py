"""Select the files of a composition: the recipe and one option of each group, checked before Hydra reads them.

Hydra stops at the first fault. Here a fault is reported and worked around: an option that does not exist is replaced by
the previous one, a wrong line of a defaults list is skipped, and composition goes on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.intentions import FORMER_OPTIONS
from trainspec_cli.core.reading.files import exists, expand
from trainspec_cli.core.reading.spec_version import KEY, find_fault
from trainspec_cli.recipe.compose.arguments import Argument, assign, problem_at
from trainspec_cli.recipe.compose.folders import NAMED_SECTIONS, OWN_FILES, ROOT, SUFFIX, Folders
from trainspec_cli.recipe.compose.origins import COMMAND_LINE, RECIPE, Origin
from trainspec_cli.recipe.compose.yaml_file import YamlEntry, YamlFile, read_yaml

SELF = "_self_"
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
        folder, folders = (selection.cwd / path).parent.resolve(), selection.folders
        selection.folders = replace(folders, recipes=tuple(dict.fromkeys((folder, *folders.recipes))))
        selection.recipe = path.stem
    elif name and selection.folders.find_config(f"{RECIPE}/{name}"):
        selection.recipe = name
    else:
        selection.failed.add(RECIPE)
        selection.problems.append(_unknown_recipe(selection, name, number, given=argument is not None))


def _unknown_recipe(selection: Selection, name: str, number: int, given: bool) -> Problem:
    names = selection.folders.recipe_names()
    there_are = f"there are: {', '.join(names)}"
    if not name:
        first = "quickstart" if "quickstart" in names else names[0]
        hint = f"type {RECIPE}={first}; {there_are}"
        problem = problem_at(number, "missing_value", "no recipe is named", hint, RECIPE)
        return problem if given else replace(problem, file=None, line=None)
    near = closest(name, names)
    hint = f"did you mean {RECIPE}={near}? {there_are}" if near else f"{there_are}; or name a .yaml file"
    beside = selection.cwd / f"{name.removesuffix(Path(name).suffix)}.yml"
    if exists(beside) or _has_yml(selection.folders.recipes, name):
        hint = f"its file must end in {SUFFIX}, not .yml: rename it"
    elif Path(name).suffix == SUFFIX:
        hint = f"no such file is in {selection.cwd}; recipes that have a name: {', '.join(names)}"
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
        hint = f"did you mean `override /{near}`? " if near else ""
        message = f"there is no group `{name}`"
        return _entry_problem(entry, "unknown_group", message, f"{hint}Groups: {', '.join(groups)}")
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
    hint = f"did you mean {write}? " if near else ""
    section = next((path for path in NAMED_SECTIONS if path.startswith(f"{group}.")), "")
    if section and origin.file == COMMAND_LINE and option:
        chips = folders.options(NAMED_SECTIONS[section])
        counted = next(match for pattern in COUNTED if (match := pattern.fullmatch(option)))  # 4x4090, h100x8
        count = counted["count"]
        name = counted["chip"]
        chip = name if name in chips else closest(name, chips)
        near = name if name in options else None if chip == name else closest(name, options)
        if f"{chip}_x{count}" in options:
            hint = f"did you mean {group}={chip}_x{count}? "
        elif chip and near and near.startswith(f"{chip}_x"):  # boxes of it, of which none was named
            hint = f"did you mean {section}={chip}? "
        elif near or chip:
            number = f" cluster.devices_per_node={count}" if count else ""
            hint = f"did you mean {f'{group}={near}' if near else f'{section}={chip}'}{number}? "
    if _has_yml([conf / group for conf in folders.conf], option):
        hint = f"its file must end in {SUFFIX}, not .yml: rename it. "
    message = f"`{group}` has no option `{option}`" if option else f"`{group}` is given no option"
    hint = f"{hint}{'O' if hint else 'o'}ptions: {', '.join(options)}"
    if group in OWN_FILES:
        hint += f"; or describe your own in a file, and type {group}=./mine{SUFFIX}"
    return Problem("unknown_option", message, group, hint, origin.file, origin.line, origin.column)


def _read(selection: Selection, file: Path | None) -> YamlFile | None:
    """Return the file, or None after reporting its faults."""
    assert file is not None
    try:
        return read_yaml(file, selection.cwd)
    except RecipeError as error:
        selection.problems.extend(error.problems)
        return None
