"""`trainspec list`: names that can be typed, with what they stand for."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.cli import list as listing
from trainspec_cli.cli.complete import complete
from trainspec_cli.planner.hardware import catalogue
from trainspec_cli.planner.workload import count_params
from trainspec_cli.session.recipe.load import load_for_planning


def test_every_name_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["accelerators", "clusters", "models"]
    names = {kind: [row["name"] for row in rows] for kind, rows in found.items()}
    for model, cluster, accelerator in [("llama3_8b", "mi300x", "rtx_4090"), ("mamba2_3b", "gb200", "tpu_v5p")]:
        assert model in names["models"] and cluster in names["clusters"] and accelerator in names["accelerators"]
        typed = [f"model={model}", f"cluster={cluster}", f"cluster.accelerator={accelerator}"]
        spec = load_for_planning(["recipe=plan_defaults", *typed]).spec
        assert spec.model.name == model and spec.cluster.accelerator is not None
    rtx = next(row for row in found["accelerators"] if row["name"] == "rtx_4090")
    assert (rtx["label"], rtx["memory_gb"], rtx["link_gb_per_s"]) == ("RTX 4090", 24, 31)
    experts = next(row for row in found["models"] if row["name"] == "mixtral_8x7b")
    assert experts["active_parameters"] < 0.3 * experts["parameters"]
    assert next(row for row in found["clusters"] if row["name"] == "h100")["accelerator"] == "h100_sxm"


def test_one_kind_is_a_table_with_ones_own(capsys: pytest.CaptureFixture[str], write) -> None:
    write("conf/cluster/ours.yaml", "defaults:\n  - /accelerator@accelerator: a30\nname: ours\ndevices_per_node: 2\n")
    assert run(["list", "clusters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["clusters", "accelerator", "devices_per_node", "scaleup_devices", "nic_gbit_per_s"]
    assert ["ours", "a30", "2", "-", "-"] in [line.split() for line in lines]
    assert len({line.index("a30") for line in lines if "a30" in line} | {lines[0].index("accelerator")}) == 1


def test_ones_own_model_is_listed_with_what_it_takes_from_another(
    capsys: pytest.CaptureFixture[str], write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("conf/model/shorter.yaml", "defaults:\n  - llama3_8b\n  - _self_\nnum_layers: 16\n")
    write("conf/cluster/empty.yaml", "defaults:\n  - {}\ndevices_per_node: 2\n")
    monkeypatch.setattr(catalogue, "models", lru_cache(catalogue.models.__wrapped__))
    monkeypatch.setattr(listing, "models", catalogue.models)
    assert run(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in found["models"]}
    spec = load_for_planning(["recipe=plan_defaults", "model=shorter"]).spec
    assert by_name["shorter"]["parameters"] == count_params(spec.model)
    assert by_name["shorter"]["parameters"] < 0.6 * by_name["llama3_8b"]["parameters"]
    assert "empty" in [row["name"] for row in found["clusters"]]


def test_a_kind_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "model"]) == 2
    assert "type trainspec list models" in capsys.readouterr().err


def test_kinds_are_completed() -> None:
    assert complete("trainspec list c", ["list"]) == ["clusters"]
