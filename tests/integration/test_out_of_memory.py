"""Whole runs whose memory runs out: they go on, and lose nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.waiting import PATIENCE_S

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

STEPS, SAMPLES, FAILS_AT = 8, 8, 3
ANY_SIZE = (
    "recipe=tiny",
    "checkpoint.interval_steps=null",
    "precision=fp32",
    f"batching.global_batch_size={SAMPLES}",
    f"train.max_steps={STEPS}",
)
RECIPE = (*ANY_SIZE, "cluster.devices_per_node=2", "batching.micro_batch_size=4")
LAYOUTS = {
    "zero1": ("layout=fsdp", "layout.zero_stage=1"),
    "zero3": ("layout=fsdp", "layout.zero_stage=3"),
    "pp": ("layout.pp=2",),
}


def steps(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events(0)) if event["type"] == "step"]


def losses(run: RunDir) -> list[float]:
    return [event["loss"] for event in steps(run)]


@pytest.fixture(scope="session")
def undisturbed_losses(whole_of: Any) -> list[float]:
    """The losses of an undisturbed run with the same samples, which are the same in every layout."""
    return losses(whole_of(*RECIPE, *LAYOUTS["zero3"]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_of_two_ranks_runs_out_of_memory_and_no_step_is_lost(
    trainspec, tmp_path: Path, undisturbed_losses: list[float], layout: str
) -> None:
    """There is no checkpoint before: the step's beginning is saved where it stands."""
    fault = f"fault=oom(step={FAILS_AT},rank=1,above=2)"
    ended = trainspec("launch", *RECIPE, *LAYOUTS[layout], fault, "run.dir=run")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    run = RunDir(tmp_path / "run")
    assert [event["step"] for event in steps(run)] == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(undisturbed_losses, rel=1e-6)
    assert {event["samples"] for event in steps(run)} == {SAMPLES}
    (directive,) = read_events(run.directives)
    assert (directive["type"], directive["step"], directive["lost_steps"]) == ("memory", FAILS_AT, 0)
    assert (directive["failed"]["micro_batch_size"], directive["taken"]["micro_batch_size"]) == (4, 2)
    assert directive["restarts"]
    assert f"from step {FAILS_AT}" in said and "micro-batches of 2 " in said
    report = json.loads(trainspec("report", "run", "--json").stdout)
    assert report["memory"][0]["taken"] == directive["taken"]
    assert f"step {FAILS_AT}: micro-batches of 2 " in trainspec("report", "run").stdout


@pytest.mark.slow
def test_a_run_that_nothing_helps_ends_and_says_what_was_tried(trainspec, tmp_path: Path) -> None:
    fault = f"fault=oom(step={FAILS_AT},rank=0,above=0)"
    recipe = (*ANY_SIZE, "cluster.devices_per_node=1", "batching.micro_batch_size=2", fault)
    ended = trainspec("launch", *recipe, "run.dir=run")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 5, said
    last, _, before = said.rpartition("tried before: ")
    assert "micro-batches of 1 " in last and "recompute=full" in last
    assert before.startswith("micro-batches of 2 ") and "micro-batches of 1 " in before
    assert "Traceback" not in said
    run = RunDir(tmp_path / "run")
    taken = [event["taken"] for event in read_events(run.directives)]
    assert [(one["micro_batch_size"], one["recompute"]) for one in taken] == [
        (1, "none"),
        (1, "selective"),
        (1, "full"),
    ]
    assert run.checkpoint_steps() == [FAILS_AT]


@pytest.mark.slow
def test_a_run_whose_scheduler_is_off_ends_at_once(trainspec, tmp_path: Path) -> None:
    fault = f"fault=oom(step={FAILS_AT},rank=1,above=2)"
    ended = trainspec("launch", *RECIPE, *LAYOUTS["zero3"], fault, "scheduler=off", "run.dir=run")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 5, said
    assert "batching.micro_batch_size=2" in said and "scheduler=advise" in said
    assert not RunDir(tmp_path / "run").directives.exists()


CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_limit(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Path]]:
    """memory_limit(bytes): a control group of that limit, for processes that write their id to its cgroup.procs."""
    group = CGROUP / f"trainspec-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group of memory: {error.strerror}")

    def limit(limit_bytes: int) -> Path:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        return group / "cgroup.procs"

    yield limit
    deadline = time.monotonic() + PATIENCE_S
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


LIMIT_BYTES, LARGE_SAMPLES = 3 * 2**29, 1024
LARGE = (
    *("recipe=tiny", "precision=fp32", "cluster.devices_per_node=1", "model.num_layers=4", "train.max_steps=2"),
    *(f"batching.global_batch_size={LARGE_SAMPLES}", f"batching.micro_batch_size={LARGE_SAMPLES}"),
    *("run.preflight=false", "run.dir=run"),
)


@pytest.mark.slow
def test_a_worker_that_the_kernel_kills_goes_on_with_less_memory(
    trainspec_in, tmp_path: Path, memory_limit: Callable[[int], Path]
) -> None:
    """The activations of all samples take about 2 GiB; the launcher, torchrun and an idle worker about 1 GiB."""
    ended = trainspec_in(memory_limit(LIMIT_BYTES), "launch", *LARGE)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert "killed by the kernel" in said
    run = RunDir(tmp_path / "run")
    given = list(read_events(run.directives))
    assert given and all(one["was_killed"] and one["restarts"] for one in given)
    assert [event["step"] for event in steps(run)] == [1, 2]
    assert {event["samples"] for event in steps(run)} == {LARGE_SAMPLES}


@pytest.mark.slow
def test_the_allocator_of_a_device_ends_a_step_and_the_run_continues_with_fewer_samples(
    trainspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """0.1 GiB hold the model and 64 samples at a time in fp32, but not 128. No fault is injected: the device's
    allocator has no room for a tensor of the forward or backward pass."""
    monkeypatch.setitem(environment, "TRAINSPEC_DEVICE", "emulated")
    monkeypatch.setitem(environment, "TRAINSPEC_EMULATED", "memory_gib=0.1")
    recipe = ("recipe=tiny", "precision=fp32", "cluster.devices_per_node=2", "train.max_steps=3")
    batch = ("batching.global_batch_size=512", "batching.micro_batch_size=256")
    ended = trainspec("launch", *recipe, *batch, "checkpoint.interval_steps=null", "run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunDir(tmp_path / "run")
    assert [event["step"] for event in steps(run)] == [1, 2, 3]
    directives = list(read_events(run.directives))
    assert {(one["type"], one["lost_steps"]) for one in directives} == {("memory", 0)}
    assert (directives[0]["failed"]["micro_batch_size"], directives[-1]["taken"]["micro_batch_size"]) == (256, 64)
    monkeypatch.delitem(environment, "TRAINSPEC_EMULATED")
    monkeypatch.delitem(environment, "TRAINSPEC_DEVICE")
    report = json.loads(trainspec("report", "run", "--json").stdout)
    assert [one["taken"] for one in report["memory"]] == [one["taken"] for one in directives]
