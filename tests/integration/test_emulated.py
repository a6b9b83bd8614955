"""Runs on the emulated accelerator with virtual time."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from trainspec_cli.balance.batch.division import divide, even_division_of
from trainspec_cli.balance.cluster import Cluster
from trainspec_cli.balance.decisions.speeds import STEEP, Speed
from trainspec_cli.balance.disturbance import Disturbance, SlowDevice
from trainspec_cli.balance.ideal import RankRows
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.engine.run.scheduling.step_scheduler import largest_micro_batch
from trainspec_cli.planner.pipeline import Action, replay
from trainspec_cli.planner.time.samples import StageTime, StepParts
from trainspec_cli.recipe.results.forecast import Simulation
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan

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


@pytest.fixture
def resume_with(trainspec, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], tmp_path: Path):
    """resume_with(COUNTS, RANK): repeat the last steps of `emulate`'s run with these sample shares and a slow rank."""

    def resume(counts: Sequence[int], slow: int) -> Ended:
        other = RunDir(tmp_path / "other")
        shutil.copytree(tmp_path / "run", other.root)
        shutil.rmtree(other.checkpoint(other.checkpoint_steps()[-1]))
        (directive,) = [json.loads(line) for line in other.directives.read_text().splitlines()]
        other.directives.write_text(json.dumps(directive | {"counts": counts}) + "\n")
        settings = f"time=slow_memory,launch_us=0,slow_rank={slow},slowness={SLOWNESS}"
        monkeypatch.setitem(environment, "TRAINSPEC_EMULATED", settings)
        ended = trainspec("resume", "other")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return Ended(other.root)

    return resume


def verdicts(trainspec) -> list[tuple[str, int | None]]:
    """Return the cause and rank of each verdict on the run, except for those on the host's memory."""
    ended = trainspec("diagnose", "run", "--json")
    found = json.loads(ended.stdout)["verdicts"]
    return [(one["cause"], one.get("rank")) for one in found if not one["cause"].startswith("memory")]


SAMPLES = 128
STEPS_OF_RUN = 24
FASTEST_WITH_EXPERTS = (17, 17, 18, 8, 17, 17, 17, 17)
"""The division with the shortest steps when rank 3 is slow, of 36 that were run: 7 to 10 samples for this rank, 14 to
20 for the one with which it exchanges tokens, and a sample more or less for others. Ranks wait for each other in every
layer, so the compute times of whole steps do not show which division is fastest."""
CHANGED_STEPS = slice(2, 6)
"""The steps after a change of shares that are compared, counted from the first one with the new shares."""


@dataclass(frozen=True)
class Slowed:
    """A run with a rank that becomes slow, and the decisions of the run."""

    run: Ended
    slow: int
    plan: Plan

    @cached_property
    def directive(self) -> dict[str, Any]:
        return next(event for event in self.run.events if event["type"] == "directive")

    @property
    def micro_batches(self) -> int:
        return even_division_of(self.plan).count_micro_batches(SAMPLES)

    def first(self, pace: float) -> int:
        """Return the first step whose computation takes the slow rank more than `pace` times as long as at first."""
        usual_s = self.run.passes_s(min(self.run.steps), self.slow)
        return next(step for step in sorted(self.run.steps) if self.run.passes_s(step, self.slow) > pace * usual_s)

    @property
    def changed_steps(self) -> range:
        return range(self.directive["step"] + 1, STEPS_OF_RUN + 1)[CHANGED_STEPS]

    @property
    def usual_steps(self) -> range:
        return range(4, self.first(STEEP) - 1)

    @property
    def row(self) -> int:
        """The slow rank's data-parallel rank."""
        layout = self.plan.layout
        return self.slow // (layout.tp * layout.cp) % layout.data_parallel_size

    @cached_property
    def pace(self) -> float:
        """How much longer the slow rank computes than the others of its stage: SLOWNESS, except that experts differ in
        how many tokens they get."""
        layout = self.plan.layout
        stage_size = layout.world_size // layout.pp
        first = self.slow // stage_size * stage_size
        passes_s = [
            fmean(self.run.passes_s(step, rank) for step in self.usual_steps)
            for rank in range(first, first + stage_size)
        ]
        own_s = passes_s.pop(self.slow - first)
        return SLOWNESS * own_s / fmean(passes_s)

    def speeds(self, *parts: str) -> list[Speed]:
        """Return the speed of a device of each stage, fitted from the passes with even shares and with the slow rank's
        new share."""
        layout = self.plan.layout
        inner = layout.tp * layout.cp
        stage_size = layout.world_size // layout.pp
        found = []
        even = SAMPLES // layout.data_parallel_size
        share = self.directive["counts"][self.row]
        for stage in range(layout.pp):
            ranks = range(stage * stage_size, (stage + 1) * stage_size)
            others = [rank for rank in ranks if rank // inner % layout.data_parallel_size != self.row]
            own = ranks[self.row * inner + self.slow % inner]
            usual_s = fmean(self._passes_s(step, rank, parts) for step in self.usual_steps for rank in others)
            own_s = fmean(self._passes_s(step, own, parts) for step in self.changed_steps)
            own_s /= self.pace if own == self.slow else 1.0
            now = self.directive["micro_batches"]
            determinant = self.micro_batches * share - now * even
            fixed_s = max(0.0, (usual_s * share - own_s * even) / determinant)
            found.append(Speed(fixed_s, (usual_s - self.micro_batches * fixed_s) / even))
        return found

    def _passes_s(self, step: int, rank: int, parts: Sequence[str]) -> float:
        return sum(self.run.steps[step][rank]["time_s"][part] for part in parts)

    def simulate(self) -> Simulation:
        """Simulate the run, with the parts of its own usual steps in place of planned ones."""
        layout = self.plan.layout
        nothing = Speed(0.0, 0.0)
        usual_s = fmean(self.run.step_s(step) for step in self.usual_steps)
        optimizer_s = fmean(self.run.steps[step][0]["time_s"]["optimizer"] for step in self.usual_steps)
        parts = StepParts(
            stages=tuple(StageTime(speed, nothing, nothing, 0.0) for speed in self.speeds(*PASSES)),
            bubble=layout.bubble_of(self.micro_batches) if layout.pp > 1 else 0.0,
            sends=nothing,
            sends_tier="scaleup",
            gradients_each_s=0.0,
            gradients_once_s=0.0,
            gradients_tier="scaleup",
            optimizer_s=optimizer_s,
            rest_s=0.0,
        )
        rows = layout.data_parallel_size
        onset = SlowDevice(device=self.slow, factor=self.pace, from_step=self.first(STEEP))
        disturbance = Disturbance(steps=STEPS_OF_RUN, noise=0.0, slow_devices=(onset,))

        def made_of(parts: StepParts) -> Simulation:
            job = DisturbedJob(
                cluster=Cluster(parts, layout, 1, layout.world_size, 1),
                layout=layout,
                even=even_division_of(self.plan),
                batching=self.plan.spec.batching,
                groups=(RankRows(slice(0, rows), rows),),
                largest_micro_batch=largest_micro_batch(self.plan),
                change=self.plan.spec.scheduler.change,
                change_s=math.inf,
                keeps_micro_batches=False,
                num_nodes=1,
                devices_per_node=layout.world_size,
                late_steps=1,
            )
            return simulate(job, disturbance, "emulated")

        # Whatever else the usual step took is exchanges and the copies for them.
        return made_of(replace(parts, gradients_once_s=usual_s - made_of(parts).step_s))


def shortest_s(ranks: int, own_s: Callable[[int], float]) -> float:
    """Return the shortest compute time of a step when whole samples are divided over equal ranks and a slow one."""
    others = ranks - 1
    return min(
        max(own_s(-(-(SAMPLES - slow) // others)), SLOWNESS * own_s(slow)) for slow in range(1, SAMPLES // others)
    )


def passes_in_turns_s(slowed: Slowed, counts: Sequence[int], micro_batches: int) -> float:
    """Return the time of the slowest pipeline, with the schedule's turns."""
    layout = slowed.plan.layout
    slow_stage = slowed.slow // (layout.world_size // layout.pp)
    speeds = {kind: slowed.speeds(kind) for kind in PASSES}

    def pipeline_s(row: int, sizes: Sequence[int]) -> float:
        def pass_s(action: Action) -> float:
            is_slow = (action.stage, row) == (slow_stage, slowed.row)
            speed = speeds[action.kind][action.stage].scaled(SLOWNESS if is_slow else 1.0)
            return speed.time_s(sizes[action.micro_batch], micro_batches=1)

        return max(passes[-1].end_s for passes in replay(layout, len(sizes), pass_s))

    # Ranks with equally many samples take equally long, except for the slow one.
    return max(pipeline_s(row, own.sizes) for row, own in enumerate(divide(counts, micro_batches)))


def shortest_in_turns_s(slowed: Slowed) -> float:
    """Return the shortest time of the passes for all samples of the slow rank, with the others' even, and all numbers
    of micro-batches."""
    rows = slowed.plan.layout.data_parallel_size
    found = []
    for share in range(1, SAMPLES // rows + 1):
        each, larger = divmod(SAMPLES - share, rows - 1)
        counts = [each + (other < larger) for other in range(rows - 1)]
        counts.insert(slowed.row, share)
        found += [passes_in_turns_s(slowed, counts, number) for number in range(1, 2 * slowed.micro_batches + 1)]
    return min(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "slow", "from_s"),
    [
        (("layout.dp_replicate=8",), 3, 27),
        (("layout.dp_shard=8", "layout.zero_stage=3"), 3, 27),
        (("layout.tp=2", "layout.dp_replicate=4"), 3, 33),
        (("model=moe_tiny", "layout.ep=2", "layout.dp_shard=8", "checkpoint.interval_steps=20"), 3, 38),
        (("layout.pp=2", "layout.dp_replicate=4", "batching.micro_batch_size=8"), 7, 38),
    ],
)
def test_a_rank_at_half_speed_gets_fewer_samples_within_five_steps_as_simulated(
    layout: Sequence[str], slow: int, from_s: int, emulate, resume_with
) -> None:
    run = emulate(
        f"slow_rank={slow},slowness={SLOWNESS},slow_from_s={from_s}",
        *layout, "scheduler=auto", "scheduler.max_micro_batch_size=64", f"train.max_steps={STEPS_OF_RUN}",
        f"batching.global_batch_size={SAMPLES}",
    )  # fmt: skip
    slowed = Slowed(run, slow, read_plan(RunDir(run.folder)))
    directive = slowed.directive
    # Speeds are known before the rank slows down, in the middle of a step, and the shares are right at the first try.
    first = slowed.first(1.9)
    assert directive["step"] - (first - 1) <= 5
    after_s = median(run.step_s(step) for step in slowed.changed_steps)
    won_s = run.step_s(first) - after_s
    even = [SAMPLES // len(directive["counts"])] * len(directive["counts"])
    if slowed.plan.layout.pp > 1:
        slow_s = passes_in_turns_s(slowed, even, slowed.micro_batches)
        best_s = shortest_in_turns_s(slowed)
    elif slowed.plan.layout.ep > 1:
        slow_s = run.step_s(first)
        best_s = median(map(resume_with(FASTEST_WITH_EXPERTS, slow).step_s, slowed.changed_steps))
        assert best_s < after_s
    else:
        (speed,) = slowed.speeds(*PASSES)
        own_s = partial(speed.time_s, micro_batches=1)
        slow_s = SLOWNESS * own_s(even[0])
        best_s = shortest_s(len(even), own_s)
    assert won_s >= 0.95 * (slow_s - best_s)
    # The simulator, which knows the run's usual steps, decides at the same step, and its steps take as long.
    simulation = slowed.simulate()
    decision, *_ = simulation.decisions
    seconds = [SAMPLES / pace for pace in simulation.on.by_step]
    seconds[decision.step - 1] -= decision.expected_s  # reading samples anew takes no virtual time
    assert decision.step == directive["step"] + 1
    assert decision.micro_batches == directive["micro_batches"]
    assert seconds[first - 1] == pytest.approx(run.step_s(first), rel=0.02)
    assert seconds[-1] == pytest.approx(after_s, rel=0.02)
    lasted_s = sum(run.step_s(step) for step in range(first, STEPS_OF_RUN + 1))
    assert sum(seconds[first - 1 :]) == pytest.approx(lasted_s, rel=0.02)


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
    run = emulate("jitter=0.05", "scheduler=auto", "train.max_steps=24", "batching.global_batch_size=64")
    assert not [event for event in run.events if event["type"] in ("directive", "link")]
    assert [cause for cause, _ in verdicts(trainspec)] in ([], ["as_planned"])
