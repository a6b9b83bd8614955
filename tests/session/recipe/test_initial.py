"""What `init.from` completes and refuses; tests/engine/build/test_initial.py trains from real weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainspec_cli.data.huggingface.config import write_config
from trainspec_cli.data.huggingface.safetensors import make_header, parameters
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.recipe.load import examine

MODEL = DecoderModel(2, 64, 4, 2, 16, 160, 300, rope_theta=5e5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose tensors are all zeros."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_config(MODEL, 64, "float32")))
    (folder / "tokenizer.json").write_text("{}")
    held = {piece.tensor: ("F32", piece.tensor_shape) for part in parameters(MODEL) for piece in part.pieces}
    content = sum(part.numel for part in parameters(MODEL)) * 4
    (folder / "model.safetensors").write_bytes(make_header(held) + bytes(content))
    return folder


def told(*arguments: str) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in examine(arguments).problems]


def test_one_line_gives_model_tokenizer_and_weights(folder: Path, write) -> None:
    write("recipes/mine.yaml", "train: {max_steps: 3}\nbatching: {global_batch_size: 8}\n")
    examined = examine(["recipe=mine", f"init.from=hf:{folder}"])
    assert examined.problems == []
    assert (examined.draft.model.hidden_size, examined.draft.model.rope_theta) == (64, 5e5)
    assert examined.draft.data.tokenizer.path == str(folder / "tokenizer.json")
    assert str(examined.composed.origins["model.hidden_size"]) == f"{folder}/config.json:1"


def test_a_name_of_the_hub_is_the_checkpoint_in_its_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tmp_path / "cache/models--some-org--tiny/snapshots"
    (snapshots.parent / "refs").mkdir(parents=True)
    snapshots.mkdir()
    (snapshots.parent / "refs/main").write_text("a" * 40)
    monkeypatch.delenv("TRAINSPEC_HUB_MIRROR", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (found,) = examine(["recipe=tiny", "model=auto", "init.from=hf:some-org/tiny"]).problems
    assert f"{tmp_path}/cache" in found.message and "some-org/tiny (main)" in found.message
    assert "trainspec get hf:some-org/tiny," in found.hint
    (snapshots / ("a" * 40)).symlink_to(folder)
    examined = examine(["recipe=tiny", "model=auto", "init.from=hf:some-org/tiny"])
    assert (examined.problems, examined.draft.model.hidden_size) == ([], 64)
    assert examined.draft.data.tokenizer.path == str(snapshots / ("a" * 40) / "tokenizer.json")


def test_keys_are_added_to_an_auto_model(folder: Path) -> None:
    examined = examine(["recipe=tiny", "model=auto", f"init.from=hf:{folder}", "model.name=mine"])
    assert (examined.problems, examined.draft.model.name, examined.draft.model.num_layers) == ([], "mine", 2)


def test_a_recipe_that_contradicts_the_checkpoint_is_told_the_key(folder: Path) -> None:
    vocabulary, theta = told("recipe=tiny", f"init.from=hf:{folder}")
    assert vocabulary[0] == "model.vocab_size" and theta[0] == "model.rope_theta"
    for message, *values in ((vocabulary[1], " 512, ", " 300"), (theta[1], " 10000.0, ", " 500000.0")):
        assert all(value in message for value in (*values, f"{folder}/config.json"))
    found = examine(["recipe=tiny", "model=auto", f"init.from=hf:{folder}", "model.norm_eps=0.1"]).problems
    assert [(problem.path, problem.where()) for problem in found] == [("model.norm_eps", "command line:4")]


def test_a_model_that_nobody_names() -> None:
    (problem,) = examine(["recipe=tiny", "model=auto"]).problems
    assert (problem.path, problem.code) == ("model", "missing_value")
    assert "init.from=hf:FOLDER" in problem.hint, "weights come with their model"


@pytest.mark.parametrize(
    ("arguments", "to_run", "missing"),
    [
        ((), True, ["init.from"]),
        ((), False, ["init.from"]),
        (("model=llama_tiny",), True, ["init.from"]),
        (("model=llama_tiny",), False, []),
        (("model=llama_tiny", "init.from=null"), True, []),
    ],
)
def test_a_recipe_that_asks_for_weights_names_them_first(
    arguments: tuple[str, ...], to_run: bool, missing: list[str]
) -> None:
    """It writes `???`, and does not train another model from scratch; a plan of a model that is named does without."""
    examined = examine(["recipe=finetune_chat", *arguments], to_run=to_run)
    problems = [one for one in examined.problems if not one.path.startswith("data.")]
    assert [(one.path, one.code) for one in problems] == [(path, "missing_value") for path in missing]
    assert all("init.from=hf:FOLDER" in one.hint for one in problems)
    assert missing or examined.draft.init.from_ is None


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    for arguments, lacks in (
        (["model=auto", f"init.from=hf:{tmp_path}"], "config.json"),
        ([f"init.from={tmp_path}"], "run"),
    ):
        ((path, message),) = told("recipe=tiny", *arguments)
        assert path == "init.from" and str(tmp_path) in message and f" {lacks}" in message


@pytest.mark.parametrize(
    ("trained", "asked", "is_refused"),
    [
        ((), (), False),
        ((), ("lora.rank=2",), False),
        (("lora.rank=2",), ("lora.rank=2",), False),
        (("lora.rank=2",), ("lora.rank=4",), True),
        (("lora.rank=2",), (), True),
    ],
    ids=["neither", "new adapters", "the same", "of another rank", "left behind"],
)
def test_a_run_is_begun_with_where_its_adapters_are_not_left_behind(
    make_run: Callable[..., RunDir], trained: tuple[str, ...], asked: tuple[str, ...], is_refused: bool
) -> None:
    run = make_run(*trained)
    write_json(run.run_json, read_json(run.run_json) | {"data_dir": None})
    found = told("recipe=tiny", f"init.from={run.root}", *asked)
    assert [(path, "LoRA adapters" in message) for path, message in found] == ([("lora", True)] if is_refused else [])


def test_faults_of_the_tensors_are_found_before_anything_runs(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.norm.height"))
    lacks, surplus = told("recipe=tiny", "model=auto", f"init.from=hf:{folder}")
    assert {lacks[0], surplus[0]} == {"init.from"}
    assert "model.norm.weight" in lacks[1] and "model.norm.height" not in lacks[1]
    assert "model.norm.height" in surplus[1] and "model.norm.weight" not in surplus[1]


def test_a_model_that_is_written_out_key_by_key_needs_no_group() -> None:
    keys = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 160}
    asked = [f"model.{key}={value}" for key, value in (keys | {"vocab_size": 512}).items()]
    examined = examine(["recipe=tiny", "model=auto", *asked])
    assert (examined.problems, examined.draft.model.num_layers) == ([], 2)


def test_a_run_without_a_checkpoint_is_no_beginning(make_run: Callable[..., RunDir]) -> None:
    run = make_run(step=0)
    write_json(run.run_json, read_json(run.run_json) | {"data_dir": None})
    ((path, message),) = told("recipe=tiny", f"init.from={run.root}")
    assert path == "init.from" and str(run.root) in message and "checkpoint" in message


def test_weights_are_looked_at_where_the_run_starts_here_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    asked = ["recipe=tiny", "model=auto", f"init.from=hf:{folder}"]
    assert [problem.path for problem in examine(asked).problems] == ["init.from"]
    assert examine(asked, to_run=False).problems == []


def test_a_model_of_another_family_contradicts_the_checkpoint(folder: Path) -> None:
    found = dict(told("recipe=tiny_unet3d", f"init.from=hf:{folder}"))
    assert " conv, " in found["model.family"] and found["model.family"].endswith(" decoder")


def test_token_folders_take_the_tokenizer_of_the_checkpoint_for_conversations_to_validate_with(folder: Path) -> None:
    asked = ["recipe=tiny", "model=auto", f"init.from=hf:{folder}", "data=tokens", f"data.path={folder}"]
    assert examine(asked).draft.data.tokenizer.path is None
    for source, path in (("jsonl", None), ("chat", str(folder / "tokenizer.json"))):
        more = [f"+data.validation.talks.source={source}", "+data.validation.talks.path=x"]
        assert examine([*asked, *more]).draft.data.tokenizer.path == path


def test_the_recipes_own_tokenizer_stays(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    asked = ["recipe=tiny", "model=auto", f"init.from=hf:{folder}"]
    assert examine(asked).draft.data.tokenizer.path == str(folder / "tokenizer.json")
    named = examine([*asked, f"data.tokenizer.path={tmp_path}/mine.json"])
    assert named.draft.data.tokenizer.path == f"{tmp_path}/mine.json"
