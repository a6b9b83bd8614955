"""The jobs that replace lost nodes, with stand-ins for Slurm's commands that write down how they were called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab.waiting import wait_for

from trainspec_cli.core.environment_names import JOINS
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.slurm import replacement
from trainspec_cli.run.slurm.replacement import ReplacementJobs, join_in_place, replacement_environment

SCONTROL = """
case "$2 $3" in
  "job "*) echo "JobId=7 JobName=x UserId=root NodeList=$(cat "$(dirname "$0")/own")" ;;
  "hostnames "*) echo "$3" | tr ',' '\\n' ;;
esac
"""


class StandIns:
    def __init__(self, folder: Path):
        self.folder = folder
        self.own_nodes("a,b")
        self._write("sbatch", 'echo "$TRAINSPEC_JOINS" >> "$0.joins"; echo 41')
        self._write("scancel", "")
        self._write("scontrol", SCONTROL)

    def own_nodes(self, names: str) -> None:
        (self.folder / "own").write_text(names)

    def calls(self, name: str) -> list[list[str]]:
        log = self.folder / f"{name}.log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def _write(self, name: str, body: str) -> None:
        program = self.folder / name
        program.write_text(f'#!/bin/sh\necho "$@" >> "$0.log"\n{body}\n')
        program.chmod(0o755)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(replacement, "LOOK_S", 0.05)
    return StandIns(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def updates(stand_ins: StandIns) -> list[str]:
    return [call[-1] for call in stand_ins.calls("scontrol") if call[0] == "update"]


def test_a_job_of_one_node_avoids_the_lost_node_until_slurm_knows_of_the_loss(stand_ins: StandIns, run: RunDir) -> None:
    jobs = ReplacementJobs(run, "7", 3, exclude="x")
    jobs.ask(1, "b", generation=4)
    wait_for(lambda: stand_ins.calls("sbatch") and jobs.take_news())
    (call,) = stand_ins.calls("sbatch")
    assert "--nodes=1" in call and "--exclude=x,a,b" in call and call[-1] == str(run.job_sbatch)
    assert (stand_ins.folder / "sbatch.joins").read_text() == "1:4\n"
    assert updates(stand_ins) == []
    stand_ins.own_nodes("a")
    wait_for(lambda: updates(stand_ins))
    assert updates(stand_ins) == ["ExcNodeList=x,a"]
    assert stand_ins.calls("scancel") == []
    jobs.close()
    assert stand_ins.calls("scancel") == [["41"]]


def test_the_job_is_cancelled_when_the_lost_node_itself_returns_but_not_when_another_takes_its_place(
    stand_ins: StandIns, run: RunDir
) -> None:
    jobs = ReplacementJobs(run, "7", 3)
    jobs.ask(1, "b", generation=4)
    wait_for(jobs.take_news)
    jobs.withdraw(1, "c")
    jobs.withdraw(0, "b")
    assert stand_ins.calls("scancel") == []
    jobs.withdraw(1, "b")
    wait_for(lambda: stand_ins.calls("scancel"))
    jobs.close()
    assert stand_ins.calls("scancel") == [["41"]]


def test_no_more_jobs_are_submitted_than_allowed(stand_ins: StandIns, run: RunDir) -> None:
    jobs = ReplacementJobs(run, "7", 1)
    jobs.ask(1, "b", generation=4)
    jobs.ask(1, "c", generation=4)
    jobs.close()
    assert len(stand_ins.calls("sbatch")) == 1
    assert any("cluster.slurm.max_requeues" in text for text in jobs.take_news())


def test_a_job_that_slurm_refuses_is_reported(stand_ins: StandIns, run: RunDir) -> None:
    (stand_ins.folder / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    jobs = ReplacementJobs(run, "7", 1)
    jobs.ask(1, "b", generation=4)
    jobs.close()
    (text,) = jobs.take_news()
    assert "node 1 (b)" in text and "no such partition" in text
    assert stand_ins.calls("scancel") == []


def test_a_replacement_inherits_the_environment_but_not_what_slurm_set_for_the_other_job() -> None:
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_HOSTFILE": "h", "SLURM_CONF": "c", "SLURMD_NODENAME": "a"}
    kept = replacement_environment(environ, 2, 5)
    assert kept == {"PATH": "/bin", "SLURM_CONF": "c", JOINS: "2:5"}


def test_one_agent_joins_with_the_options_and_the_container_of_the_runs_own_job(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, command: started.append(command))
    own = ["srun", "--nodes=4", "--ntasks=4", "--mpi=none", "--container-image=i", "python", "-m", "agent"]
    join_in_place("2:5", run, own)
    (command,) = started
    end = command.index("python")
    assert command[1:5] == own[1:5] and {"--nodes=1", "--ntasks=1"} <= set(command[5:end])
    assert command[end:] == ["python", "-m", "agent", "--joins", "2", str(run.root), "5"]
