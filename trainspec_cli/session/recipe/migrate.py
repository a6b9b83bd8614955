"""`migrate`: convert recipes, run folders and their files to the current version of the training spec."""

from __future__ import annotations

import difflib
import itertools
import os
import shlex
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.node import check_tree, private_files, why_not_trusted
from trainspec_cli.core.reading.files import (
    CURRENT_VERSION,
    NEWER_VERSION,
    UNSTATED_VERSION,
    VERSION_KEY,
    VERSION_LINE,
    VERSIONS,
    find_fault,
    open_regular,
    parse_json,
    read_bytes,
    read_object,
    unreadable,
    without_version,
)
from trainspec_cli.core.reading.yaml_file import compose_yaml, construct_yaml, read_yaml
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import key_of
from trainspec_cli.recipe.results.tables import ClusterProfile
from trainspec_cli.run.folder.events import MAX_LINE_BYTES
from trainspec_cli.run.folder.files import replace_head
from trainspec_cli.run.folder.forms import FORMS, PROFILE, RECIPE, Form, bring_to_current
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import claim, is_running
from trainspec_cli.session.recipe.load import require

# The head of a file, rewritten for the current version of the training spec; comments and formatting are preserved.


RECIPE_KEYS = {"defaults", VERSION_KEY, *(key_of(one) for one in fields(RunSpec))}
PROFILE_KEYS = {key_of(one) for one in fields(ClusterProfile)}
BOM = "\ufeff"


@dataclass(frozen=True)
class Head:
    """The head of a file, which a migration replaces."""

    version: str
    old: bytes
    new: bytes
    """Equal to `old` if the file does not need to change."""


def migrated_head(path: Path, form: Form) -> Head:
    """Return the old and the new head of a file. Raises RecipeError for a version that cannot be migrated, and
    UnreadableFileError for a damaged file."""
    if form.notation == "jsonl":
        # The head extends to the first complete event, which states the version.
        old = b""
        with open_regular(path) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if (event := _event(line)) is not None:
                    version = _checked(path, event.get(VERSION_KEY, UNSTATED_VERSION))
                    new = json_text(bring_to_current(form, event), indent=None).encode() + b"\n"
                    return Head(version, old + line, old + (line if version == CURRENT_VERSION else new))
                old += line
                if len(old) > MAX_LINE_BYTES:
                    break
        return Head(CURRENT_VERSION, b"", b"")  # without events there is nothing to migrate
    return _head_of_yaml(path) if form.notation == "yaml" else _head_of_json(path, form)


def _head_of_json(path: Path, form: Form) -> Head:
    content = read_object(path)
    old = read_bytes(path)
    version = _checked(path, content.get(VERSION_KEY, UNSTATED_VERSION))
    if missing := next((key for key in form.needs if key not in content), None):
        raise RecipeError(
            Problem("no_form", f"{path} is not a file of the kind `{form.kind}`: it has no `{missing}`", file=str(path))
        )
    new = old if version == CURRENT_VERSION else (json_text(bring_to_current(form, content)) + "\n").encode()
    return Head(version, old, new)


def _event(line: bytes) -> JsonObject | None:
    try:
        plain = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else None


def yaml_form(path: Path) -> Form:
    """Return the form of a YAML file (a recipe or a profile), determined from its keys. Raises RecipeError for other
    files."""
    content = read_yaml(path)
    keys: Collection[str] = content.keys() if isinstance(content, dict) else ()
    if {*keys} >= PROFILE_KEYS:
        return PROFILE
    strangers = [key for key in keys if key not in RECIPE_KEYS]
    if strangers or not keys:
        what = f"it has the key `{strangers[0]}`, which no recipe has" if strangers else "it has no keys"
        hint = "option files have no version; the version of the recipe that selects them applies"
        raise RecipeError(Problem("no_form", f"{path} is not a recipe: {what}", hint=hint, file=str(path)))
    return RECIPE


def _head_of_yaml(path: Path) -> Head:
    """Return the head with the version's line before the first key, or in place of the old version; no other byte
    changes."""
    yaml_form(path)
    old = read_bytes(path)
    text = old.decode()
    root = compose_yaml(text.removeprefix(BOM))
    values = _values(text)
    version = _checked(path, values.get(VERSION_KEY, UNSTATED_VERSION))
    if version == CURRENT_VERSION:
        return Head(version, old, old)
    assert root is not None, "`yaml_form` has checked that there are keys"
    before = len(text) - len(text.removeprefix(BOM))
    stated = next((value for key, value in root.value if key.value == VERSION_KEY), None)
    if stated is not None:
        new = f'{text[: before + stated.start_mark.index]}"{CURRENT_VERSION}"{text[before + stated.end_mark.index :]}'
    else:
        mark = root.value[0][0].start_mark
        at = before + mark.index
        newline = "\r\n" if "\r\n" in text else "\n"
        new = f"{text[:at]}{VERSION_LINE.strip()}{newline}{' ' * mark.column}{text[at:]}"
    if root.flow_style or repr(without_version(_values(new))) != repr(without_version(values)):
        hint = f"write each key on a separate line, and {VERSION_LINE.strip()} above them"
        raise RecipeError(Problem("no_form", f"{path} has several keys on a line", hint=hint, file=str(path)))
    return Head(version, old, new.encode())


def _values(text: str) -> JsonObject:
    root = compose_yaml(text.removeprefix(BOM))
    values: JsonObject = construct_yaml(root)
    return values


def _checked(path: Path, stated: JsonValue) -> str:
    """Return the version stated in a file. Raises RecipeError for an unknown version."""
    if fault := find_fault(stated):
        raise RecipeError(Problem(fault.code, f"{path} {fault.why}", VERSION_KEY, fault.hint, file=str(path)))
    return str(stated)


YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Migration:
    """The migration of one file."""

    path: Path
    form: Form
    head: Head
    run: RunDir | None
    """The run that the file belongs to; None for a file outside a run folder."""

    @property
    def changes(self) -> bool:
        return self.head.old != self.head.new

    def diff(self) -> str:
        """Return the lines that change, in the format of `diff -u`."""
        old, new = (text.decode(errors="replace").splitlines() for text in (self.head.old, self.head.new))
        lines = difflib.unified_diff(
            old, new, f"{self.path} ({self.head.version})", f"{self.path} ({CURRENT_VERSION})", n=1
        )
        return "\n".join(line.rstrip("\n") for line in lines)


def find_migrations(paths: Sequence[str], version: str = CURRENT_VERSION) -> list[Migration]:
    """Return the migrations of the files and run folders at `paths`, including those without changes. Raises
    RecipeError or MachineError with all problems before any file is written."""
    if version != CURRENT_VERSION:
        if version in VERSIONS:
            message = f"--to {version} is a downgrade, and would lose whatever {CURRENT_VERSION} has added"
            hint = f"restore the backup next to the file: mv FILE.{version}.bak FILE"
            raise RecipeError(Problem("downgrade", message, "--to", hint))
        fault = find_fault(version)
        assert fault is not None, "every version that was read is known"
        message = f"--to {version}: this trainspec migrates to version {CURRENT_VERSION} of the training spec"
        hint = fault.hint if fault.code == NEWER_VERSION else f"pass --to {CURRENT_VERSION}, or leave it out"
        raise RecipeError(Problem(fault.code, message, "--to", hint))
    found: list[Migration] = []
    problems: list[Problem] = []
    for path in dict.fromkeys(map(Path, paths)):
        try:
            found += _of_path(path, problems)
        except TrainspecError as error:
            problems += error.problems
    require(problems)
    return list({migration.path.resolve(): migration for migration in found}.values())


def apply(migrations: Sequence[Migration]) -> dict[Path, Path]:
    """Replace the files atomically; return the backup of each. Runs are claimed meanwhile, so that they cannot be
    started. Raises RecipeError for a run that is running, and MachineError if a file cannot be written."""
    changing = [migration for migration in migrations if migration.changes]
    runs = {migration.run.root.resolve(): migration.run for migration in changing if migration.run}
    with ExitStack() as claims, private_files():
        for run in runs.values():
            claims.enter_context(claim(run, f"migrate-{os.getpid()}"))
        return {migration.path: _replace(migration) for migration in changing}


def _of_path(path: Path, problems: list[Problem]) -> Iterator[Migration]:
    """Yield the migrations at a path; problems with files of a run folder are added to `problems`."""
    if not path.is_dir():
        _check_own_file(path)
        # Find the run whose folder contains the file.
        above = itertools.islice(path.absolute().parents, 3)
        run = next((RunDir(folder) for folder in above if RunDir(folder).run_json.is_file()), None)
        if run is not None:
            _check_free(run)
        form = _form_of_file(path)
        if not form.schema:
            yield Migration(path, form, migrated_head(path, form), run)
        return
    run = RunDir(path)
    if not run.run_json.is_file():
        hint = "specify run folders, recipes, or files of a run folder"
        raise RecipeError(Problem("no_run", f"{path} contains no run", hint=hint))
    check_tree(run.root)
    _check_free(run)
    for form in FORMS:
        for pattern in () if form.schema else form.patterns:  # files protected by a digest must not change
            for file in sorted(run.root.glob(pattern)):
                try:
                    _check_own_file(file)
                    yield Migration(file, form, migrated_head(file, form), run)
                except TrainspecError as error:
                    problems += error.problems


def _check_free(run: RunDir) -> None:
    if is_running(run):
        hint = f"stop it first: trainspec stop {shlex.quote(str(run.root))}"
        raise RecipeError(Problem("still_running", f"the run in {run.root} is still running", hint=hint))


def _check_own_file(path: Path) -> None:
    """Raise an error unless the path is a regular file that this user owns."""
    try:
        found = path.lstat()
    except OSError as error:
        raise RecipeError(Problem("missing_file", f"no such file: {path}: {error.strerror}")) from error
    if stat.S_ISLNK(found.st_mode):
        hint = f"name the file itself: {path.resolve()}"
        raise RecipeError(Problem("not_trusted", f"{path} is a link", hint=hint, file=str(path)))
    if not stat.S_ISREG(found.st_mode):
        raise unreadable(path, "is not a regular file")
    reason = why_not_trusted(found) or ("belongs to root" if found.st_uid != os.geteuid() else "")
    if reason:
        hint = f"migrate your own copy: cp {shlex.quote(str(path))} ."
        raise MachineError(Problem("not_trusted", f"{path} {reason}", hint=hint, file=str(path), environment=True))


def _form_of_file(path: Path) -> Form:
    """Return the form of a file outside a run folder. Raises RecipeError unless trainspec writes such files."""
    if path.suffix in YAML_SUFFIXES:
        return yaml_form(path)
    if path.suffix == ".json":  # a file protected by a digest states its schema
        schema = str(read_object(path).get("schema", "")).partition("/")[0]
        if form := next((form for form in FORMS if form.schema and form.schema == schema), None):
            return form
    if form := next((one for one in FORMS if one.holds(path.absolute())), None):
        return form
    kinds = ", ".join(one.kind for one in FORMS)
    hint = f"these files are recognised by their names in a run folder: {kinds}"
    raise RecipeError(Problem("no_form", f"{path} is not a file that trainspec reads", hint=hint, file=str(path)))


def _replace(migration: Migration) -> Path:
    """Rewrite a file; return the path of its backup."""
    path = migration.path
    head = migration.head
    for number in itertools.count(1):
        backup = path.with_name(f"{path.name}.{head.version}.bak{number if number > 1 else ''}")
        try:
            replace_head(path, head.old, head.new, backup)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            hint = "files migrated before it stay migrated; run the command again"
            problem = Problem("cannot_write", f"{path} cannot be written: {reason}", hint=hint, environment=True)
            raise MachineError(problem) from error
        return backup
    raise AssertionError("the loop only ends by returning")
