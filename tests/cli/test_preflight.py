"""What a launch on one host refuses before anything is made, and what it only tells of."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainspec_cli.__main__ import run
from trainspec_cli.cli.preflight import examine_all, examine_here
from trainspec_cli.errors import MachineError
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.probe import MachineProbe

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def plan(made_up_probe: MachineProbe) -> Plan:
    return made_up_probe.small.plan


def test_a_launch_without_room_for_a_checkpoint_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainspec_cli.cli.predict.predict", lambda plan, *_, **__: plan)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 2**40, 1000))
    assert run(["launch", "recipe=tiny", "--json"]) == 4
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "unfit_host"
    assert "1000 B free in " in error["message"]
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_who_wants_no_preflight_has_none(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 2**40, 0))
    with pytest.raises(MachineError):
        examine_here(plan, tmp_path, Console())
    unwanted = replace(plan, spec=replace(plan.spec, run=replace(plan.spec.run, preflight=False)))
    examine_here(unwanted, tmp_path, Console())
    assert examine_all(unwanted, RunDir(tmp_path), Console()) is None


def test_hosts_that_are_let_in_with_a_warning_are_told_of(plan: Plan, tmp_path: Path) -> None:
    said = StringIO()
    examination = examine_all(plan, RunDir(tmp_path), Console(file=said))
    assert examination is not None
    small = {"name": "/dev/shm", "status": "warn", "found": "64 MiB free", "advice": "give the container more"}
    reports: list[dict[str, Any]] = [{"host": host, "checks": [], "speed": {}} for host in ("a", "b")]
    reports[1]["checks"] = [small]
    examination.judge(reports)
    assert said.getvalue() == "b: /dev/shm: 64 MiB free; give the container more\n"
