"""A rank that stands still is named, with the others' stacks, and the run ends so that it can be resumed."""

import json
import signal

import psutil
import pytest

from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.paths import RunDir


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_ends(
    wait_for_step, workers_of, start_trainspec, trainspec, tmp_path, read_result
):
    recipe = (
        "recipe=tiny",
        "train.max_steps=4000",
        "resilience.hang_floor_s=4",
        "resilience.mode=none",
        "checkpoint.interval_steps=5",
    )
    process = start_trainspec("launch", *recipe, "run.dir=hung")
    run_dir = RunDir(tmp_path / "hung")
    wait_for_step(run_dir, 10, process)
    stopped = next(worker for worker in workers_of(process) if rank_of(worker) == 1)
    stopped.send_signal(signal.SIGSTOP)
    said = " ".join(process.communicate()[0].split())
    assert process.returncode == 5, said
    late = "rank 1 is late: it does not respond; the other ranks wait in "
    assert any(f"{late}{where}" in said for where in ("gloo:", "sums of gradients")), said
    assert "rank 0 (" in said
    assert "train_step" in said, "rank 0's stack"
    assert read_result("hung")["status"] == "failed"
    told = json.loads(run_dir.error(0).read_text())
    assert (told["code"], told["rank"]) == ("hang", 0)
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE, "nothing is left behind"
