"""`trainspec new`: files that can be used at once, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.session.planning.plan import plan_recipe
from trainspec_cli.session.recipe.new import KINDS, new_file

SIZES = ["num_layers=2", "hidden_size=64", "num_heads=4", "num_kv_heads=2", "ffn_size=128", "vocab_size=512"]
CHIP = ["vendor=acme", "bf16_tflops=1000", "memory_gb=100", "memory_tb_per_s=4", "link_gb_per_s=400", "link_kind=mesh"]
CLUSTER = ["accelerator=x1", "num_nodes=1", "devices_per_node=2", "nic_gbit_per_s=400"]
RUN = ["data.seq_len=64", "batching.global_batch_size=8", "train.max_steps=5", "optim.lr=1e-3"]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def codes(error: RecipeError) -> list[tuple[str, str]]:
    return [(problem.code, problem.path) for problem in error.problems]


def test_a_model_a_chip_a_cluster_and_a_recipe_are_planned_together() -> None:
    for kind, name, values in (
        ("model", "mine", SIZES),
        ("accelerator", "x1", CHIP),
        ("cluster", "ours", CLUSTER),
        ("recipe", "first", ["model=mine", "data=python_stdlib", "cluster=ours", *RUN]),
    ):
        assert run(["new", kind, name, *values]) == 0
    planned = plan_recipe(["recipe=first"])
    assert (planned.spec.model.name, planned.device, planned.capacity.world_size) == ("mine", "x1", 2)
    assert planned.spec.model.head_dim == 16  # 64 / 4: derived
    assert planned.spec.train.max_steps == 5 and planned.best is not None


def test_a_file_builds_on_another() -> None:
    new_file("accelerator", "x1", CHIP, "", None)
    new_file("accelerator", "x2", ["memory_gb=200"], "x1", None)
    new_file("recipe", "short", ["train.max_steps=3"], "tiny", None)
    assert yaml.safe_load(Path("conf/accelerator/x2.yaml").read_text())["defaults"] == ["x1"]
    planned = plan_recipe(["recipe=short", "cluster=h100", "cluster.accelerator=x2", "cluster.num_nodes=1"])
    chip = planned.spec.cluster.accelerator
    assert chip is not None and (chip.name, chip.memory_gb, chip.bf16_tflops) == ("x2", 200, 1000)
    assert planned.spec.train.max_steps == 3


def test_the_model_of_a_folder_is_described() -> None:
    config = {"model_type": "gemma", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    Path("folder").mkdir()
    more = {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 99}
    Path("folder/config.json").write_text(json.dumps(config | more))
    new_file("model", "mine", ["num_layers=3"], "hf:folder", None)
    written = yaml.safe_load(Path("conf/model/mine.yaml").read_text())
    assert (written["num_layers"], written["head_dim"], written["norm_offset"]) == (3, 8, True)
    assert "qk_norm" not in written
    assert plan_recipe(["model=mine", "cluster=h100", "cluster.num_nodes=1"]).best is not None


@pytest.mark.parametrize("kind", KINDS)
def test_missing_values_are_asked_for_or_named(kind: str) -> None:
    with pytest.raises(RecipeError) as found:
        new_file(kind, "mine", [], "", None)
    assert [problem.code for problem in found.value.problems] == ["missing_value"]
    asked: dict[str, str] = {}
    answers = {"link_kind": "mesh", "vendor": "acme", "accelerator": "h100_sxm", "cluster": "h100", "data": "tokens"}

    def ask(key: str, meaning: str) -> str:
        asked[key] = meaning
        return answers.get(key, "llama_tiny" if key == "model" else "1")

    path, _ = new_file(kind, "mine", [], "", ask)
    assert list(asked) == [*KINDS[kind].choices, *KINDS[kind].asked] and all(asked.values())
    read = yaml.safe_load(path.read_text())
    assert all(key.split(".")[0] in read for key in KINDS[kind].asked)


def test_an_existing_file_is_never_changed() -> None:
    path, _ = new_file("model", "mine", SIZES, "", None)
    before = path.read_bytes()
    with pytest.raises(RecipeError) as found:
        new_file("model", "mine", [*SIZES[1:], "num_layers=9"], "", None)
    assert codes(found.value) == [("output_exists", "")] and path.read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "source", "code"),
    [
        ("model", "mine", ["hiden_size=64"], "", "unknown_key"),
        ("model", "mine", [*SIZES[1:], "num_layers=x"], "", "wrong_type"),
        ("model", "../mine", SIZES, "", "wrong_name"),
        ("model", "mine", [], "llama9", "unknown_option"),
        ("cluster", "mine", [], "hf:folder", "usage"),
        ("model", "mine", [], "hf:nowhere", "missing_file"),
        ("recipe", "mine", ["train.max_stps=3"], "tiny", "unknown_key"),
        ("accelerator", "mine", ["bf16_tflops"], "h100_sxm", "bad_override"),
    ],
)
def test_mistakes_are_refused(kind: str, name: str, arguments: list[str], source: str, code: str) -> None:
    with pytest.raises(RecipeError) as found:
        new_file(kind, name, arguments, source, None)
    assert [problem.code for problem in found.value.problems] == [code]
    assert not list(Path().rglob("*.yaml"))


def test_a_recipe_with_a_contradiction_is_written_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", "recipe", "mine", "--from", "tiny", "layout.dp_shard=3"]) == 2
    assert Path("recipes/mine.yaml").is_file() and "layout" in capsys.readouterr().err
    assert run(["new", "modl", "mine"]) == 2
