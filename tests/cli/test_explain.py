"""`trainspec explain KEY` as people and programs see it."""

from __future__ import annotations

import json

import pytest

from trainspec_cli.__main__ import run


def test_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "optim.schedule.kind"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("optim.schedule.kind\n") and "  value    constant, cosine or wsd\n" in said


def test_a_group_lists_its_options_and_a_chip_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "cluster.accelerator", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "rtx_4090" in told["options"] and "link_gb_per_s" in told["meanings"][0]["below"]
    assert run(["explain", "model"]) == 0
    assert "llama_6m" in capsys.readouterr().out


def test_a_misspelt_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "optim.lrr"]) == 2
    told = capsys.readouterr().err
    assert "recipes have no key `optim.lrr`" in told and "hint: type trainspec explain optim.lr\n" in told
