"""A step of many micro-batches from two shorter ones, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.drawing import slow_after

from trainspec_cli.engine.tools import trace
from trainspec_cli.recipe.keys.layout import Layout, PipelineSchedule
from trainspec_cli.recipe.results.tools import TraceResult
from trainspec_cli.wings.certify.cases import Case, build_plan

PLAN = build_plan(Case("dense"), "cpu")


def with_micro_batches(count: int, pp: int = 1, schedule: PipelineSchedule = "1f1b") -> Any:
    return replace(PLAN, grad_accum_steps=count, layout=Layout(pp=pp, pipeline_schedule=schedule))


@pytest.mark.parametrize(
    ("count", "pp", "traced"),
    [(1, 1, (1,)), (2, 1, (2,)), (3, 1, (1, 2)), (9, 1, (1, 2)), (6, 2, (6,)), (7, 2, (4, 6)), (40, 4, (8, 12))],
)
def test_two_numbers_of_micro_batches_that_fill_the_pipeline_are_traced(
    count: int, pp: int, traced: tuple[int, ...]
) -> None:
    assert trace.traced_micro_batches(with_micro_batches(count, pp)) == traced


SHORT = TraceResult(0, 7.0, 100.0, {"activations": 60.0}, 10.0, {"tp all_reduce": 5.0})
LONG = TraceResult(0, 7.0, 130.0, {"activations": 80.0, "gathered": 10.0}, 18.0, {"tp all_reduce": 8.0, "pp send": 4.0})


@pytest.mark.parametrize(("schedule", "grows"), [("1f1b", 0), ("gpipe", 3)])
def test_work_and_messages_grow_with_micro_batches_and_memory_only_under_gpipe(schedule: Any, grows: int) -> None:
    """Traced with 4 and 6 micro-batches, of 12: three times what the last two added comes on top."""
    found = trace.extrapolate(with_micro_batches(12, 2, schedule), {4: SHORT, 6: LONG})
    assert found == TraceResult(
        rank=0,
        state_bytes=7.0,
        peak_memory_bytes=130.0 + grows * 30,
        peak_by_cause={"activations": 80.0 + grows * 20, "gathered": 10.0 + grows * 10},
        flops=18.0 + 3 * 8,
        comm_bytes={"tp all_reduce": 8.0 + 3 * 3, "pp send": 4.0 + 3 * 4},
    )


def test_what_is_traced_whole_is_the_result_and_gpipe_without_a_pipeline_holds_one_micro_batch_at_a_time() -> None:
    assert trace.extrapolate(with_micro_batches(3, 2), {3: LONG}) is LONG
    assert trace.extrapolate(with_micro_batches(5, 1, "gpipe"), {1: SHORT, 2: LONG}).peak_memory_bytes == 130.0


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        ("dense", [(4, 64), (4, 64)]),
        ("resnet", [(8, 1, 32, 32), (8,)]),
        ("unet", [(8, 1, 16, 16, 16), (8, 16, 16, 16)]),
    ],
)
def test_a_fake_batch_has_the_shapes_of_a_real_one(family: str, shapes: list[tuple[int, ...]]) -> None:
    plan = build_plan(Case(family), "cpu")
    whole = trace.fake_batch(plan, SimpleNamespace(positions_S=None))  # type: ignore[arg-type]
    assert [tuple(tensor.shape) for tensor in whole] == shapes
    assert whole[1].dtype == torch.int64
    if family == "dense":
        state: Any = SimpleNamespace(positions_S=torch.arange(16))
        assert [tuple(tensor.shape) for tensor in trace.fake_batch(plan, state)] == [(4, 16), (4, 16)]


def test_norms_are_one_kernel_on_a_gpu_and_as_before_afterwards() -> None:
    import torch.nn.functional as F

    plain = F.rms_norm
    with trace.kernels_of("cpu"):
        assert F.rms_norm is plain
    with trace.kernels_of("cuda"):
        x, weight = torch.ones(2, 3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        kept: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
            F.rms_norm(x, (4,), weight, 1e-5).sum().backward()
        assert kept == [(2, 3, 4), (4,), (2, 3)], "the input, the weight, and one number a row"
        assert x.grad is not None and weight.grad is not None
        F.rms_norm(x, (4,), None, 1e-5).sum().backward()
    assert F.rms_norm is plain


def test_a_ranks_state_gradients_and_exchanges_are_counted_by_cause_and_axis() -> None:
    """Two shards and two of tp: a rank has a quarter of what tp cuts, and half of the norms."""
    layout = Layout(dp_shard=2, tp=2)
    plan = build_plan(Case("dense", layout, optimizer="adamw", micro_batch_size=1), "cpu")
    found = trace.trace_rank(plan, 2)
    norms = 4 * (2 * 64 + 2 * 16) + 64
    matrices = 4 * (64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 128) + 2 * 256 * 64
    held = matrices / 4 + norms / 2
    tables = 2 * 64 * 16 * 4 + 64 * 8
    assert found.rank == 2
    assert found.peak_by_cause["parameters"] == 4 * held + tables
    feed_forward = 3 * 64 * 128 / 2 + 64
    assert found.peak_by_cause["gradients"] == 4 * (held + feed_forward), "and a block's first ones, not yet scattered"
    assert found.peak_by_cause["optimizer"] == pytest.approx(8 * held, rel=1e-3), "and a count of steps each"
    assert found.state_bytes == pytest.approx(12 * held + tables, rel=1e-3)
    assert found.peak_memory_bytes == sum(found.peak_by_cause.values()) > found.state_bytes
    whole = matrices / 2 + norms
    assert found.comm_bytes["dp_shard reduce_scatter"] == 4 * 4 * whole, "four micro-batches of fp32"
    root = 2 * 256 * 64 / 2 + 64
    block = (whole - root) / 4
    assert found.peak_by_cause["activations"] > found.peak_by_cause["gathered"] == 4 * (root + block)
    assert found.comm_bytes["dp_shard all_gather"] == 4 * 4 * (2 * (whole - root) + root), "the root is kept"
    assert found.comm_bytes["tp all_gather"] == found.comm_bytes["tp reduce_scatter"] == 4 * 4 * 64 * 64 * (4 * 4 + 2)
    assert found.comm_bytes["all all_reduce"] == 10 * 8, "loss, norm, three flags, and five of the noise"
    assert set(found.comm_bytes) == {
        *("dp_shard all_gather", "dp_shard reduce_scatter", "all all_reduce"),
        *("tp all_gather", "tp reduce_scatter", "tp all_reduce"),
    }
    products = 4 * 64 * 6 * (matrices - 256 * 64) / 2
    scores = 4 * 4 * 2 * (2 * 64 * 64 * 16)
    assert found.flops == products + 3.5 * scores, "two products over the causal half, five in the backward"
    assert replace(found, rank=0) == trace.trace_rank(replace(plan, spec=replace(plan.spec, compile=True)), 0)


def test_exchanges_of_spread_experts_and_of_a_pipelines_two_directions_have_their_axes() -> None:
    def group(name: str, size: int = 2) -> Any:
        return SimpleNamespace(group_name=name, size=lambda: size, get_group=lambda: group(name, size))

    mesh = SimpleNamespace(
        group=lambda axis: group(f"g {axis}", 1 if axis == "cp" else 2),
        expert_group=lambda axis: group(f"e {axis}"),
        experts="there are some",
        shard=group("shards"),
        layout=Layout(pp=2),
    )
    lines = SimpleNamespace(up=group("up"), down=group("down"))
    found = trace.axes_of_groups(SimpleNamespace(mesh=mesh, stages=SimpleNamespace(lines=lines)))  # type: ignore[arg-type]
    assert found == {
        "up": "pp",
        "down": "pp",
        "g dp_replicate": "dp_replicate",
        "shards": "dp_shard",
        "g tp": "tp",
        "e ep": "ep",
        "e expert_shard": "expert_shard",
    }


def test_every_ranks_tokens_are_evened_out_under_fake_tensors() -> None:
    from trainspec_cli.engine.models.experts import Experts
    from trainspec_cli.engine.parallel.expert import SpreadDispatch, even_splits

    model = build_plan(Case("moe"), "cpu").spec.model
    part = torch.nn.Module()
    part.experts, part.dispatch = Experts(model), SpreadDispatch(8, None, None)  # type: ignore[arg-type]
    trace.even_out(part)
    assert part.dispatch.read_splits is even_splits
    x, weight = torch.ones(6, 4, requires_grad=True), torch.ones(3, 4, 5, requires_grad=True)
    for given in (weight, weight.detach()):
        x.grad = None
        out = part.experts.grouped_matmul(x, given, torch.tensor([6, 0, 0]))
        assert out.shape == (6, 5), "one product of all rows"
        out.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and weight.grad.shape == weight.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "reductions"),
    slow_after(
        1,
        [
            ({"zero_stage": 1}, 1),
            ({"zero_stage": 2}, 4),
            ({"zero_stage": 1, "pp": 2}, 1),
            ({"zero_stage": 2, "pp": 2, "pipeline_schedule": "zbv"}, 1),
        ],
    ),
    ids=["zero 1", "zero 2", "pipeline", "split backward"],
)
def test_below_zero_3_parameters_are_gathered_once_a_step(axes: dict[str, Any], reductions: int) -> None:
    """Four micro-batches in fp32: parameters take as many bytes as gradients that are reduced once."""
    plan = build_plan(Case("dense", Layout(dp_shard=2, **axes), micro_batch_size=1), "cpu")
    found = trace.trace_rank(plan, 0).comm_bytes
    assert plan.grad_accum_steps == 4
    assert found["dp_shard reduce_scatter"] == reductions * found["dp_shard all_gather"] > 0
