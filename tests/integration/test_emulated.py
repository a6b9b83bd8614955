"""Runs on the emulated accelerator with virtual time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.run.folder.events import read_events

LAYOUTS = ("layout.dp_replicate=2", "layout.tp=2", "layout.pp=2", "layout.dp_shard=2")
STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_times_are_the_same_in_every_run_and_weights_are_those_of_a_cpu_run(
    layout: str, trainspec, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], tmp_path: Path
) -> None:
    recipe = ("launch", "recipe=tiny", f"train.max_steps={STEPS}", "cluster.devices_per_node=2", layout)
    times = []
    weights = []
    for name, virtual in (("cpu", False), ("one", True), ("other", True)):
        if virtual:
            monkeypatch.setitem(environment, "TRAINSPEC_DEVICE", "emulated")
            monkeypatch.setitem(environment, "TRAINSPEC_EMULATED", "time=h100_sxm,launch_us=0,jitter=0.02")
        ended = trainspec(*recipe, f"run.dir={name}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert not list((tmp_path / name / "logs").glob("*_start002")), "no rank failed"
        weights.append(json.loads((tmp_path / name / "result.json").read_text())["weights_sha256"])
        files = sorted((tmp_path / name / "events").glob("rank*"))
        steps = [event for file in files for event in read_events(file) if event["type"] == "step"]
        times.append({(event["rank"], event["step"]): event["step_time_s"] for event in steps})
    assert weights[0] == weights[1] == weights[2]
    assert len(times[1]) == 2 * STEPS
    assert times[1] == times[2] != times[0]
    assert len(set(times[1].values())) > STEPS  # the noise is in them


# A chip on which the kernels of a tiny model take longer than their launch, in proportion to the samples

SLOW_MEMORY = """\
name: Slow memory
vendor: nvidia
bf16_tflops: 100
fp32_tflops: 100
load_store_tb_per_s: 1
cache_mb: 0
memory_gb: 16
memory_tb_per_s: 0.00005
link_gb_per_s: 10
link_kind: nvswitch
tdp_w: 70
sources:
  default: "made up"
"""
PASSES = ("forward", "backward")
SLOWNESS = 2.0


@dataclass(frozen=True)
class Ended:
    """A run on emulated devices."""

    folder: Path

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return [event for file in sorted((self.folder / "events").glob("rank*")) for event in read_events(file)]

    @cached_property
    def steps(self) -> dict[int, dict[int, dict[str, Any]]]:
        """Step -> rank -> its event."""
        found: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        for event in self.events:
            if event["type"] == "step":
                found[event["step"]][event["rank"]] = event
        return found

    def passes_s(self, step: int, rank: int) -> float:
        return sum(self.steps[step][rank]["time_s"][part] for part in PASSES)

    def step_s(self, step: int) -> float:
        return max(event["step_time_s"] for event in self.steps[step].values())


@pytest.fixture
def emulate(trainspec, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], tmp_path: Path):
    """emulate(SETTINGS, *RECIPE): a run of eight ranks on the chip with slow memory."""
    conf = tmp_path / "conf" / "accelerator"
    conf.mkdir(parents=True)
    (conf / "slow_memory.yaml").write_text(SLOW_MEMORY)
    monkeypatch.setitem(environment, "TRAINSPEC_DEVICE", "emulated")

    def launch(settings: str, *recipe: str) -> Ended:
        monkeypatch.setitem(environment, "TRAINSPEC_EMULATED", f"time=slow_memory,launch_us=0,{settings}")
        ended = trainspec("launch", "recipe=tiny", "cluster.devices_per_node=8", "run.dir=run", *recipe)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return Ended(tmp_path / "run")

    return launch


def verdicts(trainspec) -> list[tuple[str, int | None]]:
    """Return the cause and rank of each verdict on the run, except for those on the host's memory."""
    ended = trainspec("diagnose", "run", "--json")
    found = json.loads(ended.stdout)["verdicts"]
    return [(one["cause"], one.get("rank")) for one in found if not one["cause"].startswith("memory")]


SAMPLES = 64


def shortest_s(ranks: int, own_s: Callable[[int], float]) -> float:
    """Return the shortest compute time of a step when whole samples are divided over equal ranks and a slow one."""
    others = ranks - 1
    return min(
        max(own_s(-(-(SAMPLES - slow) // others)), SLOWNESS * own_s(slow)) for slow in range(1, SAMPLES // others)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "from_s"),
    [
        (("layout.dp_replicate=8",), 14),
        (("layout.dp_shard=8", "layout.zero_stage=3"), 14),
        (("layout.tp=2", "layout.dp_replicate=4"), 17),
        (("model=moe_tiny", "layout.ep=2", "layout.dp_shard=8"), 14),
    ],
)
def test_a_rank_at_half_speed_gets_fewer_samples_within_five_steps(layout: Sequence[str], from_s: int, emulate) -> None:
    run = emulate(
        f"slow_rank=3,slowness={SLOWNESS},slow_from_s={from_s}",
        *layout, "scheduler=auto", "scheduler.max_micro_batch_size=32", "train.max_steps=24",
        f"batching.global_batch_size={SAMPLES}",
    )  # fmt: skip
    directive, *_ = (event for event in run.events if event["type"] == "directive")
    # Speeds are known before the rank slows down, in the middle of a step, and the shares are right at the first try.
    first = next(step for step in sorted(run.steps) if run.passes_s(step, 3) > 1.9 * run.passes_s(step, 0))
    assert directive["step"] - (first - 1) <= 5
    even = SAMPLES // len(directive["counts"])
    after = directive["step"] + 2
    most = max(directive["counts"])
    ranks = range(8)
    fastest = min(ranks, key=lambda rank: run.passes_s(first, rank))
    fullest = max((rank for rank in ranks if rank not in (2, 3)), key=lambda rank: run.passes_s(after, rank))
    per_sample_s = (run.passes_s(after, fullest) - run.passes_s(first, fastest)) / (most - even)
    fixed_s = run.passes_s(first, fastest) - even * per_sample_s

    def own_s(samples: int) -> float:
        return fixed_s + samples * per_sample_s

    won_s = run.step_s(first) - run.step_s(after)
    assert won_s >= 0.95 * (SLOWNESS * own_s(even) - shortest_s(len(directive["counts"]), own_s))


@pytest.mark.slow
def test_computing_and_waiting_are_told_apart(emulate, trainspec) -> None:
    run = emulate("slow_rank=5,slowness=2", "scheduler=off", "train.max_steps=12", "batching.global_batch_size=8")
    for of_rank in run.steps.values():
        fast = of_rank[0]["time_s"]
        slow = of_rank[5]["time_s"]
        for part in (*PASSES, "optimizer"):
            assert slow[part] == pytest.approx(2 * fast[part], rel=1e-6)
        # The slow rank never waits for another one, only for its own sums and transfers.
        assert slow["exposed_comm"] < 0.25 * fast["exposed_comm"]
    assert verdicts(trainspec) == [("slow_device", 5)]


@pytest.mark.slow
def test_healthy_ranks_with_noise_raise_no_alarm_and_keep_their_shares(emulate, trainspec) -> None:
    run = emulate("jitter=0.05", "scheduler=auto", "train.max_steps=24", f"batching.global_batch_size={SAMPLES}")
    assert not [event for event in run.events if event["type"] in ("directive", "link")]
    assert [cause for cause, _ in verdicts(trainspec)] in ([], ["as_planned"])
