"""A step assembled from parts whose times are small whole numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.cluster import Fabric, Group, all_reduce_s, axis_groups, group_of
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.pipeline import Action, actions
from trainspec_cli.planner.setup import RECOMPUTE, Recompute, Setup, Software
from trainspec_cli.planner.time.step import (
    LayersPart,
    MicroBatch,
    Rates,
    across_groups_s,
    assemble_step,
    bubble_s,
    data_parallel_s,
    estimate_step,
    exchanges_of,
    host_wait_s,
    micro_batch,
    optimizer_s,
    own_work_s,
    part_of,
    pipeline_sends_s,
    rank_parts,
    recompute_part_s,
    waiting_share,
)
from trainspec_cli.planner.workload import Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.results.plan import StepTime

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
RATES = Rates(100.0, 100.0, 10.0, 5.0, 20.0, 100.0, 2.0, 2.0, 3)
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
    """Links of 10 bytes a second; a network of 1."""
    return Group(size, per_domain or size, 10.0, 1.0)


@pytest.mark.parametrize(
    ("software", "ep", "expected"),
    [
        (Software(), ring(2), (2 * 10 * (1 - 0.5 / 2), 20 * 0.75, 2 * 30 * 0.8)),
        (Software(overlap_tp=False), ring(2), (2 * 10, 20 * 0.75, 2 * 30 * 0.8)),
        (Software(), ring(4, 2), (15, 15, 2 * (150 * 0.75) * 0.4)),
        (Software(grouped_experts=False), ring(4, 2), (15, 15, 1.5 * 2 * 300 * 0.5 * 0.8)),
    ],
    ids=["one node", "without overlap", "experts over two nodes", "ungrouped experts over two nodes"],
)
def test_exchanges_inside_a_layer(software: Software, ep: Group, expected: tuple[float, float, float]) -> None:
    work = Work(tp_exchanges=2, tp_bytes=100, cp_bytes=400, ep_bytes=300, expert_copies=2, experts=16)
    groups = {"tp": ring(2), "cp": ring(2), "ep": ep}
    found = part_of(work, setup_of(Layout(tp=2), software=software), RATES, groups, EFF)
    assert (found.tp, found.cp, found.ep) == pytest.approx(expected)


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
    offloaded = optimizer_s(LAYER, replace(setup, offload_optimizer=True), RATES, groups, EFF)
    assert offloaded == pytest.approx(params * 6 / 50e9 + params * 30 / 100e9)


GROUPS = {"dp": ring(2), "dp_shard": ring(2), "expert_dp": ring(4), "dp_replicate": ring(2, 1)}
REDUCE_S, GATHER_S = 4 * (100 * 0.05 + 40 * 0.075), 2 * (100 * 0.05 + 40 * 0.075)
"""Half of the bytes over 10 a second for dense parameters, three quarters for those of experts."""
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
    """Replicas of ZeRO-3 reduce 4 x 100 / 2 bytes over a network of 1 a second, half of them twice."""
    setup = setup_of(layout)
    assert data_parallel_s(LAYER, setup, GROUPS, EFF) == pytest.approx(beside)
    apart = replace(setup, software=Software(overlap_dp=False))
    assert data_parallel_s(LAYER, apart, GROUPS, EFF) == pytest.approx(alone)


def test_what_is_computed_again_hides_gradients_too() -> None:
    setup = setup_of(Layout(dp_replicate=2), recompute=RECOMPUTE["full"])
    assert data_parallel_s(LAYER, setup, GROUPS, EFF) == pytest.approx(exposed(2 * REDUCE_S, BACKWARD_S + 70))


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


@pytest.mark.parametrize(("devices", "share"), [(1, 0), (8, 0), (16, 0.01), (64, 0.03)])
def test_more_devices_wait_longer_for_the_slowest(devices: int, share: float) -> None:
    setup = setup_of()
    wide = replace(setup, fabric=replace(setup.fabric, num_devices=devices))
    assert waiting_share(wide, EFF) == pytest.approx(share)


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


def simulate_1f1b(forward_s: list[float], backward_s: list[float], micro_batches: int) -> float:
    """Seconds of one step, event by event: a pass starts when its stage is free and its input has come."""
    stages, took = len(forward_s), {"forward": forward_s, "backward": backward_s}
    orders = [list(order) for order in actions(Layout(pp=stages), micro_batches)]
    free, done = [0.0] * stages, {}
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (needed := inputs_of(order[0], stages - 1)) <= done.keys():
                action = order.pop(0)
                free[stage] = max(free[stage], *map(done.get, needed), 0.0) + took[action.kind][stage]
                done[action] = free[stage]
    return max(free)


def inputs_of(action: Action, last: int) -> set[Action]:
    if action.kind == "forward":
        return {Action("forward", action.stage - 1, action.micro_batch)} if action.stage else set()
    if action.stage == last:
        return {Action("forward", last, action.micro_batch)}
    return {Action("backward", action.stage + 1, action.micro_batch)}


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (4, 4), (4, 16), (8, 64)])
def test_even_stages_wait_as_the_closed_form_says(stages: int, micro_batches: int) -> None:
    simulated = simulate_1f1b([1.0] * stages, [2.0] * stages, micro_batches)
    closed = 3.0 * micro_batches + bubble_s([3.0] * stages, Layout(pp=stages), micro_batches)
    assert simulated == pytest.approx(closed)


def test_one_slow_stage_sets_the_pace() -> None:
    forward, backward = [1.0, 1.0, 1.0, 1.4], [2.0, 2.0, 2.0, 2.8]
    simulated = simulate_1f1b(forward, backward, 32)
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
        assert pp > 1 or step.host_s > step.matmul_s + step.memory_bound_s, "launches take longer than kernels"
        return step.total_s

    assert total_s(4) > 0.8 * total_s(1)
