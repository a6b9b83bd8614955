"""Memory by cause: states after ZeRO, activations after the published formula, pipelines after their schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.catalogue import find_accelerator, models
from trainspec_cli.planner.hardware.topology import Fabric
from trainspec_cli.planner.memory.frameworks import (
    DEFAULT_MEMORY,
    communicators,
    estimate_memory,
    in_flight,
    kept_activation_bytes,
    peak_bytes,
)
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software
from trainspec_cli.planner.workload import count_params
from trainspec_cli.spec.recipe.layout import Layout


def setup_of(model: str = "llama3_8b", **changes: object) -> Setup:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    fabric = Fabric(chip, 8, 8, 8, 450.0, 400.0)
    return replace(Setup(models()[model], Layout(), fabric, 8192, 1.0, 8), **changes)  # type: ignore[arg-type]


def test_plain_states_are_18_bytes_a_parameter() -> None:
    memory = estimate_memory(setup_of())[0]
    states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states == pytest.approx(18 * count_params(models()["llama3_8b"]), rel=0.01)


@pytest.mark.parametrize(("stage", "each"), [(1, 2 + 4 + 12 / 8), (2, 2 + (4 + 12) / 8)])
def test_zero_shards_the_optimizer_then_the_gradients(stage: int, each: float) -> None:
    memory = estimate_memory(setup_of(layout=Layout(dp_shard=8, zero_stage=stage)))[0]  # type: ignore[arg-type]
    states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states == pytest.approx(each * count_params(models()["llama3_8b"]), rel=0.01)


def test_fully_sharded_states_fall_with_the_ranks() -> None:
    software = Software(weight_bytes=4.0, master_bytes=0.0)
    small = peak_bytes(setup_of(layout=Layout(dp_shard=64), software=software))
    large = peak_bytes(setup_of(layout=Layout(dp_shard=8), software=software))
    states = 16 * count_params(models()["llama3_8b"]) * (1 / 8 - 1 / 64)
    held = (1 + DEFAULT_MEMORY.states_fragmentation) * states
    assert large - small == pytest.approx((1 + DEFAULT_MEMORY.reserve) * held, rel=0.02)


def test_recomputation_saves_in_order() -> None:
    kept = [kept_activation_bytes(setup_of(recompute=RECOMPUTE[kind])) for kind in ("none", "selective_op", "full")]
    assert kept == sorted(kept, reverse=True)
    model = models()["llama3_8b"]
    assert kept[-1] == pytest.approx(2 * 8192 * 4096 * model.num_layers)  # type: ignore[union-attr]


def test_earlier_stages_hold_more_micro_batches() -> None:
    layout = Layout(pp=4)
    held = [in_flight(setup_of(layout=layout), stage) for stage in range(4)]
    assert held == [4, 3, 2, 1]
    interleaved = setup_of(layout=replace(layout, pipeline_schedule="interleaved", virtual_stages=2))
    assert in_flight(interleaved, 0) == pytest.approx(4 * (1 + 3 / 8))
    assert in_flight(setup_of(layout=replace(layout, pipeline_schedule="gpipe")), 3) == 8


def test_the_last_stage_holds_the_logits() -> None:
    stages = estimate_memory(setup_of(layout=Layout(pp=4)))
    assert stages[-1].logits_bytes > 0
    assert all(stage.logits_bytes == 0 for stage in stages[:-1])


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    whole = kept_activation_bytes(setup_of(layout=Layout(tp=8, sequence_parallel=False)))
    split = kept_activation_bytes(setup_of(layout=Layout(tp=8, sequence_parallel=True)))
    assert split == pytest.approx(kept_activation_bytes(setup_of()) / 8)
    assert whole > 2 * split


def test_offloading_the_optimizer_leaves_weights_and_gradients() -> None:
    assert estimate_memory(setup_of(offload_optimizer=True))[0].optimizer_bytes == 0


def test_the_reserve_is_a_part_of_everything() -> None:
    bare = replace(DEFAULT_MEMORY, reserve=0.0)
    for setup in (setup_of(), setup_of(layout=Layout(pp=4))):
        assert peak_bytes(setup) == pytest.approx((1 + DEFAULT_MEMORY.reserve) * peak_bytes(setup, bare))


def test_stages_keep_what_they_sent_where_the_framework_does_not_free_it() -> None:
    """One boundary tensor for each of the first stage's four micro-batches in flight."""
    held = []
    for fused in (True, False):
        software = Software(fused_kernels=fused, fused_attention=False)  # eager copies aside
        setup = setup_of(layout=Layout(pp=4), software=software, recompute=RECOMPUTE["full"])
        held.append(estimate_memory(setup)[0].activations_bytes)
    assert held[1] - held[0] == pytest.approx(4 * 2 * 8192 * 4096)


def test_frozen_matmuls_keep_no_inputs_unless_their_weights_are_quantised() -> None:
    held = [
        kept_activation_bytes(setup_of(trainable=share, software=Software(weight_bytes=each)))
        for share, each in ((1.0, 2.0), (0.01, 2.0), (0.01, 0.69))
    ]
    model = models()["llama3_8b"]
    inputs = 2 * 8192 * (model.hidden_size + model.ffn_size) * model.num_layers  # type: ignore[union-attr]
    assert held[0] - held[1] == pytest.approx(inputs)
    assert held[2] == held[0]


def test_temporaries_of_the_step_lie_where_activations_were() -> None:
    """Few beside the activations cost nothing; many cost what they exceed."""
    optimizer = []
    for temporary in (0.0, 0.1, 12.0):
        software = Software(step_temporary_bytes=temporary)
        optimizer.append(estimate_memory(setup_of(software=software))[0].optimizer_bytes)
    assert optimizer[0] == optimizer[1] < optimizer[2] < optimizer[0] + 12 * count_params(models()["llama3_8b"])


def test_buckets_are_for_gradients_that_are_shared() -> None:
    buffers = [
        estimate_memory(setup_of(layout=layout))[0].comm_buffers_bytes
        for layout in (Layout(tp=8), Layout(dp_replicate=8))
    ]
    assert buffers[1] - buffers[0] == Software().bucket_bytes


def test_megatron_has_communicators_besides_its_axes() -> None:
    layout = Layout(tp=2, pp=2, dp_shard=2)
    counts = [communicators(setup_of(layout=layout, software=Software(model_groups=more))) for more in (False, True)]
    assert counts == [3, 5]
