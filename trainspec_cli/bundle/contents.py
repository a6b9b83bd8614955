"""What a recipe's run reads, copied into a bundle: recipes, data made into tokens, tokenizers, weights, one's own code.

A copy has another place, which the words say that launch the recipe from the folder of the bundle.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.composer.folders import SUFFIX, Folders
from trainspec_cli.corpus.collection import Collection
from trainspec_cli.corpus.prepare import prepare
from trainspec_cli.corpus.source_files import find_files
from trainspec_cli.corpus.token_files import SOURCES as TOKEN_FILES
from trainspec_cli.corpus.tokenise import OnProgress
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.extensions.source import find, source_files
from trainspec_cli.reading.files import expand
from trainspec_cli.spec.own_code import worker_code_of
from trainspec_cli.spec.recipe.data import SAMPLE_SOURCES, DataSpec, PartSpec
from trainspec_cli.spec.recipe.run import RunSpec

CONF, RECIPES, DATA, TOKENIZERS, WEIGHTS = "conf", "recipes", "data", "tokenizers", "weights"
OF_RECIPES = (SUFFIX, ".json", ".jsonl")
"""Suffixes of the files that recipes and their groups consist of."""
MADE_ON_THE_SPOT = ("python_stdlib", "phantom")
"""Sources that every machine has. Beside others, their tokens are carried all the same: all parts share a tokenizer."""
INDEX_SUFFIX = ".idx"


@dataclass(frozen=True)
class Carried:
    """What was copied for one recipe."""

    words: list[str]
    """After `trainspec launch`, in the folder of the bundle."""
    notes: list[str]
    """What the run needs and the bundle does not hold."""


def copy_recipes(folders: Folders, bundle: Path) -> None:
    """Copy the shipped recipes and groups, and over them those of one's own."""
    for name, found in ((CONF, folders.conf), (RECIPES, folders.recipes)):
        for root in reversed(found):
            for file in sorted(root.rglob("*")):
                if file.suffix in OF_RECIPES and file.is_file():
                    _copy(file, bundle / name / file.relative_to(root))


def carry(name: str, words: Sequence[str], spec: RunSpec, bundle: Path, on_progress: OnProgress | None) -> Carried:
    """Copy what the run of `spec` reads into `bundle`, below folders of this name. Raises as `prepare` does."""
    places = list(_carry_weights(name, spec, bundle))
    if spec.model.unit == "samples":
        places += _carry_samples(name, spec.data, bundle)
    else:
        places += _carry_text(name, spec.data, bundle, on_progress)
        places += _carry_tokenizer(name, spec.data, bundle)
    changed = {word.partition("=")[0] for word in places}
    kept = [word for word in words if word.partition("=")[0] not in changed]
    return Carried([*kept, *places], list(_carry_code(spec, bundle)))


def _carry_weights(name: str, spec: RunSpec, bundle: Path) -> Iterator[str]:
    """Copy a Hugging Face folder, or one of another project. Raises RecipeError for a run, which `export` writes."""
    if spec.init.run is not None:
        message = f"`init.from` is {spec.init.from_}, a run, which a bundle does not hold"
        hint = f"type trainspec export {spec.init.from_} --output FOLDER, then init.from=hf:FOLDER"
        raise RecipeError(Problem("unsupported", message, "init.from", hint))
    folder = spec.init.hugging_face or spec.init.other
    if folder is not None:
        _copy_folder(folder, bundle / WEIGHTS / name)
        yield f"init.from={'hf:' if spec.init.hugging_face else ''}{WEIGHTS}/{name}"


def _carry_samples(name: str, data: DataSpec, bundle: Path) -> Iterator[str]:
    if data.source in SAMPLE_SOURCES and data.source not in MADE_ON_THE_SPOT and data.path:
        _copy_folder(expand(data.path), bundle / DATA / name)
        yield f"data.path={DATA}/{name}"


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
        found = made.validation[key].path if group == "data.validation" else tokens[key]
        yield from _carry_part(data.with_part(part), part, found, where, place, bundle)
    if data.masks_documents and not data.document_masks:
        yield "data.document_masks=true"


def _carry_part(data: DataSpec, part: PartSpec, tokens: Path, where: str, place: str, bundle: Path) -> Iterator[str]:
    """`tokens`: the folder that was made of it."""
    if part.source in TOKEN_FILES:
        for file in find_files(data):
            for one in (file, file.with_suffix(INDEX_SUFFIX)):
                if one.is_file():
                    _copy(one, bundle / place / one.name)
    else:
        _copy_folder(tokens, bundle / place)
        yield f"{where}.source=tokens"
    yield f"{where}.path={place}"


def _carry_tokenizer(name: str, data: DataSpec, bundle: Path) -> Iterator[str]:
    if data.tokenizer.path is not None:
        place = f"{TOKENIZERS}/{name}/tokenizer.json"
        _copy(expand(data.tokenizer.path), bundle / place)
        yield f"data.tokenizer.path={place}"


def _carry_code(spec: RunSpec, bundle: Path) -> Iterator[str]:
    """Copy one's own files from below this folder to the same place in the bundle, where recipes seek them; yield what
    lies elsewhere. Sources of data are left out: their tokens are carried."""
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
