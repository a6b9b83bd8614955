"""What a launch says, and refuses, before anything starts: on GPUs that are not there, and on a CPU never probed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.launch.job.machine import Gpu

ON_GPU = ("launch", "recipe=tiny", "cluster=auto", "--dry-run", "--json")


def plug_in(monkeypatch: pytest.MonkeyPatch, name: str, memory_bytes: int) -> None:
    gpus = (Gpu(name, memory_bytes, (9, 0), memory_bytes),) * 2
    monkeypatch.setattr("trainspec_cli.launch.job.machine.visible_gpus", lambda: gpus)


def test_a_gpus_plan_has_its_prediction(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "NVIDIA H100 80GB HBM3", 80 * 2**30)
    assert run([*ON_GPU]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)["plan"]
    assert (plan["device"], plan["devices_per_node"]) == ("cuda", 2)
    assert plan["prediction"]["time_s"]["forward"] > 0
    assert plan["prediction"]["beside"]["context"] > 2**28
    assert "predicted: " in err


def test_what_does_not_fit_a_gpu_is_refused_unless_forced(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "NVIDIA H100 80GB HBM3", 2**30)
    assert run([*ON_GPU]) == 3
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "does_not_fit"
    assert "a GPU can give" in error["message"]
    assert "--force launches all the same" in error["hint"]
    assert run([*ON_GPU, "--force"]) == 0
    assert "forced" in capsys.readouterr().err


def test_a_gpu_that_the_catalogue_lacks_is_not_predicted(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "Abacus-9000", 2**30)
    assert run([*ON_GPU]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["plan"]["prediction"] is None
    assert "no prediction: the catalogue has no accelerator like Abacus-9000" in err


def test_a_dry_run_does_not_probe(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    assert run(["launch", "recipe=tiny", "--dry-run"]) == 0
    assert "no prediction: this machine was not probed yet" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
