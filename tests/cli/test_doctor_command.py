"""`trainspec doctor`: which nodes are examined, the tiers it shows, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.recipe.results.doctor import Check, NodeReport
from trainspec_cli.wings.doctor.commands import doctor


class Examinations:
    def __init__(self) -> None:
        self.status, self.topology = "ok", ""
        self.here: list[tuple[Any, Path]] = []
        self.nodes: list[tuple[Any, Any, Path]] = []

    def reports(self, *hosts: str) -> tuple[list[NodeReport], None]:
        return [
            NodeReport(host, 0.0, (Check("disk", self.status, "little space", "free some"),)) for host in hosts
        ], None

    def examine_here(self, plan: Any, machine: Any, folder: Path) -> Any:
        assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
        self.here.append((plan, folder))
        return self.reports("one")

    def examine_nodes(self, plan: Any, reach: Any, folder: Path) -> Any:
        assert folder.is_dir() and folder.is_absolute() and folder.stat().st_mode & 0o077 == 0
        self.nodes.append((plan, reach, folder))
        return self.reports("one", "two")


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Examinations:
    found = Examinations()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    monkeypatch.setattr(doctor, "examine_here", found.examine_here)
    monkeypatch.setattr(doctor, "examine_nodes", found.examine_nodes)
    slurm = SimpleNamespace(own_address=lambda: "10.0.0.1", show_topology=lambda: found.topology)
    monkeypatch.setattr(doctor, "slurm", slurm)
    return found


def test_this_node_is_examined_and_no_file_is_left(examined: Examinations, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert (diagnosis["status"], [host["host"] for host in diagnosis["hosts"]]) == ("ok", ["one"])
    ((plan, folder),) = examined.here
    assert not folder.exists()
    assert plan.num_nodes == 1 and plan.spec.model.num_layers > 2, "the default recipe is quickstart"
    assert run(["doctor", "recipe=tiny", "cluster.devices_per_node=1"]) == 0
    assert "disk" in capsys.readouterr().out
    assert (examined.here[-1][0].world_size, examined.here[-1][0].spec.model.num_layers) == (1, 2)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 4)])
def test_a_failed_check_is_an_error_of_the_machine(examined: Examinations, status: str, code: int) -> None:
    examined.status = status
    assert run(["doctor", "recipe=tiny", "--json"]) == code


def test_every_node_of_a_slurm_job_is_examined(
    examined: Examinations, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert run(["doctor", "recipe=tiny", "--json"]) == 0
    assert [host["host"] for host in json.loads(capsys.readouterr().out)["hosts"]] == ["one", "two"]
    ((plan, reach, folder),) = examined.nodes
    assert (plan.num_nodes, examined.here) == (2, [])
    assert folder.parent == tmp_path / "runs" and not folder.exists(), "the nodes share ./runs"
    assert (reach.head, reach.start[0]) == ("10.0.0.1", "srun")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert run(["doctor", "recipe=tiny", "--json"]) == 0
    assert len(examined.here) == 1


def test_slurms_switches_are_shown_as_tiers(
    examined: Examinations, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    examined.topology = "SwitchName=a Level=0 Nodes=n[1-2]\nSwitchName=b Level=1 Nodes=n[1-8] Switches=a,c\n"
    assert run(["doctor", "recipe=tiny", "cluster.devices_per_node=4", "--json"]) == 0
    [check] = json.loads(capsys.readouterr().out)["between"]
    assert check["name"] == "switches" and "{name: level0,devices: 8}" in check["found"]

    def refuse() -> str:
        raise MachineError(Problem("slurm_refused", "scontrol refused"))

    monkeypatch.setattr(doctor.slurm, "show_topology", refuse)
    assert run(["doctor", "recipe=tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["between"][0]["found"].endswith("scontrol refused")
