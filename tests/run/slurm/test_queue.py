"""The queue, with a squeue that prints a given text and counts its calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.slurm.queue import Queue, note_job, own_job


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """-> the file of its calls; jobs 7 and 8_1 are pending."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    (folder / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {calls}\nprintf "7\\n8_1\\n"\n')
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


def submitted(root: Path, job_id: str) -> RunDir:
    run = RunDir(root / f"run{job_id}")
    run.root.mkdir()
    note_job(run, job_id)
    return run


def test_slurm_is_asked_once_for_all_runs(squeue: Path, tmp_path: Path) -> None:
    queue = Queue()
    runs = [submitted(tmp_path, job_id) for job_id in ("7", "8_0", "8_1", "9")]
    assert [queue.holds(run) for run in runs] == [True, False, True, False]
    (asked,) = squeue.read_text().splitlines()
    assert "--states=PENDING" in asked
    assert "--array" in asked


def test_slurm_is_not_asked_for_runs_that_it_never_had(squeue: Path, tmp_path: Path) -> None:
    assert not Queue().holds(RunDir(tmp_path))
    assert not squeue.exists()


def test_without_slurm_nothing_is_known_to_be_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/slurm/here")
    assert not Queue().holds(submitted(tmp_path, "7"))


def test_a_task_of_an_array_is_known_by_the_arrays_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    assert own_job() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert own_job() == "10_2"
