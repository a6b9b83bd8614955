"""`trainspec plan ... disturb=` from the command line to what is printed."""

import json
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run

GPUS = ["recipe=llama3_8b", "cluster.num_nodes=4", "batching.global_batch_size=1024"]


def test_a_disturbance_is_simulated_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *GPUS, "disturb=slow_device", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    simulation = plan["simulation"]
    rates = [simulation[key]["samples_per_s"] for key in ("off", "on", "ideal", "ideal_real")]
    assert rates == sorted(rates) and simulation["won_back"] >= 0.85
    assert simulation["step_s"] == pytest.approx(plan["best"]["step_time_s"])
    assert len(simulation["on"]["by_step"]) == simulation["steps"] == 300
    assert "rank 3" in simulation["decisions"][0]["reason"]


def test_without_a_disturbance_nothing_of_it_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *GPUS, "--json"]) == 0
    assert "simulation" not in json.loads(capsys.readouterr().out)
    assert run(["plan", *GPUS]) == 0
    assert "isturb" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_for_people_and_on_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run(["plan", *GPUS, "disturb=slow_device", "--verbose", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    for words in ("scheduler off", "scheduler on", "is recovered", "device 3 takes", "other shares"):
        assert words in text
    assert "slow_device, simulated" in page.read_text() and "is recovered" in page.read_text()


@pytest.mark.slow
def test_where_shares_cannot_help_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *GPUS, "disturb=narrow_link", "scheduler.may_change=[shares]"]) == 0
    assert "would not recover any loss" in capsys.readouterr().out


@pytest.mark.slow
def test_nodes_leave_runs_that_go_on_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *GPUS, "disturb=node_leaves", "--json"]) == 0
    by_step = json.loads(capsys.readouterr().out)["simulation"]["on"]["by_step"]
    assert by_step[100] < 0.9 * by_step[10], "a run with one replica group restarts on fewer nodes"
    elastic = ["resilience=elastic", "resilience.replica_groups=2", "disturb=node_leaves", "--json"]
    assert run(["plan", *GPUS, *elastic]) == 0
    by_step = json.loads(capsys.readouterr().out)["simulation"]["on"]["by_step"]
    assert by_step[100] / by_step[10] == pytest.approx(0.5, rel=0.05)


def test_what_the_cluster_has_not_is_shown_in_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("slow_nodes:\n  - node: 4\n    factor: 2\n")
    assert run(["plan", *GPUS, f"disturb={file}"]) == 2
    printed = capsys.readouterr().err
    assert f"{file}:2:5" in printed and "`slow_nodes.0.node`" in printed and "only 4 nodes" in printed


@pytest.mark.parametrize("command", ["launch", "validate", "show"])
def test_a_run_is_not_disturbed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "recipe=quickstart", "disturb=slow_device"]) == 2
    told = capsys.readouterr().err
    assert "`disturb`" in told and "`trainspec plan`" in told


def test_a_sweep_takes_no_disturbance(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *GPUS, "disturb=slow_device", "--sweep", "cluster.num_nodes=1,2"]) == 2
    assert "disturb= describes one plan" in capsys.readouterr().err
