"""Run folders written event by event, and plans made by hand: figures that are easy to check on paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.printable import GIB
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec, SiteSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.forecast import Assumption, Goodput, Interval, RunForecast
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, MemoryBreakdown, StepTime
from trainspec_cli.reporter.plan.labels import PlanReport, SweepPoint, SweepReport
from trainspec_cli.run.folder.event_types.events import EVENT_TYPES, PARTS
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

CHIP = AcceleratorSpec("H100-SXM-80GB", "nvidia", 989, 80, 3.35)
SPEC = RunSpec(
    model=DecoderModel(32, 4096, 32, 8, 128, 14_336, 128_256, name="llama3_8b"),
    data=DataSpec(seq_len=8192, source="python_stdlib"),
    optim=OptimSpec(lr=3e-4),
    batching=BatchingSpec(global_batch_size=128),
    train=TrainSection(max_steps=1000),
    cluster=ClusterSpec(num_nodes=2, devices_per_node=8, accelerator=CHIP, site=SiteSpec(name="Iceland")),
)
FIRST_STAGE = MemoryBreakdown(parameters_bytes=10 * GIB, activations_bytes=30 * GIB)
LAST_STAGE = MemoryBreakdown(parameters_bytes=10 * GIB, activations_bytes=8 * GIB, logits_bytes=2 * GIB)
CANDIDATE = Candidate(
    layout=Layout(dp_replicate=2, dp_shard=2, tp=2, pp=2, zero_stage=1),
    micro_batch_size=1,
    grad_accum_steps=32,
    recompute="selective",
    offload="none",
    step_time_s=4.0,
    tokens_per_s=262_144.0,
    tokens_per_s_per_gpu=16_384.0,
    mfu=0.5,
    hfu=0.55,
    peak_memory_bytes=40 * GIB,
    memory_limit_bytes=74 * GIB,
    fit_probability=1.0,
    expected_step_s=4.0,
    memory=(FIRST_STAGE, LAST_STAGE),
    time=StepTime(matmul_s=2.0, attention_s=1.0, dp_comm_s=0.75, bubble_s=0.25),
)
SECOND = replace(
    CANDIDATE,
    layout=Layout(dp_shard=16),
    micro_batch_size=2,
    grad_accum_steps=4,
    recompute="none",
    step_time_s=5.0,
    tokens_per_s=209_715.2,
    tokens_per_s_per_gpu=13_107.2,
    mfu=0.4,
    hfu=0.4,
    peak_memory_bytes=72 * GIB,
    fit_probability=0.93,
    expected_step_s=5.1,
    memory=(MemoryBreakdown(parameters_bytes=60 * GIB, optimizer_bytes=12 * GIB),),
    time=StepTime(matmul_s=2.0, attention_s=1.0, tp_comm_s=2.0),
)
"""It has no pipeline, barely fits, and waits for a kind of communication that the first has not."""
CAPACITY = CapacityPlan(
    params=8_030_261_248,
    active_params=8_030_261_248,
    flops_per_token=5.1e10,
    world_size=16,
    tokens_per_step=128 * 8192,
    candidates=(CANDIDATE, SECOND),
    rejected={"needs more memory than there is": 40, "tp leaves the node": 400},
    assumptions=("a fused attention kernel",),
    considered=500,
)
RESTART = Goodput(
    mode="restart",
    goodput=Interval(0.9, 0.85, 0.95),
    lost={"restart": 0.06, "rework": 0.03, "checkpoint": 0.01},
    failures=3.0,
    mtbf_s=10_000.0,
    checkpoint_interval_s=400.0,
    checkpoint_interval_steps=100,
    optimal_interval_s=390.0,
    checkpoint_s=8.0,
    checkpoint_bytes=96e9,
    restart_s=480.0,
    wall_time_s=4444.0,
)
RUN = RunForecast(
    steps=1000,
    tokens=1.05e9,
    wall_time_s=Interval(4444.0, 4000.0, 5000.0),
    goodput=RESTART,
    energy_joules=Interval(7.2e10, 6e10, 9e10),
    carbon_kg=Interval(2000.0, 1500.0, 2500.0),
    cost_usd=None,
    alternatives=(replace(RESTART, mode="elastic", goodput=Interval(0.97, 0.96, 0.98), lost={"stall": 0.03}),),
    energy_parts_joules={"accelerators": 5.4e10, "hosts": 1.8e10},
    assumptions=(
        Assumption("cluster.site.pue", 1.2, 1.1, "a survey <2024>", verified=False),
        Assumption("cluster.accelerator.tdp_w", 700, source="the maker"),
    ),
    notes=("a note",),
)


@pytest.fixture
def found() -> tuple[Candidate, CapacityPlan]:
    return CANDIDATE, CAPACITY


@pytest.fixture
def forecast() -> tuple[RunSpec, RunForecast]:
    return SPEC, RUN


@pytest.fixture
def plan() -> PlanReport:
    return PlanReport(SPEC, CAPACITY, RUN)


@pytest.fixture
def uneven(plan: PlanReport) -> PlanReport:
    """The plan with stages of 17 and 15 layers."""
    first, *others = plan.capacity.candidates
    cut = replace(first, layout=replace(first.layout, stage_layers=(17, 15)))
    return replace(plan, capacity=replace(plan.capacity, candidates=(cut, *others)))


@pytest.fixture
def infeasible() -> PlanReport:
    too_big = replace(CANDIDATE, peak_memory_bytes=90 * GIB)
    nothing = replace(CAPACITY, candidates=(too_big,), advice=("recompute=full", "4 nodes"))
    return PlanReport(SPEC, nothing)


@pytest.fixture
def sweep(plan: PlanReport, infeasible: PlanReport) -> SweepReport:
    """1 node does not fit; of 2 and 4 the larger keeps 90% of the throughput a device."""
    priced = replace(RUN, cost_usd=Interval(1.2e4, 1e4, 1.5e4), cost_parts_usd={"devices": 9e3, "power": 3e3})
    four = replace(CANDIDATE, tokens_per_s=262_144 * 1.8, tokens_per_s_per_gpu=16_384 * 0.9, step_time_s=4 / 1.8)
    four = replace(four, time=StepTime(matmul_s=2.0 / 1.8, attention_s=2.0 / 1.8))
    spec = replace(SPEC, cluster=replace(SPEC.cluster, num_nodes=4))
    larger = PlanReport(spec, replace(CAPACITY, world_size=32, candidates=(four,)), priced)
    plans = {"1": infeasible, "2": plan, "4": larger}
    return SweepReport(tuple(SweepPoint({"cluster.num_nodes": nodes}, one) for nodes, one in plans.items()))


BEGIN = {
    "world_size": 2,
    "device_name": "a chip",
    "peak_flops": 1e9,
    "peak_source": "best matmul measured",
    "params": 1_500_000,
    "flops_per_token": 1e6,
    "pid": 1,
    "host": "h",
}


class FakeRun:
    """Writes what the workers would, with round numbers: 100 tokens per step, in one second of equal parts."""

    def __init__(self, root: Path):
        self.dir = RunDir(root)

    def start(self, step: int = 0, rank: int = 0) -> None:
        self.write("start", rank, step=step, **BEGIN)

    def step(
        self,
        step: int,
        rank: int = 0,
        seconds: float = 1.0,
        loss: float = 2.0,
        skipped: bool = False,
        **seconds_of: float,
    ) -> None:
        """`seconds_of`: parts that last otherwise than the others, and other fields of the event."""
        parts = {name: seconds_of.pop(name, seconds / len(PARTS)) for name in PARTS}
        self.write(
            "step",
            rank,
            step=step,
            loss=loss,
            grad_norm=0.5,
            lr=1e-3,
            tokens=100,
            samples=10,
            step_time_s=seconds,
            time_s=parts,
            skipped=skipped,
            **seconds_of,
        )

    def write(self, kind: str, rank: int = 0, **fields: Any) -> None:
        writer = EventWriter(self.dir.events(rank), rank)
        writer.write(EVENT_TYPES[kind](**fields))
        writer.close()

    def about(self, **fields: Any) -> None:
        write_json(self.dir.run_json, {"recipe": "tiny", "created_at": 1000.0, **fields})
        write_json(self.dir.plan_json, {"spec": {"train": {"max_steps": 20}}})

    def result(self, **fields: Any) -> None:
        write_json(self.dir.result_json, {"status": "done", "exit_code": 0, **fields})


@pytest.fixture
def fake_run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run")
