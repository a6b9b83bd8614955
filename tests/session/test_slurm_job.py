"""The inside of a Slurm job without a Slurm: what is started, and when the job goes back to the queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.errors import (
    EXIT_DONE,
    Interrupted,
    MachineError,
    PlanError,
    Problem,
    Stopped,
    WorkerError,
)
from trainspec_cli.recipe.keys.cluster import SlurmSpec
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.generations import FENCED
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.run.signals import PatientRequests
from trainspec_cli.run.slurm.commands import HOSTFILE
from trainspec_cli.session import slurm_job
from trainspec_cli.session.launching import in_slurm as requeue
from trainspec_cli.session.launching import resume
from trainspec_cli.session.launching.session import Session

MakeRun = Callable[..., RunDir]


class Slurm:
    """The requests to Slurm."""

    def __init__(self) -> None:
        self.requeued: list[str] = []
        self.job = {"Restarts": "0"}
        self.addresses = {"a": "top.leaf1.a", "b": "top.leaf2.b", "c": "top.leaf1.c", "d": "top.leaf2.d"}

    def own_address(self) -> str:
        return "node1"

    def own_name(self) -> str:
        return "b"

    def topology_addresses(self, num_nodes: int) -> dict[str, str]:
        return dict(list(self.addresses.items())[:num_nodes])

    def show(self, job_id: str) -> dict[str, str]:
        return self.job

    def requeue(self, job_id: str) -> None:
        self.requeued.append(job_id)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    found = Slurm()
    monkeypatch.setattr(slurm_job, "slurm", found)
    monkeypatch.setattr(resume, "slurm", found)
    monkeypatch.setattr(requeue, "slurm", found)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return found


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def job(make_run: MakeRun, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, RunDir]]:
    """job(start): run the batch script's command on a run of two nodes; -> (its exit code, the run)."""

    def call(start: Callable[..., int], *options: str) -> tuple[int, RunDir]:
        run = make_run("cluster.num_nodes=2")
        monkeypatch.setattr(resume, "start", start)
        monkeypatch.setattr(sys, "argv", ["slurm_job", *options, str(run.root), "srun", "agent"])
        with pytest.raises(SystemExit) as ended:
            slurm_job.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, run

    return call


def test_the_run_is_started_on_the_jobs_nodes(job: Callable[..., Any], slurm: Slurm) -> None:
    started: list[tuple[Session, Any]] = []

    def start(session: Session, requests: Any) -> int:
        started.append((session, requests))
        return EXIT_DONE

    code, run = job(start)
    ((session, requests),) = started
    assert (code, slurm.requeued) == (0, [])
    assert session.folder == run.root
    assert session.reach is not None
    assert (session.reach.head, session.reach.start) == ("node1", ("srun", "agent"))
    assert (session.force, type(requests)) == (False, PatientRequests)
    assert read_json(run.slurm_json)["job_id"] == "41"


def test_force_reaches_the_prediction(job: Callable[..., Any]) -> None:
    forced: list[bool] = []
    job(lambda session, requests: forced.append(session.force) or EXIT_DONE, "--force")
    assert forced == [True]


def test_a_warned_job_goes_back_to_the_queue(job: Callable[..., Any], slurm: Slurm, capsys: Any) -> None:
    def start(session: Session, requests: Any) -> int:
        with slurm_job.on_stop_signal(requests.add):
            os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.count == 1
        return Stopped.exit_code

    assert job(start)[0] == Stopped.exit_code
    assert slurm.requeued == ["41"]
    assert "time limit; start 2" in capsys.readouterr().out


def test_a_warning_before_the_workers_are_started_requeues_too(job: Callable[..., Any], slurm: Slurm) -> None:
    def start(session: Session, requests: Any) -> int:
        os.kill(os.getpid(), signal.SIGUSR2)
        raise AssertionError("the signal interrupts it")

    assert job(start)[0] == Interrupted.exit_code
    assert slurm.requeued == ["41"]


def test_a_stop_that_nobody_warned_of_stays_stopped(job: Callable[..., Any], slurm: Slurm) -> None:
    assert job(lambda session, requests: Stopped.exit_code)[0] == Stopped.exit_code
    assert slurm.requeued == []


def test_a_job_is_requeued_so_often_and_no_more(
    job: Callable[..., Any], slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    most = SlurmSpec().max_requeues
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(most))
    slurm.job = {"Restarts": str(most), "PreemptTime": "now"}
    assert job(lambda session, requests: WorkerError.exit_code)[0] == WorkerError.exit_code
    assert slurm.requeued == []
    assert f"requeued {most} times" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_ends_the_job(job: Callable[..., Any], slurm: Slurm, capsys: Any) -> None:
    def start(session: Session, requests: Any) -> int:
        raise PlanError(Problem("does_not_fit", "the plan does not fit"))

    assert job(start)[0] == PlanError.exit_code
    assert "not fit" in capsys.readouterr().err
    assert slurm.requeued == []


def test_an_older_start_has_no_say(job: Callable[..., Any], slurm: Slurm) -> None:
    def start(session: Session, requests: Any) -> int:
        raise WorkerError(Problem(FENCED, "begun anew"))

    slurm.job = {"Restarts": "0", "PreemptTime": "now"}
    assert job(start)[0] == WorkerError.exit_code
    assert slurm.requeued == []


def test_a_job_keeps_off_lost_nodes_and_what_the_user_excludes(
    job: Callable[..., Any], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    excluded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(slurm, "exclude", lambda *asked: excluded.append((slurm.requeued[:], *asked)), raising=False)

    def lose_node(session: Session, requests: Any) -> int:
        assert session.folder is not None
        write_json(RunDir(session.folder).node_error(1), {"node": 1, "host": "n7", "message": "", "lost": True})
        return WorkerError.exit_code

    job(lose_node)
    assert excluded == [(["41"], "41", ["n7"], None)], "only a pending job takes that"


@pytest.mark.parametrize(("refusals", "is_told"), [(2, False), (1000, True)])
def test_slurm_is_asked_again_until_the_job_is_pending(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: Any, refusals: int, is_told: bool
) -> None:
    asked, now = [], [0.0]

    def exclude(*given: object) -> None:
        asked.append(given)
        if len(asked) <= refusals:
            raise MachineError("the job is running")

    monkeypatch.setattr(slurm, "exclude", exclude, raising=False)
    monkeypatch.setattr(requeue.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(requeue.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    requeue._avoid("41", ["n7", "n8"], "n1")
    assert all(given == ("41", ["n7", "n8"], "n1") for given in asked)
    assert (" n7, n8 again" in capsys.readouterr().err) == is_told
    assert len(asked) == 3 if not is_told else 20 <= len(asked) <= 30


def test_a_job_that_slurm_does_not_take_back_keeps_its_exit_code(
    job: Callable[..., Any], slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(job_id: str) -> None:
        raise MachineError("scontrol refused")

    monkeypatch.setattr(slurm, "requeue", refuse)
    slurm.job = {"Restarts": "0", "PreemptTime": "now"}
    assert job(lambda session, requests: WorkerError.exit_code)[0] == WorkerError.exit_code
    assert "scontrol refused" in capsys.readouterr().err


def test_a_start_that_slurm_has_overtaken_asks_for_nothing(job: Callable[..., Any], slurm: Slurm) -> None:
    slurm.job = {"Restarts": "1", "PreemptTime": "now"}
    assert job(lambda session, requests: WorkerError.exit_code)[0] == WorkerError.exit_code
    assert slurm.requeued == []


TIERS = "cluster.fabric.tiers=[{name: domain},{name: leaf,devices: 2},{name: spine}]"


def test_nodes_are_numbered_by_their_switches_where_the_plan_depends_on_them(
    make_run: MakeRun, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(HOSTFILE, "before")
    run = make_run("cluster.num_nodes=4", "cluster.devices_per_node=1", TIERS)
    resume.place_nodes(run, read_plan(run), PrintableConsole())
    assert run.hosts_txt.read_text().split() == ["b", "d", "a", "c"]
    assert os.environ[HOSTFILE] == str(run.hosts_txt)
    assert capsys.readouterr().out == ""
    slurm.addresses = dict.fromkeys("abcd", "")
    resume.place_nodes(run, read_plan(run), PrintableConsole())
    assert run.hosts_txt.read_text().split() == ["b", "a", "c", "d"]
    assert "know their switches" in capsys.readouterr().out


def test_nodes_of_a_flat_network_are_left_alone(
    make_run: MakeRun, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HOSTFILE, raising=False)
    run = make_run("cluster.num_nodes=2")
    resume.place_nodes(run, read_plan(run), PrintableConsole())
    assert HOSTFILE not in os.environ and not run.hosts_txt.exists()


CHILD = """
import os, signal, sys, time
from pathlib import Path
from trainspec_cli.session import slurm_job
run, does = Path(sys.argv[1]), sys.argv[2]
def main():
    (run / "children").open("a").write("x")
    if does == "works":
        (run / "events").mkdir(exist_ok=True)
        (run / "events/rank00000.jsonl").open("a").write("{}")
    if does == "waits":
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(6))
        os.kill(os.getppid(), signal.SIGUSR2)
        time.sleep(60)
    if len((run / "children").read_text()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(5)
slurm_job.main = main
slurm_job.run_in_child()
"""


@pytest.mark.parametrize(
    ("does", "code", "children"),
    [("works", 5, 3), ("fails", 128 + signal.SIGKILL, 1), ("waits", 6, 1)],
    ids=["another one continues a run that has worked", "not one that has not", "signals are forwarded"],
)
def test_a_killed_supervisor_is_replaced(tmp_path: Path, does: str, code: int, children: int) -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), does], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert len((tmp_path / "children").read_text()) == children
