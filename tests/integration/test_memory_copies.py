"""The state of killed workers stays in the host's memory, and a resumed run continues from it without a disk."""

import pytest
from integration.conftest import WHOLE, slow_from

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.memory import memory_folder
from trainspec_cli.run.folder.paths import RunDir

RECIPE = (*WHOLE, "checkpoint.interval_steps=null", "checkpoint.memory_interval_steps=3", slow_from(10))


@pytest.mark.slow
def test_kill_9_and_resume_from_memory(
    wait_for_step, kill_everything, start_trainspec, trainspec, tmp_path, read_result, undisturbed
):
    process = start_trainspec("launch", *RECIPE, "run.dir=killed")
    run_dir = RunDir(tmp_path / "killed")
    wait_for_step(run_dir, 14, process)
    kill_everything(process)
    assert run_dir.checkpoint_steps() == []
    folder = memory_folder(run_dir)
    assert folder.is_dir()
    ended = trainspec("resume", "killed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "copy in memory" in ended.stdout
    again = [event for event in read_events(run_dir.events(0)) if event["type"] == "start"][1]
    assert again["step"] >= 6
    assert again["step"] % 3 == 0
    assert again["restored_from"].startswith(str(folder))
    assert read_result("killed")["weights_sha256"] == undisturbed
    assert not folder.exists(), "the disk has it now"


@pytest.mark.slow
def test_a_killed_workers_run_starts_again_from_memory(
    wait_for_step, workers_of, start_trainspec, tmp_path, read_result
):
    """No checkpoint is on disk: without the copies the run would have ended."""
    process = start_trainspec("launch", *RECIPE, "run.dir=killed")
    run_dir = RunDir(tmp_path / "killed")
    wait_for_step(run_dir, 14, process)
    workers_of(process)[1].kill()
    said = process.communicate()[0]
    assert process.returncode == 0, said
    starts = [event for event in read_events(run_dir.events(0)) if event["type"] == "start"]
    assert [event["step"] > 0 for event in starts] == [False, True]
    assert starts[1]["restored_from"].startswith(str(memory_folder(run_dir)))
    time_s = read_result("killed")["time_s"]
    assert time_s["detection"] > 0
    assert time_s["recovery"] > 0
    assert time_s["idle"] == 0
