"""The choice of the failure to show among several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.problems import raises

from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.run.failure import (
    WorkerFailure,
    explain,
    explain_end,
    find_failures,
    find_listed,
    tail,
)
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.record import NodeErrorRecord, write_error
from trainspec_cli.run.job.job import Job

SUMMARY = """
[{index}]:
  time      : 2026-11-21_03:45:05
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid}) (SOMETHING)
  error_file: <N/A>
"""
LOST = "[pair.cc:537] Read error [127.0.0.1]:63156: Connection reset by peer"


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    made = make_job("train")
    made.logs.mkdir(parents=True)
    return made


def say(job: Job, rank: int, message: str, time: float, **more: Any) -> None:
    words = {"rank": rank, "host": "h", "type": "ValueError", "message": message, "traceback": "Traceback\n", **more}
    write_json(job.run.error(rank), {**words, "time": time})


def note_exits(job: Job, codes: dict[int, int], before: str = "") -> None:
    blocks = [SUMMARY.format(index=rank, rank=rank, code=code, pid=100 + rank) for rank, code in codes.items()]
    job.torchrun_log.write_text(before + "".join(blocks))


def order(job: Job) -> list[int]:
    return [failure.rank for failure in find_failures(job)]


def test_the_earliest_goes_first(job: Job) -> None:
    say(job, 0, "later", time=20.0)
    say(job, 1, "earlier", time=10.0)
    assert order(job) == [1, 0]


def test_a_lost_peer_comes_after_what_was_lost(job: Job) -> None:
    say(job, 0, LOST, time=10.0)
    say(job, 2, LOST, time=11.0)
    say(job, 1, "out of luck", time=12.0)
    assert order(job) == [1, 0, 2]
    assert "\nranks 0, 2 lost the connection" in explain(find_failures(job)).detail


def test_a_killed_worker_goes_before_the_words_of_its_peers(job: Job) -> None:
    say(job, 0, "something that does not look like a lost peer", time=10.0)
    note_exits(job, {0: 1, 1: -9})
    failures = find_failures(job)
    assert [failure.rank for failure in failures] == [1, 0]
    assert "SIGKILL" in explain(failures).headline


def test_a_lost_node_goes_before_the_words_of_the_workers(job: Job) -> None:
    say(job, 0, "out of luck", time=10.0)
    lost = NodeErrorRecord(node=1, host="n1", message="was lost: its agent is silent", lost=True, time=20.0)
    write_error(job.run.node_error(1), lost)
    first, second = find_failures(job)
    assert (first.who, first.summary, first.self_reported) == ("node 1", lost.message, False)
    assert (first.whole_node, second.whole_node, second.who) == (True, False, "rank 0")


def test_nodes_that_never_came_are_named_as_nodes(job: Job) -> None:
    for node in (1, 2):
        write_error(job.run.node_error(node), NodeErrorRecord(node=node, host="", message="did not come", lost=True))
    explanation = explain(find_failures(job))
    assert explanation.headline.startswith("node 1 (") and "did not come" in explanation.headline
    assert explanation.detail.startswith("node 2 ")


def test_who_torchrun_had_to_end_is_not_the_cause(job: Job) -> None:
    say(job, 0, "out of luck", time=10.0)
    note_exits(job, {0: 1, 1: -9, 2: -15}, before="Unable to shutdown process 101 via SIGTERM, forcefully exiting\n")
    assert order(job) == [0, 1, 2]
    assert [failure.consequence for failure in find_failures(job)] == [False, True, True]


def test_a_crash_in_native_code_shows_the_end_of_the_log(job: Job) -> None:
    log = job.logs / "workers_x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(100)) + "Fatal Python error: Segmentation fault\n")
    note_exits(job, {1: -11})
    explanation = explain(find_failures(job))
    assert explanation.headline.endswith("native code (SIGSEGV)")
    assert explanation.detail.endswith("error: Segmentation fault")
    assert "line 10\n" not in explanation.detail


GLOO_ABORTS = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 24 vs 8. \
Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?
Fatal Python error: Aborted

Thread 0x00007f3e8a8bb740 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 20 in average
  File "/home/me/train.py", line 31 in <module>
"""


def test_a_rank_that_gloo_ends_for_another_collective_is_the_cause(job: Job) -> None:
    """Its peers only lose the connection; a SIGABRT without this message is NCCL's watchdog, which ends such peers."""
    say(job, 0, LOST, time=10.0)
    note_exits(job, {0: 1, 1: -6})
    log = job.logs / "workers_x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    assert order(job) == [0, 1]
    log.write_text(GLOO_ABORTS)
    assert order(job) == [1, 0]
    headline = explain(find_failures(job)).headline
    assert "24 vs 8" in headline and "train.py:20 in average" in headline


def test_an_error_that_was_foreseen_comes_without_its_traceback(job: Job) -> None:
    for rank in (0, 1):
        say(job, rank, "not finite", time=10.0, code="not_finite", hint="lower optim.lr")
    explanation = explain(find_failures(job))
    assert explanation.headline == "rank 0 (h): not finite"
    assert explanation.detail.startswith("rank 1 ") and "Traceback" not in explanation.detail
    assert explanation.hint == "lower optim.lr"


def test_other_causes_are_told_too(job: Job) -> None:
    say(job, 0, "first", time=1.0)
    say(job, 1, "second", time=2.0)
    assert explain(find_failures(job)).detail.split("\n\n") == ["Traceback", "also rank 1: ValueError: second"]


def test_without_words_or_exits_there_is_no_failure(job: Job) -> None:
    assert find_failures(job) == []
    note_exits(job, {}, before="all is well\n")
    assert find_failures(job) == []


def test_a_damaged_report_is_named(job: Job) -> None:
    say(job, 0, "out of luck", time=10.0, step="two")
    with raises(UnreadableFileError, "unreadable_file", "`step` is 'two'"):
        find_failures(job)


def test_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(2**33)
    with log.open("ab") as file:
        file.write(b"\none\ntwo\n")
    assert tail(log, 2) == "one\ntwo"


def test_the_end_of_a_log_comes_without_its_colours(tmp_path: Path) -> None:
    """Progress bars go back to the start of their line, and a stray byte may be in any log."""
    log = tmp_path / "stderr.log"
    log.write_bytes(b"first\n\x1b[1;31mERROR\x1b[0m it broke\x1b[K\r\n10%\r20%\n\xff\x1b]0;owned\n")
    assert tail(log, 4).splitlines() == ["ERROR it broke", "10%", "20%", "\ufffd\x1b]0;owned"]


@pytest.mark.parametrize(
    ("ranks", "listed", "local", "rank"),
    [
        (None, 3, 1, 3),
        (range(4, 8), 3, 1, 7),  # a group as its supervisor sees it
        (range(4, 6), 1, 1, 5),  # its part on the group's first host
        (range(6, 8), 3, 1, 7),  # its part on the second
        (range(3, 4), 1, 0, 3),
    ],
)
def test_a_rank_that_torchrun_lists_is_told_as_the_runs(
    job: Job, ranks: range | None, listed: int, local: int, rank: int
) -> None:
    block = SUMMARY.replace("(local_rank: {rank})", "(local_rank: {local})")
    job.torchrun_log.write_text(block.format(index=0, rank=listed, local=local, code=-9, pid=1))
    assert [failure.rank for failure in find_listed(replace(job, ranks=ranks))] == [rank]


@pytest.mark.parametrize(
    ("exit_code", "consequence", "headline"),
    [
        (-9, True, "torchrun was ended"),
        (-9, False, "rank 1 (a host) broke"),
        (1, True, "rank 1 (a host) broke"),
        (None, True, "rank 1 (a host) broke"),
    ],
)
def test_a_torchrun_that_was_killed_is_the_cause_of_what_its_workers_only_followed(
    job: Job, exit_code: int | None, consequence: bool, headline: str
) -> None:
    failures = [WorkerFailure(1, "a host", "broke", consequence=consequence)]
    assert explain_end(job, exit_code, failures).headline.startswith(headline)


def test_an_end_without_a_failure_is_explained_by_its_exit_code(job: Job) -> None:
    assert explain_end(job, 3, []).headline.startswith("torchrun ") and "3" in explain_end(job, 3, []).headline
    of_nodes = explain_end(replace(job, nodes=(0, 1), command=("srun", "agent")), 3, [])
    assert of_nodes.headline.startswith("srun ") and "3" in of_nodes.headline
    assert of_nodes.exit_code == 4
    assert "without writing a result" in explain_end(job, 0, []).headline
