"""A run on a disk that fills: it continues without the checkpoints that do not fit, and keeps its older ones."""

import os
import shutil
import subprocess

import pytest

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

RECIPE = ("recipe=tiny", "train.max_steps=30", "checkpoint.interval_steps=10", "checkpoint.keep_last=3")
CHECKPOINT_KB = 1800
SLOW = "fault=slow(step=10,seconds=0.1,steps=20)"
"""So that a checkpoint is whole, or has failed, long before the next one."""


@pytest.fixture
def small_disk(tmp_path):
    """Room for one checkpoint, and for a part of the second."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounts a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"mode=700,size={int(1.6 * CHECKPOINT_KB)}k"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_what_does_not_fit_is_told_and_the_last_one_is_an_error(trainspec, small_disk, read_result):
    ended = trainspec("launch", *RECIPE, "run.dir=disk", SLOW)
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode == 4, said
    run_dir = RunDir(small_disk)
    assert run_dir.checkpoint_steps() == [10]
    assert "checkpoint of step 20" in said
    assert "No space left" in said
    assert "not be written" in ended.stderr
    assert "Traceback" not in said
    steps = [event["step"] for event in read_events(run_dir.events(0)) if event["type"] == "step"]
    assert steps == list(range(1, 31)), "training went on"
    assert read_result("disk")["exit_code"] == 4
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    ended = trainspec("resume", "disk")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [event["step"] for event in read_events(run_dir.events(0)) if event["type"] == "start"] == [0, 10]
    assert run_dir.checkpoint_steps()[-1] == 30


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_nothing_else(trainspec, tmp_path):
    at_once = ("checkpoint.mode=sync", "fault=disk_full(step=15,steps=10)")
    ended = trainspec("launch", *RECIPE, *at_once, "run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = " ".join(ended.stdout.split())
    assert "checkpoint of step 20" in said and "rank 0: File too" in said
    assert RunDir(tmp_path / "run").checkpoint_steps() == [10, 30]
