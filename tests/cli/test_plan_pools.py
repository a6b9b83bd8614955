"""`trainspec plan` of a cluster of several pools, and the commands that refuse one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.__main__ import run

PINNED = ["model=llama3_8b", "layout.tp=8", "layout.cp=1", "layout.pp=1", "layout.dp_shard=1", "recompute=none"]
MIXED = "cluster.pools=[h100_sxm*1x8,a100_sxm_80gb*1x8]"


def plan_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *PINNED, *arguments, "--json"]) in (0, 3)
    return capsys.readouterr().out


def test_one_pool_is_planned_to_the_byte_as_the_cluster_that_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["cluster=auto", "cluster.accelerator=h100_sxm", "cluster.num_nodes=2", "cluster.devices_per_node=8"]
    assert plan_text(capsys, "cluster.pools=[h100_sxm*2x8]") == plan_text(capsys, *plain)


def test_pools_are_in_the_json_and_on_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run(["plan", *PINNED, MIXED, "--json", "--html", str(page)]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [pool["num_nodes"] for pool in plan["cluster"]["pools"]] == [1, 1] and plan["cluster"]["world_size"] == 16
    fast, slow = plan["best"]["pools"]
    assert fast["samples"] + slow["samples"] == 1024 and fast["samples"] > 2 * slow["samples"]
    assert [choice["division"] for choice in plan["pools"]["choices"]] == ["samples", "alone", "alone"]
    drawn = page.read_text()
    assert plan["pools"]["verdict"] in drawn.replace("All pools", "all pools")
    assert "8 H100-SXM-80GB on 1 node + 8 A100-SXM-80GB on 1 node" in drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cluster.pools=[h100_sxn*1x8, h100_sxm*1by8]"], ["`h100_sxm`?", "h100_sxm*8x8"]),
        (
            [MIXED, "fabric=leaf_spine", "cost=owned", "cluster.reliability.spare_nodes=1"],
            ["fabric=flat", "price_usd_per_device_hour", "spare nodes"],
        ),
        pytest.param(["cluster=h100", MIXED], ["set cluster=auto"], marks=pytest.mark.slow),
        pytest.param([MIXED, "disturb=slow_node"], ["leave out disturb="], marks=pytest.mark.slow),
    ],
)
def test_what_does_not_go_with_pools_says_what_to_type(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *PINNED, *arguments]) == 2
    printed = capsys.readouterr().err
    assert all(hint in printed for hint in said) and "has no value" not in printed


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "command", ["launch", pytest.param("validate", marks=SLOW), pytest.param("sbatch", marks=SLOW)]
)
def test_commands_that_start_a_run_name_the_live_scheduler(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([command, "recipe=tiny", "cluster=auto", MIXED]) == 2
    printed = capsys.readouterr().err
    assert "~cluster.pools cluster.num_nodes=2 cluster.devices_per_node=8:" in printed
    assert not [*tmp_path.rglob("plan.json")]
