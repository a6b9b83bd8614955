"""Make a bundle: wheels, recipes and what their runs read, in a folder that appears when it is whole.

A run reads recipes, data made into tokens, tokenizers, weights and the user's own code. A copy has another place, which
the words state that launch the recipe from the folder of the bundle.
"""

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
"""Suffixes of the files that recipes and their groups consist of."""
MADE_ON_THE_SPOT = ("python_stdlib", "phantom")
"""Sources that every machine has. Next to other sources their tokens are carried too: all parts share a tokenizer."""
INDEX_SUFFIX = ".idx"
_PAGE = """\
# trainspec {version}, without a network

This folder installs trainspec and trains where there is no way out. It needs Python {python}.

```sh
python{python} {installer} ~/trainspec
{launches}
```

`{installer}` compares every file with `{record}` first, and prints what is missing or altered; `--check`
does that alone.
pip reads no settings and no index.

| what | is |
|---|---|
| `{record}` | what the bundle is for, and the sha256 of every file |
| `{wheels}/` | trainspec, all that it depends on, and pip |
| `conf/`, `recipes/` | recipes and their groups, to be changed; found by every command that is typed in this folder |
| `data/`, `tokenizers/`, `weights/` | what the recipes named above read |
"""


ShowPart = Callable[[str, float], None]
"""Takes what is being done, and which part of the whole is done."""


@dataclass(frozen=True)
class WantedRecipe:
    name: str
    words: tuple[str, ...]
    """`recipe=NAME` and what is changed of it."""
    spec: RunSpec


@dataclass(frozen=True)
class WantedBundle:
    targets: tuple[WheelTarget, ...]
    """All of one Python."""
    extras: tuple[str, ...]
    recipes: tuple[WantedRecipe, ...]
    wheels: Path | None
    """The folder that wheels are taken from; None: pip gets them from where its settings say."""
    command: str


def make_bundle(folder: Path, wanted: WantedBundle, on_progress: ShowPart) -> tuple[BundleRecord, list[str]]:
    """Write `folder`, which must not exist or be empty; return its record, and what runs need that it does not hold.

    Raises FileExistsError where it was filled meanwhile, MachineError for wheels that cannot be got or a full disk, and
    as `carry` and `download` do; nothing is left then.
    """
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
            carried = carry(recipe.name, recipe.words, recipe.spec, bundle, _part_of(recipe.name, on_progress))
            launches[recipe.name] = tuple(carried.words)
            notes += [f"recipe={recipe.name}: {note}" for note in carried.notes]
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
        # After all others: it holds their digests.
        write_json(bundle / RECORD, to_plain(record))
    return record, notes


def _part_of(recipe: str, on_progress: ShowPart) -> OnProgress:
    """Return the progress of a recipe's data, as the part of the whole between 0.7 and 0.9."""
    return lambda phase, done, _: on_progress(f"{recipe}: {phase}", 0.7 + 0.2 * done)


# What a recipe's run reads


@dataclass(frozen=True)
class Carried:
    """What was copied for one recipe."""

    words: list[str]
    """After `trainspec launch`, in the folder of the bundle."""
    notes: list[str]
    """What the run needs and the bundle does not hold."""


def copy_recipes(folders: Folders, bundle: Path) -> None:
    """Copy the shipped recipes and groups, and over them the user's own."""
    for name, found in (("conf", folders.conf), ("recipes", folders.recipes)):
        for root in reversed(found):
            for file in sorted(root.rglob("*")):
                if file.suffix in OF_RECIPES and file.is_file():
                    _copy(file, bundle / name / file.relative_to(root))


def carry(name: str, words: Sequence[str], spec: RunSpec, bundle: Path, on_progress: OnProgress | None) -> Carried:
    """Copy what the run of `spec` reads into `bundle`, below folders of this name.

    Raises as `prepare` does, and RecipeError where it begins with the weights of a run, which `export` writes.
    """
    if spec.init.run is not None:
        message = f"`init.from` is {spec.init.from_}, a run, which a bundle does not hold"
        hint = f"type trainspec export {spec.init.from_} --output FOLDER, then init.from=hf:FOLDER"
        raise RecipeError(Problem("unsupported", message, "init.from", hint))
    places = []
    weights = spec.init.hugging_face or spec.init.other
    if weights is not None:
        _copy_folder(weights, bundle / WEIGHTS / name)
        places.append(f"init.from={'hf:' if spec.init.hugging_face else ''}{WEIGHTS}/{name}")
    data = spec.data
    if spec.model.unit != "samples":
        places += _carry_text(name, data, bundle, on_progress)
        if data.tokenizer.path is not None:
            place = f"{TOKENIZERS}/{name}/tokenizer.json"
            _copy(expand(data.tokenizer.path), bundle / place)
            places.append(f"data.tokenizer.path={place}")
    elif data.source in SAMPLE_SOURCES and data.source not in MADE_ON_THE_SPOT and data.path:
        _copy_folder(expand(data.path), bundle / DATA / name)
        places.append(f"data.path={DATA}/{name}")
    changed = {word.partition("=")[0] for word in places}
    kept = [word for word in words if word.partition("=")[0] not in changed]
    return Carried([*kept, *places], list(_carry_code(spec, bundle)))


def _carry_text(name: str, data: DataSpec, bundle: Path, on_progress: OnProgress | None) -> Iterator[str]:
    """Copy the tokens of each source, or files of tokens as they are."""
    groups = {"data": {"": data.parts[""]}} if "" in data.parts else {"data.mixture": dict(data.mixture)}
    groups["data.validation"] = dict(data.validation)
    parts = {(group, key): part for group, of_group in groups.items() for key, part in of_group.items()}
    if all(part.source in MADE_ON_THE_SPOT for part in parts.values()):
        return
    made = Collection.open(prepare(data, on_progress))
    tokens = {key: part.folder.path for key, part in made.parts.items()}
    for (group, key), part in parts.items():
        place = "/".join((DATA, name, *filter(None, (group.partition(".")[2], key))))
        where = f"{group}.{key}" if key else group
        if part.source in TOKEN_FILES:
            for file in find_files(data.with_part(part)):
                for one in (file, file.with_suffix(INDEX_SUFFIX)):
                    if one.is_file():
                        _copy(one, bundle / place / one.name)
        else:
            _copy_folder(made.validation[key].path if group == "data.validation" else tokens[key], bundle / place)
            yield f"{where}.source=tokens"
        yield f"{where}.path={place}"
    if data.masks_documents and not data.document_masks:
        yield "data.document_masks=true"


def _carry_code(spec: RunSpec, bundle: Path) -> Iterator[str]:
    """Copy the user's own files from below this folder to the same place in the bundle, where recipes seek them; yield
    what lies elsewhere. Sources of data are left out: their tokens are carried."""
    for extension in worker_code_of(spec):
        source = find(extension)
        here = Path.cwd().resolve()
        if source.module or source.file is None:
            yield f"{extension.path} runs {source.describe()}: install its package too"
        elif not source.file.resolve().is_relative_to(here):
            yield f"{extension.path} runs {source.describe()}: copy that file, and name its new place"
        else:
            for file in source_files(source):
                _copy(file, bundle / file.resolve().relative_to(here))


def _copy_folder(source: Path, target: Path) -> None:
    """Copy regular files alone; what a link leads to is copied as a file, as caches of checkpoints keep theirs."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            _copy(file, target / file.relative_to(source))


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
