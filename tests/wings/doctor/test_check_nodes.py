"""What a launch refuses before it creates anything, and what it only reports."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from lab.gpus.machines import play

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import MachineError
from trainspec_cli.planner.run.forecast import checkpoint_bytes
from trainspec_cli.recipe.results.doctor import Check, NodeReport
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.doctor import checks
from trainspec_cli.wings.doctor.examine import check_nodes, preflight

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def plan(made_up_probe: MachineProbe) -> Plan:
    """One process on the CPU, of a model of a few parameters."""
    made = made_up_probe.small.plan
    predicted = LocalPrediction(time_s={"forward": 1.0}, memory={"parameters": 1.0})
    return replace(made, num_nodes=1, devices_per_node=1, layout=type(made.layout)(), prediction=predicted)


def set_free_space(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 0, int(free)))


def changed(plan: Plan, section: str, **values: object) -> Plan:
    return replace(plan, spec=replace(plan.spec, **{section: replace(getattr(plan.spec, section), **values)}))


def predicting(plan: Plan, memory: float) -> Plan:
    return replace(plan, prediction=LocalPrediction(time_s={"forward": 1.0}, memory={"parameters": memory}))


def test_a_launch_without_room_for_a_checkpoint_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainspec_cli.session.launching.session.predict", lambda plan, *_, **__: plan)
    set_free_space(monkeypatch, 1000)
    assert run(["launch", "recipe=tiny", "--json"]) == 4
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "unfit_host" and "1000 B" in error["message"]
    assert not list(tmp_path.iterdir()), "no file was created"


def test_preflight_can_be_switched_off(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_space(monkeypatch, 0)
    with pytest.raises(MachineError):
        check_nodes(plan, tmp_path, PrintableConsole())
    without = changed(plan, "run", preflight=False)
    assert check_nodes(without, tmp_path, PrintableConsole()) is None
    of_failed = check_nodes(replace(without, num_nodes=2), tmp_path, PrintableConsole())
    assert of_failed is not None and not of_failed.of_all, "nodes that have failed repeatedly are examined"


def test_a_fit_node_has_no_warnings_and_no_files_are_created(plan: Plan, tmp_path: Path, monkeypatch) -> None:
    set_free_space(monkeypatch, 2**34)
    assert preflight(plan, tmp_path / "runs/quickstart") == []
    assert not (tmp_path / "runs").exists()


def test_a_disk_without_space_for_one_checkpoint_is_refused_with_the_hosts_name(
    plan: Plan, tmp_path: Path, monkeypatch
) -> None:
    set_free_space(monkeypatch, 0.9 * checkpoint_bytes(plan.spec, plan.params))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    with pytest.raises(MachineError) as caught:
        preflight(plan, tmp_path)
    (problem,) = caught.value.problems
    assert (caught.value.exit_code, problem.code) == (4, "unfit_host")
    assert problem.message.startswith("node7 ") and "run.preflight=false" in problem.hint


@pytest.mark.parametrize(("kept", "written", "wanted"), [(3, 0, 4), (3, 2, 2), (3, 3, 1), (3, 9, 1), (1, 0, 2)])
def test_space_is_needed_for_the_kept_checkpoints_and_the_next(
    plan: Plan, tmp_path: Path, monkeypatch, kept: int, written: int, wanted: int
) -> None:
    """The oldest is removed after the next one is complete."""
    monkeypatch.setattr(RunDir, "checkpoint_steps", lambda _: list(range(written)))
    one = checkpoint_bytes(plan.spec, plan.params)
    keeping = changed(plan, "checkpoint", keep_last=kept)
    set_free_space(monkeypatch, wanted * one)
    assert preflight(keeping, tmp_path) == []
    if wanted > 1:
        set_free_space(monkeypatch, (wanted - 0.5) * one)
        (check,) = preflight(keeping, tmp_path)
        assert (check.name, check.status) == ("disk", "warn")
        assert f"space for {wanted} " in check.found
    if not written:
        set_free_space(monkeypatch, wanted * one)
        assert (
            f"space for {wanted + 1} " in preflight(changed(keeping, "checkpoint", keep_best=True), tmp_path)[0].found
        )


def test_a_warning_of_the_only_node_is_shown(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_space(monkeypatch, 1.5 * checkpoint_bytes(plan.spec, plan.params))
    shown = StringIO()
    assert check_nodes(plan, tmp_path, PrintableConsole(file=shown)) is None
    assert shown.getvalue().startswith("disk: ")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_the_node_or_of_each_gpu_is_checked_unless_forced(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    needs: dict[str, float] = {}
    for name in ("check_memory", "check_gpus"):
        checked = lambda needed, name=name: needs.update({name: needed}) or ()  # noqa: E731
        monkeypatch.setattr(f"trainspec_cli.wings.doctor.examine.{name}", checked)
    monkeypatch.setattr("trainspec_cli.wings.doctor.examine.check_torch", lambda _: ())
    two = predicting(replace(plan, device=device, devices_per_node=2), 1e9)
    assert two.prediction is not None
    one = two.prediction.needed_bytes
    assert one >= 1e9
    preflight(two, tmp_path)
    assert needs == ({"check_memory": 2 * one} if device == "cpu" else {"check_memory": 0, "check_gpus": one})
    preflight(two, tmp_path, force=True)
    assert set(needs.values()) == {0}


def test_too_little_free_memory_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        preflight(predicting(plan, 1e18), tmp_path)
    (problem,) = caught.value.problems
    assert problem.code == "unfit_host" and "memory" in problem.message


def test_warnings_name_the_node(plan: Plan, tmp_path: Path) -> None:
    shown = StringIO()
    examination = check_nodes(replace(plan, num_nodes=2), tmp_path, PrintableConsole(file=shown))
    assert examination is not None
    assert str(tmp_path) in examination.command
    small = Check("/dev/shm", "warn", "64 MiB free", "give the container more")
    reports = [NodeReport("a", 0.0, ()), NodeReport("b", 0.0, (small,))]
    examination.judge(reports)
    assert shown.getvalue() == f"b: /dev/shm: {small.found}; {small.advice}\n"
    with pytest.raises(MachineError, match=r"a .*/dev/shm"):
        examination.judge([NodeReport("a", 0.0, (replace(small, status="fail"),)), reports[1]])


def test_shared_memory_is_checked_for_several_processes(plan: Plan, tmp_path: Path, monkeypatch) -> None:
    set_free_space(monkeypatch, 2**26)
    assert preflight(plan, tmp_path) == []
    assert "/dev/shm" in {check.name for check in preflight(replace(plan, devices_per_node=2), tmp_path)}


def write_machine(folder: Path, used_gib: int) -> str:
    """Describe a node with one H100, with memory used by another program."""
    machine = folder / "machine.json"
    machine.write_text(json.dumps({"gpus": [{"card": "h100_sxm", "used_mib": used_gib * 1024}]}))
    return str(machine)


@pytest.mark.parametrize(("used_gib", "status"), [(5, "ok"), (25, "warn"), (45, "fail")])
def test_a_gpu_in_use_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used_gib: int, status: str) -> None:
    play(write_machine(tmp_path, used_gib), monkeypatch)
    found = list(checks.check_gpus(needed_bytes=40 * 2**30))
    assert [check.status for check in found] == ([] if status == "ok" else [status])
    assert all("nvidia-smi" in check.advice for check in found)


def test_gpus_are_checked_only_for_a_run_on_gpus(plan: Plan, tmp_path: Path, monkeypatch) -> None:
    set_free_space(monkeypatch, 2**34)
    play(write_machine(tmp_path, 25), monkeypatch)
    monkeypatch.setattr(checks, "torch_build", lambda: ("2.13.0+cu128", "12.8", ""))
    assert preflight(plan, tmp_path) == []
    on_gpu = replace(plan, device="cuda")
    assert [check.name for check in preflight(on_gpu, tmp_path)] == ["chips"]
    with pytest.raises(MachineError, match=r"60\.0"):
        preflight(predicting(on_gpu, 60 * 2.0**30), tmp_path)
