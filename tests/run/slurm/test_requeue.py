from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import NodeErrorRecord, WorkerErrorRecord, write_error
from trainspec_cli.run.slurm.queue import decide, is_over, is_preempted


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.mark.parametrize("exit_code", [6, 130])
def test_a_warned_run_that_stopped_goes_on_later(run: RunDir, exit_code: int) -> None:
    again = decide(run, exit_code, warned=True, preempted=False, num_nodes=2)
    assert again is not None
    assert "time limit" in again.reason


@pytest.mark.parametrize("warned", [True, False])
def test_a_preempted_run_goes_on_later_whatever_signal_told_it(run: RunDir, warned: bool) -> None:
    for exit_code in (5, 6):
        again = decide(run, exit_code, warned=warned, preempted=True, num_nodes=2)
        assert again is not None
        assert again.reason == "it was preempted"
    assert decide(run, 0, warned=warned, preempted=True, num_nodes=2) is None, "it was done in time"


def test_a_run_that_its_user_stopped_does_not(run: RunDir) -> None:
    assert decide(run, 6, warned=False, preempted=False, num_nodes=2) is None


@pytest.mark.parametrize("exit_code", [0, 2, 3, 4])
def test_a_run_that_is_done_or_wrong_does_not(run: RunDir, exit_code: int) -> None:
    assert decide(run, exit_code, warned=True, preempted=False, num_nodes=2) is None


def test_a_lost_host_is_avoided(run: RunDir) -> None:
    write_json(run.node_error(1), {"node": 1, "host": "node7", "lost": True, "message": "gone"})
    write_json(run.error(0), {"rank": 0, "message": "connection reset"})
    again = decide(run, 5, warned=False, preempted=False, num_nodes=2)
    assert again is not None
    assert again.reason.startswith("node 1 (node7) ") and list(again.avoid) == ["node7"]


@pytest.mark.parametrize(("host", "goes_back"), [("", True), ("node7", False)])
def test_a_host_that_never_joined_is_tried_again_and_nothing_else_that_this_machine_lacks(
    run: RunDir, host: str, goes_back: bool
) -> None:
    write_error(run.node_error(1), NodeErrorRecord(node=1, host=host, message="did not come", lost=True))
    again = decide(run, 4, warned=False, preempted=False, num_nodes=2)
    assert (again is not None) is goes_back


def test_a_host_that_could_not_start_is_not_lost(run: RunDir) -> None:
    write_error(run.node_error(1), NodeErrorRecord(node=1, host="node7", message="no disk", lost=False))
    assert decide(run, 5, warned=False, preempted=False, num_nodes=2) is None


def test_hosts_that_are_lost_all_at_once_are_not_avoided(run: RunDir) -> None:
    """Their step was ended: the job could wait for ever for hosts that are none of its own."""
    for node in (0, 1):
        write_json(run.node_error(node), {"node": node, "host": f"node{node}", "lost": True, "message": "gone"})
    again = decide(run, 5, warned=False, preempted=False, num_nodes=2)
    assert again is not None
    assert list(again.avoid) == []


def test_a_start_that_slurm_has_followed_by_another_has_no_say() -> None:
    assert is_over({"Restarts": "1"}, restarts=0)
    assert not is_over({"Restarts": "1"}, restarts=1)


@pytest.mark.parametrize(("time", "preempted"), [("2026-01-01T00:01:00", True), ("None", False)])
def test_slurm_tells_a_preemption_from_a_scancel(time: str, preempted: bool) -> None:
    assert is_preempted({"PreemptTime": time}) is preempted


def test_a_hang_is_tried_again_and_an_error_of_the_run_is_not(run: RunDir) -> None:
    write_error(run.error(0), WorkerErrorRecord(rank=0, host="a", type="ValueError", message="", traceback=""))
    assert decide(run, 5, warned=False, preempted=False, num_nodes=2) is None
    hung = WorkerErrorRecord(rank=1, host="a", type="", message="a step hung", traceback="", code="hang")
    write_error(run.error(1), hung)
    again = decide(run, 5, warned=False, preempted=False, num_nodes=2)
    assert again is not None
    assert again.reason == "a step hung"


def test_lost_hosts_are_named_in_order_and_those_without_a_name_are_not_avoided(run: RunDir) -> None:
    for node, host in ((10, ""), (2, "node2"), (1, "node1")):
        write_json(run.node_error(node), {"node": node, "host": host, "lost": True, "message": "gone"})
    again = decide(run, 5, warned=False, preempted=False, num_nodes=4)
    assert again is not None
    assert again.reason.startswith("node 1 (node1), node 2 (node2), node 10 (")
    assert list(again.avoid) == ["node1", "node2"]


def test_a_job_of_which_slurm_tells_nothing_was_neither_restarted_nor_preempted() -> None:
    assert not is_over({}, restarts=3)
    assert not is_preempted({}) and not is_preempted({"PreemptTime": "Unknown"})
