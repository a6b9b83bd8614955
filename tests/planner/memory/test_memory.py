"""Memory by cause: states after ZeRO, activations after the published formula, pipelines after their schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.cluster import Fabric
from trainspec_cli.planner.hardware.rates import find_accelerator, models
from trainspec_cli.planner.memory.engine.step import EngineRun, engine_peak
from trainspec_cli.planner.memory.predict import (
    communicators,
    estimate_memory,
    in_flight,
    layer_memory,
    logits_bytes,
    mean_layer_memory,
    memory_within,
    peak_of,
    predict_memory,
    state_bytes,
)
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software
from trainspec_cli.planner.validation.backtest import kept_activation_bytes
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.layout import Layout


def setup_of(model: str = "llama3_8b", **changes: object) -> Setup:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    fabric = Fabric(chip, 8, 8, 8, 450.0, 400.0)
    return replace(Setup(models()[model], Layout(), fabric, 8192, 1.0, 8), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=8), Layout(dp_shard=8, ep=8), Layout(dp_shard=4, tp=2, ep=4), Layout(dp_shard=4, tp=2, etp=2)],
    ids=["by data parallelism", "an expert a rank", "also over tp", "cut experts"],
)
def test_a_rank_has_its_share_of_the_optimizer_state_however_experts_are_spread(layout: Layout) -> None:
    memory = estimate_memory(setup_of("mixtral_8x7b", layout=replace(layout, zero_stage=1)))[0]
    assert memory.optimizer_bytes == pytest.approx(12 * count_params(models()["mixtral_8x7b"]) / 8, rel=0.01)


def test_recomputation_saves_in_order() -> None:
    kept = [kept_activation_bytes(setup_of(recompute=RECOMPUTE[kind])) for kind in ("none", "selective_op", "full")]
    assert kept == sorted(kept, reverse=True)
    model = models()["llama3_8b"]
    assert kept[-1] == pytest.approx(2 * 8192 * 4096 * model.num_layers)  # type: ignore[union-attr]


@pytest.mark.parametrize("layers", [None, (4, 12, 12, 4), (4, 6, 10, 12), (13, 7, 6, 6)])
def test_the_peak_is_that_of_the_fullest_stage(layers: tuple[int, ...] | None) -> None:
    setup = setup_of(layout=Layout(pp=4, stage_layers=layers))
    sizes = [stage.total_bytes for stage in estimate_memory(setup)]
    assert peak_bytes(setup) == max(sizes)
    assert sizes.index(max(sizes)) == (layers.index(max(layers)) if layers else 0)


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


def test_first_gradients_lie_where_one_of_the_micro_batches_in_flight_was() -> None:
    """The engine has no buffers for them; a stage that goes on with more micro-batches has none free."""
    setup = setup_of(layout=Layout(pp=4), recompute=RECOMPUTE["full"])
    more, just = (estimate_memory(replace(setup, grad_accum=count))[0] for count in (5, 4))
    assert more.activations_bytes == just.activations_bytes
    assert more.gradients_bytes - just.gradients_bytes == pytest.approx(just.activations_bytes / 4)


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    whole = kept_activation_bytes(setup_of(layout=Layout(tp=8, sequence_parallel=False)))
    split = kept_activation_bytes(setup_of(layout=Layout(tp=8, sequence_parallel=True)))
    assert split == pytest.approx(kept_activation_bytes(setup_of()) / 8)
    assert whole > 2 * split


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


def peak_bytes(setup: Setup) -> float:
    return peak_of(setup, mean_layer_memory(setup))


EAGER = Software(fused_kernels=False, weight_bytes=4.0, master_bytes=0.0)


@pytest.mark.parametrize(
    ("layout", "changes", "expected"),
    [
        (Layout(), {}, (200, 400, 800 + 400)),
        (Layout(cp=4, zero_stage=1), {}, (200, 400, 300)),
        (Layout(dp_replicate=2, cp=2, zero_stage=1), {"software": Software(shards_states=False)}, (200, 400, 1200)),
        (Layout(dp_shard=4, pp=2), {"software": replace(EAGER, unshards_pipelines=True)}, (100, 500, 200)),
        (Layout(dp_replicate=4, zero_stage=1), {}, (200, 400, 1200)),
        (Layout(dp_shard=4, zero_stage=1), {}, (200, 400, 300)),
        (Layout(dp_shard=4, zero_stage=2), {}, (200, 100, 300)),
        (Layout(dp_shard=4, zero_stage=3), {}, (50, 100, 300)),
        (Layout(dp_shard=4), {"software": EAGER}, (100, 100, 200)),
        (Layout(dp_shard=4), {"software": replace(EAGER, grad_bytes=2.0)}, (100, 100, 200)),
        (Layout(), {"offload_optimizer": True}, (200, 400, 0)),
        (Layout(), {"trainable": 0.5}, (200, 200, 600)),
        (Layout(), {"trainable": 0.5, "matmul": "fp8"}, (100, 200, 600)),
    ],
    ids=["whole", "context ranks", "plain replicas", "whole in stages",
         "replicas", "zero 1", "zero 2", "zero 3", "fp32 shards", "reduced in bf16", "offloaded", "adapters",
         "adapters on fp8"],
)  # fmt: skip
def test_states_of_a_hundred_parameters(
    layout: Layout, changes: dict[str, object], expected: tuple[float, float, float]
) -> None:
    assert state_bytes(100.0, 4, setup_of(layout=layout, **changes)) == expected
    ends = state_bytes(100.0, 4, setup_of(layout=layout, **changes), ends=True)
    assert ends == ((200, *expected[1:]) if changes.get("matmul") else expected), "ends are not quantised"


def test_logits_by_who_computes_them() -> None:
    """8192 tokens of 128,256 logits."""
    logits = 8192 * 128_256
    assert logits_bytes(setup_of()) == 10 * logits
    assert logits_bytes(setup_of(software=EAGER, layout=Layout(tp=4))) == 12 * logits / 4
    assert logits_bytes(setup_of(software=Software(shifted_logits=True))) == 12 * logits
    assert logits_bytes(setup_of("resnet50")) == 0


def test_what_the_optimizer_takes_for_a_step() -> None:
    """Flat copies cost what they are; temporaries what exceeds half of what the backward has freed."""
    plain, copies, few, many = (
        estimate_memory(setup_of(software=Software(**changes)))[0]
        for changes in ({}, {"step_bytes": 6.0}, {"step_temporary_bytes": 0.1}, {"step_temporary_bytes": 12.0})
    )
    params = count_params(models()["llama3_8b"])
    assert copies.optimizer_bytes - plain.optimizer_bytes == pytest.approx(6 * params, rel=1e-3)
    assert few.optimizer_bytes == plain.optimizer_bytes
    freed = 0.5 * (plain.activations_bytes + plain.logits_bytes)
    assert many.optimizer_bytes - plain.optimizer_bytes == pytest.approx(12 * params - freed, rel=1e-3)


@pytest.mark.parametrize("layout", [Layout(dp_shard=8), Layout(pp=4, dp_shard=2)], ids=["shards", "stages"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_an_eager_run_of_the_engine_is_counted_tensor_by_tensor(layout: Layout, recompute: str) -> None:
    """And what no tensor takes is added: holes, communicators, the context, and the reserve over all."""
    setup = setup_of(layout=layout, software=EAGER)
    found = predict_memory(setup, recompute)
    fullest_bytes = max(stage.total_bytes for stage in found)
    assert memory_within(setup, recompute, fullest_bytes) == found
    assert memory_within(setup, recompute, 0.99 * fullest_bytes) is None
    wanted = EngineRun(setup.model, layout, 8192, 1, 8, "bf16", "fp32", recompute, 8.0, "bf16")  # type: ignore[arg-type]
    wanted = replace(wanted, layout=replace(layout, sequence_parallel=False))
    assert len(found) == layout.pp and len(set(found[:-1])) <= 1
    for stage, rank in ((found[0], 0), (found[-1], layout.pp - 1)):
        peak = engine_peak(wanted, rank)
        assert stage.parameters_bytes == peak["parameters"] + peak["gathered"]
        assert (stage.gradients_bytes, stage.optimizer_bytes) == (peak["gradients"], peak["optimizer"])
        assert stage.activations_bytes == peak["activations"] + peak["temporaries"]
        assert stage.logits_bytes == peak["logits"]
        assert stage.comm_buffers_bytes == peak["collectives"] + 0.3 * 2**30 * communicators(setup)
        assert stage.context_bytes == 1.2 * 2**30
        states = stage.parameters_bytes + stage.optimizer_bytes
        holes = 0.08 * (sum(peak.values()) - states) + 0.04 * states
        whole = sum(peak.values()) + 0.3 * 2**30 * communicators(setup) + stage.context_bytes + holes
        assert stage.fragmentation_bytes == pytest.approx(holes + 0.06 * whole)


def test_segments_that_grow_lose_less_where_the_framework_sets_it_and_the_device_allows_it() -> None:
    setup = setup_of(layout=Layout(dp_shard=8), software=replace(EAGER, expandable_segments=True))
    amd = replace(setup, fabric=replace(setup.fabric, chip=replace(setup.fabric.chip, vendor="amd")))
    plain = replace(setup, software=EAGER)
    for recompute, part in (("none", 0.02), ("full", 0.02 + 0.05)):
        recomputed = [replace(one, recompute=RECOMPUTE[recompute]) for one in (setup, amd, plain)]
        grown, refused, unset = (predict_memory(one, recompute)[0] for one in recomputed)
        tensors = grown.total_bytes - grown.fragmentation_bytes - grown.context_bytes - 0.3 * 2**30
        lost = grown.fragmentation_bytes - 0.06 * (grown.total_bytes - grown.fragmentation_bytes)
        assert lost == pytest.approx(1.06 * part * tensors, rel=1e-6)
        assert refused == unset and grown.total_bytes < unset.total_bytes


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"software": replace(EAGER, reduce_bytes=2.0)}, {"reduce": "bf16"}),
        ({"software": replace(EAGER, optimizer="sgd", moment_bytes=0.0)}, {"optimizer": "sgd"}),
        ({"compute": "fp32", "matmul": "fp32"}, {"compute": "fp32", "matmul": "fp32"}),
        ({"micro_batch_size": 2.0, "grad_accum": 3}, {"samples": 2, "micro_batches": 3}),
        ({"seq_len": 1024}, {"seq_len": 1024}),
    ],
    ids=["reduced in bf16", "sgd", "fp32", "batch", "short"],
)
def test_a_setup_is_counted_with_its_formats_and_sizes(changes: dict[str, object], counts: dict[str, object]) -> None:
    setup = setup_of(**{"layout": Layout(dp_shard=8), "software": EAGER} | changes)
    layout = replace(setup.layout, sequence_parallel=False)
    run = EngineRun(setup.model, layout, 8192, 1, 8, "bf16", "fp32", "none", 8.0, "bf16")
    peak = engine_peak(replace(run, **counts), 0)  # type: ignore[arg-type]
    (found,) = predict_memory(setup, "none")
    assert found.activations_bytes == peak["activations"] + peak["temporaries"]
    assert (found.gradients_bytes, found.optimizer_bytes) == (peak["gradients"], peak["optimizer"])


@pytest.mark.parametrize(
    ("model", "recompute", "changes"),
    [
        ("mixtral_8x7b", "none", {"software": Software()}),
        ("llama3_8b", "selective_op", {}),
        ("llama3_8b", "none", {"matmul": "mxfp8"}),
        ("mixtral_8x7b", "none", {"layout": Layout(dp_shard=8, ep=2, etp=2)}),
        ("mixtral_8x7b", "none", {"layout": Layout(dp_shard=4, ep=8)}),
        ("mamba2_1b", "none", {"layout": Layout(dp_shard=4, cp=2)}),
    ],
    ids=["fused experts", "half of the products again", "mxfp8", "cut experts",
         "more ranks of experts than ranks",
         "a scan along cut sequences"],
)  # fmt: skip
def test_what_the_engine_does_not_run_is_estimated_like_other_frameworks(
    model: str, recompute: str, changes: dict[str, object]
) -> None:
    setup = setup_of(model, **{"layout": Layout(dp_shard=8), "software": EAGER} | changes)
    assert predict_memory(setup, recompute) == estimate_memory(setup)
    assert layer_memory(setup, recompute) == mean_layer_memory(setup)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_layer_keeps_what_one_layer_more_adds_to_the_count(recompute: str) -> None:
    setup = setup_of(layout=Layout(dp_shard=8), software=EAGER)
    layers = [replace(setup, model=replace(setup.model, num_layers=number)) for number in (8, 9)]  # type: ignore[type-var]
    activations = [predict_memory(each, recompute)[0].activations_bytes for each in layers]
    found = layer_memory(setup, recompute)
    assert activations[1] - activations[0] == pytest.approx(found.kept_bytes, rel=1e-6)
    assert found.params == mean_layer_memory(setup).params
    assert found.working_bytes > mean_layer_memory(setup).output_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "gpipe"])
def test_a_full_pipeline_holds_no_more_with_more_micro_batches(schedule: str) -> None:
    """Gpipe holds all of them."""
    layout = Layout(dp_shard=2, pp=4, zero_stage=1, pipeline_schedule=schedule)
    software = Software(fused_kernels=True, counted=True)
    short, long = (
        predict_memory(setup_of(layout=layout, software=software, grad_accum=count), "none")[0].total_bytes
        for count in (16, 64)
    )
    assert (long == pytest.approx(short, rel=1e-3)) == (schedule != "gpipe")
