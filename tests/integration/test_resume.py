"""Killed, stopped and resumed runs end with the weights of one that was left alone, bit for bit."""

import random
import re
import shutil
import signal
import time

import pytest
from integration.conftest import STEPS, WHOLE, slow_from

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan

RECIPE = (*WHOLE, "checkpoint.interval_steps=10")


@pytest.mark.clause("NUM-6", "CKPT-1")
@pytest.mark.slow
def test_kill_9_at_random_moments_and_resume(
    wait_for_step, kill_everything, start_trainspec, trainspec, tmp_path, read_result, undisturbed
):
    moments = random.Random(7)
    for attempt in range(5):
        run = f"killed{attempt}"
        process = start_trainspec("launch", *RECIPE, f"run.dir={run}", slow_from(45))
        wait_for_step(RunDir(tmp_path / run), moments.randrange(1, 50), process)
        time.sleep(moments.uniform(0, 0.2))
        kill_everything(process)
        killed_at = max(e["step"] for e in read_events(RunDir(tmp_path / run).events(0)) if e["type"] == "step")
        ended = trainspec("resume", run)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert read_result(run)["weights_sha256"] == undisturbed, f"killed after step {killed_at}"


def test_kill_9_of_one_worker_then_resume(trainspec, tmp_path, read_result):
    """The steps after the checkpoint are made again, with the same losses to the bit."""
    recipe = ("recipe=tiny", "train.max_steps=12", "checkpoint.interval_steps=6", "checkpoint.mode=sync")
    ended = trainspec("launch", *recipe, "run.dir=killed", "resilience=none", "fault='kill(rank=1,step=10)'")
    assert ended.returncode == 5, ended.stdout + ended.stderr
    assert "SIGKILL" in ended.stdout + ended.stderr
    assert (read_result("killed")["status"], read_result("killed")["exit_code"]) == ("failed", 5)
    ended = trainspec("resume", "killed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = list(read_events(RunDir(tmp_path / "killed").events(0)))
    starts = [number for number, event in enumerate(events) if event["type"] == "start"]
    assert [events[number]["step"] for number in starts] == [0, 6]
    before, after = (
        {event["step"]: event["loss"] for event in part if event["type"] == "step"}
        for part in (events[: starts[1]], events[starts[1] :])
    )
    assert list(after) == list(range(7, 13))
    assert [after[step] for step in range(7, 10)] == [before[step] for step in range(7, 10)]


@pytest.mark.clause("LAUNCH-7")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stopped_run_goes_on_at_the_next_sample(
    wait_for_step, start_trainspec, trainspec, tmp_path, read_result, undisturbed, number
):
    process = start_trainspec("launch", *WHOLE, "checkpoint.interval_steps=null", "run.dir=stopped", slow_from(5))
    wait_for_step(RunDir(tmp_path / "stopped"), 5, process)
    process.send_signal(number)
    said = process.communicate()[0]
    assert process.returncode == 6, said
    stopped = read_result("stopped")
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 6)
    assert 5 <= stopped["steps"] < STEPS
    assert RunDir(tmp_path / "stopped").checkpoint_steps() == [stopped["steps"]]
    ended = trainspec("resume", "stopped")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_result("stopped")["weights_sha256"] == undisturbed
    steps = [e["step"] for e in read_events(RunDir(tmp_path / "stopped").events(0)) if e["type"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "no step twice, none left out"


@pytest.mark.clause("RUN-8")
@pytest.mark.slow
def test_an_altered_checkpoint_is_refused_by_name(trainspec, tmp_path, whole):
    altered = RunDir(shutil.copytree(whole.root, tmp_path / "altered"))
    part = altered.checkpoint(STEPS) / "rank00001.safetensors"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    refused = trainspec("resume", "altered", f"train.max_steps={STEPS + 4}")
    assert refused.returncode != 0
    said = " ".join((refused.stdout + refused.stderr).split())
    assert re.search(rf"step_000000{STEPS}/\s*rank00001.safetensors", said), said
    assert "altered" in said
    assert "Traceback" not in said
    assert read_plan(altered).spec.train.max_steps == STEPS, "a resume that failed has changed nothing"


@pytest.mark.clause("RUN-9")
@pytest.mark.slow
def test_what_a_killed_save_left_is_passed_over(trainspec, tmp_path, read_result, whole):
    run_dir = RunDir(shutil.copytree(whole.root, tmp_path / "half"))
    shutil.copytree(run_dir.checkpoint(STEPS), run_dir.checkpoints / f".step_000000{STEPS + 2}.killed.partial")
    ended = trainspec("resume", "half", f"train.max_steps={STEPS + 2}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_result("half")["steps"] == STEPS + 2
    assert not list(run_dir.checkpoints.glob(".*"))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(trainspec, tmp_path):
    """The samples are the same and the sums nearly so: the losses go on as if nothing had changed."""

    def losses(run):
        return [e["loss"] for e in read_events(RunDir(tmp_path / run).events(0)) if e["type"] == "step"]

    common = ("recipe=tiny", "precision=fp32", "optim.schedule.kind=constant")
    for run, steps in (("whole", 8), ("half", 4)):
        ended = trainspec("launch", *common, f"train.max_steps={steps}", f"run.dir={run}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    ended = trainspec("resume", "half", "train.max_steps=8", "cluster.devices_per_node=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses("half") == pytest.approx(losses("whole"), rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comm", "layout", "part"),
    [
        ("int4", "layout.dp_shard=2", 1 / 7),
        ("int4", "layout.dp_replicate=2", 1 / 7),
    ],
)
def test_what_compressed_gradients_have_lost_is_in_the_checkpoint(trainspec, tmp_path, read_result, comm, layout, part):
    """One run is killed and restarts from its checkpoint, and one is left alone. Sent in full, the bits are others."""
    recipe = (*WHOLE, layout, "checkpoint.interval_steps=5", "checkpoint.mode=sync")
    found = {}
    for run, more in (
        ("alone", [f"comm={comm}"]),
        ("killed", [f"comm={comm}", "fault='kill(rank=1,step=8)'"]),
        ("full", ["comm=full"]),
    ):
        ended = trainspec("launch", *recipe, f"run.dir={run}", *more)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found[run] = read_result(run)
    starts = [e for e in read_events(RunDir(tmp_path / "killed").events(0)) if e["type"] == "start"]
    assert [event["step"] for event in starts] == [0, 5]
    assert not [e for e in read_events(RunDir(tmp_path / "killed").events(0)) if e["type"] == "warning"]
    assert found["killed"]["weights_sha256"] == found["alone"]["weights_sha256"] != found["full"]["weights_sha256"]
    sent = {run: result["wire_bytes"]["gradients"] for run, result in found.items()}
    assert sent["alone"] < sent["full"] * part
