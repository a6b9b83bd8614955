"""Slurm commands, with an scontrol that prints a given text."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError
from trainspec_cli.run.slurm import commands as slurm

SAID = "JobId=7 JobName=a b   Requeue=1 Restarts=2 ExcNodeList=(null) PreemptTime=None Comment=x=y"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\necho '{SAID}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "calls"


SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show job") echo "Partition=main NumNodes={wanted} ExcNodeList={excluded}" ;;
  "show partition") echo "TotalNodes={nodes} TotalCPUs=64" ;;
  "show hostnames") echo "$3" | tr , '\\n' ;;
  update*) echo "$@" > {log} ;;
esac
"""


@pytest.mark.parametrize(
    ("nodes", "excluded", "always", "left", "wanted"),
    [
        (8, "(null)", None, "c", "2-2"),
        (8, "a,b", None, "a,b,c", "2-2"),
        (4, "a,b", None, "b,c", "2-4"),
        (4, "a,b", "a", "a,c", "2"),
        (3, "c", None, "c", "2"),
        (2, "a", None, "", "2"),
        (2, "a", None, "", "1"),
    ],
    ids=[
        *("the first", "one more", "the newest alone", "the user's own stay", "the same again", "none can be spared"),
        "none can be spared, and one has completed",
    ],
)
def test_a_job_avoids_lost_hosts_as_long_as_enough_are_left(
    tmp_path: Path, monkeypatch, nodes: int, excluded: str, always: str | None, left: str, wanted: str
) -> None:
    log = tmp_path / "log"
    (tmp_path / "scontrol").write_text(SCONTROL.format(excluded=excluded, nodes=nodes, log=log, wanted=wanted))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm.exclude("7", ["c"], always)
    assert log.read_text().split() == ["update", "job=7", f"ExcNodeList={left}"]


def test_what_slurm_knows_of_a_job_is_read(calls: Path) -> None:
    known = slurm.show("7")
    assert (known["Restarts"], known["PreemptTime"], known["Comment"]) == ("2", "None", "x=y")


def test_names_and_paths_with_blanks_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "JobId=7 JobName=my run Restarts=9 UserId=me(1) Restarts=2 NumNodes=1 WorkDir=/a Restarts=8 NumNodes=5"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    known = slurm.show("7")
    assert (known["Restarts"], known["NumNodes"], known["WorkDir"]) == ("2", "1", "/a")


def test_a_host_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/slurm/here")
    with raises(MachineError, "no_slurm", "scontrol"):
        slurm.show("7")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[tuple[str, ...]], dict[str, str]]]:
    """The commands that are run, and what each program answers."""
    commands: list[tuple[str, ...]] = []
    answers: dict[str, str] = {}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(tuple(command))
        answer = answers.get(" ".join(command[:3]), answers.get(command[0]))
        if answer is None:
            return subprocess.CompletedProcess(command, 1, "", "slurm_load_jobs error: Invalid job id specified\n")
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(slurm.subprocess, "run", run)
    yield commands, answers


@pytest.mark.parametrize(
    ("answer", "alive"),
    [("RUNNING\n", True), ("PENDING\n", True), ("COMPLETED\n", False), ("TIMEOUT\nNODE_FAIL\n", False),
     ("CANCELLED\nRUNNING\n", True), ("", False), (None, False)],
)  # fmt: skip
def test_a_job_lives_until_all_of_it_has_ended(cluster, answer: str | None, alive: bool) -> None:
    commands, answers = cluster
    if answer is not None:
        answers["squeue"] = answer
    assert slurm.is_alive("12") == alive
    assert "--jobs=12" in commands[0] and "--states=all" in commands[0]


def test_pending_jobs_are_this_users_tasks_one_by_one(cluster) -> None:
    commands, answers = cluster
    assert slurm.pending() == frozenset()
    answers["squeue"] = "12_3\n12_4\n15\n"
    assert slurm.pending() == {"12_3", "12_4", "15"}
    assert {"--me", "--array", "--states=PENDING", "--noheader"} <= set(commands[-1])


def test_a_script_is_submitted_and_a_job_requeued(cluster) -> None:
    commands, answers = cluster
    answers |= {"sbatch": "77;cluster\n", "scontrol": ""}
    assert slurm.submit(Path("job.sbatch")) == "77"
    slurm.requeue("77")
    assert commands == [("sbatch", "--parsable", "job.sbatch"), ("scontrol", "requeue", "77")]


def test_what_slurm_refuses_is_told_in_its_own_words(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(MachineError, "slurm_refused", "sbatch", "slurm_load_jobs error: Invalid") as raised:
        slurm.submit(Path("job.sbatch"))
    (problem,) = raised.value.problems
    assert (problem.code, problem.environment) == ("slurm_refused", True) and "sinfo" in problem.hint

    def hang(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(slurm.subprocess, "run", hang)
    with raises(MachineError, slurm.SILENT, f"{slurm.TIMEOUT_S:g} s"):
        slurm.requeue("7")
    assert not slurm.is_alive("7")


def test_a_nodes_own_address_is_slurms(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    _, answers = cluster
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    answers["scontrol show node"] = "NodeName=n2 NodeAddr=10.0.0.2 NodeHostName=n2"
    assert slurm.own_address() == "10.0.0.2"
    answers["scontrol show node"] = "NodeName=n2"
    assert slurm.own_address() == "n2"
    monkeypatch.delenv("SLURMD_NODENAME")
    answers["scontrol show hostnames"] = "n1\nn2\n"
    assert slurm.own_address() == "n1"


def test_the_switches_above_each_node_come_in_slurms_order_of_the_nodes(cluster, monkeypatch) -> None:
    commands, answers = cluster
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    answers |= {"srun": "node3 top.leaf2.node3\nnode1 top.leaf1.node1\nnode2\n", "scontrol": "node1\nnode2\nnode3\n"}
    found = slurm.topology_addresses(3)
    assert list(found.items()) == [("node1", "top.leaf1.node1"), ("node2", ""), ("node3", "top.leaf2.node3")]
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1"} <= set(commands[0])


NODE = (
    "NodeName=gpu-7 Arch=x86_64 CoresPerSocket=32 State={state} ThreadsPerCore=2 Weight=1 "
    "BootTime=2026-11-27T03:11:02 {reason}Comment=rack 3 Reason"
)


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("DOWN*", "Reason=Not responding [slurm@2026-11-28T00:10:11] ", "DOWN*: Not responding"),
        ("IDLE+DRAIN", "Reason=gpu 3: Xid 79 [root@2026-11-28T00:10:11] ", "IDLE+DRAIN: gpu 3: Xid 79"),
        ("ALLOCATED", "", ""),
    ],
)
def test_slurms_reason_for_a_lost_node(calls: Path, monkeypatch, state: str, reason: str, words: str) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    scontrol = calls.parent / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '{NODE.format(state=state, reason=reason)}'\n")
    assert slurm.why_down("gpu-7") == words
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm.why_down("gpu-7") == ""
