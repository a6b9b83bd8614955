"""Create a bundle: wheels, recipes and the files that their runs read, in a folder that appears only once it is
complete.

A run reads recipes, token files, tokenizers, weights and the user's own code. The copies have new paths. The launch
arguments listed in the bundle set the keys that contain these paths."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.shards import publishing
from trainspec_cli.data.corpus.source_files import find_files
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.data.corpus.token_files import SOURCES as TOKEN_FILES
from trainspec_cli.data.corpus.tokenise import OnProgress
from trainspec_cli.recipe.compose.folders import SUFFIX, Folders, find_folders
from trainspec_cli.recipe.keys.run import SAMPLE_SOURCES, DataSpec, RunSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.user_code import find, source_files, worker_code_of
from trainspec_cli.run.folder.files import write_json, write_text
from trainspec_cli.wings.bundle import installer
from trainspec_cli.wings.bundle.installer import INSTALLER, RECORD, WHEELS, BundledFile, BundleRecord, sha256_of
from trainspec_cli.wings.bundle.wheels import NAME, WheelTarget, download, read_wheel

README = "README.md"
DATA = "data"
TOKENIZERS = "tokenizers"
WEIGHTS = "weights"
OF_RECIPES = (SUFFIX, ".json", ".jsonl")
"""Suffixes of recipe and group files."""
GENERATED_SOURCES = ("python_stdlib", "phantom")
"""Sources that every machine can generate itself. If a mixture also has other sources, the tokens of the generated ones
are copied as well, because all sources of a mixture share a tokenizer."""
INDEX_SUFFIX = ".idx"
_PAGE = """\
# trainspec {version} without a network

This folder installs trainspec and trains without a network. It needs Python {python}.

```sh
python{python} {installer} ~/trainspec
{launches}
```

`{installer}` first compares every file with `{record}` and prints those that are missing or changed; `--check`
does only that. pip uses neither settings nor an index.

| file or folder | content |
|---|---|
| `{record}` | the systems the bundle is for, and the sha256 of every file |
| `{wheels}/` | trainspec, its dependencies and pip |
| `conf/`, `recipes/` | recipes and their groups, which you may change; every command run in this folder finds them |
| `data/`, `tokenizers/`, `weights/` | the files that the recipes above read |
"""


OnPart = Callable[[str, float], None]
"""Called with the name of the current task and the completed fraction of all work."""


@dataclass(frozen=True)
class WantedRecipe:
    name: str
    words: tuple[str, ...]
    """`recipe=NAME` and the keys that it overrides."""
    spec: RunSpec


@dataclass(frozen=True)
class WantedBundle:
    targets: tuple[WheelTarget, ...]
    """All targets have the same Python version."""
    extras: tuple[str, ...]
    recipes: tuple[WantedRecipe, ...]
    wheels: Path | None
    """The folder with the wheels; if None, pip downloads them according to its settings."""
    command: str


def make_bundle(folder: Path, wanted: WantedBundle, on_progress: OnPart) -> tuple[BundleRecord, list[str]]:
    """Write `folder`, which must be empty or not exist yet. Return the bundle's record, and notes on what else its
    recipes need.

    Raises FileExistsError if another process has filled it in the meantime, MachineError for missing wheels or a full
    disk, and the same errors as `copy_run_files` and `download`. On any error, everything that was written is
    removed."""
    folder = folder.expanduser().resolve()
    launches: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    with publishing(folder) as bundle:
        (bundle / WHEELS).mkdir()
        with tempfile.TemporaryDirectory(prefix="trainspec-wheels-") as staging:
            download(
                bundle / WHEELS,
                Path(staging),
                wanted.targets,
                wanted.extras,
                wanted.wheels,
                lambda line: on_progress(line, 0.1),
            )
        on_progress("conf and recipes", 0.7)
        copy_recipes(find_folders(Path.cwd()), bundle)
        for recipe in wanted.recipes:
            on_progress(f"data of {recipe.name}", 0.7)
            copied = copy_run_files(recipe.name, recipe.words, recipe.spec, bundle, _part_of(recipe.name, on_progress))
            launches[recipe.name] = tuple(copied.words)
            notes += [f"recipe={recipe.name}: {note}" for note in copied.notes]
        on_progress("digests", 0.9)
        python = wanted.targets[0].python
        wheels = [read_wheel(file) for file in (bundle / WHEELS).glob("*.whl")]
        version = next(wheel.version for wheel in wheels if wheel.name == NAME)
        shutil.copyfile(Path(installer.__file__), bundle / INSTALLER)
        lines = [shlex.join(words) for words in launches.values()] or ["recipe=quickstart"]
        page = _PAGE.format(
            version=version,
            python=python,
            installer=INSTALLER,
            record=RECORD,
            wheels=WHEELS,
            launches="\n".join(f"~/trainspec/bin/trainspec launch {line}" for line in lines),
        )
        write_text(bundle / README, page)
        files = sorted(path for path in bundle.rglob("*") if path.is_file())
        record = BundleRecord(
            version=version,
            date=datetime.now(UTC).date().isoformat(),
            python=python,
            platforms=tuple(target.platform for target in wanted.targets),
            extras=wanted.extras,
            command=wanted.command,
            launches=launches,
            files={
                path.relative_to(bundle).as_posix(): BundledFile(sha256_of(path), path.stat().st_size) for path in files
            },
        )
        # The record is written last, because it contains the digests of all other files.
        write_json(bundle / RECORD, to_plain(record))
    return record, notes


def _part_of(recipe: str, on_progress: OnPart) -> OnProgress:
    """Return a callback that maps the progress on a recipe's data to the range from 0.7 to 0.9 of all work."""
    return lambda phase, done, _: on_progress(f"{recipe}: {phase}", 0.7 + 0.2 * done)


# The files that a run of a recipe reads


@dataclass(frozen=True)
class CopiedRun:
    """How to launch one recipe with its copied files."""

    words: list[str]
    """The arguments of `trainspec launch` in the bundle's folder."""
    notes: list[str]
    """What the run needs but the bundle does not contain."""


def copy_recipes(folders: Folders, bundle: Path) -> None:
    """Copy trainspec's recipes and groups; the user's own files replace those of the same name."""
    for name, found in (("conf", folders.conf), ("recipes", folders.recipes)):
        for root in reversed(found):
            for file in sorted(root.rglob("*")):
                if file.suffix in OF_RECIPES and file.is_file():
                    _copy(file, bundle / name / file.relative_to(root))


def copy_run_files(
    name: str, words: Sequence[str], spec: RunSpec, bundle: Path, on_progress: OnProgress | None
) -> CopiedRun:
    """Copy the files read by a run of `spec` to folders with this name in `bundle`.

    Raises the same errors as `prepare`, and RecipeError if the run starts from another run, whose weights would have to
    be exported."""
    if spec.init.run is not None:
        message = f"`init.from` is the run {spec.init.from_}; a bundle cannot contain a run"
        hint = f"run trainspec export {spec.init.from_} --output FOLDER, then init.from=hf:FOLDER"
        raise RecipeError(Problem("unsupported", message, "init.from", hint))
    settings = []
    weights = spec.init.hugging_face or spec.init.other
    if weights is not None:
        _copy_folder(weights, bundle / WEIGHTS / name)
        settings.append(f"init.from={'hf:' if spec.init.hugging_face else ''}{WEIGHTS}/{name}")
    data = spec.data
    if spec.model.unit != "samples":
        settings += _copy_tokens(name, data, bundle, on_progress)
        if data.tokenizer.path is not None:
            target = f"{TOKENIZERS}/{name}/tokenizer.json"
            _copy(expand(data.tokenizer.path), bundle / target)
            settings.append(f"data.tokenizer.path={target}")
    elif data.source in SAMPLE_SOURCES and data.source not in GENERATED_SOURCES and data.path:
        _copy_folder(expand(data.path), bundle / DATA / name)
        settings.append(f"data.path={DATA}/{name}")
    changed = {word.partition("=")[0] for word in settings}
    kept = [word for word in words if word.partition("=")[0] not in changed]
    return CopiedRun([*kept, *settings], list(_copy_code(spec, bundle)))


def _copy_tokens(name: str, data: DataSpec, bundle: Path, on_progress: OnProgress | None) -> Iterator[str]:
    """Copy each source's tokens (existing token files are copied unchanged); yield the keys to set."""
    groups = {"data": {"": data.parts[""]}} if "" in data.parts else {"data.mixture": dict(data.mixture)}
    groups["data.validation"] = dict(data.validation)
    parts = {(group, key): part for group, of_group in groups.items() for key, part in of_group.items()}
    if all(part.source in GENERATED_SOURCES for part in parts.values()):
        return
    made = Collection.open(prepare(data, on_progress))
    tokens = {key: part.folder.path for key, part in made.parts.items()}
    for (group, key), part in parts.items():
        target = "/".join((DATA, name, *filter(None, (group.partition(".")[2], key))))
        where = f"{group}.{key}" if key else group
        if part.source in TOKEN_FILES:
            for file in find_files(data.with_part(part)):
                for one in (file, file.with_suffix(INDEX_SUFFIX)):
                    if one.is_file():
                        _copy(one, bundle / target / one.name)
        else:
            _copy_folder(made.validation[key].path if group == "data.validation" else tokens[key], bundle / target)
            yield f"{where}.source=tokens"
        yield f"{where}.path={target}"
    if data.masks_documents and not data.document_masks:
        yield "data.document_masks=true"


def _copy_code(spec: RunSpec, bundle: Path) -> Iterator[str]:
    """Copy the user's own files from this folder to the same path in the bundle, where recipes expect them. Yield a
    note for each file that is elsewhere. Data sources are not copied, because their tokens are."""
    for extension in worker_code_of(spec):
        source = find(extension)
        here = Path.cwd().resolve()
        if source.module or source.file is None:
            yield f"{extension.path} runs {source.describe()}: install its package too"
        elif not source.file.resolve().is_relative_to(here):
            yield f"{extension.path} runs {source.describe()}: copy that file, and set its new path in the recipe"
        else:
            for file in source_files(source):
                _copy(file, bundle / file.resolve().relative_to(here))


def _copy_folder(source: Path, target: Path) -> None:
    """Copy the regular files. The targets of links are copied as files, because checkpoint caches contain links."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            _copy(file, target / file.relative_to(source))


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
