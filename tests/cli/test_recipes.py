from __future__ import annotations

import json

from trainspec_cli.__main__ import run


def test_each_with_a_line_ones_own_first(capsys, write) -> None:
    write("recipes/zeta.yaml", "description: mine\n")
    write("recipes/tiny.yaml", "train: {seed: 1}\n")
    write("recipes/broken.yaml", "a: [1\n")
    assert run(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [recipe["name"] for recipe in found] == ["broken", "tiny", "zeta", "quickstart"]
    assert found[1] == {"name": "tiny", "description": "(no description)", "file": "recipes/tiny.yaml"}
    assert found[0]["description"].startswith("(cannot be read: recipes/broken.yaml:1:4: this is not YAML")


def test_for_people(capsys, write) -> None:
    write("recipes/zeta.yaml", "description: mine\n")
    assert run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["zeta        mine", "            recipes/zeta.yaml"]


def test_every_shipped_recipe_is_described_and_sound(capsys, write) -> None:
    run(["recipes", "--json"])
    for recipe in json.loads(capsys.readouterr().out):
        assert not recipe["description"].startswith("("), recipe
        assert run(["validate", f"recipe={recipe['name']}"]) == 0
