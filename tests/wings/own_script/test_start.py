"""One start of a command on several nodes, driven by messages of its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.run.channel.messages import (
    GroupExited,
    HangFound,
    NodeSilent,
    NodeStands,
    NodeWorks,
    ProcessSilent,
    RankStands,
    StepsMade,
    WorkedLong,
)
from trainspec_cli.run.folder.record import WorkerErrorRecord, read_error
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery import run_state
from trainspec_cli.wings.own_script.job import OUTPUT_LOG
from trainspec_cli.wings.own_script.start import OwnStart
from trainspec_cli.wings.own_script.watches import name_late


def stands(rank: int, place: str = "all_reduce, called at train.py:3", **differs: bool) -> RankStands:
    about = {"waiting": True, "stopped": False, "ended": False, **differs}
    return RankStands(rank, f"node{rank}", step=7, stack="in train.py", place=place, **about)


def hung(*ranks: RankStands) -> NodeStands:
    return NodeStands(0, 1, waited_s=9.0, deadline_s=8.0, ranks=ranks)


def silent(node: int, *, stopped: bool = False) -> NodeSilent:
    return NodeSilent(0, 1, 20.0, (ProcessSilent(node, f"node{node}", 70 + node, "train.py", stopped=stopped),))


@pytest.fixture
def named() -> list[HangFound]:
    return []


@pytest.fixture
def start(tmp_path: Path, named: list[HangFound]) -> OwnStart:
    own = {"program": "train.py", "log": OUTPUT_LOG}
    job = Job(tmp_path, ("agent",), {}, 2, 60.0, tmp_path / "logs", nodes=(0, 1), **own)
    return OwnStart(job, 1, range(2), named.append)


def test_the_steps_of_a_start_are_those_of_the_furthest_node(start: OwnStart) -> None:
    assert start.hear(0, "a", StepsMade(0, 1, 4)) == [run_state.Stepped(0)]
    assert start.hear(1, "b", StepsMade(0, 1, 3)) == []
    assert start.hear(1, "b", StepsMade(0, 1, 5)) == [run_state.Stepped(0)]


def test_a_start_ends_with_its_last_node_and_the_first_failure_counts(start: OwnStart) -> None:
    list(start.poll())
    start.hear(0, "a", StepsMade(0, 1, 4))
    assert start.hear(1, "b", GroupExited(0, 1, 3)) == [run_state.WorkerFailed(0)]
    assert not start.has_ended and list(start.poll()) == []
    start.hear(0, "a", GroupExited(0, 1, -15))
    (end,) = start.poll()
    assert isinstance(end, run_state.GroupEnded)
    assert (end.done, end.exit_code, end.checkpoint_step) == (False, 3, 4)
    assert end.headline.startswith("train.py ") and end.headline.endswith(" 3")


def test_a_node_that_is_done_early_is_waited_for(start: OwnStart) -> None:
    list(start.poll())
    assert start.hear(1, "b", GroupExited(0, 1, 0)) == []
    start.hear(0, "a", GroupExited(0, 1, 0))
    (end,) = start.poll()
    assert isinstance(end, run_state.GroupEnded) and end.done and end.exit_code == 0


def test_a_lost_node_is_named_and_expected_to_fail_again(start: OwnStart) -> None:
    list(start.poll())
    start.lose(1, 1, "b", "closed its connection")
    start.hear(0, "a", GroupExited(0, 1, None))
    (end,) = start.poll()
    assert isinstance(end, run_state.GroupEnded) and end.foreseen and not end.done
    assert end.headline.startswith("node 1 (b)")


def test_a_hang_needs_every_node_without_work(start: OwnStart, named: list[HangFound], tmp_path: Path) -> None:
    for node in (0, 1):
        start.hear(node, "a", StepsMade(0, 1, 7))
    assert start.hear(0, "a", hung(stands(0))) == []
    start.hear(0, "a", NodeWorks(0, 1))
    assert start.hear(1, "b", hung(stands(1, waiting=False))) == [], "the other node works again"
    assert start.hear(0, "a", hung(stands(0))) == [run_state.WorkerFailed(0)]
    assert [(hang.late, hang.is_over) for hang in named] == [((1,), True)]
    error = read_error(start._job.run.error(1), WorkerErrorRecord)
    assert (error.rank, error.host, error.code, error.step) == (1, "node1", "hang", 8)
    assert "9 s" in error.message and "rank 1:" in error.message


def test_without_steps_a_hang_needs_every_node_silent(start: OwnStart, named: list, tmp_path: Path) -> None:
    assert start.hear(0, "a", silent(0)) == []
    start.hear(0, "a", NodeWorks(0, 1))
    assert start.hear(1, "b", silent(1, stopped=True)) == [], "the other node works again"
    assert start.hear(0, "a", silent(0)) == [run_state.WorkerFailed(0)]
    assert named == []
    error = read_error(start._job.run.error(1), WorkerErrorRecord)
    assert (error.rank, error.host, error.code, error.step) == (1, "node1", "hang", None)
    assert all(part in error.message for part in ("20 s", "rank 1", "process 71 (train.py)", "node1", "is stopped"))


def test_a_silent_node_is_ignored_once_others_make_steps(start: OwnStart) -> None:
    start.hear(1, "b", silent(1))
    start.hear(0, "a", StepsMade(0, 1, 1))
    assert start.hear(1, "b", silent(1)) == []
    assert start.hear(0, "a", hung(stands(0))) == [run_state.WorkerFailed(0)]


@pytest.mark.parametrize(("messages", "worked"), [((WorkedLong(0, 1),), True), ((), False)])
@pytest.mark.parametrize("made", [0, 1])
def test_a_start_without_steps_has_worked_if_a_node_has(start: OwnStart, messages, worked: bool, made: int) -> None:
    for message in (*messages, *[StepsMade(0, 1, step + 1) for step in range(made)], GroupExited(0, 1, 1)):
        start.hear(1, "b", message)
    start.hear(0, "a", GroupExited(0, 1, 1))
    end = list(start.poll())[-1]
    assert isinstance(end, run_state.GroupEnded) and end.has_worked == (worked and not made)


@pytest.mark.parametrize(
    ("ranks", "late", "why"),
    [
        ([stands(0), stands(1, stopped=True)], [1], ""),
        ([stands(0), stands(1, ended=True)], [1], "ended"),
        ([stands(0), stands(1)], [0, 1], "all_reduce, "),
        ([stands(0), stands(1), stands(2, "barrier")], [2], "rank 2 waits"),
        ([stands(4, "sleep", waiting=False)], [4], "sleep"),
    ],
)
def test_late_ranks_are_named_over_all_nodes(ranks: list[RankStands], late: list[int], why: str) -> None:
    found, reason = name_late(ranks)
    assert found == late and why in reason
