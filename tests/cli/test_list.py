"""`trainspec list`: names that can be typed, with what they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.cli.complete import complete
from trainspec_cli.cli.main import COMMANDS
from trainspec_cli.planner.hardware import rates as catalogue
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.session.recipe.load import load_for_planning


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    catalogue.models.cache_clear()
    yield
    catalogue.models.cache_clear()


def test_every_name_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {group: [row["name"] for row in rows] for group, rows in found.items()}
    folders = find_folders(Path.cwd())
    assert names == {group: sorted(folders.options(group)) for group in (*folders.groups, "disturb")} | {
        "recipe": sorted(folders.recipe_names())
    }
    for model, cluster, accelerator in [("llama3_8b", "mi300x", "rtx_4090"), ("mamba2_3b", "gb200", "tpu_v5p")]:
        assert model in names["model"] and cluster in names["cluster"] and accelerator in names["accelerator"]
        typed = [f"model={model}", f"cluster={cluster}", f"cluster.accelerator={accelerator}"]
        spec = load_for_planning(["recipe=plan_defaults", *typed]).spec
        assert spec.model.name == model and spec.cluster.accelerator is not None
    rtx = next(row for row in found["accelerator"] if row["name"] == "rtx_4090")
    assert (rtx["label"], rtx["memory_gb"], rtx["link_gb_per_s"]) == ("RTX 4090", 24, 31)
    experts = next(row for row in found["model"] if row["name"] == "mixtral_8x7b")
    assert experts["active_parameters"] < 0.3 * experts["parameters"]
    assert next(row for row in found["cluster"] if row["name"] == "h100")["accelerator"] == "h100_sxm"


def test_every_shipped_option_is_described_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--json"]) == 0
    rows = [(group, row) for group, rows in json.loads(capsys.readouterr().out).items() for row in rows]
    assert [f"{group}/{row['name']}" for group, row in rows if not row["description"]] == []
    assert not any("\n" in row["description"] or row["description"].startswith("(cannot") for _, row in rows)


def test_all_groups_are_listed_with_how_they_are_typed_and_ones_own_first(
    capsys: pytest.CaptureFixture[str], write
) -> None:
    write("conf/optim/zz.yaml", "# Mine alone.\nname: adamw\n")
    assert run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line.split() for line in lines if "=NAME" in line]
    assert ["accelerator", "cluster.accelerator=NAME"] in headings and ["recipe", "recipe=NAME"] in headings
    assert lines[lines.index("optim  optim=NAME") + 1].split() == ["zz", "Mine", "alone"]
    assert run(["list", "optim", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["optim"][0]
    assert (first["name"], first["file"]) == ("zz", "conf/optim/zz.yaml")


def test_one_group_is_a_table_with_ones_own(capsys: pytest.CaptureFixture[str], write) -> None:
    write("conf/cluster/ours.yaml", "defaults:\n  - /accelerator@accelerator: a30\nname: ours\ndevices_per_node: 2\n")
    assert run(["list", "cluster"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["cluster", "accelerator", "devices_per_node", "scaleup_devices", "nic_gbit_per_s"]
    assert ["ours", "a30", "2", "-", "-"] in [line.split() for line in lines]
    assert len({line.index("a30") for line in lines if "a30" in line} | {lines[0].index("accelerator")}) == 1


def test_ones_own_model_is_listed_with_what_it_takes_from_another(capsys: pytest.CaptureFixture[str], write) -> None:
    write("conf/model/shorter.yaml", "defaults:\n  - llama3_8b\n  - _self_\nnum_layers: 16\n")
    write("conf/cluster/empty.yaml", "defaults:\n  - {}\ndevices_per_node: 2\n")
    assert run(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in found["model"]}
    spec = load_for_planning(["recipe=plan_defaults", "model=shorter"]).spec
    assert by_name["shorter"]["parameters"] == count_params(spec.model)
    assert by_name["shorter"]["parameters"] < 0.6 * by_name["llama3_8b"]["parameters"]
    assert "empty" in [row["name"] for row in found["cluster"]]


def test_a_group_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "modle"]) == 2
    assert "trainspec list model" in capsys.readouterr().err
    assert run(["list", "nothing at all"]) == 2
    assert "groups: recipe, " in capsys.readouterr().err


def test_a_plural_names_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "clusters"]) == 0
    assert capsys.readouterr().out.startswith("cluster ")


def test_groups_are_completed() -> None:
    assert complete("trainspec list cl", COMMANDS) == ["cluster"]
