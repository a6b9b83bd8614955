"""A Slurm job that runs a user's command, without Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.errors import EXIT_DONE, RecipeError, Stopped
from trainspec_cli.run.folder.event_types.events import RecoveryEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_run_record
from trainspec_cli.run.signals import PatientRequests
from trainspec_cli.session import slurm_job
from trainspec_cli.wings.own_script import launching
from trainspec_cli.wings.own_script.job import CommandSettings, OwnJob, write_own_job


@pytest.fixture
def own_run(tmp_path: Path) -> RunDir:
    """A user's command on three nodes, as `trainspec sbatch` writes it."""
    run = RunDir(tmp_path / "own")
    run.root.mkdir(mode=0o700)
    write_own_job(run, OwnJob(3, CommandSettings(2, 60.0, None, None, 300.0), max_requeues=1, exclude="n1"))
    write_json(run.run_json, {"recipe": "train.py", "created_at": 1.0, "command": ["train"]})
    return run


def begin_own(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["slurm_job", str(run.root), "srun", "agent"])
    with pytest.raises(SystemExit) as ended:
        slurm_job.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_command_runs_on_the_jobs_nodes_and_is_requeued_as_often_as_allowed(
    own_run: RunDir, slurm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    reached: list[Any] = []

    def start(kind: object, run: RunDir, reach: Any, console: Any, requests: Any, *, force: bool) -> int:
        reached.append((run.root, reach.head, reach.start, type(requests)))
        return Stopped.exit_code

    monkeypatch.setattr(launching.CommandRuns, "run_in_job", start)
    slurm.job = {"Restarts": "0", "PreemptTime": "now"}
    assert begin_own(own_run, monkeypatch) == Stopped.exit_code
    assert reached == [(own_run.root, "node1", ("srun", "agent"), PatientRequests)]
    assert slurm.requeued == ["41"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm.job = {"Restarts": "1", "PreemptTime": "now"}
    assert begin_own(own_run, monkeypatch) == Stopped.exit_code
    assert slurm.requeued == ["41"]
    assert "cluster.slurm.max_requeues" in capsys.readouterr().out


def test_a_start_has_the_restarts_that_earlier_ones_have_left(
    own_run: RunDir, slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, jobs = EventWriter(own_run.events(0), rank=0), []
    events.write(RecoveryEvent(step=5, change="restart", group=None, stall_s=None, lost_steps=None))
    events.close()
    write_json(own_run.result_json, {"status": "stopped", "exit_code": 1, "steps": 5})
    monkeypatch.setattr(launching, "run", lambda job, *_, **__: jobs.append(job) or EXIT_DONE)
    assert begin_own(own_run, monkeypatch) == EXIT_DONE
    (job,) = jobs
    assert (job.max_restarts, job.program, job.nodes) == (1, "train", (0, 1, 2))
    assert not own_run.result_json.exists()
    assert len(read_run_record(own_run).resumes) == 1


def test_a_finished_command_is_not_run_again(
    own_run: RunDir, slurm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_json(own_run.result_json, {"status": "done", "exit_code": 0, "steps": 5})
    monkeypatch.setattr(launching, "run", lambda *_, **__: pytest.fail("it was run"))
    assert begin_own(own_run, monkeypatch) == RecipeError.exit_code
    assert capsys.readouterr().err
