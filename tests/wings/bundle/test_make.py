"""A bundle contains what its recipes read: launched with the bundle's arguments, they read the same data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lab import own_model

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.session.recipe.load import load
from trainspec_cli.wings.bundle import CopiedRun, copy_recipes, copy_run_files

Write = Callable[[str, str], Path]
TEXTS = {
    name: "".join(f"the {name} brown fox {number} jumps over\\n\n" for number in range(99))
    for name in ("quick", "slow")
}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def project(write: Write, tmp_path: Path) -> Path:
    """The user's folder, which does not exist on the machine of the bundle."""
    for name, text in TEXTS.items():
        write(f"texts/{name}.jsonl", "\n".join(f'{{"text": "{line}"}}' for line in text.splitlines() if line))
    return tmp_path


def copied_of(project: Path, *words: str) -> tuple[CopiedRun, Path]:
    bundle = project.parent / f"{project.name}-bundle"
    copy_recipes(find_folders(project), bundle)
    return copy_run_files("own", words, load(words).spec, bundle, None), bundle


def tokens_of(words: list[str]) -> dict[str, list[int]]:
    made = Collection.open(prepare(load(words).spec.data))
    folders = {name: part.folder for name, part in made.parts.items()} | dict(made.validation)
    return {name: folder.tokens("train", 0, folder.num_tokens("train")).tolist() for name, folder in folders.items()}


def reads_the_same(project: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> CopiedRun:
    """Check that the recipe reads the same tokens from the bundle, without the user's folder and cache."""
    before = tokens_of(list(words))
    copied, bundle = copied_of(project, *words)
    monkeypatch.chdir(bundle)
    shutil.rmtree(project)
    assert tokens_of(copied.words) == before
    assert all(before.values())
    return copied


SMALL = ("recipe=tiny", "data=jsonl", "data.seq_len=16", "data.heldout_fraction=0.1")


def test_text_is_copied_as_tokens(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = reads_the_same(project, monkeypatch, *SMALL, "data.path=texts/quick.jsonl")
    assert copied.words[-2:] == ["data.source=tokens", "data.path=data/own"]
    assert copied.notes == []


def test_parts_of_a_mixture_and_validation_sets_are_copied(
    project: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    write(
        "recipes/mixed.yaml",
        """\
        defaults:
          - override /model: llama_tiny
          - override /data: mixture
          - override /cluster: cpu
        data:
          seq_len: 16
          heldout_fraction: 0.1
          tokenizer: {path: tokenizer.json}
          mixture:
            one: {source: jsonl, path: texts/quick.jsonl, weight: 2}
            code: {source: python_stdlib}
          validation:
            two: {source: jsonl, path: texts/slow.jsonl}
          max_bytes: 30000
        batching: {global_batch_size: 4}
        train: {max_steps: 2}
        optim: {lr: 1e-3}
        """,
    )
    folder = Collection.open(prepare(load([*SMALL, "data.path=texts/quick.jsonl"]).spec.data)).main.path
    shutil.copy(folder / "tokenizer.json", project)
    copied = reads_the_same(project, monkeypatch, "recipe=mixed")
    assert "data.mixture.code.path=data/own/mixture/code" in copied.words
    assert "data.validation.two.path=data/own/validation/two" in copied.words
    assert "data.tokenizer.path=tokenizers/own/tokenizer.json" in copied.words
    assert load(copied.words).spec.data.mixture["one"].weight == 2


def test_generated_data_is_not_copied(project: Path) -> None:
    copied, bundle = copied_of(project, "recipe=tiny")
    assert copied.words == ["recipe=tiny"]
    assert sorted(path.name for path in bundle.iterdir()) == ["conf", "recipes"]


def test_token_files_are_copied_unchanged(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "ids").mkdir()
    np.arange(200, dtype="<u2").tofile(project / "ids" / "train.bin")
    np.arange(50, dtype="<u2").tofile(project / "ids" / "val.bin")
    words = ("recipe=tiny", "data=nanogpt", "data.path=ids", "data.seq_len=16")
    copied = reads_the_same(project, monkeypatch, *words)
    assert copied.words[-1] == "data.path=data/own"


def test_conversations_stay_separate_documents(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = reads_the_same(project, monkeypatch, "recipe=tiny_chat")
    assert load(copied.words).spec.data.masks_documents


def test_images_are_copied(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat", "dog"):
        (project / "pictures" / name).mkdir(parents=True)
        np.save(project / "pictures" / name / "1.npy", np.zeros((8, 8, 1), np.uint8))
    copied, bundle = copied_of(
        project, "recipe=tiny_resnet", "data=images", "data.path=pictures", "model.in_channels=1"
    )
    assert copied.words[-1] == "data.path=data/own"
    assert (bundle / "data" / "own" / "dog" / "1.npy").read_bytes() == (project / "pictures/dog/1.npy").read_bytes()


def test_weights_and_their_tokenizer_are_copied(
    project: Path, hf_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(hf_folder("qwen3"), project / "weights_of_mine", dirs_exist_ok=True)
    words = ("recipe=finetune_chat", "init.from=hf:weights_of_mine", "data=jsonl", "data.path=texts/quick.jsonl")
    copied = reads_the_same(project, monkeypatch, *words, "data.seq_len=16", "cluster=cpu")
    spec = load(copied.words).spec
    assert spec.init.from_ == "hf:weights/own" and spec.init.hugging_face == Path("weights/own")


def test_a_recipe_that_starts_from_a_run_is_refused(project: Path) -> None:
    spec = load(["recipe=tiny"]).spec
    object.__setattr__(spec.init, "from_", "runs/first")
    with pytest.raises(RecipeError) as caught:
        copy_run_files("own", ("recipe=tiny",), spec, project / "bundle", None)
    assert "trainspec export runs/first" in caught.value.problems[0].hint


def test_own_code_in_this_folder_is_copied_and_code_elsewhere_is_noted(project: Path) -> None:
    source = Path(own_model.__file__)
    (project / "code").mkdir()
    shutil.copy(source, project / "code" / "mine.py")
    words = ("recipe=tiny", "train.loss=code/mine.py:smoothed", "train.loss_options.smoothing=0.3")
    copied, bundle = copied_of(project, *words)
    assert (bundle / "code" / "mine.py").read_bytes() == source.read_bytes()
    assert copied.notes == []
    copied, _ = copied_of(project, *words[:1], f"train.loss={source}:smoothed", *words[2:])
    (note,) = copied.notes
    assert "train.loss" in note and str(source) in note


def test_own_recipes_replace_shipped_ones(project: Path, write: Write) -> None:
    write("recipes/tiny.yaml", "mine: 1\n")
    write("recipes/notes.txt", "no recipe")
    copy_recipes(find_folders(project), project / "bundle")
    assert (project / "bundle/recipes/tiny.yaml").read_text() == "mine: 1\n"
    assert not (project / "bundle/recipes/notes.txt").exists()
    assert (project / "bundle/conf/data/tokens.yaml").is_file()
