from __future__ import annotations

import json

import pytest
import yaml

from trainspec_cli.__main__ import run


def show(capsys, *arguments: str) -> str:
    assert run(["show", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.clause("REC-1")
def test_every_value_with_the_place_it_comes_from(capsys, write) -> None:
    write("recipes/mine.yaml", "defaults: [tiny, _self_]\ntrain:\n  seed: 7\n")
    text = show(capsys, "recipe=mine", "optim.lr=0.5")
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in text.splitlines()}
    assert lines["seed: 7"] == "recipes/mine.yaml:3"
    assert lines["lr: 0.5"] == "command line:2"
    assert lines["num_layers: 2"].endswith("conf/model/llama_tiny.yaml:5")
    assert yaml.safe_load(text)["train"] == {
        "max_steps": 20, "tokens": None, "epochs": None, "seed": 7,
        "max_skipped_steps": 10, "eval_interval_steps": None, "early_stop_evals": None, "sample_interval_steps": None,
        "log_interval_steps": 10,
    }  # fmt: skip


def test_as_json(capsys) -> None:
    shown = json.loads(show(capsys, "recipe=tiny", "optim.lr=0.5", "--json"))
    assert (shown["recipe"], shown["values"]["optim"]["lr"]) == ("tiny", 0.5)
    assert shown["origins"]["optim.lr"] == {"file": "command line", "line": 2, "column": None}


def test_what_differs_from_another_recipe(capsys) -> None:
    lines = show(capsys, "recipe=tiny", "--diff", "quickstart").splitlines()
    assert lines[0].split() == ["tiny", "quickstart"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert cells["model.num_layers"] == ["2", "3"]
    assert "train.seed" not in cells


def test_what_differs_from_a_run(capsys, write) -> None:
    run_yaml = write("runs/tiny/1/composed.yaml", show(capsys, "recipe=tiny", "train.seed=7", "~compile"))
    for other in (str(run_yaml), str(run_yaml.parent)):
        shown = json.loads(show(capsys, "recipe=tiny", "--diff", other, "--json"))
        assert shown["differences"] == [
            {"path": "compile", "this": False, "other": None},
            {"path": "train.seed", "this": 0, "other": 7},
        ]


def test_a_key_that_is_null_differs_from_one_that_is_not_there(capsys, write) -> None:
    other = write("runs/tiny/1/composed.yaml", show(capsys, "recipe=tiny", "~train.eval_interval_steps"))
    shown = json.loads(show(capsys, "recipe=tiny", "--diff", str(other), "--json"))
    assert [difference["path"] for difference in shown["differences"]] == ["train.eval_interval_steps"]


def test_a_key_that_only_the_other_has(capsys) -> None:
    lines = show(capsys, "recipe=tiny", "~compile", "--diff", "tiny").splitlines()
    assert [line.split() for line in lines] == [["tiny", "tiny"], ["compile", "-", "false"]]


def test_nothing_differs(capsys) -> None:
    assert "not differ" in show(capsys, "recipe=tiny", "--diff", "tiny")


def test_problems_follow_what_could_be_composed(capsys) -> None:
    assert run(["show", "recipe=tiny", "optim.lrr=3"]) == 2
    captured = capsys.readouterr()
    assert "  lrr: 3" in captured.out
    assert "unknown key `optim.lrr`" in captured.err
    assert run(["show", "recipe=tinny"]) == 2
    assert capsys.readouterr().out == ""


def test_an_unknown_recipe_to_compare_with(capsys) -> None:
    assert run(["show", "recipe=tiny", "--diff", "quickstrat"]) == 2
    assert "no recipe `quickstrat`" in capsys.readouterr().err
