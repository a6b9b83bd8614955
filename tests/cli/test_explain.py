"""`trainspec explain KEY` as people and programs see it."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.recipe.keys.cluster import SlurmSpec


def test_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "optim.schedule.kind"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("optim.schedule.kind\n") and "constant, cosine or wsd\n" in said


def test_a_group_lists_its_options_and_a_chip_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "cluster.accelerator", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "rtx_4090" in told["options"] and "link_gb_per_s" in told["meanings"][0]["below"]
    assert run(["explain", "model"]) == 0
    assert "llama_6m" in capsys.readouterr().out


def test_a_misspelt_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "optim.lrr"]) == 2
    told = capsys.readouterr().err
    assert "`optim.lrr`" in told and "explain optim.lr\n" in told
    assert run(["explain", "train.learning_rate"]) == 2
    assert " `optim.lr`?\n" in capsys.readouterr().err


def test_a_key_by_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    for field in fields(SlurmSpec):
        assert run(["explain", f"slurm.{field.name}", "--json"]) == 0
        (meaning,) = json.loads(capsys.readouterr().out)["meanings"]
        assert meaning["key"] == f"cluster.slurm.{field.name}" and meaning["doc"]
    assert run(["explain", "slurm.tim"]) == 2
    assert " explain cluster.slurm.time\n" in capsys.readouterr().err


def test_the_shipped_file_has_every_key_of_slurm_below_a_comment() -> None:
    text = (Path(__file__).parents[2] / "conf/slurm/default.yaml").read_text()
    assert re.findall(r"^# .*\n(\w+):", text, re.MULTILINE) == [field.name for field in fields(SlurmSpec)]
