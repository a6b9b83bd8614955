"""Compose a recipe and `key=value` arguments into a plain dict, with the origin of every value and all problems.

Files are merged section by section in the order given by `defaults` in conf/trainspec.yaml: one option for each group,
then the recipe, then the command line. The last value wins.

Composition continues after a mistake, so one pass reports all mistakes: a missing option is replaced by the previous
choice, and an invalid line of a defaults list is skipped."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainspec_cli.core.errors import Problem, RecipeError, closest, did_you_mean
from trainspec_cli.core.intentions import FORMER_OPTIONS
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import VERSION_KEY, exists, expand, find_fault
from trainspec_cli.recipe.compose.folders import (
    ABOUT_FILE,
    COMMAND_LINE,
    DISTURB,
    NAMED_SECTIONS,
    OWN_FILES,
    RECIPE,
    ROOT,
    SECTION_NAMED_BY,
    SUFFIX,
    Folders,
    Origin,
    Origins,
    YamlEntry,
    YamlFile,
    find_folders,
    locate,
    read_yaml,
    shipped_data,
    show_path,
)
from trainspec_cli.recipe.compose.values import Argument, all_paths, overlaid, parse_arguments, resolve, value_paths
from trainspec_cli.recipe.field_types import MISSING

# Mutually exclusive keys: setting one of them replaces alternatives that were set earlier.


SECTION, NAMES = "train", ("max_steps", "tokens", "epochs")
"""Keys that set the run length."""


def section_of(data: JsonObject) -> JsonObject:
    """Return the section that contains the alternatives; empty if the value is not a section (an error that is reported
    elsewhere)."""
    section = data.get(SECTION)
    return section if isinstance(section, dict) else {}


def given(data: JsonObject) -> list[str]:
    """Return the names of the alternatives that have a value."""
    return [name for name in NAMES if section_of(data).get(name) not in (None, MISSING)]


def _keep_last(data: JsonObject, origins: Origins, files: Sequence[str]) -> None:
    """Remove the alternatives that are overridden by a later file or the command line.

    `files`: the configuration files in merge order; values from elsewhere count as earlier. If several alternatives
    come from the same file or command line, all of them are kept, and validation rejects them later."""
    rank_of_file = {file: rank for rank, file in enumerate((*files, COMMAND_LINE))}
    found = {name: origins.get(f"{SECTION}.{name}") for name in given(data)}
    ranks = {name: rank_of_file.get(origin.file, -1) if origin else -1 for name, origin in found.items()}
    for name in (name for name, rank in ranks.items() if rank < max(ranks.values())):
        del section_of(data)[name]
        origins.pop(f"{SECTION}.{name}", None)


OWN_SOURCE = "recipe"
"""The source of values that the user has set."""
ALSO_KNOWN_AS = {"cluster.accelerator.price_usd_per_hour": "cluster.cost.price_usd_per_device_hour"}
"""A key -> the one that states its uncertainty, if that is in another section."""


def _attribute_own_values(data: JsonObject, origins: Origins, shipped: Path, cwd: Path) -> None:
    """Mark the values that the user has set as exact, with the recipe as their source. The source and the uncertainty
    in an option's file belong to the value that it replaced; those stated by the user stay."""

    def is_own(path: str) -> bool:
        origin = origins.get(path)
        return origin is not None and not (cwd / origin.file).is_relative_to(shipped)

    for path in [path for path in origins if is_own(path)]:
        above, _, key = path.rpartition(".")
        section = _section_at(data, above)
        if not isinstance(section.get(key), (int, float)):
            continue
        if "sources" in section and not (is_own(f"{above}.sources.{key}") or is_own(f"{above}.sources.default")):
            section["sources"] = _section_at(section, "sources") | {key: OWN_SOURCE}
        unverified = section.get("unverified")
        if isinstance(unverified, list) and key in unverified and not is_own(f"{above}.unverified"):
            section["unverified"] = [other for other in unverified if other != key]
        above, _, key = ALSO_KNOWN_AS.get(path, path).rpartition(".")
        if not is_own(f"{above}.known_within.{key}"):
            _delete(data, f"{above}.known_within.{key}")


def _section_at(data: JsonObject, path: str) -> JsonObject:
    """Return the section at a dotted path; empty if there is none."""
    for word in path.split("."):
        section = data.get(word)
        data = section if isinstance(section, dict) else {}
    return data


# The files of a composition: the recipe, its base recipes, and one option for each group.


SELF = "_self_"
ALL_OF = "`trainspec list {}` shows all"
"""The command that lists the options of a group."""
_ELSEWHERE = re.compile(r"/?(?P<group>[\w/]+)@(?P<key>[\w.]+)")
"""In a group's file: a reference to another group's option, with the key that the option fills
(`/accelerator@accelerator`)."""
COUNTED = (
    re.compile(r"(?P<count>\d+)[x*_]+(?P<chip>.+)", re.IGNORECASE),
    re.compile(r"(?P<chip>.+?)(?:_*[x*]_*(?=\d)|_(?=\d$))(?P<count>\d{1,3})", re.IGNORECASE),
    re.compile(r"(?P<chip>.+)(?P<count>)"),
)
"""A chip's name, optionally with a number of chips before or after it. The number in `rtx_4090` is part of the name."""


@dataclass(frozen=True)
class MergedFile:
    """One of the files in a composition."""

    read: YamlFile
    package: str = ""
    """The dotted path where its values are merged; empty for the root."""
    replaces: bool = False
    """True if the file discards all earlier values of its section. Mixing the fields of two accelerators would describe
    a chip that does not exist."""
    chosen_at: Origin | None = None
    """The argument or the recipe line that chose the file; None for a default."""


@dataclass
class Selection:
    folders: Folders
    cwd: Path
    recipe: str = ""
    """The recipe's name; empty if it could not be found or read."""
    recipes: list[YamlFile] = field(default_factory=list)
    """The recipe and its base recipes, in merge order."""
    options: dict[str, list[tuple[str, Origin]]] = field(default_factory=dict)
    """Group -> the requested options, the last of which takes precedence."""
    failed: set[str] = field(default_factory=set)
    """Groups (and `recipe`) that could not be read as requested."""
    problems: list[Problem] = field(default_factory=list)

    def choose(self, arguments: Sequence[Argument]) -> list[MergedFile]:
        """Return the files that a command line selects, in merge order."""
        root = self._read(self.folders.find_config(ROOT))
        assert root is not None, "conf/trainspec.yaml ships with the package"
        self.options = {entry.key: [(entry.value, entry.origin)] for entry in root.defaults if entry.key}
        del self.options[RECIPE]
        # If a recipe is specified as a path, its folder becomes the first of the recipe folders.
        argument = next((argument for argument in arguments if argument.key == RECIPE), None)
        name = str(argument.value) if argument else ""
        path = expand(name)
        if path.suffix == SUFFIX and exists(self.cwd / path):
            folder = (self.cwd / path).parent.resolve()
            self.folders = replace(self.folders, recipes=tuple(dict.fromkeys((folder, *self.folders.recipes))))
            self.recipe = path.stem
        elif name and self.folders.find_config(f"{RECIPE}/{name}"):
            self.recipe = name
        else:
            self.failed.add(RECIPE)
            origin = argument.origin if argument else None
            self.problems.append(self._unknown_recipe(name, origin))
        # Without a readable recipe, the arguments are still checked against the defaults.
        if self.recipe and not self._add_recipe(f"{RECIPE}/{self.recipe}", ()):
            self.recipe = ""
        for argument in arguments:
            if self.is_choice(argument):
                origin = argument.origin
                option = argument.text.partition("=")[2].strip().strip("\"'")
                if argument.key in self.options:
                    self.options[argument.key].append((option, origin))
                    continue
                # Options of some groups fill a section with a different name, so the group itself is not a recipe key,
                # as in `accelerator=rtx_4090`.
                section = SECTION_NAMED_BY.get(argument.key, "")
                message = f"`{argument.key}` is a group of options, not a key of a recipe"
                message += f"; one of them can be the value of `{section}`" if section else ""
                hint = f"set {section}={option}" if section else f"groups: {', '.join(sorted(self.options))}"
                self.failed.add(argument.key)
                self.problems.append(origin.problem("unknown_group", message, hint, argument.key))
        parts: list[MergedFile] = []
        for entry in root.defaults:
            if entry.value == SELF:
                parts.append(MergedFile(root))
            elif entry.key == RECIPE:
                parts += map(MergedFile, self.recipes)
            else:
                # One unreadable option must not hide errors in the others, so it is replaced by the previous option.
                options = self.options[entry.key]
                while options and (found := self.parts_of(entry.key, *options[-1])) is None:
                    self.failed.add(entry.key)
                    options.pop()
                if options and found:
                    at = options[-1][1]
                    parts += found if at == entry.origin else [replace(part, chosen_at=at) for part in found]
        return parts

    def is_choice(self, argument: Argument) -> bool:
        """Return True for `model=llama_6m`, which selects a file, as opposed to `model={num_layers: 2}` and `~model`,
        which set values."""
        is_value = argument.deletes or isinstance(argument.value, dict)
        return argument.key in self.folders.groups and not is_value

    def _unknown_recipe(self, name: str, origin: Origin | None) -> Problem:
        names = self.folders.recipe_names()
        if not name or origin is None:
            first = "quickstart" if "quickstart" in names else names[0]
            hint = f"set {RECIPE}={first}, or another: {ALL_OF.format(RECIPE)}"
            if origin is None:
                return Problem("missing_value", "no recipe is named", RECIPE, hint)
            return origin.problem("missing_value", "no recipe is named", hint, RECIPE)
        near = closest(name, names)
        hint = choices(f"did you mean {RECIPE}={near}?", RECIPE, names)
        if not near:
            hint = f"{choices('', RECIPE, names)}; or give the path of a .yaml file"
        beside = self.cwd / f"{name.removesuffix(Path(name).suffix)}.yml"
        if exists(beside) or _has_yml(self.folders.recipes, name):
            hint = f"its file must end in {SUFFIX}, not .yml: rename it"
        elif Path(name).suffix == SUFFIX:
            hint = f"no such file in {self.cwd}; for recipes by name, {ALL_OF.format(RECIPE)}"
        return origin.problem("unknown_recipe", f"there is no recipe `{name}`", hint, RECIPE)

    def _add_recipe(self, name: str, within: tuple[str, ...]) -> bool:
        """Read a recipe and its base recipes, and record the options that they request. Return False if the recipe is
        unreadable. `within`: the chain of recipes that leads to it."""
        file = self._read(self.folders.find_config(name))
        if file is not None and file.version and (fault := find_fault(file.version[0])):
            origin = file.version[1]
            self.problems.append(origin.problem(fault.code, f"{origin.file} {fault.why}", fault.hint, VERSION_KEY))
            file = None
        if file is None:
            self.failed.add(RECIPE)
            return False
        if any(file.start.file == other.start.file for other in self.recipes):
            return True
        repeated = self._repeated(file)
        options: list[tuple[str, str, Origin]] = []
        stands_itself = any(not entry.key and entry.value == SELF for entry in file.defaults)
        for entry in file.defaults:
            parent = f"{RECIPE}/{entry.value.removeprefix(f'/{RECIPE}/')}"
            group = entry.key.split()[-1].removeprefix("/") if entry.key else RECIPE
            if entry in repeated:
                continue
            if problem := self._check_entry(entry, parent, (*within, name)):
                self.problems.append(problem)
                # Later errors about the group that this line was supposed to set would only repeat this error.
                self.failed.add(closest(group, self.folders.groups) or group)
            elif entry.key:
                options.append((group, entry.value, entry.origin))
            elif entry.value == SELF:
                self.recipes.append(file)
            elif not self._add_recipe(parent, (*within, name)):
                return False
        self.recipes += [] if stands_itself else [file]
        # A recipe's own options follow those of its base recipes, regardless of their order in its list.
        for group, option, origin in options:
            self.options[group].append((option, origin))
        return True

    def _check_entry(self, entry: YamlEntry, parent: str, within: tuple[str, ...]) -> Problem | None:
        """Check one line of a recipe's defaults list: `_self_`, a recipe name, or `override /group: option`."""
        if not entry.key:
            if entry.value == SELF:
                return None
            if parent in within:
                message = f"the recipe `{entry.value}` builds on itself"
                return entry.origin.problem("bad_defaults", message, "leave the line out", "defaults")
            if entry.value and self.folders.find_config(parent):
                return None
            names = self.folders.recipe_names()
            near = closest(entry.value, names)
            hint = f"did you mean `{near}`?" if near else f"there are: {', '.join(names)}"
            message = f"there is no recipe `{entry.value}` to build on"
            return entry.origin.problem("unknown_recipe", message, hint, "defaults")
        *keywords, group = entry.key.split()
        name = group.removeprefix("/")
        section = SECTION_NAMED_BY.get(name, "")
        if section:
            message = f"a recipe's defaults cannot select an option of `{name}`, which is a value of `{section}`"
            hint = f"leave the line out, and set {section}={entry.value} on the command line"
            return entry.origin.problem("unknown_group", message, hint, "defaults")
        if name not in self.options:
            near = closest(name, self.options)
            hint = f"did you mean `override /{near}`?" if near else f"groups: {', '.join(sorted(self.options))}"
            return entry.origin.problem("unknown_group", f"there is no group `{name}`", hint, "defaults")
        if keywords != ["override"] or not group.startswith("/"):
            message = f"`{entry.key}: {entry.value}` would add a second {name}, not replace the first"
            return entry.origin.problem("bad_defaults", message, f"write - override /{name}: {entry.value}", "defaults")
        return None

    def _repeated(self, file: YamlFile) -> list[YamlEntry]:
        """Report and return the lines of a defaults list that repeat a choice made by an earlier line."""
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
            self.problems.append(entry.origin.problem("bad_defaults", message, hint, "defaults"))
            repeated.append(entry)
        return repeated

    def parts_of(
        self,
        group: str,
        option: str,
        origin: Origin | None,
        key: str = "",
        package: str | None = None,
        within: tuple[Path, ...] = (),
    ) -> list[MergedFile] | None:
        """Return the file of an option and the files that it builds on. Return None if one of them cannot be read; the
        error is reported at `origin`.

        `key`: the key that requested the option, if it is not the group. `package`: the section that the option fills;
        None: the one stated in its file or, by default, named after the group. `within`: the chain of files that leads
        to it."""
        is_own = option.endswith(SUFFIX) and group in OWN_FILES
        path = self.cwd / expand(option) if is_own else self.folders.find_config(f"{group}/{option}")
        if not option or path is None or not exists(path):
            self.problems.append(self._unknown_option(group, option, origin, key or group))
            return None
        if path in within:
            message = f"`{option}` builds on itself"
            assert origin is not None, "a line of a file names it"
            self.problems.append(origin.problem("bad_defaults", message, "leave the line out", "defaults"))
            return None
        file = self._read(path)
        if file is None or self._repeated(file):
            return None
        if package is None:
            package = group.replace("/", ".") if file.package is None else file.package
        own = MergedFile(file, package)
        parts: list[MergedFile] = []
        whole = True
        for entry in file.defaults:
            found: list[MergedFile] | None
            elsewhere = _ELSEWHERE.fullmatch(entry.key)
            if not entry.key and entry.value == SELF:
                found = [own]
            elif not entry.key:
                found = self.parts_of(group, entry.value, entry.origin, "", package, (*within, path))
            elif elsewhere is None or elsewhere["group"] not in self.folders.groups:
                self.problems.append(self._misplaced(entry))
                found = None
            else:
                inside = f"{package}.{elsewhere['key']}".lstrip(".")
                found = self.parts_of(elsewhere["group"], entry.value, entry.origin, "", inside, (*within, path))
                found = found and [replace(found[0], replaces=True), *found[1:]]
            parts += found or ()
            whole = whole and found is not None
        parts += [] if own in parts else [own]
        return parts if whole else None

    def _misplaced(self, entry: YamlEntry) -> Problem:
        """Return the problem for a line in a group's file that names something other than an option of that group."""
        name = entry.key.split()[-1].removeprefix("/").partition("@")[0]
        if name not in self.folders.groups:
            near = closest(name, self.folders.groups)
            hint = f"did you mean `/{near}@KEY`?" if near else f"groups: {', '.join(self.folders.groups)}"
            return entry.origin.problem("unknown_group", f"there is no group `{name}`", hint, "defaults")
        message = f"`{entry.key}: {entry.value}` does not name the key that the option fills"
        return entry.origin.problem("bad_defaults", message, f"write - /{name}@KEY: {entry.value}", "defaults")

    def _unknown_option(self, group: str, option: str, origin: Origin | None, key: str) -> Problem:
        if group in OWN_FILES and option.endswith(SUFFIX):
            code = "missing_file"
            message = f"no such file: {show_path(self.cwd / expand(option), self.cwd)}"
            hint = f"write it, or choose an option by name: `trainspec explain {group}` lists them"
        elif former := FORMER_OPTIONS.get((group, option)):
            code = "unknown_option"
            message = f"`{group}` no longer has an option `{option}`: {former.why}"
            hint = former.hint
        else:
            code = "unknown_option"
            message = f"`{key}` has no option `{option}`" if option else f"`{key}` has no value"
            hint = self._nearest_option(group, option, origin, key)
        return origin.problem(code, message, hint, key) if origin else Problem(code, message, key, hint)

    def _nearest_option(self, group: str, option: str, origin: Origin | None, key: str) -> str:
        options = self.folders.options(group)
        near = closest(option, options)
        is_typed = origin is not None and origin.file == COMMAND_LINE
        hint = f"did you mean {f'{key}={near}' if is_typed else f'`{near}`'}?" if near else ""
        section = next((path for path in NAMED_SECTIONS if path.startswith(f"{group}.")), "")
        if section and is_typed and option:
            chips = self.folders.options(NAMED_SECTIONS[section])
            counted = next(match for pattern in COUNTED if (match := pattern.fullmatch(option)))  # 4x4090, h100x8
            count = counted["count"]
            name = counted["chip"]
            chip = name if name in chips else closest(name, chips)
            near = name if name in options else None if chip == name else closest(name, options)
            if f"{chip}_x{count}" in options:
                hint = f"did you mean {group}={chip}_x{count}?"
            elif chip and near and near.startswith(f"{chip}_x"):  # conf/ has no cluster with this number of chips
                hint = f"did you mean {section}={chip}?"
            elif near or chip:
                number = f" cluster.devices_per_node={count}" if count else ""
                hint = f"did you mean {f'{group}={near}' if near else f'{section}={chip}'}{number}?"
        if _has_yml([conf / group for conf in self.folders.conf], option):
            hint = f"its file must end in {SUFFIX}, not .yml: rename it."
        hint = choices(hint, group, options)
        own = f"; or describe your own in a file, and set {group}=./mine{SUFFIX}"
        return hint + (own if group in OWN_FILES else "")

    def _read(self, file: Path | None) -> YamlFile | None:
        """Return a file if its values can also be read; otherwise report its mistakes and return None."""
        assert file is not None
        try:
            read = read_yaml(file, self.cwd)
            read.values()
        except RecipeError as error:
            self.problems.extend(error.problems)
            return None
        return read


def _has_yml(folders: Sequence[Path], name: str) -> bool:
    return any(exists(folder / f"{name}.yml") for folder in folders)


def choices(near: str, group: str, options: Sequence[str]) -> str:
    """Return the hint `near`, followed by the command that lists the group's options; the full list would bury the
    hint. Without `near`, return the options themselves."""
    return f"{near} {ALL_OF.format(group)}" if near else f"options: {', '.join(options)}"


# Values from files, values from the command line, and values derived from both.


POOLS = "cluster.pools"
GROUP = "accelerator"
SHORT = re.compile(r"(?P<accelerator>[^*\s]+)\s*\*\s*(?P<num_nodes>\d+)(?:\s*x\s*(?P<devices_per_node>\d+))?")
"""accelerator*nodes, or accelerator*nodes x devices per node."""
NOT_HERE = {
    DISTURB: (
        "describes disturbances that `trainspec plan` simulates; it is not part of a run",
        "leave it out, or run trainspec plan",
    ),
    VERSION_KEY: (
        "states a file's version of the training spec; a command line always uses the current version",
        "leave it out; `trainspec migrate` converts a recipe to this version",
    ),
}
"""Keys that a command line cannot set: (what they do, what to type instead)."""


@dataclass(frozen=True)
class Composed:
    recipe: str
    """The recipe's name; "" if it could not be found or read."""
    data: JsonObject
    """The values with interpolations resolved; `???` marks a value that is not set."""
    origins: Origins
    arguments: tuple[str, ...]
    cwd: Path
    problems: tuple[Problem, ...] = ()
    """All problems that can be found without interpreting the values, with their locations."""
    failed: frozenset[str] = frozenset()
    """Groups and keys (including `recipe`) that could not be read as requested. Other problems in them may be mere
    consequences."""
    chosen_at: Origins = field(default_factory=dict)
    """Section -> the argument or recipe line that chose the option that fills it."""

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Add the location of the value to problems that only have a path."""
        return locate(problems, self.origins, self.arguments, self.cwd, self.chosen_at)


@dataclass(frozen=True)
class Completion:
    """Values that a recipe takes from elsewhere, such as a checkpoint's config.json."""

    values: JsonObject
    source: str
    """The file that contains the values, or the key that implies them."""
    replaced: frozenset[str] = frozenset()
    """Groups whose explicitly specified values are all discarded."""
    problems: tuple[Problem, ...] = ()
    failed: frozenset[str] = frozenset()
    """Groups and keys that could not be completed."""


Complete = Callable[[JsonObject, frozenset[str]], Completion]
"""A function of the composed values (with references resolved as far as possible) and of the groups that were left at
their defaults."""


def compose(recipe: str, overrides: Sequence[str] = (), cwd: Path | None = None) -> Composed:
    return compose_arguments([f"{RECIPE}={recipe}", *overrides], cwd)


def compose_arguments(
    arguments: Sequence[str],
    cwd: Path | None = None,
    completions: Iterable[Complete] = (),
    aside: Collection[str] = (),
) -> Composed:
    """Compose a command line, which may contain `recipe=NAME`; each of `completions` fills in the values that it knows.

    User errors are not raised but listed in `problems`; `data` contains everything else. `aside`: keys that belong to
    the command instead of the recipe."""
    cwd = (cwd or Path.cwd()).resolve()
    parsed, problems = parse_arguments(arguments)
    parsed = [argument for argument in parsed if argument.key not in aside]
    for argument in (argument for argument in parsed if argument.key in NOT_HERE):
        message, hint = NOT_HERE[argument.key]
        origin = argument.origin
        problems.append(origin.problem("unknown_key", f"`{argument.key}` {message}", hint, argument.key))
    parsed = [argument for argument in parsed if argument.key not in NOT_HERE]
    selection = Selection(find_folders(cwd), cwd)
    parts = selection.choose(parsed)
    values = [argument for argument in parsed if argument.key != RECIPE and not selection.is_choice(argument)]
    # A name in place of a section: in `cluster.accelerator=rtx_4090`, 4090 is part of a name, not a number. This
    # argument may come before or after those for keys inside the section.
    named = [
        argument
        for argument in values
        if argument.key in NAMED_SECTIONS and isinstance(argument.value, (str, int)) and not argument.deletes
    ]
    for argument in named:
        origin = argument.origin
        group = NAMED_SECTIONS[argument.key]
        found = selection.parts_of(group, str(argument.value), origin, argument.key, argument.key)
        found = [replace(part, chosen_at=origin) for part in found or ()]
        parts += [replace(part, replaces=True) for part in found[:1]] + found[1:]
    values = [argument for argument in values if argument not in named]
    data, origins = _merge(parts)
    misplaced = [problem for problem in problems if (problem.code, problem.path) == ("bad_override", RECIPE)]
    if misplaced:  # a lone word, as in `trainspec launch tiyn`, was meant as a recipe name
        names = selection.folders.recipe_names()
        for problem in misplaced:
            word = arguments[(problem.line or 1) - 1]
            if word not in names and (near := closest(word, names)):
                hinted = replace(problem, hint=f"to choose a recipe, set {RECIPE}={near}")
                problems = [hinted if one is problem else one for one in problems]
        selection.problems = [one for one in selection.problems if (one.code, one.path) != ("missing_value", RECIPE)]
    problems += [*selection.problems, *_apply_arguments(data, values)]
    problems += _write_out_pools(data, selection)
    origins = _with_arguments(origins, values)
    # The user fixes a problem with an entire section by choosing another option, not by editing the option's file.
    chosen = {part.package: part.chosen_at for part in parts if part.chosen_at}
    chosen = {path: at for path, at in chosen.items() if path not in {argument.key for argument in values}}
    # If a later file sets one of several alternative keys, that key replaces the alternative set by an earlier file.
    _keep_last(data, origins, [part.read.start.file for part in parts])
    _attribute_own_values(data, origins, shipped_data() / "conf", cwd)
    unchosen = frozenset(
        group
        for group in selection.folders.groups
        # Keep only the groups for which neither a recipe nor the command line chose an option or set a value.
        if len(selection.options.get(group, ())) == 1
        and len({origin.file for path, origin in origins.items() if path.partition(".")[0] == group}) == 1
    )
    # Completion comes last, because it needs the interpolated values to find a checkpoint's config.json.
    data, more, incomplete = _complete(data, completions, unchosen, origins)
    return Composed(
        recipe=selection.recipe,
        data=data,
        origins=origins,
        arguments=tuple(arguments),
        cwd=cwd,
        problems=tuple(locate([*problems, *more], origins, arguments, cwd, chosen)),
        failed=frozenset(selection.failed | incomplete),
        chosen_at=chosen,
    )


def amend(recipe: str, values: JsonObject, arguments: Sequence[str], completions: Iterable[Complete]) -> Composed:
    """Apply `key=value` arguments to previously composed values, such as those of a run; each of `completions` fills in
    the values that follow from them.

    Groups and recipes are not looked up: `model=x` is a value here."""
    parsed, problems = parse_arguments(arguments)
    data = overlaid({}, values)
    problems += _apply_arguments(data, parsed)
    origins = _with_arguments({}, parsed)
    _keep_last(data, origins, ())
    data, more, failed = _complete(data, completions, frozenset(), origins)
    cwd = Path.cwd()
    located = tuple(locate([*problems, *more], origins, arguments, cwd))
    return Composed(recipe, data, origins, tuple(arguments), cwd, located, failed)


def _merge(parts: Iterable[MergedFile]) -> tuple[JsonObject, Origins]:
    """Return the merged values of the files, and the origin of each value."""
    data: JsonObject = {}
    origins: Origins = {}
    for part in parts:
        prefix = f"{part.package}." if part.package else ""
        if part.replaces:
            _delete(data, part.package)
            origins = {path: origin for path, origin in origins.items() if not path.startswith(prefix)}
        values = {key: value for key, value in part.read.values().items() if key not in ABOUT_FILE}
        data = overlaid(data, _nested(part.package, values))
        origins |= {part.package: part.read.start} if part.package else {}
        origins |= {f"{prefix}{path}": origin for path, origin in part.read.origins.items()}
    return data, origins


def _nested(path: str, value: JsonObject) -> JsonObject:
    for key in reversed(path.split(".") if path else ()):
        value = {key: value}
    return value


def _with_arguments(origins: Origins, arguments: Iterable[Argument]) -> Origins:
    for argument in arguments:
        if argument.deletes:
            origins = {path: origin for path, origin in origins.items() if not path.startswith(f"{argument.key}.")}
        origins |= dict.fromkeys(value_paths(argument.key, argument.value), argument.origin)
    return origins


def _apply_arguments(data: JsonObject, arguments: Iterable[Argument]) -> Iterator[Problem]:
    """Set and delete values in order. Unknown keys are added; they are checked later."""
    for argument in arguments:
        origin = argument.origin
        key = argument.key
        if argument.deletes:
            if not _delete(data, key):
                hint = did_you_mean(key, all_paths(data))
                yield origin.problem("unknown_key", f"there is no `{key}` to delete", hint, key)
            continue
        *above, name = key.split(".")
        section = data
        for depth, word in enumerate(above, 1):
            # The contents of an unset section (`???`) are not known yet.
            below = {} if section.get(word, MISSING) == MISSING else section[word]
            if not isinstance(below, dict):
                scalar = ".".join(above[:depth])
                message = f"`{scalar}` is a single value: it has no key `{key.removeprefix(f'{scalar}.')}`"
                yield origin.problem("unknown_key", message, f"set {scalar}=<value>", key)
                break
            section[word] = below
            section = below
        else:
            if isinstance(argument.value, list) and isinstance(section.get(name), dict):
                hint = f"set {key}.<key>=<value>, or the name of an option"
                yield origin.problem("wrong_type", f"`{key}` is a section of keys, not a list", hint, key)
            else:
                section[name] = overlaid(section, {name: argument.value})[name]


def _delete(data: JsonObject, path: str) -> bool:
    """Remove a value; return whether it existed."""
    *above, name = path.split(".")
    section: JsonValue = data
    for word in above:
        section = section.get(word) if isinstance(section, dict) else None
    if not isinstance(section, dict) or name not in section:
        return False
    del section[name]
    return True


def _write_out_pools(data: JsonObject, selection: Selection) -> list[Problem]:
    """Expand each pool's short form (`h100_sxm*8x8`) and accelerator name to values; return the problems."""
    cluster = data.get("cluster")
    pools = cluster.get("pools") if isinstance(cluster, dict) else None
    if not isinstance(cluster, dict) or not isinstance(pools, list):
        return []
    problems: list[Problem] = []
    whole: list[JsonValue] = []
    for place, pool in enumerate(pools):
        path = f"{POOLS}.{place}"
        if isinstance(pool, str):
            short = SHORT.fullmatch(pool.strip())
            if short is None:
                message = f"`{path}` is {pool}; expected accelerator*nodes or accelerator*nodes x devices per node"
                problems.append(Problem("wrong_type", message, path, "write it as h100_sxm*8x8, without spaces"))
                continue
            numbers = {key: int(text) for key, text in short.groupdict().items() if key != GROUP and text}
            pool = {GROUP: short[GROUP], **numbers}
        if isinstance(pool, dict) and isinstance(pool.get(GROUP), str):
            before = len(selection.problems)
            parts = selection.parts_of(GROUP, str(pool[GROUP]), None, f"{path}.{GROUP}", "")
            problems += selection.problems[before:]
            pool = {**pool, GROUP: _merge(parts or ())[0]}
        whole.append(pool)
    cluster["pools"] = [] if problems else whole  # do not report follow-up problems
    return problems


def _complete(
    data: JsonObject, completions: Iterable[Complete], unchosen: frozenset[str], origins: Origins
) -> tuple[JsonObject, list[Problem], frozenset[str]]:
    """Return the values as completed by `completions`, all problems, and the keys that could not be completed."""
    resolved, unresolved = resolve(data)
    problems: list[Problem] = []
    failed: frozenset[str] = frozenset()
    for complete in completions:
        completion = complete(resolved, unchosen)
        problems += completion.problems
        failed |= completion.failed
        if completion.values or completion.replaced:
            origin = origins.get(completion.source, Origin(completion.source, 1))
            for path in (path for key, item in completion.values.items() for path in value_paths(key, item)):
                origins[path] = origin
            whole = data | {group: {} for group in completion.replaced}
            data = overlaid(whole, _without_references(completion.values))
            # Interpolations may refer to completed values, so they are resolved again.
            resolved, unresolved = resolve(data)
    return resolved, [*problems, *unresolved], failed


def _without_references(value: Any) -> Any:
    """Escape `${` in values from another program's file, so that they are read as plain text."""
    if isinstance(value, dict):
        return {key: _without_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_references(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
