"""Predictions for GPUs that were found on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.memory.predict import predict_memory
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import device_limit_bytes, is_known, predict_device, setup_of
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec

H100S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H100 80GB HBM3",) * 8, gpu_memory_bytes=80 * 2**30, bf16=True)
SPEC = RunSpec(
    model=DecoderModel(32, 4096, 32, 8, 128, 14336, 128256),
    data=DataSpec(seq_len=1024, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16, micro_batch_size=1),
    train=TrainSection(max_steps=1),
    layout=LayoutSpec(dp_shard=8),
)


def test_the_layout_that_will_run_is_predicted() -> None:
    planned = plan(SPEC, H100S)
    prediction = predict_device(planned, H100S)
    assert prediction.step_time_s == pytest.approx(
        estimate_step(setup_of(planned, H100S), efficiency_of(SPEC.cluster)).total_s
    )
    time = estimate_step(setup_of(planned, H100S), efficiency_of(SPEC.cluster))
    forward_s = prediction.time_s["forward"]
    assert 0.3 < forward_s / (time.matmul_s + time.attention_s + time.memory_bound_s) < 0.4
    assert (prediction.time_s["optimizer"], prediction.time_s["other"]) == (time.optimizer_s, time.host_s)
    assert prediction.time_s["data_wait"] == time.data_s
    assert prediction.memory["optimizer"] == pytest.approx(8 * planned.params / 8, rel=0.01)
    assert prediction.needed_bytes > prediction.peak_memory_bytes


def test_replicas_of_what_fits_in_shards_do_not_fit() -> None:
    sharded = plan(SPEC, H100S)
    whole = plan(replace(SPEC, layout=LayoutSpec(dp_replicate=8, dp_shard=1)), H100S)
    limit_bytes = device_limit_bytes(sharded, H100S)
    assert limit_bytes < 80 * 2**30
    assert predict_device(sharded, H100S).needed_bytes < limit_bytes < predict_device(whole, H100S).needed_bytes


def test_the_catalogue_must_describe_the_gpu() -> None:
    planned = plan(SPEC, H100S)
    assert is_known(planned, H100S)
    assert not is_known(planned, replace(H100S, gpu_names=("Abacus-9000",) * 8))
    assert not is_known(replace(planned, device="cpu"), H100S)


def test_a_plans_own_settings_are_predicted() -> None:
    planned = replace(plan(SPEC, H100S), micro_batch_size=2, grad_accum_steps=3, recompute="full", offload="optimizer")
    setup = setup_of(planned, H100S)
    assert (setup.layout, setup.micro_batch_size, setup.grad_accum) == (planned.layout, 2, 3)
    assert (setup.compute, setup.matmul, setup.recompute.full, setup.offload_optimizer) == ("bf16", "bf16", True, True)
    assert (setup.software.weight_bytes, setup.software.master_bytes) == (4, 0)
    assert (setup.fabric.num_devices, setup.fabric.devices_per_node, setup.fabric.chip.memory_gb) == (8, 8, 80)
    whole = replace(planned, layout=replace(planned.layout, zero_stage=1), compute="fp32", offload="none")
    setup = setup_of(whole, H100S)
    assert (setup.software.weight_bytes, setup.software.master_bytes) == (2, 4)
    assert (setup.matmul, setup.offload_optimizer) == ("fp32", False)
    eight = replace(planned, spec=replace(SPEC, precision=PrecisionSpec(matmul="fp8")))
    assert setup_of(eight, H100S).matmul == "fp8"


def test_causes_of_a_devices_memory() -> None:
    planned = plan(SPEC, H100S)
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
    elastic = replace(SPEC, layout=layout, resilience=ResilienceSpec(mode="elastic", replica_groups=4))
    planned = plan(elastic, H100S)
    assert (planned.replica_groups, planned.layout.dp_replicate) == (4, 1)
    setup = setup_of(planned, H100S)
    assert (setup.replica_groups, setup.layout.dp_replicate, setup.group_layout) == (4, 4, planned.layout)
    assert setup_of(planned.as_one_group, H100S) == setup
    counted = replace(elastic, resilience=ResilienceSpec(mode="elastic"), layout=replace(layout, dp_replicate=4))
    assert setup_of(plan(counted, H100S), H100S).group_layout == planned.layout
    assert setup_of(plan(replace(SPEC, layout=replace(layout, dp_replicate=4)), H100S), H100S).replica_groups == 1


def test_the_stages_of_a_replica_group_are_cut_and_its_replicas_stay() -> None:
    layout = LayoutSpec(dp_shard=1, dp_replicate=1, pp=2)
    elastic = replace(SPEC, layout=layout, resilience=ResilienceSpec(mode="elastic", replica_groups=4))
    assert plan(elastic, H100S).layout.dp_replicate == 1
