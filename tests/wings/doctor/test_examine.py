"""The examination of nodes: which tools run on them, and what a node reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.node import node_name
from trainspec_cli.recipe.results.doctor import Check
from trainspec_cli.recipe.results.tools import LinksRequest, SpeedRequest
from trainspec_cli.wings.doctor import examine

FINE = Check("disk", "ok", "fast")
LINKS = SimpleNamespace(name="links")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The tools that were run: (tool, request, how, shared folder)."""
    made: list[tuple[Any, ...]] = []

    def run_tool(tool: Any, request: Any, how: Any = None, shared: Path | None = None) -> Any:
        made.append((tool, request, how, shared))
        return LINKS if tool is examine.LINKS else None

    monkeypatch.setattr(examine, "run_tool", run_tool)
    monkeypatch.setattr(examine, "check_node", lambda folder, device, devices: [FINE, Check("chips", "ok", device)])
    monkeypatch.setattr(examine, "torchrun", lambda plan, machine: ("torchrun", plan, machine))
    monkeypatch.setattr(examine, "on_nodes", lambda plan, reach, wanted: ("nodes", plan, reach, wanted))
    return made


def plan(world_size: int) -> Any:
    return SimpleNamespace(device="cpu", compute="fp32", world_size=world_size, devices_per_node=1)


def test_links_are_measured_between_several_processes(runs: list[tuple[Any, ...]], tmp_path: Path) -> None:
    one, two, machine = plan(1), plan(2), SimpleNamespace()
    (report,), links = examine.examine_here(one, machine, tmp_path)
    assert (report.host, links) == (node_name(), None)
    assert report.checks == (FINE, Check("chips", "ok", "cpu"))
    assert runs == [(examine.SPEED, SpeedRequest("cpu", "fp32"), None, None)]
    assert examine.examine_here(two, machine, tmp_path)[1] is LINKS
    assert runs[-1] == (examine.LINKS, LinksRequest("cpu"), ("torchrun", two, machine), None)


def test_every_node_of_a_job_reports(runs: list[tuple[Any, ...]], tmp_path: Path) -> None:
    job, reach = plan(4), SimpleNamespace()
    reports, links = examine.examine_nodes(job, reach, tmp_path)
    ((tool, request, (_, of, by, wanted), shared),) = runs
    assert (tool, request, shared, links) == (examine.LINKS, LinksRequest("cpu"), tmp_path, LINKS)
    assert of is job and by is reach
    assert wanted.command == ("-m", "trainspec_cli.wings.doctor.examine", str(tmp_path), "cpu", "fp32", "1")
    wanted.judge(["a report"])
    assert reports == ["a report"], "no report is refused"


def test_a_node_that_cannot_compute_fails_with_the_reason(
    runs: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MachineError("it failed\nTraceback\nImportError: libcuda")

    monkeypatch.setattr(examine, "run_tool", fail)
    report = examine.examine_node(tmp_path, "cpu", "fp32", 1)
    found = [(check.name, check.status, check.found) for check in report.checks]
    assert found[-1] == ("speed", "fail", "it failed: ImportError: libcuda")
    assert len(found) == 3 and report.checks[-1].advice and report.speed is None


def test_a_nodes_report_is_one_line_of_json(
    runs: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", list(examine.node_command(plan(1), tmp_path)[1:]))
    examine.main()
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["host"] == node_name() and report["checks"][1] == {**report["checks"][1], "found": "cpu"}
    assert runs[0][1] == SpeedRequest("cpu", "fp32")
