from __future__ import annotations

from pathlib import Path

import pytest
from trainspec_cli.report.status import status_of

from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Written down for Slurm."""
    (tmp_path / "job.sbatch").touch()
    return RunDir(tmp_path)


def test_a_job_that_was_never_started_is_made(run: RunDir) -> None:
    assert status_of(run, running=False, queued=False) == "made"


def test_a_job_that_began_and_left_no_result_was_killed(run: RunDir) -> None:
    generations.begin(run)
    assert status_of(run, running=False, queued=False) == "killed"


def test_a_launch_that_left_no_result_was_killed(tmp_path: Path) -> None:
    assert status_of(RunDir(tmp_path), running=False, queued=False) == "killed"


def test_a_stopped_job_that_waits_to_go_on_is_queued(run: RunDir) -> None:
    write_json(run.result_json, {"status": "stopped"})
    assert status_of(run, running=False, queued=False) == "stopped"
    assert status_of(run, running=False, queued=True) == "queued"


def test_a_job_lost_with_its_host_is_queued_though_its_lock_is_left(run: RunDir) -> None:
    assert status_of(run, running=True, queued=True) == "queued"
    assert status_of(run, running=True, queued=False) == "running"
