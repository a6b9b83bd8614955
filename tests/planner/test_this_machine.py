"""A made-up probe whose figures are easy to check on paper: each operation has its own cost, all others are free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.memory.predict import predict_memory
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import (
    block_matrices,
    copy_bytes,
    curve_parts_s,
    device_limit_bytes,
    is_known,
    is_predictable,
    micro_tokens,
    parameter_bytes,
    predict_device,
    predict_local,
    setup_of,
    step_bytes,
    suggest,
    unit_params,
)
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import CheckpointSpec, DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, LoraSpec, OptimSpec
from trainspec_cli.recipe.records import build, from_plain, to_plain
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan, PlannedLink
from trainspec_cli.recipe.results.tools import Curve, MachineProbe, MatmulCurves, Passes, Reference
from trainspec_cli.run.folder.event_types.events import PARTS

MODEL = DecoderModel(4, 64, 2, 2, 32, 128, 512, tied_embeddings=True)
SPEC = RunSpec(
    model=MODEL,
    data=DataSpec(seq_len=256, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16, micro_batch_size=4),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
)
MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
FREE = Curve((1.0, 2.0**20), (1e-12, 1e-12 * 2**20))
"""1 ps an element: lost in the tolerances below."""
NO_PASSES = Passes(FREE, FREE)
UNKNOWN = Reference(plan(SPEC, MACHINE), {}, 0.0)
RAW = MachineProbe(
    processes=2,
    compute="bf16",
    empty_step_s=dict.fromkeys(PARTS, 1.0),
    empty_block_s=dict.fromkeys(PARTS, 0.25),
    small=UNKNOWN,
    large=UNKNOWN,
    matmul=MatmulCurves(FREE, FREE, FREE),
    attention=NO_PASSES,
    attention_narrow=NO_PASSES,
    norm=NO_PASSES,
    rope=NO_PASSES,
    swiglu=NO_PASSES,
    loss=FREE,
    add=FREE,
    cast=FREE,
    optimizer=FREE,
    all_reduce=FREE,
    all_gather=FREE,
    reduce_scatter=FREE,
    bare_bytes=1e9,
    displaced=0.0,
    peak_flops=1.0,
)
BLOCK_MATRICES = 4 * 64 * 64 + 3 * 64 * 128
BLOCK, OUTSIDE = BLOCK_MATRICES + 2 * 64, 512 * 64 + 64


def linear(seconds_each: float) -> Curve:
    """Proportional to size, from a call that costs next to nothing."""
    return Curve((1.0, 2.0**20), (seconds_each, seconds_each * 2**20))


def as_told(probe: MachineProbe, **measured: float) -> MachineProbe:
    """With references that took just what the curves and the causes say, but for what was `measured` otherwise."""
    references = {}
    for name, layers in (("small", 1), ("large", 8)):
        reference = made(model=replace(MODEL, num_layers=layers))
        parts = curve_parts_s(reference, probe) | measured
        references[name] = Reference(reference, parts, grown_bytes=0.0)
    return replace(probe, **references)


def predicted(planned: Plan, probe: MachineProbe) -> LocalPrediction:
    return predict_local(planned, as_told(probe))


def made(**changes: object) -> Plan:
    return plan(replace(SPEC, **changes), MACHINE)  # type: ignore[arg-type]


def test_a_curve_is_straight_on_logarithmic_axes_and_proportional_beyond() -> None:
    curve = Curve((1, 4, 16), (1, 2, 4))
    assert [curve.at(size) for size in (0.1, 1, 2, 4, 8, 16, 32)] == pytest.approx([1, 1, 2**0.5, 2, 2 * 2**0.5, 4, 8])
    assert curve.beyond_call(16) == 3
    assert curve.beyond_call(0.1) == 0


def test_calls_cost_what_a_model_next_to_nothing_costs() -> None:
    parts = predicted(made(), RAW).time_s
    assert set(parts) == set(PARTS)
    assert parts["forward"] == pytest.approx(2 * (1 + 4 * 0.25), rel=1e-3)  # two micro-batches
    assert parts["optimizer"] == pytest.approx(1 + 4 * 0.25, rel=1e-3)


def test_products_take_their_own_rates() -> None:
    products = MatmulCurves(linear(1e-6), linear(2e-6), linear(3e-6))
    parts = predicted(made(), replace(RAW, matmul=products)).time_s
    block, head = 4 * BLOCK_MATRICES * 1e-6, 512 * 64 * 1e-6  # 1024 tokens, as probed
    assert parts["forward"] == pytest.approx(2 * (2 + block + 6 * head), rel=1e-3)  # the head's gradients too
    assert parts["backward"] == pytest.approx(2 * (2 + 5 * block), rel=1e-3)


def test_attention_grows_with_heads_and_their_size() -> None:
    flat = Curve((64.0, 1024.0), (1.0, 1.0))
    probe = replace(RAW, attention_narrow=Passes(flat, flat), attention=Passes(linear(4.0 / 256), linear(4.0 / 256)))
    # Head size 32 is a third of the way from 16 (1 s) to 64 (4 s at 256 tokens); 2 of 4 heads; 4 layers.
    expected = 2 * (2 + 4 * (1 + (4 - 1) / 3) / 2)
    assert predicted(made(), probe).time_s["forward"] == pytest.approx(expected, rel=1e-3)


def test_gradients_are_reduced_once_a_step_and_shards_are_gathered_for_every_micro_batch() -> None:
    probe = replace(RAW, all_reduce=linear(1e-6), all_gather=linear(1e-6), reduce_scatter=linear(1e-6))
    replicated = predicted(made(), probe).time_s["exposed_comm"]
    assert replicated == pytest.approx(2 + 4e-6 * (4 * BLOCK + OUTSIDE), rel=1e-3)
    sharded = predicted(made(layout=LayoutSpec(dp_shard=2)), probe).time_s["exposed_comm"]
    gathered, reduced = 2 * 2e-6 * (2 * 4 * BLOCK + OUTSIDE), 2 * 4e-6 * (4 * BLOCK + OUTSIDE)
    assert sharded == pytest.approx(2 + gathered + reduced, rel=1e-3)


def test_links_are_as_fast_as_the_largest_exchange_of_their_axis_was_probed() -> None:
    two_s, four_s = (Curve((1.0, 2.0**30), (seconds, seconds)) for seconds in (2.0, 4.0))
    probe, largest = replace(RAW, all_reduce=two_s, all_gather=four_s), max(BLOCK, OUTSIDE)
    assert predicted(made(), probe).links == (PlannedLink("dp_replicate", 2 * (4 * largest / 2) / 2),)
    sharded = predicted(made(layout=LayoutSpec(dp_shard=2)), probe)
    assert sharded.links == (PlannedLink("dp_shard", 2 * largest / 2 / 4),)
    assert build(LocalPrediction, to_plain(sharded)) == (sharded, []), "a plan is read as it was written"


def test_zero_1_gathers_and_reduces_once_a_step() -> None:
    probe = replace(RAW, all_gather=linear(1e-6), reduce_scatter=linear(1e-6))
    seconds = predicted(made(layout=LayoutSpec(dp_shard=2, zero_stage=1)), probe).time_s["exposed_comm"]
    gathered, reduced = 2e-6 * (4 * BLOCK + OUTSIDE), 4e-6 * (4 * BLOCK + OUTSIDE)
    assert seconds == pytest.approx(2 + gathered + reduced, rel=1e-3)


def test_memory_by_cause() -> None:
    planned, params = made(), 4 * BLOCK + OUTSIDE
    memory = predicted(planned, RAW).memory
    assert planned.params == params
    assert memory["worker"] == 1e9
    assert memory["parameters"] == (4 + 2) * params
    assert (memory["optimizer"], memory["gradients"]) == (8 * params, 4 * params)
    per_token = 20 * 64 + 8 + 4 * 2 * 32 * 4 // 2 + 4 * 2 + 8 * 128
    assert memory["activations"] == 1024 * 4 * per_token


def test_the_heaps_holes_are_those_of_the_larger_reference() -> None:
    probe = as_told(RAW)
    plan = probe.large.plan
    kept, step = parameter_bytes(plan), sum(step_bytes(plan).values())
    grown = kept + 1.25 * step
    memory = predict_local(made(), replace(probe, large=replace(probe.large, grown_bytes=grown))).memory
    assert memory["fragmentation"] == pytest.approx(0.25 * sum(step_bytes(made()).values()))
    assert predict_local(made(), probe).memory["fragmentation"] == 0


def test_parts_take_what_the_references_took_over_what_the_curves_say() -> None:
    probe, told = as_told(RAW), predicted(made(), RAW).time_s
    slow = {part: 3 * seconds for part, seconds in probe.large.parts_s.items()}
    large = predict_local(probe.large.plan, replace(probe, large=replace(probe.large, parts_s=slow))).time_s
    small = predict_local(probe.small.plan, replace(probe, large=replace(probe.large, parts_s=slow))).time_s
    between = predict_local(made(), replace(probe, large=replace(probe.large, parts_s=slow))).time_s
    for part in ("forward", "backward", "optimizer"):
        assert large[part] == pytest.approx(slow[part])
        assert small[part] == pytest.approx(probe.small.parts_s[part])
        assert told[part] < between[part] < 3 * told[part]


def test_peers_are_waited_for_in_proportion_to_the_passes() -> None:
    probe = as_told(RAW)
    took = probe.large.parts_s
    waited = 0.1 * (took["forward"] + took["backward"])
    late = replace(probe.large, parts_s=took | {"exposed_comm": took["exposed_comm"] + waited})
    before, after = (predict_local(made(), p).time_s for p in (probe, replace(probe, large=late)))
    passes = before["forward"] + before["backward"]
    assert after["exposed_comm"] - before["exposed_comm"] == pytest.approx(0.1 * passes)


def test_probe_and_prediction_go_through_json() -> None:
    planned = made()
    planned = replace(planned, prediction=predicted(planned, RAW))
    assert from_plain(Plan, to_plain(planned)) == planned
    probe = as_told(RAW)
    assert from_plain(MachineProbe, to_plain(probe)) == probe


def test_no_probe_speaks_of_other_arithmetic() -> None:
    assert is_predictable(made())
    assert not is_predictable(made(compile=True))
    assert not is_predictable(made(recompute="full"))
    assert not is_predictable(made(layout=LayoutSpec(tp=2)))
    for departure in ({"gated_mlp": False}, {"qk_norm": True}, {"sliding_window": 64}):
        assert not is_predictable(made(model=replace(MODEL, **departure)))


PASSING = 1024 * 64
"""Elements of the residual stream of a micro-batch."""
HEAD = 512 * 64


@pytest.mark.parametrize(
    ("operation", "forward", "backward"),
    [
        ("add", 4 * 2 * PASSING + PASSING, 4 * 5 * PASSING + 2 * PASSING + 2 * HEAD),
        ("cast", 4 * BLOCK + 2 * HEAD + OUTSIDE, 4 * 2 * BLOCK + 2 * HEAD + 2 * OUTSIDE),
        ("loss", 1024 * 512, 0),
        ("norm", (4 * 2 + 1) * PASSING, (4 * 2 + 1) * PASSING),
        ("rope", 4 * (PASSING + PASSING), 4 * (PASSING + PASSING)),
        ("swiglu", 4 * 1024 * 128, 4 * 1024 * 128),
    ],
)
def test_elements_that_each_operation_passes(operation: str, forward: int, backward: int) -> None:
    """Of two micro-batches; each call's own cost is among that of the empty step, 2 s."""
    curve = linear(1e-6)
    probe = replace(RAW, **{operation: curve if operation in ("add", "cast", "loss") else Passes(curve, curve)})
    parts = predicted(made(), probe).time_s
    assert parts["forward"] == pytest.approx(2 * (2 + 1e-6 * forward), rel=1e-4)
    assert parts["backward"] == pytest.approx(2 * (2 + 1e-6 * backward), rel=1e-4)


def test_forward_and_backward_have_curves_of_their_own() -> None:
    for name in ("norm", "rope", "swiglu"):
        ahead, back = (predicted(made(), replace(RAW, **{name: passes})).time_s
                       for passes in (Passes(linear(1e-6), FREE), Passes(FREE, linear(1e-6))))  # fmt: skip
        assert ahead["forward"] > 4.1 > back["forward"] and back["backward"] > 4.1 > ahead["backward"]


def test_a_large_vocabulary_goes_through_the_loss_in_chunks() -> None:
    """Of 256 tokens. All 1,024 are one group, whose product is cast and added to the head's gradient."""
    model = replace(MODEL, vocab_size=2**17)
    probe = replace(RAW, cast=linear(1e-6))
    head, outside = 2**17 * 64, 2**17 * 64 + 64
    casts = 4 * BLOCK + 2 * head + outside
    assert curve_parts_s(made(model=model), probe)["forward"] == pytest.approx(2 * (2 + 1e-6 * casts), rel=1e-3)
    parts = curve_parts_s(made(model=model), replace(RAW, loss=linear(1e-6)))
    assert parts["forward"] == pytest.approx(2 * (2 + 1024 * 2**17 * 1e-6), rel=1e-3)


@pytest.mark.parametrize(("shard", "share"), [(1, 1), (2, 2)])
def test_the_optimizer_updates_its_own_share(shard: int, share: int) -> None:
    probe = replace(RAW, optimizer=linear(1e-6))
    parts = predicted(made(layout=LayoutSpec(dp_shard=shard)), probe).time_s
    assert parts["optimizer"] == pytest.approx(2 + 1e-6 * (4 * BLOCK + OUTSIDE) / share, rel=1e-4)


def test_a_part_that_no_reference_shows_takes_what_the_curves_say() -> None:
    probe = as_told(RAW, optimizer=0.0)
    assert predict_local(made(), probe).time_s["optimizer"] == pytest.approx(2, rel=1e-3)


def test_a_part_larger_than_the_references_keeps_the_larger_ones_ratio() -> None:
    probe = as_told(RAW)
    slow = replace(probe.large, parts_s=probe.large.parts_s | {"optimizer": 3 * probe.large.parts_s["optimizer"]})
    huge = made(model=replace(MODEL, num_layers=100))
    assert predict_local(huge, replace(probe, large=slow)).time_s["optimizer"] == pytest.approx(3 * 26, rel=1e-3)


def test_sizes_of_a_block_whose_heads_are_wider_than_the_model() -> None:
    model = replace(MODEL, num_kv_heads=1, head_dim=48)
    assert block_matrices(model) == (64 * 96, 64 * 48, 64 * 48, 96 * 64, 64 * 128, 64 * 128, 128 * 64)
    planned = made(model=model)
    assert unit_params(planned) == (43_008 + 2 * 64, OUTSIDE)
    assert micro_tokens(planned) == 4 * 256


@pytest.mark.parametrize(
    ("changes", "parameters", "optimizer", "gradients", "collectives"),
    [
        ({}, (4 + 2) * (4 * BLOCK + OUTSIDE), 8, 4, 6),
        ({"layout": LayoutSpec(dp_shard=2)}, 2 * (4 * BLOCK + OUTSIDE) + 2 * (2 * BLOCK + OUTSIDE), 4, 2, 6),
        ({"layout": LayoutSpec(dp_shard=2, zero_stage=2)}, (2 + 2) * (4 * BLOCK + OUTSIDE), 4, 2, 6),
        ({"optim": OptimSpec(lr=1.0, name="sgd")}, 6 * (4 * BLOCK + OUTSIDE), 0, 4, 6),
        ({"precision": PrecisionSpec(compute="fp32")}, 8 * (4 * BLOCK + OUTSIDE), 8, 4, 8),
        ({"precision": PrecisionSpec(reduce="bf16")}, 6 * (4 * BLOCK + OUTSIDE), 8, 4, 4),
    ],
    ids=["replicas", "zero 3", "zero 2", "sgd", "fp32", "reduced in bf16"],
)
def test_memory_of_each_sharding_and_format(
    changes: dict[str, object], parameters: int, optimizer: int, gradients: int, collectives: int
) -> None:
    """A parameter of moments and of gradients, a parameter of the larger unit in flight."""
    planned, params = made(**changes), 4 * BLOCK + OUTSIDE
    memory = predicted(planned, RAW).memory
    assert memory["parameters"] == parameters
    assert (memory["optimizer"], memory["gradients"]) == (optimizer * params, gradients * params)
    assert memory["collectives"] == collectives * max(BLOCK, OUTSIDE)
    # The softmax in fp32, and the logits; with bf16 also their copy in fp32. The gradient takes less and comes later.
    assert memory["loss"] == 1024 * 512 * (10 if planned.compute == "bf16" else 8)
    per_token = 2 * (8 + 2) * 64 + 8 + 2 * 32 * 2 * 4 + 4 * 2 + 4 * 2 * 128
    wide_per_token = 2 * (8 + 4) * 64 + 8 + 4 * 32 * 2 * 4 + 4 * 2 + 4 * 4 * 128
    assert memory["activations"] == 1024 * 4 * (per_token if planned.compute == "bf16" else wide_per_token)


@pytest.mark.parametrize(
    ("checkpoint", "optim", "held"),
    [
        (CheckpointSpec(interval_steps=None), "adamw", 0),
        (CheckpointSpec(interval_steps=5, mode="async"), "adamw", 12 / 2),
        (CheckpointSpec(interval_steps=5, mode="async"), "sgd", 4 / 2),
        (CheckpointSpec(interval_steps=5, mode="sync"), "adamw", 0),
        (CheckpointSpec(interval_steps=5, memory_interval_steps=1), "adamw", 2 * 12 / 2),
    ],
    ids=["none", "beside", "beside, of sgd", "at once", "in memory"],
)
def test_a_copy_of_the_state_waits_to_be_written(checkpoint: CheckpointSpec, optim: str, held: float) -> None:
    planned = made(checkpoint=checkpoint, optim=OptimSpec(lr=1.0, name=optim))  # type: ignore[arg-type]
    assert copy_bytes(planned) == held * (4 * BLOCK + OUTSIDE)
    assert predicted(planned, RAW).memory["checkpoint copy"] == copy_bytes(planned)


def test_no_probe_speaks_of_other_devices_families_or_of_adapters() -> None:
    planned = made()
    assert not is_predictable(replace(planned, device="cuda"))
    assert not is_predictable(replace(planned, num_nodes=2))
    assert not is_predictable(replace(planned, offload="optimizer"))
    assert not is_predictable(made(lora=LoraSpec(rank=2)))
    assert not is_predictable(made(model=HybridModel(64, 512, 2)))
    for axis in ("cp", "pp", "ep"):
        assert not is_predictable(replace(planned, layout=replace(planned.layout, **{axis: 2})))


def test_a_site_keeps_the_outer_optimizer_beside_its_part() -> None:
    assert "outer optimizer" not in predicted(made(), RAW).memory
    planned = made(resilience=ResilienceSpec(mode="sites"))
    assert predicted(planned, RAW).memory["outer optimizer"] == 8 * planned.params / planned.layout.dp_shard


# What would fit: found by predicting it


FITTING_SPEC = RunSpec(
    model=DecoderModel(4, 64, 2, 2, 32, 128, 512, tied_embeddings=True),
    data=DataSpec(seq_len=256, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16, micro_batch_size=8),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
)
PLAN = plan(FITTING_SPEC, MACHINE)


def made_up(plan: Plan) -> LocalPrediction:
    """20 bytes of states, shared by shards, 10 for every sample at a time, and 5 that nobody measures."""
    return LocalPrediction({}, {"states": 20 / plan.layout.dp_shard, "samples": 10.0 * plan.micro_batch_size}, {"x": 5})


def test_what_would_fit_is_found() -> None:
    assert suggest(PLAN, made_up, 105) == "batching.micro_batch_size=8"
    assert suggest(PLAN, made_up, 104) == "batching.micro_batch_size=4"
    sharded = ["layout.dp_replicate=1", "layout.dp_shard=2", "batching.micro_batch_size=1"]
    assert suggest(PLAN, made_up, 34).split() == sharded
    assert suggest(PLAN, made_up, 24) == ""


def test_what_would_fit_of_a_batch_that_does_not_divide() -> None:
    """Seven samples on the rank that has most."""
    odd = plan(replace(FITTING_SPEC, batching=BatchingSpec(13, micro_batch_size=8)), MACHINE)
    assert (odd.micro_batch_size, odd.grad_accum_steps) == (7, 1)
    assert suggest(odd, made_up, 95) == "batching.micro_batch_size=7"
    assert suggest(odd, made_up, 94) == "batching.micro_batch_size=4"
    assert suggest(odd, made_up, 64) == "batching.micro_batch_size=3"
    tried: list[tuple[int, int]] = []

    def never(plan: Plan) -> LocalPrediction:
        tried.append((plan.micro_batch_size, plan.grad_accum_steps))
        return made_up(plan)

    assert suggest(odd, never, 0) == ""
    assert tried == [(7, 1), (4, 2), (3, 3), (2, 4), (1, 7)] * 2


# Predictions for GPUs that were found on this machine


H100S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H100 80GB HBM3",) * 8, gpu_memory_bytes=80 * 2**30, bf16=True)
GPU_SPEC = RunSpec(
    model=DecoderModel(32, 4096, 32, 8, 128, 14336, 128256),
    data=DataSpec(seq_len=1024, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16, micro_batch_size=1),
    train=TrainSection(max_steps=1),
    layout=LayoutSpec(dp_shard=8),
)


def test_the_layout_that_will_run_is_predicted() -> None:
    planned = plan(GPU_SPEC, H100S)
    prediction = predict_device(planned, H100S)
    assert prediction.step_time_s == pytest.approx(
        estimate_step(setup_of(planned, H100S), efficiency_of(GPU_SPEC.cluster)).total_s
    )
    time = estimate_step(setup_of(planned, H100S), efficiency_of(GPU_SPEC.cluster))
    forward_s = prediction.time_s["forward"]
    # A third of the layers' time, and all products of the head: the loss computes its gradients in the forward.
    assert 0.38 < forward_s / (time.matmul_s + time.attention_s + time.memory_bound_s) < 0.43
    assert (prediction.time_s["optimizer"], prediction.time_s["other"]) == (time.optimizer_s, time.host_s)
    assert prediction.time_s["data_wait"] == time.data_s
    assert prediction.memory["optimizer"] == pytest.approx(8 * planned.params / 8, rel=0.01)
    assert prediction.needed_bytes > prediction.peak_memory_bytes


def test_replicas_of_what_fits_in_shards_do_not_fit() -> None:
    sharded = plan(GPU_SPEC, H100S)
    whole = plan(replace(GPU_SPEC, layout=LayoutSpec(dp_replicate=8, dp_shard=1)), H100S)
    limit_bytes = device_limit_bytes(sharded, H100S)
    assert limit_bytes < 80 * 2**30
    assert predict_device(sharded, H100S).needed_bytes < limit_bytes < predict_device(whole, H100S).needed_bytes


def test_the_catalogue_must_describe_the_gpu() -> None:
    planned = plan(GPU_SPEC, H100S)
    assert is_known(planned, H100S)
    assert not is_known(planned, replace(H100S, gpu_names=("Abacus-9000",) * 8))
    assert not is_known(replace(planned, device="cpu"), H100S)


def test_a_plans_own_settings_are_predicted() -> None:
    planned = replace(
        plan(GPU_SPEC, H100S),
        micro_batch_size=2,
        grad_accum_steps=3,
        recompute="full",
        offload="optimizer",
    )
    setup = setup_of(planned, H100S)
    assert (setup.layout, setup.micro_batch_size, setup.grad_accum) == (planned.layout, 2, 3)
    assert (setup.compute, setup.matmul, setup.recompute.full, setup.offload_optimizer) == ("bf16", "bf16", True, True)
    assert (setup.software.weight_bytes, setup.software.master_bytes) == (4, 0)
    assert (setup.fabric.num_devices, setup.fabric.devices_per_node, setup.fabric.chip.memory_gb) == (8, 8, 80)
    whole = replace(planned, layout=replace(planned.layout, zero_stage=1), compute="fp32", offload="none")
    setup = setup_of(whole, H100S)
    assert (setup.software.weight_bytes, setup.software.master_bytes) == (2, 4)
    assert (setup.matmul, setup.offload_optimizer) == ("fp32", False)
    eight = replace(planned, spec=replace(GPU_SPEC, precision=PrecisionSpec(matmul="fp8")))
    assert setup_of(eight, H100S).matmul == "fp8"


def test_causes_of_a_devices_memory() -> None:
    planned = plan(GPU_SPEC, H100S)
    (memory,) = predict_memory(setup_of(planned, H100S), "none")
    found = predict_device(planned, H100S)
    assert found.memory == {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "logits": memory.logits_bytes,
        "collectives": memory.comm_buffers_bytes,
    }
    assert found.needed_bytes == pytest.approx(memory.total_bytes)


def test_replica_groups_are_predicted_as_they_exchange() -> None:
    """Also where the plan calls its groups replicas of one group."""
    layout = LayoutSpec(dp_shard=2, dp_replicate=1)
    elastic = replace(GPU_SPEC, layout=layout, resilience=ResilienceSpec(mode="elastic", replica_groups=4))
    planned = plan(elastic, H100S)
    assert (planned.replica_groups, planned.layout.dp_replicate) == (4, 1)
    setup = setup_of(planned, H100S)
    assert (setup.replica_groups, setup.layout.dp_replicate, setup.group_layout) == (4, 4, planned.layout)
    assert setup_of(planned.as_one_group, H100S) == setup
    counted = replace(elastic, resilience=ResilienceSpec(mode="elastic"), layout=replace(layout, dp_replicate=4))
    assert setup_of(plan(counted, H100S), H100S).group_layout == planned.layout
    assert setup_of(plan(replace(GPU_SPEC, layout=replace(layout, dp_replicate=4)), H100S), H100S).replica_groups == 1


def test_the_stages_of_a_replica_group_are_cut_and_its_replicas_stay() -> None:
    layout = LayoutSpec(dp_shard=1, dp_replicate=1, pp=2)
    elastic = replace(GPU_SPEC, layout=layout, resilience=ResilienceSpec(mode="elastic", replica_groups=4))
    assert plan(elastic, H100S).layout.dp_replicate == 1
