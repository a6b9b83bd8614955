"""A step assembled from parts whose times are small whole numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.planner.capacity import plan_on_what_divides
from trainspec_cli.planner.capacity import setup_of as setup_of_candidate
from trainspec_cli.planner.hardware.cluster import (
    Fabric,
    Group,
    all_reduce_s,
    all_to_all_s,
    axis_groups,
    efficiency_of,
    group_of,
    group_of_ranks,
    send_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.pipeline import replay
from trainspec_cli.planner.setup import RECOMPUTE, Recompute, Setup, Software
from trainspec_cli.planner.time.data_parallel import across_groups_s, exchanges_of
from trainspec_cli.planner.time.samples import StepParts, step_parts
from trainspec_cli.planner.time.step import (
    PASSES as EXCHANGES,
)
from trainspec_cli.planner.time.step import (
    LayersPart,
    MicroBatch,
    Rates,
    alignment,
    assemble_step,
    attention_s,
    bubble_s,
    data_parallel_s,
    estimate_step,
    gemm_s,
    host_wait_s,
    micro_batch,
    moved_s,
    optimizer_s,
    own_work_s,
    part_of,
    pipeline_sends_s,
    rank_parts,
    rates_of,
    recompute_part_s,
)
from trainspec_cli.planner.workload import Core, Gemm, Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Candidate, StepTime
from trainspec_cli.session.recipe.load import load_for_planning

EFF = Efficiency(
    collective_latency_s=0.0,
    hop_latency_s=0.0,
    all_to_all=0.5,
    tp_overlap=0.5,
    cp_overlap=0.25,
    ep_overlap=0.2,
    ep_overlap_network=0.6,
    dp_overlap=0.5,
    pp_overlap=0.5,
    contention=0.25,
    experts_ungrouped=1.5,
    launch_s=0.01,
    optimizer_passes=2.0,
    step_s=5.0,
    step_graphed_s=3.0,
    bubble=0.5,
    jitter=0.01,
)
CHIP = find_accelerator("H100-SXM-80GB")
assert CHIP is not None
RATES = Rates(100.0, 100.0, 10.0, 5.0, 20.0, 100.0, 2.0, 2.0, 3, 25.0)
LAYER = LayersPart(1, 2, 3, 5, 7, 11, 13, 2, 17, 19, 23, 100, 40)
"""Forward 1 + 3 + 7, backward 2 + 5 + 11; exchanges of 17 and 23 forward and backward, of 19 three times."""
OWN_S = 11 + 18 + 2 * 17 + 3 * 19 + 2 * 23
EMBEDDING = LayersPart(memory_f=1, memory_b=2, kernels=4, params=50)
HEAD = LayersPart(matmul_f=20, matmul_b=40, memory_f=9, memory_b=18, kernels=12, tp=5, params=60)
ZERO_1 = Layout(dp_shard=8, zero_stage=1)


def setup_of(layout: Layout = ZERO_1, accum: int = 8, layers: int = 4, **more: object) -> Setup:
    fabric = Fabric(CHIP, layout.world_size, 8, 8, 450.0, 400.0)  # type: ignore[arg-type]
    model = DecoderModel(layers, 64, 4, 2, 16, 128, 512)
    return replace(Setup(model, layout, fabric, 32, 1.0, accum), **more)  # type: ignore[arg-type]


def ring(size: int, per_domain: int | None = None) -> Group:
    """Links of 10 bytes per second; a network of 1."""
    return Group(size, per_domain or size, 10.0, 1.0)


@pytest.mark.parametrize(
    ("software", "ep", "expected"),
    [
        (Software(counted=False), ring(2), (2 * 10 * (1 - 0.5 / 2), 20 * 0.75, 2 * 30 * 0.8)),
        (Software(counted=False, overlap_tp=False), ring(2), (2 * 10, 20 * 0.75, 2 * 30 * 0.8)),
        (Software(counted=False), ring(4, 2), (15, 15, 2 * (150 * 0.75) * 0.4)),
        (Software(counted=False, grouped_experts=False), ring(4, 2), (15, 15, 1.5 * 2 * 300 * 0.5 * 0.8)),
    ],
    ids=["one node", "without overlap", "experts over two nodes", "ungrouped experts over two nodes"],
)
def test_exchanges_inside_a_layer(software: Software, ep: Group, expected: tuple[float, float, float]) -> None:
    work = Work(tp_exchanges=2, tp_bytes=100, cp_bytes=400, ep_bytes=300, expert_copies=2, experts=16)
    groups = {"tp": ring(2), "cp": ring(2), "ep": ep}
    found = part_of(work, setup_of(Layout(tp=2), software=software), RATES, groups, EFF)
    assert (found.tp, found.cp, found.ep) == pytest.approx(expected)


EXPERTS = ExpertSpec(num_experts=16, top_k=2, expert_ffn_size=128)


def test_exchanges_with_experts_hide_behind_another_micro_batch() -> None:
    """Without a second micro-batch, or in a hybrid model, they are exposed as without the overlap."""
    layout = Layout(dp_shard=4, ep=4, zero_stage=1)
    groups = {axis: ring(1) for axis in ("tp", "cp", "dp")} | {"ep": ring(4)}

    def layer_of(overlap: bool, accum: int = 8) -> LayersPart:
        software = Software(counted=False, overlap_experts=overlap)
        setup = setup_of(layout, accum, software=software)
        model = replace(cast("DecoderModel", setup.model), experts=EXPERTS)
        return micro_batch(replace(setup, model=model), groups, EFF).layer

    apart, beside = layer_of(False), layer_of(True)
    whole_s = apart.ep / (1 - EFF.ep_overlap)
    room_s = EFF.dp_overlap * (apart.forward + apart.backward) / 2
    hidden_s = min(whole_s, room_s)
    assert 0 < hidden_s < whole_s
    assert beside.ep == pytest.approx(whole_s - hidden_s + EFF.contention * hidden_s)
    assert replace(beside, ep=apart.ep) == apart
    assert layer_of(True, accum=1).ep == pytest.approx(layer_of(False, accum=1).ep)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("options", [{}, {"matmul": "fp8"}, {"lora": LoraSpec(rank=1)}, {"zero_bubble": True}])
def test_the_engine_hides_exchanges_behind_gradients_of_weights(split: bool, options: dict[str, Any]) -> None:
    """A sum takes as long as three products. Each half of it hides behind its products, not behind the other's."""
    hides = not options
    pipeline = {"pp": 2, "pipeline_schedule": "zero_bubble"} if options.pop("zero_bubble", False) else {}
    layout = Layout(tp=2, sequence_parallel=split, **pipeline)  # type: ignore[arg-type]
    setup = setup_of(layout, software=Software(fused_kernels=True), **options)
    product = Gemm(64, 64, 64)
    takes_s = gemm_s(product, RATES, EFF)[2]
    groups = {"tp": ring(2), "cp": ring(1), "ep": ring(2)}
    whole_s = 3 * takes_s
    work = Work(tp_exchanges=1, tp_bytes=10 * whole_s, ep_bytes=300, expert_copies=2)
    waits = part_of(work, setup, RATES, groups, EFF)
    assert waits.tp == pytest.approx(whole_s)
    # All copies of a token are sent, and nothing hides them.
    assert waits.ep == pytest.approx(2 * all_to_all_s(groups["ep"], 300, 1, EFF))
    entering = part_of(replace(work, tp_delayed=(product,)), setup, RATES, groups, EFF)
    both = part_of(
        replace(work, tp_delayed=(product,), tp_delayed_after=2 * (product,), tp_last=True), setup, RATES, groups, EFF
    )
    total_s = [EXCHANGES["tp"] * part.tp for part in (waits, entering, both)]
    hidden_s = [takes_s, takes_s + split * min(2 * takes_s, whole_s / 2)] if hides else [0.0, 0.0]
    assert total_s == pytest.approx([2 * whole_s, 2 * whole_s - hidden_s[0], 2 * whole_s - hidden_s[1]])
    # A repeated forward ends before the last exchange.
    assert waits.tp + waits.ep + waits.tp_again == pytest.approx(whole_s + waits.ep)
    assert both.tp + both.tp_again == pytest.approx(whole_s / 2 if split else 0.0)


@pytest.mark.parametrize(("axes", "chip", "pair"), [((1, 4), "MI355X", (0, 1)), ((4, 4), "H100-SXM-80GB", (4, 8))])
def test_neighbours_in_a_ring_wait_for_the_slowest_pair(
    axes: tuple[int, int], chip: str, pair: tuple[int, int]
) -> None:
    """Two devices of a mesh share one link, and two of the four pairs are in different nodes."""
    accelerator = find_accelerator(chip)
    assert accelerator is not None
    layout = Layout(tp=axes[0], cp=axes[1])
    fabric = Fabric(accelerator, layout.world_size, 8, 8, accelerator.link_gb_per_s, 400.0)
    setup = setup_of(layout, fabric=fabric)
    part = part_of(Work(cp_bytes=400), setup, RATES, axis_groups(layout, fabric, EFF), EFF)
    slowest = group_of_ranks(fabric, pair, EFF)
    expected_s = 6 * send_s(slowest, 100, EFF) + 4 * send_s(slowest, 200, EFF)
    assert EXCHANGES["cp"] * part.cp == pytest.approx(expected_s)


def test_the_ring_hides_keys_behind_attention_and_ulysses_hides_nothing() -> None:
    groups = {"tp": ring(1), "cp": ring(2), "ep": ring(1)}
    slow = Work(cp_bytes=400, cp_query_bytes=600)
    attends = replace(slow, attention_flops=1e30)
    found = {}
    for method in ("ring", "ulysses"):
        setup = setup_of(Layout(cp=2, context_method=method))  # type: ignore[arg-type]
        found[method] = [EXCHANGES["cp"] * part_of(one, setup, RATES, groups, EFF).cp for one in (slow, attends)]
    pair = group_of_ranks(setup_of(Layout(cp=2)).fabric, (0, 1), EFF)
    sent_s = send_s(pair, 200, EFF)
    gradients_s = 2 * send_s(pair, 400, EFF)
    assert found["ring"] == pytest.approx([2 * sent_s + gradients_s, gradients_s])
    merges = replace(slow, counted_kernels=({}, {}))
    hidden_s = EXCHANGES["cp"] * part_of(merges, setup_of(Layout(cp=2)), RATES, groups, EFF).cp
    assert hidden_s == pytest.approx(gradients_s), "kernels that merge a turn's results take longer than the message"
    swaps_s = 4 * sum(all_to_all_s(groups["cp"], size, 1, EFF) for size in (600, 100))
    assert found["ulysses"] == pytest.approx([swaps_s, swaps_s])


def test_a_part_without_work_takes_nothing_and_others_know_their_parameters() -> None:
    setup = setup_of()
    groups = axis_groups(setup.layout, setup.fabric, EFF)
    assert part_of(None, setup, RATES, groups, EFF) == LayersPart()
    found = part_of(Work(params=3, expert_params=4, pass_bytes=10), setup, RATES, groups, EFF)
    assert (found.params, found.expert_params) == (3, 4)
    assert found.memory_f > 0


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        (RECOMPUTE["none"], 0),
        (RECOMPUTE["selective"], 3),
        (RECOMPUTE["selective_op"], 0.5 * 1 + 7),
        (RECOMPUTE["full"], 1 + 3 + 7 + 17 + 19 + 23),
        (Recompute(1.0, 1.0, 1.0, layers=0.5), 35),
    ],
    ids=["none", "selective", "every second product", "full", "full in half of the layers"],
)
def test_work_that_is_done_again(recompute: Recompute, again: float) -> None:
    assert recompute_part_s(LAYER, recompute) == again


def test_stages_have_their_layers_and_the_ends_what_stands_there() -> None:
    assert own_work_s(LAYER) == OWN_S
    once = MicroBatch.of([LAYER], [0] * 5, EMBEDDING, HEAD, RATES)
    first, last = (rank.whole for rank in rank_parts(once, Layout(pp=2, stage_layers=(2, 3))))
    assert first == LayersPart(2, 4, 6, 10, 15, 24, 30, 4, 34, 38, 46, 250, 80)
    assert last == LayersPart(23, 46, 9, 15, 30, 51, 51, 6, 56, 57, 69, 360, 120)


def test_stages_have_the_kinds_of_layers_that_stand_there() -> None:
    """Two kinds, one of three times the work; of a V the first rank holds both ends."""
    heavy = LayersPart().plus(LAYER, 3)
    once = MicroBatch.of([LAYER, heavy], [0, 1, 1, 0, 1, 1, 0, 0], EMBEDDING, HEAD, RATES)
    assert once.layer.params == pytest.approx(2 * LAYER.params)
    assert [once.kind_of(layer) for layer in range(8)] == [0, 1, 1, 0, 1, 1, 0, 0]
    plain = rank_parts(once, Layout(pp=2, stage_layers=(3, 5)))
    assert [rank.layers.params for rank in plain] == [7 * LAYER.params, 9 * LAYER.params]
    assert [rank.beside for rank in plain] == [LayersPart().plus(EMBEDDING), LayersPart().plus(HEAD)]
    first, last = rank_parts(once, Layout(pp=2, pipeline_schedule="zbv"))
    assert (first.layers.params, last.layers.params) == (6 * LAYER.params, 10 * LAYER.params)
    assert (first.beside.params, last.beside.params) == (EMBEDDING.params + HEAD.params, 0)
    chunks = rank_parts(once, Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2))
    assert [rank.layers.params for rank in chunks] == [10 * LAYER.params, 6 * LAYER.params]


def test_the_head_is_never_done_again_but_in_tables_of_measured_runs() -> None:
    setup = setup_of(recompute=RECOMPUTE["full"])
    last = rank_parts(MicroBatch.of([LAYER], [0] * 4, EMBEDDING, HEAD, RATES), Layout(pp=2))[-1]
    plain_s, again_s = 2 * OWN_S + own_work_s(HEAD), 2 * recompute_part_s(LAYER, setup.recompute)
    assert last.time_s(setup) == pytest.approx(plain_s + again_s)
    head_s = recompute_part_s(HEAD, setup.recompute)
    assert last.time_s(replace(setup, tabled=True)) == pytest.approx(plain_s + again_s + head_s)


def test_further_predictions_repeat_a_layer_and_the_head() -> None:
    setup = setup_of()
    twice = replace(setup, model=replace(setup.model, prediction_layers=2))  # type: ignore[type-var]
    groups = axis_groups(setup.layout, setup.fabric, EFF)
    plain, longer = (micro_batch(one, groups, EFF) for one in (setup, twice))
    assert longer.head == plain.head.plus(plain.head.plus(plain.layer), 2)


def test_neighbouring_stages_send_for_every_micro_batch_and_wait_at_both_ends() -> None:
    """A message of 2 bytes x 32 tokens x 64 goes over the pipeline's link in a second, and has a latency of one."""
    eff, group = replace(EFF, collective_latency_s=1.0), Group(2, 2, 2 * 32 * 64, 1.0)
    plain = Layout(pp=2)
    assert pipeline_sends_s(setup_of(plain), group, eff) == pytest.approx(2 * 8 * 2 * 0.5 + 2 * 2)
    longer = replace(plain, pp=4)
    assert pipeline_sends_s(setup_of(longer), group, eff) == pytest.approx(2 * 8 * 2 * 0.5 + 2 * 3 * 2)
    chunks = replace(plain, pipeline_schedule="interleaved", virtual_stages=2)
    assert pipeline_sends_s(setup_of(chunks), group, eff) == pytest.approx(2 * 2 * 8 * 2 * 0.5 + 2 * 2)
    cut = replace(plain, tp=4)
    assert pipeline_sends_s(setup_of(cut), group, eff) == pytest.approx((2 * 8 * 0.5 + 2) * 1.25)
    unsplit = setup_of(replace(cut, sequence_parallel=False), software=Software(split_sends=False))
    assert pipeline_sends_s(unsplit, group, eff) == pytest.approx((2 * 8 * 0.5 + 2) * 2)
    assert pipeline_sends_s(setup_of(Layout()), group, eff) == 0


@pytest.mark.parametrize(
    ("software", "recompute", "device_s", "waits_s"),
    [
        (Software(), "none", 0.1, 13 * 3 * 0.7 * 0.01 - 0.1),
        (Software(fused_kernels=False), "none", 0.1, 13 * 3 * 0.01 - 0.1),
        (Software(fused_kernels=False), "full", 0.1, 13 * 4 * 0.01 - 0.1),
        (Software(fused_kernels=False, grouped_experts=False), "none", 0.1, (13 + 6 * 2) * 3 * 0.01 - 0.1),
        (Software(fused_kernels=False, graphs=True), "none", 0.1, 0),
        (Software(), "none", 1.0, 0),
    ],
    ids=["fused", "eager", "recomputed", "ungrouped experts", "graphs", "a slow device"],
)
def test_a_device_waits_where_launching_takes_longer(
    software: Software, recompute: str, device_s: float, waits_s: float
) -> None:
    setup = setup_of(software=software, recompute=RECOMPUTE[recompute])
    assert host_wait_s(LAYER, device_s, setup, EFF) == pytest.approx(waits_s)


def test_the_optimizer_reads_and_writes_its_shard_of_the_state() -> None:
    """100 / 8 dense and 40 / 4 expert parameters: a gradient of 4 bytes, master weights and moments twice, a weight."""
    setup, params = setup_of(Layout(dp_shard=8, ep=2, zero_stage=1)), 100 / 8 + 40 / 4
    groups = axis_groups(setup.layout, setup.fabric, EFF)
    assert optimizer_s(LAYER, setup, RATES, groups, EFF) == pytest.approx(2 * params * (4 + 2 * 4 + 2 * 8 + 2) / 10)
    assert optimizer_s(LAYER, replace(setup, trainable=0.5), RATES, groups, EFF) == pytest.approx(params * 30 / 10)
    offloaded = replace(setup, offload_optimizer=True, software=Software(counted=False))
    other_s = optimizer_s(LAYER, offloaded, RATES, groups, EFF)
    assert other_s == pytest.approx(params * 6 / 50e9 + params * 30 / 100e9)
    own_s = optimizer_s(LAYER, replace(offloaded, software=Software()), RATES, groups, EFF)
    assert own_s == pytest.approx(params * (3 * 4 + 2 * 4 + 2 * 8) / 100e9)


def test_offloaded_shards_cross_the_host_link_for_each_exchange() -> None:
    """With ZeRO-3, each micro-batch gathers twice and sums once; the host adds later sums, which nothing hides."""
    usual = setup_of(Layout(dp_shard=8), grad_accum=4)
    groups = axis_groups(usual.layout, usual.fabric, EFF)
    before = exchanges_of(8e9, 0.0, usual, groups, EFF)
    after = exchanges_of(8e9, 0.0, replace(usual, offload_optimizer=True), groups, EFF)
    copy_s, add_s = 4 * 1e9 / 50e9, 12 * 1e9 / 100e9
    sum_s = before.backward_s - before.forward_s
    assert after.forward_s - before.forward_s == pytest.approx(copy_s)
    assert after.backward_s - after.forward_s == pytest.approx((sum_s + copy_s) / 4)
    assert (before.waited_s, after.waited_s) == (0.0, pytest.approx(3 * (sum_s + copy_s + add_s)))


GROUPS = {"dp": ring(2), "dp_shard": ring(2), "expert_dp": ring(4), "dp_replicate": ring(2, 1)}
REDUCE_S, GATHER_S = 4 * (100 * 0.05 + 40 * 0.075), 2 * (100 * 0.05 + 40 * 0.075)
"""Half of the bytes over 10 per second for dense parameters, three quarters for those of experts."""
FORWARD_S, BACKWARD_S = 11 + 17 + 23, 18 + 17 + 23


def exposed(comm_s: float, beside_s: float) -> float:
    hidden = min(comm_s, 0.5 * beside_s)
    return comm_s - hidden + 0.25 * hidden


@pytest.mark.parametrize(
    ("layout", "beside", "alone"),
    [
        (Layout(dp_shard=2, zero_stage=1), exposed(REDUCE_S, BACKWARD_S) + exposed(GATHER_S, FORWARD_S),
         REDUCE_S + GATHER_S),
        (Layout(dp_replicate=2), exposed(2 * REDUCE_S, BACKWARD_S), 2 * REDUCE_S),
        (Layout(dp_shard=2, dp_replicate=2),
         8 * (exposed(GATHER_S, FORWARD_S) + exposed(GATHER_S + REDUCE_S, BACKWARD_S)) + exposed(200, BACKWARD_S / 2),
         8 * (2 * GATHER_S + REDUCE_S) + 200),
    ],
    ids=["zero 1", "replicas", "zero 3 in replicas"],
)  # fmt: skip
def test_gradients_and_parameters_travel_beside_the_work(layout: Layout, beside: float, alone: float) -> None:
    """Replicas of ZeRO-3 reduce 4 x 100 / 2 bytes over a network of 1 per second, half of them twice."""
    setup = setup_of(layout)
    assert data_parallel_s(LAYER, setup, GROUPS, EFF) == pytest.approx(beside)
    apart = replace(setup, software=Software(overlap_dp=False))
    assert data_parallel_s(LAYER, apart, GROUPS, EFF) == pytest.approx(alone)


@pytest.mark.parametrize("inside", [Layout(dp_shard=2, zero_stage=3), Layout(dp_shard=2, zero_stage=1), Layout()])
@pytest.mark.parametrize(("groups", "asked"), [(4, 4), (4, 0), (2, 2)])
def test_replica_groups_exchange_inside_each_and_then_over_all(inside: Layout, groups: int, asked: int) -> None:
    """`asked` 0: each replica is a group. Two groups of the four replicas have two inside each."""
    layout = replace(inside, dp_replicate=4)
    own = replace(inside, dp_replicate=4 // groups)
    setup = setup_of(layout, replica_groups=asked)
    everywhere = axis_groups(layout, setup.fabric, EFF)
    sent = exchanges_of(1e9, 0.0, setup, everywhere, EFF)
    alone = replace(setup, layout=own, replica_groups=1)
    within = exchanges_of(1e9, 0.0, alone, axis_groups(own, setup.fabric, EFF), EFF)
    assert (sent.forward_s, sent.backward_s, sent.times) == (within.forward_s, within.backward_s, within.times)
    across_s = across_groups_s(1e9 / inside.shards, groups, setup, EFF)
    assert sent.across_s - within.across_s == pytest.approx(across_s)
    ring = group_of(setup.fabric, groups, layout.world_size // groups, EFF)
    assert across_s == pytest.approx(all_reduce_s(ring, 4e9 / inside.shards, EFF)), "over the devices' own links"


def test_each_packet_between_replica_groups_has_the_latency_of_a_sum() -> None:
    eff = replace(EFF, collective_latency_s=1.0)
    setup = setup_of(Layout(dp_replicate=2), layers=4, replica_groups=2)
    quick_s, slow_s = (across_groups_s(params, 2, setup, eff) for params in (2**18, 2**30))
    assert across_groups_s(2**17, 2, setup, eff) == pytest.approx(2, rel=1e-3), "one packet of less than 1 MiB"
    assert (quick_s, slow_s) == (pytest.approx(2, rel=1e-3), pytest.approx(2 * 4 * 7, rel=1e-3)), "by the matrices"
    assert across_groups_s(3 * 2**18, 2, setup, eff) == pytest.approx(2 * 3, rel=1e-3), "by their bytes"


def test_offloaded_gradients_are_brought_to_the_device_and_back() -> None:
    setup = setup_of(Layout(dp_replicate=2), replica_groups=2)
    offloaded = replace(setup, offload_optimizer=True)
    extra_s = across_groups_s(1e9, 2, offloaded, EFF) - across_groups_s(1e9, 2, setup, EFF)
    assert extra_s == pytest.approx(2 * 4e9 / (setup.fabric.host_link_gb_per_s * 1e9))


def test_frozen_weights_send_no_gradients() -> None:
    few = {"trainable": 0.1, "software": Software(overlap_dp=False)}
    whole = setup_of(Layout(dp_shard=2), **few)
    assert data_parallel_s(LAYER, whole, GROUPS | {"dp_replicate": ring(1)}, EFF) == pytest.approx(
        8 * (2 * GATHER_S + 0.1 * REDUCE_S)
    )
    once = setup_of(Layout(dp_shard=2, zero_stage=1), **few)
    assert data_parallel_s(LAYER, once, GROUPS, EFF) == pytest.approx(0.1 * (REDUCE_S + GATHER_S))


@pytest.mark.parametrize(("graphs", "between"), [(False, 5.0), (True, 3.0)])
def test_a_step_is_that_of_its_slowest_stage(graphs: bool, between: float) -> None:
    """Two layers a stage and eight micro-batches; the head makes the last stage the slowest. 16 devices wait 1%."""
    layout = Layout(pp=2, dp_replicate=8)
    setup = setup_of(layout, recompute=RECOMPUTE["selective"], software=Software(graphs=graphs, overlap_dp=False))
    groups = GROUPS | {"dp": ring(2), "expert_dp": ring(1), "pp": Group(2, 2, 2 * 32 * 64, 1.0)}
    found = assemble_step(setup, MicroBatch.of([LAYER], [0] * 4, EMBEDDING, HEAD, RATES), groups, EFF)
    head_s = 60 + 27 + 2 * 5
    first_s, last_s = 2 * OWN_S + 2 * 3 + 3, 2 * OWN_S + 2 * 3 + head_s
    assert last_s > first_s
    expected = StepTime(
        matmul_s=8 * (2 * 3 + 60),
        attention_s=8 * 2 * 8,
        memory_bound_s=8 * (2 * 18 + 27),
        recompute_s=8 * 2 * 3,
        tp_comm_s=8 * 2 * (2 * 17 + 5),
        cp_comm_s=8 * 3 * 2 * 19,
        ep_comm_s=8 * 2 * 2 * 23,
        pp_comm_s=2 * 8 * 0.5 + 2,
        bubble_s=0.5 * first_s,
        optimizer_s=2 * (2 * 100 + 60 + 2 * 40) * 30 / 10,
        dp_comm_s=2 * 4 * 0.05 * (2 * 100 + 60),
    )
    waits = 0.01 * expected.total_s
    for name in StepTime.__dataclass_fields__:
        wanted = between + waits if name == "host_s" else getattr(expected, name)
        assert getattr(found, name) == pytest.approx(wanted), name


# Pipelines: the closed forms agree with a simulation of the schedule's own actions


def replay_s(layout: Layout, micro_batches: int, forward_s: list[float], backward_s: list[float]) -> float:
    took = {"forward": forward_s, "backward": backward_s}
    timeline = replay(layout, micro_batches, lambda action: took[action.kind][action.stage])
    return max(passes[-1].end_s for passes in timeline)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (4, 4), (4, 16), (8, 64)])
def test_even_stages_wait_as_the_closed_form_says(stages: int, micro_batches: int) -> None:
    simulated = replay_s(Layout(pp=stages), micro_batches, [1.0] * stages, [2.0] * stages)
    closed = 3.0 * micro_batches + bubble_s([3.0] * stages, Layout(pp=stages), micro_batches)
    assert simulated == pytest.approx(closed)


def test_one_slow_stage_sets_the_pace() -> None:
    forward, backward = [1.0, 1.0, 1.0, 1.4], [2.0, 2.0, 2.0, 2.8]
    simulated = replay_s(Layout(pp=4), 32, forward, backward)
    closed = 4.2 * 32 + bubble_s([3.0, 3.0, 3.0, 4.2], Layout(pp=4), 32)
    assert simulated == pytest.approx(closed, rel=0.03)


def test_schedules_shrink_the_bubble() -> None:
    times = [3.0] * 4
    plain = bubble_s(times, Layout(pp=4), 32)
    interleaved = bubble_s(times, Layout(pp=4, pipeline_schedule="interleaved", virtual_stages=3), 32)
    assert interleaved == pytest.approx(plain / 3)
    assert bubble_s(times, Layout(pp=4, pipeline_schedule="zero_bubble"), 32) < plain / 2


def test_with_fewer_micro_batches_than_stages_zero_bubble_has_nothing_to_fill_the_wait_with() -> None:
    """One micro-batch: the others' forward and input gradients, two thirds of the work, come before a stage's own."""
    times = [3.0] * 4
    starved = bubble_s(times, Layout(pp=4, pipeline_schedule="zero_bubble"), 1)
    assert starved == pytest.approx(2 / 3 * bubble_s(times, Layout(pp=4), 1))


def test_stages_of_a_small_model_wait_for_one_another_s_launches() -> None:
    """5.5M parameters, one micro-batch of 8 short samples: kernels take less time than their launches, so that stages
    launch in turn, and save next to nothing over one process."""

    def total_s(pp: int) -> float:
        fabric = Fabric(CHIP, pp, 8, 8, 450.0, 400.0)  # type: ignore[arg-type]
        model = DecoderModel(8, 256, 8, 8, 32, 688, 4096)
        setup = Setup(model, Layout(pp=pp), fabric, 256, 8.0, 1, software=Software(fused_kernels=False))
        step = estimate_step(setup, Efficiency(step_s=0.0))
        assert pp > 1 or step.host_s > 0, "launches take longer than kernels"
        return step.total_s

    assert total_s(4) > 0.8 * total_s(1)


# Round rates, so that times can be worked out on paper

ROUND = Rates(
    matmul=200.0,
    plain_matmul=100.0,
    memory=10.0,
    exponentials=5.0,
    load_store=20.0,
    cache_bytes=100.0,
    element_bytes=2.0,
    wide_element_bytes=1.0,
    generation=3,
    precise_matmul=25.0,
)
ROUND_EFF = Efficiency(
    gemm_memory=0.5,
    kernel_s=1.0,
    tail_waves=1 / (128 * 256 * 128),
    misalignment=0.25,
    attention_forward=0.8,
    attention_backward=0.4,
    attention_older=0.5,
    exponentials=0.5,
    cache_reuse=0.5,
    elementwise=2.0,
    elementwise_eager=3.0,
    issue=1.0,
    cast_fp8=0.5,
    expert_imbalance=0.25,
    experts_ungrouped=1.5,
    conv=0.5,
    conv_memory=4.0,
)
ALONE = axis_groups(Layout(), setup_of().fabric, EFF)


def timed(work: Work, setup: Setup, rates: Rates = ROUND) -> LayersPart:
    """Time work that exchanges nothing."""
    return part_of(work, setup, rates, ALONE, ROUND_EFF)


PRODUCT = Gemm(2, 64, 32)
"""A dimension of 64 fills the tiles; one of 32 falls short by a halving: a loss of 0.25 x (0 + 1) / 2."""


@pytest.mark.parametrize(
    ("size", "halvings"), [(64, 0), (128, 0), (192, 0), (32, 1), (96, 1), (48, 2), (1, 6), (0, 6), (2.5, 6)]
)
def test_dimensions_fall_short_of_tiles_by_halvings(size: float, halvings: int) -> None:
    assert alignment(size) == halvings


def test_a_product_takes_its_arithmetic_half_its_traffic_its_tail_and_a_launch() -> None:
    wide = gemm_s(replace(PRODUCT, count=3), ROUND, ROUND_EFF)
    assert wide == pytest.approx((
        3 * (8192 / 200 * 1.125 + 0.5 * (64 + 2048 + 2 * 128) / 10) + 64 / 200 * 1.125 + 1,
        3 * (8192 / 200 * 1.125 + 0.5 * (128 + 2048 + 2 * 64) / 10) + 128 / 200 * 1.125 + 1,
        3 * (8192 / 200 * 1.125 + 0.5 * (64 + 128 + 2 * 2048) / 10) + 4 / 200 * 1.125 + 1,
    ))  # fmt: skip
    plain = gemm_s(replace(PRODUCT, wide=False), ROUND, ROUND_EFF)
    assert plain[0] == pytest.approx(8192 / 100 * 1.125 + 0.5 * 2 * (64 + 2048 + 128) / 10 + 64 / 100 * 1.125 + 1)


def test_a_convolution_multiplies_or_loads_its_patches_whichever_takes_longer() -> None:
    assert gemm_s(Gemm(10, 64, 32, 4), ROUND, ROUND_EFF, convolves=True) == pytest.approx(
        (163_840 / 50 * 1.125 + 1,) * 3
    )
    assert gemm_s(Gemm(10, 1, 32, 4), ROUND, ROUND_EFF, convolves=True) == pytest.approx(
        (2 * 10 * 32 * 4 / 20 + 1,) * 3
    )


@pytest.mark.parametrize(
    ("software", "forward", "backward"),
    [
        (Software(), 1000 / 80 + 5, 2500 / 40 + 5),
        (Software(attention_generation=2), 1000 / 40 + 5, 2500 / 20 + 5),
        (Software(attention_generation=1), 1000 / 20 + 5, 2500 / 10 + 5),
        (Software(fused_attention=False), 2000 / 70 + 6 * 7, 4000 / 70 + 8 * 7),
    ],
    ids=["of its chip", "a generation older", "two generations older", "in plain products"],
)
def test_attention_takes_its_products_and_its_exponentials(software: Software, forward: float, backward: float) -> None:
    work = Work(attention_flops=1000, attention_head_dim=5, score_bytes=70)
    assert attention_s(work, setup_of(software=software), ROUND, ROUND_EFF) == pytest.approx((forward, backward))
    assert attention_s(Work(score_bytes=70), setup_of(software=software), ROUND, ROUND_EFF) == (0, 0)


PASSES = Work(pass_bytes=400, loss_bytes=300, eager_bytes=60, tensor_bytes=300, kernels=7)
"""A quarter of the tensors fits the cache, which saves half of it."""


@pytest.mark.parametrize(
    ("work", "software", "forward", "backward"),
    [
        (PASSES, Software(), 2 * 0.875 * 70 + 35, 2),
        (PASSES, Software(fused_loss=True), 2 * 0.875 * 50 + 25, 2),
        (PASSES, Software(fused_kernels=False), 3 * 0.875 * 72 + 36, 2),
        (replace(PASSES, convolves=True), Software(), 4 * 0.875 * 70 + 35, 2),
        (replace(PASSES, leaf=True), Software(), 2 * 0.875 * 70 + 35, 1),
        (replace(PASSES, frozen=True), Software(), 2 * 0.875 * 70 + 35, 0),
    ],
    ids=["fused", "fused loss", "eager", "convolution", "first", "frozen"],
)
def test_passes_over_memory(work: Work, software: Software, forward: float, backward: int) -> None:
    found = timed(work, setup_of(software=software))
    assert (found.memory_f, found.memory_b) == pytest.approx((forward, backward * forward))
    waiting = timed(replace(work, serial_kernels=2), setup_of(software=software))
    assert (waiting.memory_f, waiting.memory_b) == pytest.approx((forward + 2, backward * forward))
    assert found.kernels == 7
    wider = timed(work, setup_of(software=software), replace(ROUND, element_bytes=4.0))
    assert wider.memory_f == pytest.approx(2 * forward)


def test_what_trainspec_runs_eagerly_is_counted() -> None:
    """Compiled blocks, other frameworks and adapters keep the fitted factors."""
    kernels = {50.0: 2}, {100.0: 2, 0.0: 1}
    core = Core(1000, 5, 2)
    work = replace(PASSES, gemms=(PRODUCT,), counted_kernels=kernels, counted_gemms=(PRODUCT, PRODUCT))
    work = replace(work, attention_flops=500, counted_core=core)
    eager = setup_of(accum=1, software=Software(fused_kernels=False))
    found = timed(work, eager)
    one, other = (moved_s(size, ROUND, ROUND_EFF) for size in (50.0, 100.0))
    assert (found.memory_f, found.memory_b) == pytest.approx((2 * one, 2 * other + ROUND_EFF.kernel_s))
    ahead, back = attention_s(replace(work, attention_flops=1000, attention_head_dim=5), eager, ROUND, ROUND_EFF)
    started_s = 2 * ROUND_EFF.kernel_s
    assert (found.attention_f, found.attention_b) == pytest.approx((ahead + started_s, back + started_s))
    assert found.matmul_f == pytest.approx(2 * gemm_s(PRODUCT, ROUND, ROUND_EFF)[0])
    uncounted = replace(work, counted_kernels=None, counted_gemms=None, counted_core=None)
    others = (Software(), Software(fused_kernels=False, counted=False))
    for setup in (*(replace(eager, software=software) for software in others), replace(eager, lora=LoraSpec(rank=4))):
        assert timed(work, setup) == timed(uncounted, setup)


def test_products_of_a_layer_forward_and_backward() -> None:
    """Weights' gradients are added up apart: read in 2 bytes, and added to 4 that are read and written."""
    ahead, inputs, weights = gemm_s(PRODUCT, ROUND, ROUND_EFF)
    work = Work(gemms=(PRODUCT, PRODUCT), experts=16)
    setup = setup_of(accum=1)
    whole = timed(work, setup)
    assert (whole.matmul_f, whole.matmul_b) == pytest.approx((2 * ahead, 2 * (inputs + weights)))
    assert whole.experts == 16
    assert timed(replace(work, frozen=True), setup).backward == 0
    leaf = timed(replace(work, leaf=True), setup)
    assert leaf.matmul_b == pytest.approx(2 * weights)
    adapters = timed(work, replace(setup, trainable=0.01))
    assert adapters.matmul_b == pytest.approx(2 * inputs)
    uneven = timed(replace(work, expert_params=1), setup)
    assert (uneven.matmul_f, uneven.matmul_b) == pytest.approx((2.5 * ahead, 2.5 * (inputs + weights)))
    ungrouped = timed(work, replace(setup, software=Software(grouped_experts=False)))
    assert (ungrouped.matmul_f, ungrouped.matmul_b) == pytest.approx((3 * ahead, 3 * (inputs + weights)))
    added = timed(work, setup_of(software=Software(fused_accumulation=False)))
    assert added.matmul_b - whole.matmul_b == pytest.approx(10 * 2 * 2048 / 10)
    fused = timed(work, setup_of(software=Software(grad_bytes=2.0)))
    assert fused.matmul_b - whole.matmul_b == pytest.approx(0.5 * 2 * 2 * 2 * 2048 / 10)


@pytest.mark.parametrize(("experts", "slowness"), [(0, 1), (1, 1), (2, 1.125), (4, 1.25), (16, 1.5)])
def test_experts_one_after_the_other_are_slower_by_their_number(experts: int, slowness: float) -> None:
    grouped, apart = (setup_of(software=Software(grouped_experts=together)) for together in (True, False))
    times = [timed(Work(gemms=(PRODUCT,), experts=experts), one) for one in (grouped, apart)]
    assert times[1].matmul_f / times[0].matmul_f == pytest.approx(slowness)


@pytest.mark.parametrize(("matmul", "kernels"), [("bf16", 0), ("fp8", 3), ("mxfp8", 6), ("nvfp4", 8)])
def test_inputs_of_eight_bits_are_cast_twice_and_weights_once_a_step(matmul: str, kernels: int) -> None:
    work = Work(gemms=(PRODUCT, replace(PRODUCT, wide=False)), kernels=10)
    found = timed(work, replace(setup_of(accum=4), matmul=matmul))
    cast = 0.5 * (2 * 32 + 32 * 64 / 4) * (2 + 2 * 1) / 10 if kernels else 0
    assert (found.memory_f, found.memory_b, found.kernels) == (pytest.approx(cast), pytest.approx(cast), 10 + kernels)


@pytest.mark.parametrize(
    ("matmul", "compute", "element", "wide"),
    [("bf16", "bf16", 2, 2), ("fp32", "fp32", 4, 2), ("tf32", "tf32", 4, 2), ("fp8", "bf16", 2, 1),
     ("mxfp8", "bf16", 2, 1.03), ("nvfp4", "bf16", 2, 0.56)],
)  # fmt: skip
def test_formats_have_their_widths(matmul: str, compute: str, element: float, wide: float) -> None:
    rates = rates_of(replace(CHIP, cache_mb=50.0), matmul, compute, EFF)
    assert (rates.element_bytes, rates.wide_element_bytes, rates.cache_bytes) == (element, wide, 50e6)


def test_tensor_cores_have_a_generation_by_what_they_multiply() -> None:
    plain = replace(CHIP, bf16_tflops=312.0, matmul_bf16_tflops=0.0, fp8_tflops=0.0, fp4_tflops=0.0)
    old = replace(plain, bf16_tflops=0.0, fp16_tflops=100.0)
    chips = [old] + [
        replace(plain, fp8_tflops=fp8, fp4_tflops=fp4) for fp8, fp4 in ((0.0, 0.0), (1.0, 0.0), (1.0, 2.0))
    ]
    assert [rates_of(chip, "bf16", "bf16", EFF).generation for chip in chips] == [1, 2, 3, 4]


# A step taken apart by who processes which samples: the parts are the whole, and grow as the estimate does


LAYOUTS = {
    "sharded": ["recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=2"],
    "pipeline": ["recipe=llama3_70b", "cluster=h100", "cluster.num_nodes=8", "layout.pp=4", "layout.tp=4"],
    "experts": ["recipe=mixtral_8x7b", "cluster=h100", "cluster.num_nodes=8", "layout.ep=8"],
}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def planned(request: pytest.FixtureRequest) -> tuple[RunSpec, Candidate]:
    spec, capacity = plan_on_what_divides(load_for_planning(LAYOUTS[request.param]).spec)
    assert capacity.best is not None
    return spec, capacity.best


def assembled_s(parts: StepParts, samples: float, micro_batches: int) -> float:
    """A step of ranks that all have as many samples."""
    lines = [
        sum(line.time_s(samples, micro_batches) for line in (stage.compute, stage.scaleup, stage.network))
        for stage in parts.stages
    ]
    slowest = max(range(len(lines)), key=lines.__getitem__)
    waits_s = (sum(lines) - lines[slowest]) / micro_batches * parts.bubble
    busy_s = max(lines[slowest], micro_batches * parts.stages[slowest].launch_s)
    exchanged_s = micro_batches * parts.gradients_each_s + parts.gradients_once_s
    return (
        busy_s + waits_s + parts.sends.time_s(samples, micro_batches) + exchanged_s + parts.optimizer_s + parts.rest_s
    )


def test_the_parts_of_a_step_sum_to_the_step(planned: tuple[RunSpec, Candidate]) -> None:
    spec, candidate = planned
    parts = step_parts(setup_of_candidate(candidate, spec, None), efficiency_of(spec.cluster))
    samples = candidate.micro_batch_size * candidate.grad_accum_steps
    assert assembled_s(parts, samples, candidate.grad_accum_steps) == pytest.approx(candidate.step_time_s, rel=1e-9)


def test_they_hold_for_another_number_of_micro_batches(planned: tuple[RunSpec, Candidate]) -> None:
    spec, candidate = planned
    setup, eff = setup_of_candidate(candidate, spec, None), efficiency_of(spec.cluster)
    more = candidate.grad_accum_steps + 3
    step_s = estimate_step(replace(setup, grad_accum=more), eff).total_s
    found_s = assembled_s(step_parts(setup, eff), candidate.micro_batch_size * more, more)
    assert found_s == pytest.approx(step_s, rel=1e-3)


# Which links each exchange takes

SAMPLES_EFF, NONE = Efficiency(), Speed(0.0, 0.0)


def small_setup(layout: Layout, per_node: int = 8, **more: object) -> Setup:
    """A small decoder of eight layers on H100s; launching its kernels takes next to no time beside 4096 tokens."""
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    fabric = Fabric(chip, layout.world_size, per_node, per_node, 450.0, 400.0)
    model = DecoderModel(8, 2048, 16, 16, 128, 8192, 32_000)
    return replace(Setup(model, layout, fabric, 4096, 2.0, 4), **more)  # type: ignore[arg-type]


def test_gradients_cross_nodes_where_the_ranks_do() -> None:
    inside, across = (step_parts(small_setup(Layout(dp_shard=8), per_node), SAMPLES_EFF) for per_node in (8, 4))
    assert (inside.gradients_tier, across.gradients_tier) == ("scaleup", "network")
    assert across.gradients_each_s > inside.gradients_each_s > 0


def test_sharded_parameters_are_exchanged_for_each_micro_batch_and_whole_ones_once() -> None:
    sharded = step_parts(small_setup(Layout(dp_shard=8)), SAMPLES_EFF)
    whole = step_parts(small_setup(Layout(dp_replicate=8)), SAMPLES_EFF)
    assert sharded.gradients_each_s > 10 * abs(sharded.gradients_once_s)
    assert whole.gradients_each_s == pytest.approx(0.0, abs=1e-12) and whole.gradients_once_s > 0
    setup = small_setup(Layout(dp_replicate=8))
    groups = axis_groups(setup.layout, setup.fabric, SAMPLES_EFF)
    (stage,) = rank_parts(micro_batch(setup, groups, SAMPLES_EFF), setup.layout)
    assert whole.gradients_once_s == pytest.approx(data_parallel_s(stage.whole, setup, groups, SAMPLES_EFF))


def test_exchanges_inside_layers_take_the_links_of_their_axis() -> None:
    """Tensor parallelism inside a node; context parallelism of 4 over nodes of 4, with 2 tensor-parallel ranks."""
    (near,) = step_parts(small_setup(Layout(tp=8)), SAMPLES_EFF).stages
    assert near.scaleup != NONE and near.network == NONE
    (both,) = step_parts(small_setup(Layout(tp=2, cp=4), per_node=4), SAMPLES_EFF).stages
    assert both.scaleup != NONE and both.network != NONE
    (alone,) = step_parts(small_setup(Layout(dp_shard=8)), SAMPLES_EFF).stages
    assert alone.scaleup == alone.network == NONE
    setup = small_setup(Layout(tp=2, cp=4), per_node=4)
    once = micro_batch(setup, axis_groups(setup.layout, setup.fabric, SAMPLES_EFF), SAMPLES_EFF)
    assert both.scaleup.time_s(2, 1) == pytest.approx(2 * (8 * once.layer.tp + once.embedding.tp + once.head.tp))
    assert both.network.time_s(2, 1) == pytest.approx(8 * 3 * once.layer.cp)


def test_a_stage_computes_forward_backward_and_what_is_done_again() -> None:
    """Eight devices wait for nobody; sixteen wait 1% of the work for the slowest."""
    for recompute in ("none", "full"):
        setup = small_setup(Layout(dp_shard=8), recompute=RECOMPUTE[recompute])
        groups = axis_groups(setup.layout, setup.fabric, SAMPLES_EFF)
        (whole,) = rank_parts(micro_batch(setup, groups, SAMPLES_EFF), setup.layout)
        (stage,) = step_parts(setup, SAMPLES_EFF).stages
        again_s = recompute_part_s(whole.layers, setup.recompute)
        time = whole.whole
        assert stage.compute.time_s(2, 1) == pytest.approx(time.forward + time.backward + again_s)
        assert stage.compute.fixed_s >= 0 and stage.compute.per_sample_s > 0
        wide = replace(setup, fabric=replace(setup.fabric, num_devices=16))
        (waiting,) = step_parts(wide, SAMPLES_EFF).stages
        assert waiting.compute.per_sample_s == pytest.approx((1 + SAMPLES_EFF.jitter) * stage.compute.per_sample_s)


def test_sends_between_stages_take_the_pipelines_links() -> None:
    near, far = (step_parts(small_setup(Layout(pp=8), per_node), SAMPLES_EFF) for per_node in (8, 1))
    assert (near.sends_tier, far.sends_tier) == ("scaleup", "network")
    assert far.sends.per_sample_s > near.sends.per_sample_s > 0
    assert len(near.stages) == 8
    one = step_parts(small_setup(Layout(dp_shard=8)), SAMPLES_EFF)
    assert (one.sends, one.bubble) == (NONE, 0.0)
    assert step_parts(small_setup(Layout(pp=8)), SAMPLES_EFF).bubble == pytest.approx(SAMPLES_EFF.bubble)
    interleaved = Layout(pp=4, dp_shard=2, pipeline_schedule="interleaved", virtual_stages=2)
    assert step_parts(small_setup(interleaved), SAMPLES_EFF).bubble == pytest.approx(SAMPLES_EFF.bubble / 2)


def test_between_steps_the_host_works_for_a_while_that_graphs_shorten() -> None:
    plain, graphed = (
        step_parts(small_setup(Layout(dp_shard=8), software=Software(graphs=graphs)), SAMPLES_EFF)
        for graphs in (False, True)
    )
    assert plain.rest_s - graphed.rest_s == pytest.approx(SAMPLES_EFF.step_s - SAMPLES_EFF.step_graphed_s)
    assert plain.rest_s == SAMPLES_EFF.step_s
    (stage,), (launched,) = graphed.stages, plain.stages
    assert stage.launch_s == 0.0 < launched.launch_s
