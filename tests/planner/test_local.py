"""A made-up probe whose figures are easy to check on paper: each operation has its own cost, all others are free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.fitting import suggest
from trainspec_cli.planner.local import is_predictable, predict_local
from trainspec_cli.planner.plan import plan
from trainspec_cli.rundir.events import PARTS
from trainspec_cli.spec.batching import BatchingSpec
from trainspec_cli.spec.canonical import from_plain, to_plain
from trainspec_cli.spec.cluster import ClusterSpec, Machine
from trainspec_cli.spec.data import DataSpec
from trainspec_cli.spec.layout import LayoutSpec
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.optim import OptimSpec
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.probe import Curve, MachineProbe, MatmulCurves, Passes
from trainspec_cli.spec.run import RunSpec, TrainSection

FREE = Curve((1.0, 2.0**20), (1e-12, 1e-12 * 2**20))
"""1 ps an element: lost in the tolerances below."""
NO_PASSES = Passes(FREE, FREE)
PROBE = MachineProbe(
    processes=2,
    compute="bf16",
    empty_step_s=dict.fromkeys(PARTS, 1.0),
    empty_block_s=dict.fromkeys(PARTS, 0.25),
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
    matmul_shape_bytes=1e6,
)
SPEC = RunSpec(
    model=DecoderModel(4, 64, 2, 2, 32, 128, 512, tied_embeddings=True),
    data=DataSpec(seq_len=256, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16, micro_batch_size=4),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
)
MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
BLOCK_MATRICES = 4 * 64 * 64 + 3 * 64 * 128
BLOCK, OUTSIDE = BLOCK_MATRICES + 2 * 64, 512 * 64 + 64


def linear(seconds_each: float) -> Curve:
    """Proportional to size, from a call that costs next to nothing."""
    return Curve((1.0, 2.0**20), (seconds_each, seconds_each * 2**20))


def made(**changes: object) -> Plan:
    return plan(replace(SPEC, **changes), MACHINE)  # type: ignore[arg-type]


def test_a_curve_is_straight_on_logarithmic_axes_and_proportional_beyond() -> None:
    curve = Curve((1, 4, 16), (1, 2, 4))
    assert [curve.at(size) for size in (0.1, 1, 2, 4, 8, 16, 32)] == pytest.approx([1, 1, 2**0.5, 2, 2 * 2**0.5, 4, 8])
    assert curve.beyond_call(16) == 3
    assert curve.beyond_call(0.1) == 0


def test_calls_cost_what_a_model_next_to_nothing_costs() -> None:
    parts = predict_local(made(), PROBE).time_s
    assert set(parts) == set(PARTS)
    assert parts["forward"] == pytest.approx(2 * (1 + 4 * 0.25), rel=1e-3)  # two micro-batches
    assert parts["optimizer"] == pytest.approx(1 + 4 * 0.25, rel=1e-3)


def test_products_take_their_own_rates() -> None:
    products = MatmulCurves(linear(1e-6), linear(2e-6), linear(3e-6))
    parts = predict_local(made(), replace(PROBE, matmul=products)).time_s
    block, head = 4 * BLOCK_MATRICES * 1e-6, 512 * 64 * 1e-6  # 1024 tokens, as probed
    assert parts["forward"] == pytest.approx(2 * (2 + block + 6 * head), rel=1e-3)  # the head's gradients too
    assert parts["backward"] == pytest.approx(2 * (2 + 5 * block), rel=1e-3)


def test_attention_grows_with_heads_and_their_size() -> None:
    flat = Curve((64.0, 1024.0), (1.0, 1.0))
    probe = replace(PROBE, attention_narrow=Passes(flat, flat), attention=Passes(linear(4.0 / 256), linear(4.0 / 256)))
    # Head size 32 is a third of the way from 16 (1 s) to 64 (4 s at 256 tokens); 2 of 4 heads; 4 layers.
    expected = 2 * (2 + 4 * (1 + (4 - 1) / 3) / 2)
    assert predict_local(made(), probe).time_s["forward"] == pytest.approx(expected, rel=1e-3)


def test_gradients_are_reduced_once_a_step_and_shards_are_gathered_for_every_micro_batch() -> None:
    probe = replace(PROBE, all_reduce=linear(1e-6), all_gather=linear(1e-6), reduce_scatter=linear(1e-6))
    replicated = predict_local(made(), probe).time_s["exposed_comm"]
    assert replicated == pytest.approx(2 + 4e-6 * (4 * BLOCK + OUTSIDE), rel=1e-3)
    sharded = predict_local(made(layout=LayoutSpec(dp_shard=2)), probe).time_s["exposed_comm"]
    gathered, reduced = 2 * 2e-6 * (2 * 4 * BLOCK + OUTSIDE), 2 * 4e-6 * (4 * BLOCK + OUTSIDE)
    assert sharded == pytest.approx(2 + gathered + reduced, rel=1e-3)


def test_memory_by_cause() -> None:
    planned, params = made(), 4 * BLOCK + OUTSIDE
    memory = predict_local(planned, PROBE).memory
    assert planned.params == params
    assert memory["worker"] == 1e9
    assert memory["parameters"] == (4 + 2) * params
    assert (memory["optimizer"], memory["gradients"]) == (8 * params, 4 * params)
    per_token = 20 * 64 + 8 + 4 * 2 * 32 * 4 // 2 + 4 * 2 + 8 * 128
    assert memory["activations"] == 1024 * 4 * per_token


def test_a_long_text_at_the_end_outweighs_training() -> None:
    spec = replace(SPEC, sample=replace(SPEC.sample, max_new_tokens=100))
    memory = predict_local(plan(spec, MACHINE), PROBE).memory
    assert memory["sample"] == 100 * 3 * 1e6  # q, k, v and out; gate, up and down, which have as many; the head
    assert "activations" not in memory


def test_what_would_fit_is_found() -> None:
    planned = made(batching=BatchingSpec(global_batch_size=16, micro_batch_size=8))
    prediction = predict_local(planned, PROBE)
    needed = 2 * prediction.peak_memory_bytes
    assert fits(prediction, planned, needed)
    assert not fits(prediction, planned, needed - 1)
    assert suggest(planned, PROBE, needed - 1) == "batching.micro_batch_size=4"
    assert suggest(planned, PROBE, 1e9) == ""


def test_probe_and_prediction_go_through_json() -> None:
    planned = made()
    planned = replace(planned, prediction=predict_local(planned, PROBE))
    assert from_plain(Plan, to_plain(planned)) == planned
    assert from_plain(MachineProbe, to_plain(PROBE)) == PROBE


def test_no_probe_speaks_of_compiled_blocks() -> None:
    assert is_predictable(made())
    assert not is_predictable(made(compile=True))
