from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.session.recipe.load import load_for_planning

SHIPPED = sorted(path.stem for path in Path(__file__).parents[2].joinpath("recipes").glob("*.yaml"))
NEED_VALUES = ["finetune_chat"]
TRAINED_HERE = ["quickstart", "tiny", "tiny_chat", "tiny_resnet", "tiny_unet3d"]


def test_each_with_a_line_ones_own_first(capsys, write) -> None:
    write("recipes/zeta.yaml", "description: mine\n")
    write("recipes/tiny.yaml", "train: {seed: 1}\n")
    write("recipes/broken.yaml", "a: [1\n")
    assert run(["list", "recipe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipe"]
    shipped = [name for name in SHIPPED if name != "tiny"]
    assert [recipe["name"] for recipe in found] == ["broken", "tiny", "zeta", *shipped]
    assert found[1] == {"name": "tiny", "description": "", "file": "recipes/tiny.yaml"}
    assert found[0]["description"].startswith("(cannot be read: recipes/broken.yaml:1:4: this is not YAML")


def test_for_people(capsys, write) -> None:
    write("recipes/zeta.yaml", "description: mine\n")
    assert run(["list", "recipe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["zeta", "mine"]
    assert lines[1].split() == ["recipes/zeta.yaml"]
    assert lines[0].index("mine") == lines[1].index("recipes"), "one column under the other"


def test_every_shipped_recipe_is_described_and_sound(capsys, write) -> None:
    run(["list", "recipe", "--json"])
    for recipe in json.loads(capsys.readouterr().out)["recipe"]:
        assert not recipe["description"].startswith("("), recipe
        if recipe["name"] not in NEED_VALUES:
            load_for_planning([f"recipe={recipe['name']}"])


@pytest.mark.parametrize("name", NEED_VALUES)
def test_a_recipe_that_needs_values_of_ones_own_names_them(name, write) -> None:
    with pytest.raises(RecipeError) as told:
        load_for_planning([f"recipe={name}"])
    assert "init.from" in str(told.value)


def test_recipes_for_this_machine_can_be_launched_as_they_are() -> None:
    for name in TRAINED_HERE:
        assert run(["validate", f"recipe={name}"]) == 0


def test_the_first_run_takes_little_work_and_explains_its_result() -> None:
    """A minute of two cores: few steps and tokens, and held-out text that is judged next to xz before the end."""
    spec = load_for_planning(["recipe=quickstart"]).spec
    steps = spec.train.max_steps
    assert steps is not None and spec.train.eval_interval_steps is not None
    assert steps * spec.batching.global_batch_size * spec.data.seq_len <= 350_000
    assert spec.train.eval_interval_steps < steps
