"""`trainspec run` in a Slurm job with the user's script, without Slurm."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.errors import EXIT_DONE, Problem, RecipeError, Stopped, WorkerError
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import FENCED
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.signals import PatientRequests, StopRequests
from trainspec_cli.run.slurm.queue import job_of, note_job
from trainspec_cli.session.launching.nodes import NodeOptions
from trainspec_cli.wings.own_script import launching
from trainspec_cli.wings.own_script.launching import (
    describe_slurm_nodes,
    earlier_start,
    find_nodes_and_folder,
    requeueing,
)

COMMAND = ("torchrun", "--nproc-per-node", "8", "train.py")
TASK = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_JOB_NUM_NODES": "2",
}


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    write_json(run.run_json, {"recipe": "train.py", "created_at": 1.0, "command": list(COMMAND)})
    note_job(run, "41")
    return run


def set_task(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name, value in (TASK | changed).items():
        monkeypatch.setenv(name, value)


def test_nodes_and_folder_are_those_of_the_step(slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_task(monkeypatch)
    nodes, folder = find_nodes_and_folder(COMMAND, None, NodeOptions())
    assert (nodes, folder) == (NodeOptions(2, 1, of_slurm=True), "runs/train.py/slurm-41.0")
    assert "node 1 of 2" in describe_slurm_nodes(nodes, None)
    assert find_nodes_and_folder(COMMAND, "mine", NodeOptions()) == (nodes, "mine")


def test_typed_options_override_slurms_environment(slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_task(monkeypatch)
    typed = NodeOptions(4, 3, "node1:29500")
    assert find_nodes_and_folder(COMMAND, None, typed) == (typed, AUTO)
    assert describe_slurm_nodes(typed, None) == ""


def test_a_step_of_one_node_has_a_folder_that_its_next_start_finds(slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_task(monkeypatch, SLURM_STEP_NUM_TASKS="1", SLURM_STEP_NUM_NODES="1", SLURM_PROCID="0")
    assert find_nodes_and_folder(COMMAND, None, NodeOptions()) == (NodeOptions(), "runs/train.py/slurm-41.0")


@pytest.mark.parametrize(("tasks", "nodes"), [("16", "2"), ("8", "1")])
def test_several_tasks_on_a_node_are_refused(
    slurm: Any, monkeypatch: pytest.MonkeyPatch, tasks: str, nodes: str
) -> None:
    set_task(monkeypatch, SLURM_STEP_NUM_TASKS=tasks, SLURM_STEP_NUM_NODES=nodes)
    with pytest.raises(RecipeError) as raised:
        find_nodes_and_folder(COMMAND, None, NodeOptions())
    (problem,) = raised.value.problems
    assert (problem.code, problem.path) == ("usage", "--ntasks-per-node")
    assert "srun --ntasks-per-node=1" in problem.hint


@pytest.mark.parametrize("shell", ["a batch script", "salloc"])
def test_unused_nodes_are_reported(slurm: Any, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    if shell == "salloc":
        monkeypatch.setenv("SLURM_STEP_ID", "4294967290")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert find_nodes_and_folder(COMMAND, None, NodeOptions()) == (NodeOptions(), AUTO)
    assert "srun --ntasks-per-node=1" in describe_slurm_nodes(NodeOptions(), None)


def test_a_run_continues_when_slurm_requeues_its_job(
    slurm: Any, begun: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert earlier_start(begun, COMMAND) is None, "the job was not requeued"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert earlier_start(begun, COMMAND) == "begun"
    assert earlier_start(begun, (*COMMAND, "--lr", "1")) is None
    write_json(begun.result_json, {"status": "stopped", "exit_code": 1, "steps": 3})
    assert earlier_start(begun, COMMAND) == "begun"
    write_json(begun.result_json, {"status": "done", "exit_code": 0, "steps": 3})
    assert earlier_start(begun, COMMAND) == "done"
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert earlier_start(begun, COMMAND) is None, "the run belongs to another job"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert earlier_start(begun, COMMAND) is None


Start = Callable[[StopRequests], int]


def ends(begun: RunDir, start: Start) -> int:
    return requeueing(begun, NodeOptions(2, of_slurm=True), PrintableConsole(), start)


def test_a_warned_run_is_requeued(slurm: Any, begun: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def start(requests: StopRequests) -> int:
        signal.signal(signal.SIGTERM, lambda *_: requests.add())
        os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.count == 1
        return Stopped.exit_code

    assert ends(begun, start) == Stopped.exit_code
    assert slurm.requeued == ["41"]
    assert "time limit; start 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "it was preempted; start 2"),
        ({"Requeue": "0"}, "without --requeue"),
        ({"BatchFlag": "0"}, ""),
    ],
)
def test_a_preempted_run_is_requeued_if_its_job_allows_it(
    slurm: Any, begun: RunDir, changed: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.job |= {"PreemptTime": "2026-01-01T00:00:00"} | changed
    assert ends(begun, lambda requests: Stopped.exit_code) == Stopped.exit_code
    assert slurm.requeued == ([] if changed else ["41"])
    assert said in capsys.readouterr().out


def test_a_failure_is_final_and_a_lost_node_is_requeued(slurm: Any, begun: RunDir) -> None:
    def fail(requests: StopRequests) -> int:
        raise WorkerError("rank 1 failed")

    with pytest.raises(WorkerError):
        ends(begun, fail)
    assert slurm.requeued == []
    for node in (0, 1):  # all nodes, so that none is excluded
        write_json(begun.node_error(node), {"node": node, "host": f"n{node}", "message": "", "lost": True})
    with pytest.raises(WorkerError):
        ends(begun, fail)
    assert slurm.requeued == ["41"]


def test_a_run_that_a_newer_start_owns_is_not_requeued(slurm: Any, begun: RunDir) -> None:
    slurm.job |= {"PreemptTime": "2026-01-01T00:00:00"}

    def fenced(requests: StopRequests) -> int:
        raise WorkerError(Problem(FENCED, "begun anew"))

    with pytest.raises(WorkerError):
        ends(begun, fenced)
    assert slurm.requeued == []


def test_a_hang_without_restarts_left_ends_the_job(slurm: Any, begun: RunDir) -> None:
    write_json(begun.error(0), {"rank": 0, "host": "a", "type": "Hang", "message": "", "traceback": "", "code": "hang"})
    assert ends(begun, lambda requests: WorkerError.exit_code) == WorkerError.exit_code
    assert slurm.requeued == []


def test_a_finished_run_does_not_query_slurm(slurm: Any, begun: RunDir, tmp_path: Path) -> None:
    slurm.show = lambda job_id: pytest.fail("asked")
    assert ends(RunDir(tmp_path), lambda requests: EXIT_DONE) == EXIT_DONE


@pytest.mark.parametrize(("at_terminal", "kind"), [(True, StopRequests), (False, PatientRequests)])
def test_only_a_person_can_hurry_the_end(
    slurm: Any, begun: RunDir, at_terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: at_terminal, raising=False)
    kinds: list[type] = []
    ends(begun, lambda requests: kinds.append(type(requests)) or EXIT_DONE)  # type: ignore[func-returns-value]
    assert kinds == [kind]


def test_without_slurm_no_job_is_noted(slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert requeueing(RunDir(tmp_path), NodeOptions(), PrintableConsole(), lambda requests: 6) == 6
    assert job_of(RunDir(tmp_path)) is None
    with pytest.raises(RecipeError):
        requeueing(RunDir(tmp_path), NodeOptions(), PrintableConsole(), refuse)
    assert launching.JOB not in os.environ


def refuse(requests: StopRequests) -> int:
    raise RecipeError("refused")
