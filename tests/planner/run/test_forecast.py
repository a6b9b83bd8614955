"""The forecast of a whole run, from a capacity plan made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.balance.batch.batch import schedule_batches, step_batch
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import PREDICTED_SIZES, as_plan, main_size, plan_capacity, plan_other_recovery
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.planes import Failure, simulate
from trainspec_cli.planner.run import forecast as forecast_module
from trainspec_cli.planner.run import goodput
from trainspec_cli.planner.run.forecast import (
    STEP_TIME_KNOWN_WITHIN,
    UNMEASURED_CHIP_WITHIN,
    checkpoint_bytes,
    checkpoint_times,
    describe_job,
    expect_goodput,
    expect_work,
    forecast_run,
    gather_assumptions,
    occupation,
    recovery_modes,
)
from trainspec_cli.recipe.keys.cluster import (
    AcceleratorSpec,
    ClusterSpec,
    CostSpec,
    FabricSpec,
    PlanesSpec,
    ReliabilitySpec,
    SiteSpec,
)
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import CheckpointSpec, DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, LoraSpec, OptimSpec, RampStage
from trainspec_cli.recipe.results.forecast import RunForecast
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, MemoryBreakdown, SizedStep, StepTime

H100 = AcceleratorSpec(
    name="H100-SXM-80GB",
    vendor="nvidia",
    bf16_tflops=989,
    memory_gb=80,
    memory_tb_per_s=3.35,
    tdp_w=700,
    price_usd_per_hour=2.5,
)
CLUSTER = ClusterSpec(
    num_nodes=2048,
    devices_per_node=8,
    accelerator=H100,
    reliability=ReliabilitySpec(spare_nodes=32, repair_s=3600.0, known_within={"mtbf_device_hours": 1.5}),
    site=SiteSpec(known_within={"pue": 1.1, "carbon_g_per_kwh": 1.2}),
    cost=CostSpec(known_within={"price_usd_per_device_hour": 1.3}),
)
SPEC = RunSpec(
    model=DecoderModel(126, 16_384, 128, 8, 128, 53_248, 128_256),
    data=DataSpec(seq_len=8192, source="python_stdlib"),
    optim=OptimSpec(lr=8e-5),
    batching=BatchingSpec(global_batch_size=2048),
    train=TrainSection(max_steps=200_000),
    cluster=CLUSTER,
)
CANDIDATE = Candidate(
    layout=Layout(dp_replicate=128, tp=8, pp=16),
    micro_batch_size=1,
    grad_accum_steps=16,
    recompute="none",
    offload="none",
    step_time_s=6.0,
    tokens_per_s=2048 * 8192 / 6,
    tokens_per_s_per_gpu=2048 * 8192 / 6 / 16_384,
    mfu=0.42,
    hfu=0.42,
    peak_memory_bytes=70e9,
    memory_limit_bytes=80e9,
    fit_probability=1.0,
    expected_step_s=6.0,
    memory=(MemoryBreakdown(parameters_bytes=70e9),),
    time=StepTime(matmul_s=4.0, dp_comm_s=1.0, bubble_s=1.0),
)
PLAN = CapacityPlan(
    params=405_853_388_800,
    active_params=405_853_388_800,
    flops_per_token=2.6e12,
    world_size=16_384,
    tokens_per_step=2048 * 8192,
    candidates=(CANDIDATE,),
)


@pytest.fixture(autouse=True)
def few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons hold for any number of simulated runs, which draw the same chances; more only take longer."""
    monkeypatch.setattr(forecast_module, "SEEDS", 8)


def forecast(cluster: ClusterSpec = CLUSTER, **changes: object) -> RunForecast:
    return forecast_run(replace(SPEC, cluster=cluster, **changes), PLAN, CANDIDATE)


def test_a_forecast_adds_up_and_comes_with_intervals() -> None:
    run = forecast()
    useful = run.goodput.goodput
    assert run.tokens == 200_000 * 2048 * 8192
    assert run.wall_time_s.value == pytest.approx(200_000 * 6.0 / useful.value)
    assert run.goodput.failures == pytest.approx(run.wall_time_s.value / run.goodput.mtbf_s)
    slow = math.hypot(math.log(STEP_TIME_KNOWN_WITHIN), math.log(useful.value / useful.low))
    quick = math.hypot(math.log(STEP_TIME_KNOWN_WITHIN), math.log(useful.high / useful.value))
    assert run.wall_time_s.high / run.wall_time_s.value == pytest.approx(math.exp(slow))
    assert run.wall_time_s.value / run.wall_time_s.low == pytest.approx(math.exp(quick))
    for one in (run.goodput, *run.alternatives):
        assert one.goodput.value + sum(one.lost.values()) == pytest.approx(1)
    assert run.energy_joules and run.cost_usd
    assert sum(run.energy_parts_joules.values()) == pytest.approx(run.energy_joules.value)
    assert sum(run.cost_parts_usd.values()) == pytest.approx(run.cost_usd.value)
    assert run.cost_usd.value == pytest.approx((16_384 + 32 * 8) * run.wall_time_s.value / 3600 * 2.5)
    for interval in (useful, run.energy_joules, run.carbon_kg, run.cost_usd):
        assert interval is not None and 0 < interval.low < interval.value < interval.high


def test_shrinking_and_healing_is_compared_where_the_layout_has_groups() -> None:
    restart = forecast()
    assert [other.mode for other in restart.alternatives] == ["elastic"]
    assert restart.alternatives[0].goodput.value > restart.goodput.goodput.value
    sharded = replace(CANDIDATE, layout=Layout(dp_shard=16_384))
    elastic = forecast_run(replace(SPEC, resilience=ResilienceSpec(mode="elastic")), PLAN, sharded)
    assert elastic.goodput.mode == "restart" and elastic.alternatives == ()
    assert any("layout.dp_replicate" in note for note in elastic.notes)


def test_the_recipes_own_interval_is_kept_and_the_best_one_told() -> None:
    own = forecast(checkpoint=CheckpointSpec(interval_steps=1000))
    best = forecast()
    assert own.goodput.checkpoint_interval_steps == 1000
    assert own.goodput.optimal_interval_s == best.goodput.optimal_interval_s
    assert own.goodput.goodput.value < best.goodput.goodput.value


def test_a_run_shorter_than_the_interval_has_one_checkpoint_at_most() -> None:
    run = forecast(train=TrainSection(max_steps=3), checkpoint=CheckpointSpec(mode="sync"))
    assert run.goodput.checkpoint_interval_steps == 3


@pytest.mark.parametrize(
    ("published_gb", "params"),
    [(105, 8.03e9), (920, 70.55e9), (5200, 405.85e9), (204, 15.6e9), (4400, 341e9), (2300, 176.2e9)],
    ids=["llama 8B", "llama 70B", "llama 405B", "nemotron 15B", "nemotron 340B", "bloom 176B"],
)
def test_checkpoints_weigh_what_was_published(published_gb: float, params: float) -> None:
    """Sizes from NVIDIA/dgxc-benchmarking and the BLOOM logbook; theirs hold bf16 copies or less, ours fp32 alone."""
    assert checkpoint_bytes(SPEC, int(params)) / 1e9 == pytest.approx(published_gb, rel=0.1)


def test_every_assumption_names_its_key_and_says_when_it_was_not_checked() -> None:
    cluster = replace(CLUSTER, site=SiteSpec(pue=1.3, sources={"pue": "the meter"}, unverified=("pue",)))
    assumptions = {assumption.key: assumption for assumption in forecast(cluster).assumptions}
    assert assumptions["cluster.site.pue"].value == 1.3
    assert assumptions["cluster.site.pue"].source == "the meter"
    assert not assumptions["cluster.site.pue"].verified
    assert assumptions["cluster.accelerator.price_usd_per_hour"].value == 2.5
    assert assumptions["cluster.accelerator.price_usd_per_hour"].known_within == 1.3


def test_owned_machines_are_paid_by_use_and_rent_does_not_matter() -> None:
    owned = replace(CLUSTER, cost=CostSpec(owned=True, device_price_usd=40_000))
    run = forecast(owned)
    assert set(run.cost_parts_usd) == {"machines", "operation", "electricity"}
    assert "cluster.accelerator.price_usd_per_hour" not in {assumption.key for assumption in run.assumptions}


def test_a_checkpoint_written_beside_training_holds_it_up_for_the_copy_alone() -> None:
    beside, at_once = (forecast(checkpoint=CheckpointSpec(mode=mode)).goodput for mode in ("async", "sync"))
    assert beside.checkpoint_s < at_once.checkpoint_s / 10
    assert beside.optimal_interval_s >= at_once.checkpoint_s, "never two at once"
    assert beside.goodput.value > at_once.goodput.value


EXTREMES = st.sampled_from([0.0, 1e-30, 1e-9, 1.0, 1e9, 1e30])
POSITIVE = st.sampled_from([1e-30, 1e-9, 1.0, 1e9, 1e30])


@settings(max_examples=80, deadline=None)
@given(st.tuples(POSITIVE, POSITIVE, POSITIVE), st.tuples(EXTREMES, EXTREMES, EXTREMES), st.booleans())
def test_a_forecast_has_an_answer_for_every_number_in_range(
    rates: tuple[float, float, float], times: tuple[float, float, float], elastic: bool
) -> None:
    """It is finite and positive; a run that failures never let end is refused with what to change."""
    mtbf, storage, link = rates
    reliability = ReliabilitySpec(mtbf_device_hours=mtbf, detect_s=times[0], start_s=times[1], shrink_stall_s=times[2])
    cluster = replace(CLUSTER, reliability=reliability, storage_gb_per_s=storage, host_link_gb_per_s=link)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forecast_module, "SEEDS", 2)
        patched.setattr(goodput, "ENOUGH_OF_MANY", 20)
        try:
            run = forecast(cluster, resilience=ResilienceSpec(mode="elastic" if elastic else "restart"))
        except RecipeError as error:
            (problem,) = error.problems
            assert problem.path == "cluster.reliability.mtbf_device_hours"
            assert "never makes progress" in problem.message
        else:
            assert 0 < run.goodput.goodput.low <= run.goodput.goodput.value <= 1
            assert 0 < run.wall_time_s.value < math.inf


def test_time_in_checkpoints_and_stalls_is_waiting_and_not_work() -> None:
    """Devices at a checkpoint draw what waiting ones do; those of a job that is down are idle."""
    useful = replace(forecast().goodput, lost={"checkpoint": 0.2, "stall": 0.1, "restart": 0.15, "shrunk": 0.05})
    spent = occupation(useful, StepTime(matmul_s=3.0, dp_comm_s=1.0))
    assert (spent.busy, spent.waiting, spent.idle) == pytest.approx((0.5 * 0.75, 0.5 * 0.25 + 0.3, 0.2))


SIZE = 12 * 405_853_388_800


def test_a_checkpoint_holds_weights_and_moments_and_of_frozen_weights_no_moments() -> None:
    assert checkpoint_bytes(SPEC, 1000) == 12_000
    assert checkpoint_bytes(replace(SPEC, optim=OptimSpec(lr=1.0, name="sgd")), 1000) == 4000
    assert checkpoint_bytes(replace(SPEC, lora=LoraSpec(rank=8)), 1000) == 4000


def test_nodes_share_the_writing_and_devices_the_copying() -> None:
    blocked_s, written_s = checkpoint_times(replace(SPEC, checkpoint=CheckpointSpec(mode="async")), PLAN)
    assert written_s == pytest.approx(SIZE / (2048 * 1.2e9))
    assert blocked_s == pytest.approx(SIZE / (16_384 * 50e9))
    at_once = checkpoint_times(replace(SPEC, checkpoint=CheckpointSpec(mode="sync")), PLAN)
    assert at_once == (written_s, written_s)


def test_the_simulated_job_is_the_recipes() -> None:
    spec = replace(SPEC, checkpoint=CheckpointSpec(interval_steps=1000))
    job = describe_job(spec, PLAN, CANDIDATE, spec.resilience)
    blocked_s, written_s = checkpoint_times(spec, PLAN)
    assert (job.work_s, job.step_time_s, job.devices, job.replica_groups) == (1_200_000, 6, 16_384, 128)
    assert (job.interval_s, job.blocked_s, job.written_s) == (6000, blocked_s, written_s)
    assert job.load_s == written_s
    assert job.state_bytes_per_device == SIZE / 128


def test_a_run_reports_its_own_interval_and_times() -> None:
    spec = replace(SPEC, checkpoint=CheckpointSpec(interval_steps=1000), resilience=ResilienceSpec(mode="elastic"))
    run = forecast_run(spec, PLAN, CANDIDATE)
    useful = run.goodput
    blocked_s, written_s = checkpoint_times(spec, PLAN)
    assert (useful.mode, useful.checkpoint_interval_s, useful.checkpoint_interval_steps) == ("elastic", 6000, 1000)
    assert (useful.checkpoint_s, useful.checkpoint_bytes) == (blocked_s, SIZE)
    assert useful.mtbf_s == pytest.approx(50_677 * 3600 / 16_384)
    assert useful.restart_s == pytest.approx(60 + 120 + 300 + written_s)
    assert useful.wall_time_s == pytest.approx(1_200_000 / useful.goodput.value)
    assert (run.steps, run.notes) == (200_000, ())
    assert [other.mode for other in run.alternatives] == ["restart"]


def test_missing_spares_are_noted_where_they_cost_much() -> None:
    short = replace(CLUSTER, reliability=replace(CLUSTER.reliability, spare_nodes=None, mtbf_device_hours=1e5))
    waiting = ResilienceSpec(after_node_loss="wait")
    (note,) = forecast(short, resilience=waiting).notes
    assert note.startswith("cluster.reliability.spare_nodes is 0")
    rare = replace(short, reliability=replace(short.reliability, mtbf_device_hours=1e9))
    assert forecast(rare, resilience=waiting).notes == ()


def test_an_interval_that_is_left_open_is_noted_with_the_one_that_is_counted_on() -> None:
    run = forecast(checkpoint=CheckpointSpec(interval_steps=None))
    steps = run.goodput.checkpoint_interval_steps
    (note,) = run.notes
    assert note.startswith("checkpoint.interval_steps is null") and f" {steps}," in note
    assert run.goodput.checkpoint_interval_s == 6 * steps
    assert abs(run.goodput.optimal_interval_s - 6 * steps) <= 3, "the nearest whole number of steps"
    auto = forecast(checkpoint=CheckpointSpec(interval_steps="auto"))
    assert not auto.notes, "what is planned will be done"
    assert 60 <= auto.goodput.checkpoint_interval_s <= 600


def test_one_group_can_only_restart_and_several_can_do_either() -> None:
    for mode, other in (("restart", "elastic"), ("elastic", "restart")):
        wanted = ResilienceSpec(mode=mode, min_groups=3)  # type: ignore[arg-type]
        assert [item.mode for item in recovery_modes(wanted, 4)] == [mode, other]
        assert recovery_modes(wanted, 1) == (ResilienceSpec(mode="restart", min_groups=3),)
        assert recovery_modes(wanted, 2)[0] == wanted


def test_the_same_work_in_groups_is_set_beside_it_with_its_layout() -> None:
    sharded = replace(CANDIDATE, layout=Layout(dp_shard=128, tp=8, pp=16))
    run = forecast_run(SPEC, PLAN, sharded, other=CANDIDATE)
    (other,) = run.alternatives
    assert (run.goodput.mode, run.goodput.layout) == ("restart", "")
    assert (other.mode, other.layout) == ("elastic", CANDIDATE.layout.describe())


def test_the_median_run_and_nine_in_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the ordered runs quantiles are linear; mean losses are scaled to what the median run lost."""
    lost = ({"restart": 40.0, "rework": 10.0}, {"restart": 40.0, "stall": 0.0}, {"rework": 20.0})
    runs = [
        goodput.SimulatedRun(100.0, kept_s, parts, 3) for kept_s, parts in zip((50.0, 60.0, 80.0), lost, strict=True)
    ]
    monkeypatch.setattr(goodput, "simulate_many", lambda job, cluster, resilience, seeds: runs)
    useful = expect_goodput(SPEC, PLAN, CANDIDATE, SPEC.resilience)
    assert useful is not None
    interval = useful.goodput
    assert (interval.low, interval.value, interval.high) == pytest.approx((0.51, 0.6, 0.78))
    assert useful.lost == pytest.approx({"restart": 0.4 * 80 / 110, "rework": 0.4 * 30 / 110})
    assert useful.failures == pytest.approx(useful.wall_time_s / useful.mtbf_s)
    runs[0] = goodput.SimulatedRun(100.0, -10.0, {"rework": 110.0}, 3)
    assert expect_goodput(SPEC, PLAN, CANDIDATE, SPEC.resilience) is None


@pytest.mark.parametrize("name", ["llama3_70b", "mixtral_8x7b", "resnet50"])
def test_a_step_is_known_within_what_held_for_runs_that_were_not_fitted(name: str) -> None:
    assert gather_assumptions(replace(SPEC, model=models()[name]), CANDIDATE)[0].known_within == 1.45


def test_a_step_of_a_chip_without_measured_runs_is_known_less_well() -> None:
    new = replace(SPEC, cluster=replace(CLUSTER, accelerator=replace(CLUSTER.accelerator, name="X1")))
    step = gather_assumptions(new, CANDIDATE)[0]
    assert step.known_within == UNMEASURED_CHIP_WITHIN > STEP_TIME_KNOWN_WITHIN and "X1" in step.source


def test_one_node_and_runs_without_recovery_have_no_other_way() -> None:
    assert plan_other_recovery(replace(SPEC, resilience=ResilienceSpec(mode="none")), None) is None
    assert plan_other_recovery(replace(SPEC, cluster=replace(CLUSTER, num_nodes=1)), None) is None


def test_each_way_of_recovering_is_planned_in_its_own_best_layout() -> None:
    """What is said beside a plan is what the other plan itself finds."""
    chip = replace(H100, link_gb_per_s=450.0, link_kind="nvswitch")
    spec = replace(
        SPEC,
        model=DecoderModel(4, 1024, 8, 8, 128, 4096, 8192),
        data=DataSpec(seq_len=2048, source="python_stdlib"),
        batching=BatchingSpec(global_batch_size=64),
        cluster=ClusterSpec(num_nodes=2, devices_per_node=8, accelerator=chip),
        layout=LayoutSpec(dp_replicate="auto", dp_shard="auto", tp="auto", pp="auto", cp="auto", zero_stage="auto"),
        resilience=ResilienceSpec(mode="restart"),
    )
    plans = {mode: replace(spec, resilience=ResilienceSpec(mode=mode)) for mode in ("restart", "elastic")}
    best = {mode: plan_capacity(planned).best for mode, planned in plans.items()}
    assert best["elastic"] and best["elastic"].layout.dp_replicate >= 2
    for mode, other in (("restart", "elastic"), ("elastic", "restart")):
        assert plan_other_recovery(plans[mode], None) == best[other]
        run = forecast_run(plans[mode], plan_capacity(plans[mode]), best[mode], best[other])
        alone = forecast_run(plans[other], plan_capacity(plans[other]), best[other])
        (beside,) = run.alternatives
        assert (beside.mode, beside.wall_time_s) == (other, alone.goodput.wall_time_s)


TIME = ["step_time_s", "peak_memory_bytes", "cluster.storage_gb_per_s"]
FAILING = [f"cluster.reliability.{key}" for key in ("mtbf_device_hours", "detect_s", "swap_s", "start_s", "repair_s")]
SPARES = ["cluster.reliability.spare_nodes"]
GROUPS = [
    f"cluster.reliability.{key}" for key in ("job_wide_fraction", "shrink_stall_s", "rejoin_stall_s", "heal_gb_per_s")
]
POWER = [f"cluster.power.{key}" for key in ("busy", "waiting", "idle", "host")]
SITE = ["cluster.site.pue", "cluster.site.carbon_g_per_kwh"]
PRICE, TDP = ["cluster.accelerator.price_usd_per_hour"], ["cluster.accelerator.tdp_w"]
OWNED = [f"cluster.cost.{key}" for key in ("device_price_usd", "useful_years", "utilisation", "operation_ratio")]


@pytest.mark.parametrize(
    ("changes", "groups", "keys"),
    [
        ({}, 2, [*TIME, *FAILING, *SPARES, *GROUPS, *TDP, *POWER, *SITE, *PRICE]),
        ({}, 1, [*TIME, *FAILING, *SPARES, *TDP, *POWER, *SITE, *PRICE]),
        ({"reliability": ReliabilitySpec()}, 1, [*TIME, *FAILING, *TDP, *POWER, *SITE, *PRICE]),
        ({"accelerator": None}, 1, [*TIME, *FAILING, *SPARES, *POWER, *SITE]),
        ({"accelerator": replace(H100, tdp_w=0.0)}, 1, [*TIME, *FAILING, *SPARES, *POWER, *SITE, *PRICE]),
        ({"cost": CostSpec(price_usd_per_device_hour=1.0)}, 1,
         [*TIME, *FAILING, *SPARES, *TDP, *POWER, *SITE, "cluster.cost.price_usd_per_device_hour"]),
        ({"cost": CostSpec(owned=True)}, 1,
         [*TIME, *FAILING, *SPARES, *TDP, *POWER, *SITE, *OWNED, "cluster.site.electricity_usd_per_kwh"]),
    ],
    ids=["groups", "one group", "no spares", "no accelerator", "no power", "own price", "owned"],
)  # fmt: skip
def test_a_forecast_lists_what_it_rests_on(changes: dict[str, object], groups: int, keys: list[str]) -> None:
    candidate = replace(CANDIDATE, layout=Layout(dp_replicate=groups, tp=8, pp=16))
    spec = replace(SPEC, cluster=replace(CLUSTER, **changes))  # type: ignore[arg-type]
    found = gather_assumptions(spec, candidate)
    assert [assumption.key for assumption in found] == keys
    by_key = {assumption.key: assumption for assumption in found}
    step, memory = by_key["step_time_s"], by_key["peak_memory_bytes"]
    assert (step.value, step.known_within, memory.value, memory.known_within) == (
        6.0,
        STEP_TIME_KNOWN_WITHIN,
        70e9,
        1.1,
    )
    assert by_key["cluster.storage_gb_per_s"].value == 1.2
    sheet = {key: each.known_within for key, each in by_key.items() if key.endswith(("tdp_w", "price_usd_per_hour"))}
    assert sheet.items() <= {"cluster.accelerator.tdp_w": 1.0, PRICE[0]: 1.3}.items()
    assert "6% added" in memory.source and "2% of all tensors" in memory.source
    assert "7% where all" in memory.source
    assert "1.2 GiB" in memory.source and "0.30 GiB" in memory.source


def test_sources_of_an_accelerators_figures() -> None:
    def source(sources: dict[str, str] | None) -> str:
        chip = replace(H100, sources=sources)
        found = gather_assumptions(replace(SPEC, cluster=replace(CLUSTER, accelerator=chip)), CANDIDATE)
        return next(each.source for each in found if each.key == "cluster.accelerator.tdp_w")

    assert [source(None), source({"default": "sheet"}), source({"default": "sheet", "tdp_w": "meter"})] == [
        "", "sheet", "meter"
    ]  # fmt: skip


def test_on_several_planes_failures_of_the_network_cost_dips_and_end_nothing() -> None:
    """Half of all failures are the network's: half as many end the job, and the others' dips are a part of the loss."""
    often = replace(SPEC.cluster.reliability, mtbf_device_hours=20_000.0)
    planes = PlanesSpec(8, 800, 51.2, network_fraction=0.5)
    plain = replace(SPEC, cluster=replace(SPEC.cluster, reliability=often))
    sprayed = replace(plain, cluster=replace(plain.cluster, fabric=FabricSpec(planes=planes)))
    before, after = (expect_goodput(spec, PLAN, CANDIDATE, SPEC.resilience) for spec in (plain, sprayed))
    assert before is not None and after is not None
    assert after.mtbf_s == pytest.approx(2 * before.mtbf_s)
    dips = PLAN.world_size * 0.5 / (20_000 * 3600) * simulate(planes, PLAN.world_size, [Failure("port", 0, 60)]).lost_s
    assert after.lost["dip"] == pytest.approx(dips) and "dip" not in before.lost
    assert after.goodput.value + sum(after.lost.values()) == pytest.approx(1)
    assert after.goodput.value > before.goodput.value
    assert {assumption.key for assumption in gather_assumptions(sprayed, CANDIDATE)} >= {
        "cluster.fabric.planes.network_fraction", "cluster.fabric.planes.flap_s",
    }  # fmt: skip


# The steps of a run whose batch changes, against plans of each size alone and against one step after another


CHIP = AcceleratorSpec("chip", "maker", 500.0, 80.0, 3.0, link_gb_per_s=300.0, link_kind="nvswitch", tdp_w=500)
SEESAW = BatchScheduleSpec(kind="seesaw", growth=2.0)
CONSTANT = BatchScheduleSpec()


def make_spec(schedule: BatchScheduleSpec, size: int = 32, layout: LayoutSpec | None = None) -> RunSpec:
    return RunSpec(
        model=DecoderModel(4, 1024, 8, 8, 128, 4096, 8192),
        data=DataSpec(seq_len=2048, source="tokens"),
        optim=OptimSpec(lr=1e-4),
        batching=BatchingSpec(global_batch_size=size, micro_batch_size=2, schedule=schedule),
        train=TrainSection(max_steps=5000),
        cluster=ClusterSpec(num_nodes=2, devices_per_node=4, accelerator=CHIP, nic_gbit_per_s=400.0),
        layout=layout or LayoutSpec(dp_shard=8, dp_replicate=1),
    )


def best(spec: RunSpec) -> Candidate:
    found = plan_capacity(spec).best
    assert found is not None
    return found


def test_each_size_is_predicted_as_a_run_of_that_size_alone() -> None:
    sized = best(make_spec(SEESAW)).sized_steps
    assert [step.samples for step in sized] == [32, 64, 128, 256]
    for step in sized:
        assert step.time == best(make_spec(CONSTANT, step.samples)).time


def test_micro_batches_that_are_not_full_count_as_whole_ones() -> None:
    ramp = BatchScheduleSpec(kind="ramp", stages=(RampStage(10**6, 40),))
    _, larger = best(make_spec(ramp)).sized_steps
    assert larger.time == best(make_spec(CONSTANT, 48)).time


def test_an_interleaved_pipeline_takes_micro_batches_in_turns() -> None:
    pipeline = LayoutSpec(dp_shard=4, dp_replicate=1, pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    ramp = BatchScheduleSpec(kind="ramp", stages=(RampStage(10**6, 36),))
    _, larger = best(make_spec(ramp, layout=pipeline)).sized_steps
    assert larger.time == best(make_spec(CONSTANT, 48, pipeline)).time


@pytest.mark.parametrize("schedule", [CONSTANT, BatchScheduleSpec(kind="noise", max_global_batch_size=256)])
def test_where_no_other_size_is_known_nothing_else_is_predicted(schedule: BatchScheduleSpec) -> None:
    spec = make_spec(schedule)
    candidate = best(spec)
    work = expect_work(spec, candidate)
    assert (candidate.sized_steps, work.batches) == ((), ())
    assert (work.steps, work.step_time_s, work.time) == (5000, candidate.step_time_s, candidate.time)


def test_of_many_sizes_some_are_predicted_and_the_others_lie_between() -> None:
    spec = make_spec(replace(SEESAW, growth=1.05))
    candidate = best(spec)
    work = expect_work(spec, candidate)
    assert len(candidate.sized_steps) == PREDICTED_SIZES
    assert len(work.batches) > 2 * PREDICTED_SIZES
    assert all(a.step_time_s < b.step_time_s for a, b in pairwise(work.batches[:-1]))
    by_size = {batch.step_samples: batch.step_time_s for batch in work.batches}
    assert all(by_size[step.samples] == pytest.approx(step.time.total_s) for step in candidate.sized_steps)


def test_the_work_is_that_of_the_steps_one_after_the_other() -> None:
    """With steps of 0.5 s and 0.01 s per sample, predicted at three sizes alone."""
    spec = make_spec(replace(SEESAW, growth=1.2))
    sizes = spec.batching.sizes_up_to(320)
    sized = tuple(SizedStep(size, StepTime(0.01 * size, dp_comm_s=0.5)) for size in (32, 144, max(sizes) + 50))
    candidate = replace(best(make_spec(CONSTANT)), sized_steps=sized)
    work, schedule = expect_work(spec, candidate), schedule_batches(spec)
    taken: list[int] = []
    while sum(taken) < schedule.run_samples:
        taken.append(step_batch(schedule, sum(taken)).samples)
    assert work.steps == len(taken)
    assert work.time.dp_comm_s == pytest.approx(0.5)
    last_as_the_others = taken[-2] - taken[-1]
    assert work.work_s == pytest.approx(0.5 * len(taken) + 0.01 * (sum(taken) + last_as_the_others))


def test_layouts_are_ranked_for_the_size_that_trains_most_samples() -> None:
    """Of a ramp to 16 times the batch: those of that batch alone, as far as the first size divides over them."""
    long_ramp = BatchScheduleSpec(kind="ramp", stages=(RampStage(10**6, 512),))
    free = LayoutSpec(dp_replicate=1, pp="auto", tp="auto")
    growing, constant = make_spec(long_ramp, layout=free), make_spec(CONSTANT, 512, layout=free)
    plans = [plan_capacity(spec) for spec in (growing, constant)]
    layouts = [[candidate.layout for candidate in plan.candidates] for plan in plans]
    of_the_first = [candidate.layout for candidate in plan_capacity(make_spec(CONSTANT, layout=free)).candidates]
    assert layouts[0] == layouts[1] != of_the_first
    first, same = plans[0].candidates[0], plans[1].candidates[0]
    assert (first.step_time_s, first.tokens_per_s, first.mfu) == (same.step_time_s, same.tokens_per_s, same.mfu)
    assert sum("ranked for 512 samples" in one for one in plans[0].assumptions) == 1
    assert as_plan(growing, first, plans[0], "bf16").grad_accum_steps == same.grad_accum_steps // 16


def test_a_forecast_is_of_the_steps_that_the_run_makes() -> None:
    constant, seesaw = make_spec(CONSTANT), make_spec(SEESAW)
    runs = [forecast_run(spec, plan_capacity(spec), best(spec)) for spec in (constant, seesaw)]
    assert [run.tokens for run in runs] == [5000 * 32 * 2048] * 2
    assert runs[0].steps == 5000
    assert runs[0].batches == ()
    assert runs[1].steps == sum(batch.steps for batch in runs[1].batches) < 0.7 * 5000
    work_s = sum(batch.steps * batch.step_time_s for batch in runs[1].batches)
    goodput = runs[1].goodput.goodput.value
    assert runs[1].wall_time_s.value == pytest.approx(work_s / goodput)
    assert runs[1].goodput.wall_time_s == pytest.approx(work_s / goodput)
    assert runs[1].wall_time_s.value < runs[0].wall_time_s.value
    assert runs[1].energy_joules is not None
    assert runs[0].energy_joules is not None
    assert runs[1].energy_joules.value < runs[0].energy_joules.value
    step_time_s = next(one for one in runs[1].assumptions if one.key == "step_time_s")
    assert step_time_s.value == pytest.approx(work_s / runs[1].steps)


def test_a_device_that_waits_in_large_steps_takes_less_energy() -> None:
    spec = make_spec(SEESAW)
    candidate = best(spec)
    busy = (SizedStep(32, StepTime(matmul_s=1.0)), SizedStep(256, StepTime(matmul_s=8.0)))
    waiting = (SizedStep(32, StepTime(matmul_s=1.0)), SizedStep(256, StepTime(matmul_s=1.0, bubble_s=7.0)))
    energies = [
        forecast_run(spec, plan_capacity(spec), replace(candidate, sized_steps=steps)).energy_joules
        for steps in (busy, waiting)
    ]
    assert energies[0] is not None
    assert energies[1] is not None
    assert energies[1].value < energies[0].value


def test_the_main_size_trains_most_samples_however_large_others_are() -> None:
    tokens = 32 * 5000 * 2048
    stages = (RampStage(tokens // 10, 64), RampStage(tokens - tokens // 10, 512))
    assert main_size(make_spec(BatchScheduleSpec(kind="ramp", stages=stages))) == 64
    assert main_size(make_spec(CONSTANT)) == 32


def test_a_batch_that_follows_the_noise_is_forecast_as_the_first_and_says_so() -> None:
    spec = make_spec(BatchScheduleSpec(kind="noise", max_global_batch_size=256))
    run = forecast_run(spec, plan_capacity(spec), best(spec))
    assert run.steps == 5000
    assert any(" 32 samples per step" in note and "up to 256," in note for note in run.notes)
