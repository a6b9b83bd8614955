"""What a launch on one host refuses before anything is made, and what it only tells of."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import MachineError
from trainspec_cli.planner.run.forecast import checkpoint_bytes
from trainspec_cli.recipe.results.doctor import Check, NodeReport
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.wings.doctor.check_nodes import _needs, check_nodes

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def plan(made_up_probe: MachineProbe) -> Plan:
    return made_up_probe.small.plan


def test_a_launch_without_room_for_a_checkpoint_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainspec_cli.session.launching.session.predict", lambda plan, *_, **__: plan)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 2**40, 1000))
    assert run(["launch", "recipe=tiny", "--json"]) == 4
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "unfit_host"
    assert "1000 B free in " in error["message"]
    assert not list(tmp_path.iterdir()), "nothing was made"


def on_nodes(plan: Plan, nodes: int, **run: bool) -> Plan:
    return replace(plan, num_nodes=nodes, spec=replace(plan.spec, run=replace(plan.spec.run, **run)))


def test_who_wants_no_preflight_has_none(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 2**40, 0))
    with pytest.raises(MachineError):
        check_nodes(plan, tmp_path, PrintableConsole())
    assert check_nodes(on_nodes(plan, 1, preflight=False), tmp_path, PrintableConsole()) is None
    assert check_nodes(on_nodes(plan, 2, preflight=False), tmp_path, PrintableConsole()) is None


def test_a_warning_of_the_only_node_is_shown(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = checkpoint_bytes(plan.spec, plan.params)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 2**40, one * 1.5))
    shown = StringIO()
    assert check_nodes(plan, tmp_path, PrintableConsole(file=shown)) is None
    assert shown.getvalue().startswith("disk: ")


def test_memory_counts_unless_the_run_is_forced(plan: Plan, tmp_path: Path) -> None:
    greedy = replace(plan, prediction=LocalPrediction(time_s={"forward": 1.0}, memory={"parameters": 1e18}))
    with pytest.raises(MachineError, match="memory"):
        check_nodes(greedy, tmp_path, PrintableConsole(file=StringIO()))
    check_nodes(greedy, tmp_path, PrintableConsole(file=StringIO()), force=True)


def test_nodes_that_are_let_in_with_a_warning_are_named(plan: Plan, tmp_path: Path) -> None:
    shown = StringIO()
    examination = check_nodes(on_nodes(plan, 2), tmp_path, PrintableConsole(file=shown))
    assert examination is not None
    assert str(tmp_path) in examination.command
    small = Check("/dev/shm", "warn", "64 MiB free", "give the container more")
    reports = [NodeReport("a", 0.0, ()), NodeReport("b", 0.0, (small,))]
    examination.judge(reports)
    assert shown.getvalue() == "b: /dev/shm: 64 MiB free; give the container more\n"
    with pytest.raises(MachineError, match="a is not fit: /dev/shm"):
        examination.judge([NodeReport("a", 0.0, (replace(small, status="fail"),)), reports[1]])


@pytest.mark.parametrize(("kept", "written", "wanted"), [(3, 0, 4), (3, 2, 2), (3, 3, 1), (3, 9, 1), (1, 0, 2)])
def test_room_is_wanted_for_what_is_kept_and_the_next(plan: Plan, kept: int, written: int, wanted: int) -> None:
    """The oldest is removed once the next one is whole."""
    keeping = replace(plan, spec=replace(plan.spec, checkpoint=replace(plan.spec.checkpoint, keep_last=kept)))
    needs = _needs(keeping, written, force=False)
    assert (needs.checkpoints, needs.checkpoint_bytes) == (wanted, checkpoint_bytes(plan.spec, plan.params))
    best = replace(keeping, spec=replace(keeping.spec, checkpoint=replace(keeping.spec.checkpoint, keep_best=True)))
    assert _needs(best, 0, force=False).checkpoints == kept + 2


@pytest.mark.parametrize(("device", "memory", "gpu_memory"), [("cpu", 2, 0), ("cuda", 0, 1)])
def test_memory_is_a_nodes_or_each_gpus(plan: Plan, device: str, memory: int, gpu_memory: int) -> None:
    predicted = LocalPrediction(time_s={"forward": 1.0}, memory={"parameters": 1e9})
    two = replace(plan, device=device, devices_per_node=2, prediction=predicted)
    needs = _needs(two, 0, force=False)
    one = predicted.needed_bytes
    assert one >= 1e9
    assert (needs.memory_bytes, needs.gpu_memory_bytes) == (memory * one, gpu_memory * one)
    assert (needs.uses_gpus, needs.processes) == (device == "cuda", plan.world_size)
    forced = _needs(two, 0, force=True)
    assert (forced.memory_bytes, forced.gpu_memory_bytes) == (0, 0)
