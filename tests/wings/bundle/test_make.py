"""What a recipe reads goes along: launched from the bundle, by the words that it says, the recipe reads the same."""

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
from trainspec_cli.wings.bundle import Carried, carry, copy_recipes

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
    """A user's own folder, which is gone where the bundle is unpacked."""
    for name, text in TEXTS.items():
        write(f"texts/{name}.jsonl", "\n".join(f'{{"text": "{line}"}}' for line in text.splitlines() if line))
    return tmp_path


def carried_of(project: Path, *words: str) -> tuple[Carried, Path]:
    bundle = project.parent / f"{project.name}-bundle"
    copy_recipes(find_folders(project), bundle)
    return carry("own", words, load(words).spec, bundle, None), bundle


def tokens_of(words: list[str]) -> dict[str, list[int]]:
    made = Collection.open(prepare(load(words).spec.data))
    folders = {name: part.folder for name, part in made.parts.items()} | dict(made.validation)
    return {name: folder.tokens("train", 0, folder.num_tokens("train")).tolist() for name, folder in folders.items()}


def reads_the_same(project: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Carried:
    """Check that the bundle gives the tokens that the recipe had, once the user's folder and cache are gone."""
    before = tokens_of(list(words))
    carried, bundle = carried_of(project, *words)
    monkeypatch.chdir(bundle)
    shutil.rmtree(project)
    assert tokens_of(carried.words) == before
    assert all(before.values())
    return carried


SMALL = ("recipe=tiny", "data=jsonl", "data.seq_len=16", "data.heldout_fraction=0.1")


def test_text_goes_along_as_tokens(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = reads_the_same(project, monkeypatch, *SMALL, "data.path=texts/quick.jsonl")
    assert carried.words[-2:] == ["data.source=tokens", "data.path=data/own"]
    assert carried.notes == []


def test_parts_of_a_mixture_and_sets_to_judge_by_go_along(
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
    carried = reads_the_same(project, monkeypatch, "recipe=mixed")
    assert "data.mixture.code.path=data/own/mixture/code" in carried.words
    assert "data.validation.two.path=data/own/validation/two" in carried.words
    assert "data.tokenizer.path=tokenizers/own/tokenizer.json" in carried.words
    assert load(carried.words).spec.data.mixture["one"].weight == 2


def test_the_standard_library_stays_where_every_machine_has_it(project: Path) -> None:
    carried, bundle = carried_of(project, "recipe=tiny")
    assert carried.words == ["recipe=tiny"]
    assert sorted(path.name for path in bundle.iterdir()) == ["conf", "recipes"]


def test_files_of_tokens_go_along_as_they_are(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "ids").mkdir()
    np.arange(200, dtype="<u2").tofile(project / "ids" / "train.bin")
    np.arange(50, dtype="<u2").tofile(project / "ids" / "val.bin")
    words = ("recipe=tiny", "data=nanogpt", "data.path=ids", "data.seq_len=16")
    carried = reads_the_same(project, monkeypatch, *words)
    assert carried.words[-1] == "data.path=data/own"


def test_conversations_stay_apart(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = reads_the_same(project, monkeypatch, "recipe=tiny_chat")
    assert load(carried.words).spec.data.masks_documents


def test_pictures_go_along(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat", "dog"):
        (project / "pictures" / name).mkdir(parents=True)
        np.save(project / "pictures" / name / "1.npy", np.zeros((8, 8, 1), np.uint8))
    carried, bundle = carried_of(
        project, "recipe=tiny_resnet", "data=images", "data.path=pictures", "model.in_channels=1"
    )
    assert carried.words[-1] == "data.path=data/own"
    assert (bundle / "data" / "own" / "dog" / "1.npy").read_bytes() == (project / "pictures/dog/1.npy").read_bytes()


def test_weights_and_their_tokenizer_go_along(
    project: Path, hf_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(hf_folder("qwen3"), project / "weights_of_mine", dirs_exist_ok=True)
    words = ("recipe=finetune_chat", "init.from=hf:weights_of_mine", "data=jsonl", "data.path=texts/quick.jsonl")
    carried = reads_the_same(project, monkeypatch, *words, "data.seq_len=16", "cluster=cpu")
    spec = load(carried.words).spec
    assert spec.init.from_ == "hf:weights/own" and spec.init.hugging_face == Path("weights/own")


def test_a_run_is_no_beginning_that_goes_along(project: Path) -> None:
    spec = load(["recipe=tiny"]).spec
    object.__setattr__(spec.init, "from_", "runs/first")
    with pytest.raises(RecipeError) as caught:
        carry("own", ("recipe=tiny",), spec, project / "bundle", None)
    assert "trainspec export runs/first --output FOLDER" in caught.value.problems[0].hint


def test_ones_own_code_goes_along_from_below_this_folder_and_is_told_from_elsewhere(project: Path) -> None:
    source = Path(own_model.__file__)
    (project / "code").mkdir()
    shutil.copy(source, project / "code" / "mine.py")
    words = ("recipe=tiny", "train.loss=code/mine.py:smoothed", "train.loss_options.smoothing=0.3")
    carried, bundle = carried_of(project, *words)
    assert (bundle / "code" / "mine.py").read_bytes() == source.read_bytes()
    assert carried.notes == []
    carried, _ = carried_of(project, *words[:1], f"train.loss={source}:smoothed", *words[2:])
    assert carried.notes == [f"train.loss runs smoothed of {source}: copy that file, and name its new place"]


def test_ones_own_recipes_come_before_the_shipped_ones(project: Path, write: Write) -> None:
    write("recipes/tiny.yaml", "mine: 1\n")
    write("recipes/notes.txt", "no recipe")
    copy_recipes(find_folders(project), project / "bundle")
    assert (project / "bundle/recipes/tiny.yaml").read_text() == "mine: 1\n"
    assert not (project / "bundle/recipes/notes.txt").exists()
    assert (project / "bundle/conf/data/tokens.yaml").is_file()
