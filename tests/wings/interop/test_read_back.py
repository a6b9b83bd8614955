"""Engines' files read back: an emitted file gives the same recipe, and unknown keys are listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.drawing import slow_after
from wings.interop import (
    test_accelerate,
    test_axolotl,
    test_deepspeed,
    test_maxtext,
    test_megatron,
    test_megatron_bridge,
    test_torchtitan,
)
from wings.interop.emitting import files_in, translated_for

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.interop import READERS, TARGETS, ReadBack, guess_engine, read_back, read_source
from trainspec_cli.wings.interop.commands.import_recipe import import_file, write_recipe

FILES = {
    "deepspeed": "ds_config.json",
    "accelerate": "accelerate.yaml",
    "torchtitan": "trainspec_run.py",
    "megatron": "pretrain.sh",
    "maxtext": "maxtext.yml",
    "megatron-bridge": "trainspec_bridge.py",
    "axolotl": "axolotl.yml",
}
RUNS = {
    "deepspeed": test_deepspeed.RUNS,
    "accelerate": test_accelerate.RUNS,
    "torchtitan": test_torchtitan.RUNS,
    "megatron": test_megatron.RUNS,
    "maxtext": test_maxtext.RUNS,
    "megatron-bridge": test_megatron_bridge.RUNS,
    "axolotl": test_axolotl.RUNS,
}
CASES = [(engine, run) for engine, runs in RUNS.items() for run in runs]


IMPLIED = {"maxtext": ("model.activation", "model.gated_mlp", "data.heldout_fraction")}
"""Keys that `complete` does not restore from MaxText's axes."""


def read_back_from(engine: str, text: str, folder: Path) -> ReadBack:
    file = folder / FILES[engine]
    file.write_text(text)
    return read_back(TARGETS[engine], read_source(file, engine))


@pytest.mark.parametrize(("engine", "run"), slow_after(12, CASES))
def test_import_after_emit_is_the_identity(engine: str, run: tuple[str, ...], tmp_path: Path) -> None:
    found = read_back_from(engine, files_in(engine, *run)[FILES[engine]], tmp_path)
    assert guess_engine(tmp_path / FILES[engine]) == engine
    wanted = {
        one.ours: one.value
        for one in translated_for(engine, *run).translated
        if not one.ours.startswith("derived.")
        if (one.ours not in IMPLIED[engine] if engine in IMPLIED else one.destination == "config" and one.theirs)
    }
    read = {key: found.values.get(key, MISSING) for key in wanted}
    assert {key: (read[key], value) for key, value in wanted.items() if not same(read[key], value)} == {}
    assert set(found.unread) <= {"loss.loss_fn"}


MISSING: JsonValue = "missing"


def same(one: JsonValue, other: JsonValue) -> bool:
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return one == pytest.approx(other, rel=1e-4, abs=1e-6) if numbers else one == other


def test_every_reader_has_a_table() -> None:
    assert set(READERS) == set(FILES) <= set(TARGETS)


def test_unknown_keys_are_listed(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "overlap_comm": True}, "gradient_clippin": 1.0}
    config["optimizer"] = {"type": "Lion", "params": {"lr": 1e-3}}
    found = read_back_from("deepspeed", json.dumps(config), tmp_path)
    assert set(found.unread) == {"zero_optimization.overlap_comm", "gradient_clippin", "optimizer.type"}
    assert "AdamW" in found.unread["optimizer.type"]
    assert found.values["optim.lr"] == 1e-3


def test_contradicting_keys_are_listed(tmp_path: Path) -> None:
    text = "torchrun pretrain_gpt.py --seq-length 4096 --max-position-embeddings 8192"
    found = read_back_from("megatron", text, tmp_path)
    assert found.values["data.seq_len"] == 4096
    assert "4096" in found.unread["--max-position-embeddings"]


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("deepspeed", "{"),
        ("deepspeed", "[1]"),
        ("accelerate", "a: [b"),
        ("accelerate", "just text"),
        ("torchtitan", "def f(:"),
        ("torchtitan", "import os\n"),
        ("megatron", "echo 'unclosed"),
        ("megatron", "echo nothing"),
        ("deepspeed", "[" * 100_000),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(engine: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        read_back_from(engine, text, tmp_path)
    assert [problem.code for problem in refused.value.problems] == ["unreadable"]


def test_a_module_is_not_run(tmp_path: Path) -> None:
    text = files_in("torchtitan")["trainspec_run.py"] + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
    assert read_back_from("torchtitan", text, tmp_path).values["train.max_steps"]
    assert not (tmp_path / "ran").exists()


def test_the_recipe_leaves_open_what_the_file_does_not_contain(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(files_in("deepspeed")["ds_config.json"])
    imported = import_file(tmp_path / "ds.json")
    assert imported.missing == ("model", "cluster", "data.seq_len")
    write_recipe(imported, tmp_path / "ds.yaml")
    recipe = f"recipe={tmp_path / 'ds.yaml'}"
    with pytest.raises(RecipeError) as refused:
        load_for_planning([recipe])
    assert {"model", "cluster"} <= {problem.path for problem in refused.value.problems}
    spec = load_for_planning([recipe, "model=llama3_8b", "cluster=h100", "data.seq_len=8192"]).spec
    assert (spec.batching.global_batch_size, spec.optim.lr, spec.layout.zero_stage) == (512, 3e-4, 3)
    with pytest.raises(RecipeError) as existing:
        write_recipe(imported, tmp_path / "ds.yaml")
    assert existing.value.problems[0].code == "output_exists"


def test_a_script_determines_its_model(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(files_in("megatron", *test_megatron.RUNS[2])["pretrain.sh"])
    write_recipe(import_file(tmp_path / "run.sh"), tmp_path / "mine.yaml")
    spec = load_for_planning([f"recipe={tmp_path / 'mine.yaml'}", "cluster=h100"]).spec
    assert (spec.model.num_layers, spec.layout.tp, spec.layout.pp, spec.cluster.num_nodes) == (32, 4, 2, 2)
