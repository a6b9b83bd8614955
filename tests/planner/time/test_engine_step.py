"""An eager step of the engine: passes whose times are small whole numbers, and whole steps beside the closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.planner.hardware.cluster import Fabric, all_gather_s, all_reduce_s, axis_groups, group_of_ranks
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.pipeline import Action, Kind, actions
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software
from trainspec_cli.planner.time.engine_step import EngineStep, FsdpUnit, RankClock, RankRun, Stage
from trainspec_cli.planner.time.samples import step_parts
from trainspec_cli.planner.time.step import (
    assemble_step,
    estimate_step,
    gemm_s,
    micro_batch,
    optimizer_s,
    rank_parts,
)
from trainspec_cli.planner.workload import Gemm
from trainspec_cli.recipe.keys.layout import Layout, PipelineSchedule
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec

CHIP = find_accelerator("H100-SXM-80GB")
assert CHIP is not None
EFF = Efficiency(launch_s=0.0, step_s=0.0, jitter=0.0, contention=0.0)
EAGER = Software(fused_kernels=False)
MODEL = DecoderModel(8, 1024, 16, 16, 64, 4096, 32_000)


def setup_of(layout: Layout, accum: int = 8, model: DecoderModel = MODEL, **more: object) -> Setup:
    fabric = Fabric(CHIP, layout.world_size, 8, 8, 450.0, 400.0)  # type: ignore[arg-type]
    return replace(Setup(model, layout, fabric, 2048, 1.0, accum, software=EAGER), **more)  # type: ignore[arg-type]


# One rank's passes

NOTHING: dict[str, Any] = {**dict.fromkeys(FsdpUnit.__dataclass_fields__, 0.0), "group": "dp_shard"}
BLOCK = FsdpUnit(**NOTHING | {"gather_s": 1.0, "reduce_s": 1.0, "forward_s": 3.0, "backward_s": 6.0})
ROOT = FsdpUnit(**NOTHING | {"gather_s": 2.0, "reduce_s": 2.0})
STAGE = Stage(((BLOCK,), (BLOCK,)), ROOT, (0.0, 0.0), (0.0, 0.0))


def run(layout: Layout, micro_batches: int, stage: Stage = STAGE) -> RankRun:
    (order,) = actions(layout, micro_batches)
    return RankClock({0: stage}, setup_of(layout), EFF).run(order)


def test_zero_3_waits_for_the_first_gathers_and_the_last_reductions_of_each_micro_batch() -> None:
    """The root (2 s) and the first block (1 s) are gathered before anything computes, and the second block beside the
    first. In the backward, the first block's reduction (1 s) and the root's (2 s) have nothing left to hide behind."""
    found = run(Layout(dp_shard=8), 2)
    assert found.passes_s == (9.0, 15.0, 9.0, 15.0)
    assert (found.waited_s, found.sent_s) == (12.0, 2 * 10.0)


@pytest.mark.parametrize(("stage", "repeated_s"), [(0, 19.0), (1, 18.0)])
def test_a_backward_after_another_one_gathers_the_root_again(stage: int, repeated_s: float) -> None:
    """All forwards come first. The second backward waits for the reductions of the first one. Then the last block is
    gathered, the other block, and the root (1 + 1 + 2 s); in the stage with the head, first the root and then the last
    block (2 + 1 s)."""
    layout = Layout(pp=2, dp_shard=8, pipeline_schedule="gpipe")
    found = RankClock({stage: STAGE}, setup_of(layout), EFF).run(actions(layout, 2)[stage])
    assert found.passes_s == (9.0, 7.0, 15.0, repeated_s)


def test_exchanges_that_are_longer_than_the_blocks_are_waited_for_block_by_block() -> None:
    """Forward: the blocks have arrived at 6 and 10 s, and compute until 9 and 13 s. Backward: the second block is
    gathered again until 14 s, the first one beside it; their reductions end at 24 and 30 s, and the root's at 32 s."""
    slow = replace(BLOCK, gather_s=4.0, reduce_s=4.0)
    found = run(Layout(dp_shard=8), 1, replace(STAGE, blocks=((slow,), (slow,))))
    assert found.passes_s == (13.0, 19.0)
    assert found.waited_s == 32 - 2 * 9


def test_below_zero_3_parameters_are_gathered_once_and_with_zero_1_gradients_reduced_once() -> None:
    zero_2 = run(Layout(dp_shard=8, zero_stage=2), 3)
    assert zero_2.passes_s == (9.0, 15.0, 6.0, 15.0, 6.0, 15.0)
    zero_1 = run(Layout(dp_shard=8, zero_stage=1), 3)
    assert zero_1.passes_s == (9.0, 12.0, 6.0, 12.0, 6.0, 15.0)


def test_gradients_that_wait_for_the_last_micro_batch_are_added() -> None:
    unit = replace(BLOCK, first_sum_s=0.25, sum_s=0.5, copy_in_s=1.0, copy_sums_in_s=2.0)
    found = run(Layout(dp_shard=8, zero_stage=1), 3, replace(STAGE, blocks=((unit,),)))
    alone = run(Layout(dp_shard=8, zero_stage=1), 3, replace(STAGE, blocks=((BLOCK,),)))
    more = [one - other for one, other in zip(found.passes_s, alone.passes_s, strict=True)]
    assert more == [0.0, 0.25, 0.0, 0.5, 0.0, 2.5]


@pytest.mark.parametrize(
    ("kinds", "more_s"),
    [
        (("backward_input", "backward_weight") * 2, [0.25, 0.0, 0.75 + 0.5, 1.5 + 8.0]),
        (("backward_input",) * 2 + ("backward_weight",) * 2, [0.25, 0.5, 0.0, 0.75 + 0.75 + 8.0]),
    ],
)
def test_a_split_schedule_adds_late_gradients_in_the_next_backward_of_inputs(
    kinds: tuple[Kind, ...], more_s: list[float]
) -> None:
    """A quarter of the gradients is early, and is added at once. Two weight passes in a row are added to each other."""
    unit = replace(BLOCK, first_sum_s=1.0, sum_s=2.0, copy_in_s=4.0, copy_sums_in_s=8.0, early_share=0.25)
    layout = Layout(pp=2, dp_shard=8, zero_stage=1, pipeline_schedule="zero_bubble")
    order = [Action(kind, 0, kinds[:place].count(kind)) for place, kind in enumerate(kinds)]
    found, alone = (
        RankClock({0: replace(STAGE, blocks=((block,),))}, setup_of(layout), EFF).run(order) for block in (unit, BLOCK)
    )
    assert [one - other for one, other in zip(found.passes_s, alone.passes_s, strict=True)] == more_s


def test_a_copy_of_one_block_delays_the_gather_of_the_next_in_the_backward() -> None:
    """Forward: the blocks arrive at 8 and 16 s. Backward: the second one arrives again at 24 s and is copied; only
    then, from 24.5 s to 32.5 s, is the first one gathered."""
    copied = replace(BLOCK, copy_out_s=0.5, gather_s=8.0, reduce_s=0.0)
    found = run(Layout(dp_shard=8), 1, Stage(((copied,), (copied,)), FsdpUnit(**NOTHING), (0.0, 0.0), (0.0, 0.0)))
    assert found.passes_s == (19.5, 32.5 + 6.5 - 19.5)


def test_the_buffer_of_a_reduction_is_free_before_the_next_gradients_are_copied_into_it() -> None:
    """After 6 s of forward, the second block's gradients are copied until 13 s and reduced until 21 s."""
    copied = replace(BLOCK, copy_in_s=1.0, gather_s=0.0, reduce_s=8.0)
    found = run(Layout(dp_shard=8), 1, Stage(((copied,), (copied,)), FsdpUnit(**NOTHING), (0.0, 0.0), (0.0, 0.0)))
    assert found.passes_s == (6.0, 21 + 1 + 8 - 6)


def test_spread_experts_are_gathered_inside_their_block() -> None:
    """Forward: block and experts arrive at 1 and 3 s, and compute until 4 and 5 s. Backward: the block arrives again at
    4 s, but is needed at 5 s; only then the experts are gathered (7 s). They compute until 9 s, and their reduction
    until 14 s runs beside the rest of the block (6 s, until 15 s), whose own takes 1 s."""
    experts = replace(BLOCK, group="expert_dp", gather_s=2.0, reduce_s=5.0, forward_s=1.0, backward_s=2.0)
    found = run(Layout(dp_shard=8, ep=2), 1, Stage(((BLOCK, experts),), FsdpUnit(**NOTHING), (0.0, 0.0), (0.0, 0.0)))
    assert found.passes_s == (5.0, 11.0)
    # Reductions of one communicator do not delay gathers of another one, but both share a stream with their kind.
    assert found.waited_s == 16 - 3 - 1 - 2 - 6
    # Work before the experts (1.5 s) overlaps the gathering of their parameters.
    outer = replace(BLOCK, backward_s=4.5, early_s=1.5)
    found = run(Layout(dp_shard=8, ep=2), 1, Stage(((outer, experts),), FsdpUnit(**NOTHING), (0.0, 0.0), (0.0, 0.0)))
    assert found.passes_s == (5.0, 10.0), "the last reduction begins after that of the experts, at 14 s"


@pytest.mark.parametrize("split", [False, True])
def test_each_end_of_a_pipeline_has_one_exchange_of_tensor_parallelism_outside_its_blocks(split: bool) -> None:
    """The embedding is summed in the forward, and the gradient of the head's input in the backward. With sequence
    parallelism, half of each exchange is in the other pass."""
    layout = Layout(pp=2, tp=4, sequence_parallel=split)
    setup = setup_of(layout)
    groups = axis_groups(layout, setup.fabric, EFF)
    once = micro_batch(setup, groups, EFF)
    first, last = (stage for stages in EngineStep(setup, once, groups, EFF)._stages for stage in stages.values())
    whole_s = all_reduce_s(groups["tp"], 2.0 * setup.tokens * MODEL.hidden_size, EFF)
    waits_s = [
        before_s - own_s
        for before_s, own_s in zip(first.before_s, (once.embedding.forward, once.embedding.backward), strict=True)
    ]
    assert waits_s == pytest.approx([whole_s / 2, whole_s / 2] if split else [whole_s, 0.0])
    in_loss_s = 2 * once.head.tp - whole_s
    assert in_loss_s > 0
    assert last.after_s[0] == pytest.approx(once.head.forward + once.head.backward + whole_s + in_loss_s)


@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_tokens_are_sent_while_the_parameters_of_experts_are_gathered(again: str) -> None:
    layout = Layout(dp_shard=8, ep=8)
    setup = setup_of(layout, model=replace(MODEL, experts=ExpertSpec(16, 2, 4096)), recompute=RECOMPUTE[again])
    groups = axis_groups(layout, setup.fabric, EFF)
    once = micro_batch(setup, groups, EFF)
    ((stage,),) = (tuple(stages.values()) for stages in EngineStep(setup, once, groups, EFF)._stages)
    outer, experts = stage.blocks[0]
    parts = once.mixers[0]
    ep_s = parts[-1].ep
    assert outer.forward_waits_s == pytest.approx(ep_s / 2) and ep_s > 0
    forward_s = sum(part.forward + part.tp + part.ep for part in parts)
    backward_s = sum(part.backward + part.tp + part.ep for part in parts)
    repeated_s = [sum(EngineStep(setup, once, groups, EFF)._repeated(part)) for part in parts]
    units = (outer, experts)
    assert sum(unit.forward_s + unit.forward_waits_s for unit in units) == pytest.approx(forward_s)
    total_s = sum(unit.backward_s + unit.backward_waits_s + unit.early_s for unit in units)
    assert total_s == pytest.approx(backward_s + sum(repeated_s))
    # The gradients of the experts' parameters are reduced before the tokens' gradients are sent back.
    assert experts.backward_s + experts.backward_waits_s < parts[-1].backward + ep_s / 2 + repeated_s[-1]
    assert outer.early_s >= ep_s / 2


@pytest.mark.parametrize("ep", [1, 8])
def test_a_split_schedule_computes_the_gradients_of_experts_with_those_of_their_inputs(ep: int) -> None:
    model = replace(MODEL, experts=ExpertSpec(16, 2, 4096))
    units = {}
    for schedule in ("1f1b", "zero_bubble"):
        setup = setup_of(Layout(pp=2, dp_shard=8, ep=ep, pipeline_schedule=schedule), model=model)  # type: ignore[arg-type]
        groups = axis_groups(setup.layout, setup.fabric, EFF)
        once = micro_batch(setup, groups, EFF)
        units[schedule] = EngineStep(setup, once, groups, EFF)._stages[0][0].blocks[0]
    attention, experts = once.mixers[0]
    assert sum(unit.weights_s for unit in units["zero_bubble"]) == attention.weights_b
    assert 0 == experts.weights_b < attention.weights_b < attention.matmul_b
    whole, split = (
        sum(unit.backward_s + unit.backward_waits_s + unit.early_s + unit.weights_s for unit in units[schedule])
        for schedule in units
    )
    assert split == pytest.approx(whole)
    shares = [unit.early_share for unit in units["zero_bubble"]]
    assert shares == [0.0, 1.0] if ep > 1 else 0.5 < shares[0] < 1.0


# Whole steps


def test_a_large_embedding_is_waited_for() -> None:
    """Nothing computes before the embedding has been gathered, however long the layers are."""
    small, large = (
        estimate_step(setup_of(Layout(dp_shard=64), model=replace(MODEL, vocab_size=vocab)), EFF)
        for vocab in (1024, 256_000)
    )
    layout = Layout(dp_shard=64)
    shard = axis_groups(layout, setup_of(layout).fabric, EFF)["dp_shard"]
    # Gathered in 2 bytes per value and reduced in 4, for embedding and head
    exchanged_s = 3 * all_gather_s(shard, 2.0 * 2 * 1024 * (256_000 - 1024), EFF)
    assert large.dp_comm_s - small.dp_comm_s > 0.9 * 8 * exchanged_s


def test_experts_that_are_not_spread_are_exchanged_and_updated_like_other_parameters() -> None:
    """Ranks of tp hold the same experts: they gather them over the shards, not over all ranks, and sum their gradients
    once per step."""
    model = replace(MODEL, experts=ExpertSpec(16, 2, 4096))
    layout = Layout(dp_shard=8, tp=8)
    setup = setup_of(layout, model=model)
    groups = axis_groups(layout, setup.fabric, EFF)
    once = micro_batch(setup, groups, EFF)
    (part,) = rank_parts(once, layout)
    assert groups["expert_dp"].size == 64 and groups["dp_shard"].size == 8
    assert part.whole.expert_params > 10 * part.whole.params
    exchanged_s = 8 * 4 * all_gather_s(groups["dp_shard"], 2.0 * part.whole.expert_params, EFF)
    late_s = all_reduce_s(groups["tp"], 4.0 * part.whole.expert_params / 8, EFF)
    found = assemble_step(setup, once, groups, EFF)
    assert exchanged_s / 2 + late_s < found.dp_comm_s < 1.2 * exchanged_s + late_s
    spread = replace(setup, software=replace(EAGER, counted=False))
    updated_s, spread_s = (optimizer_s(part.whole, one, once.rates, groups, EFF) for one in (setup, spread))
    assert updated_s == pytest.approx(8 * spread_s, rel=0.2)


def test_a_pipeline_s_ends_sum_the_gradients_of_a_tied_embedding() -> None:
    tied, apart = (
        estimate_step(setup_of(Layout(pp=2, dp_shard=8), model=replace(MODEL, tied_embeddings=tied)), EFF)
        for tied in (True, False)
    )
    setup = setup_of(Layout(pp=2, dp_shard=8))
    ends = group_of_ranks(setup.fabric, (0, 8), EFF)
    sum_s = all_reduce_s(ends, 4.0 * 32_000 * 1024 / 8, EFF)
    assert tied.dp_comm_s - apart.dp_comm_s == pytest.approx(sum_s, rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"])
def test_many_micro_batches_repeat_the_schedule(schedule: PipelineSchedule) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    layout = Layout(pp=2, dp_shard=8, pipeline_schedule=schedule, virtual_stages=virtual, zero_stage=2)
    setup = setup_of(layout, 64)
    groups = axis_groups(layout, setup.fabric, EFF)
    engine = EngineStep(setup, micro_batch(setup, groups, EFF), groups, EFF)
    replayed = max(engine._run(64).ends_s)
    late = engine.time()
    outside_s = late.optimizer_s + late.host_s
    assert late.total_s - outside_s == pytest.approx(replayed, rel=2e-3)


def test_gpipe_waits_for_the_slowest_forward_and_the_slowest_backward() -> None:
    """The loss computes its gradients in the forward, so the last stage has the longest forwards, and the first one,
    with more layers, the longest backwards."""
    model = replace(MODEL, vocab_size=128_000)
    gpipe, one_f_one_b = (
        estimate_step(setup_of(Layout(pp=2, pipeline_schedule=schedule, stage_layers=(6, 2)), 16, model), EFF)
        for schedule in ("gpipe", "1f1b")
    )
    assert gpipe.bubble_s > one_f_one_b.bubble_s + 0.2 * one_f_one_b.total_s
    assert gpipe.matmul_s == one_f_one_b.matmul_s


def test_selective_recomputation_repeats_all_but_products_and_attention() -> None:
    """The exchanges between products are repeated, too."""
    layout = Layout(tp=2)
    none, selective = (
        estimate_step(setup_of(layout, recompute=RECOMPUTE[name]), EFF) for name in ("none", "selective")
    )
    groups = axis_groups(layout, setup_of(layout).fabric, EFF)
    (part,) = rank_parts(micro_batch(setup_of(layout), groups, EFF), layout)
    assert none.recompute_s == 0 and selective.recompute_s == pytest.approx(8 * part.layers.memory_f)
    assert selective.tp_comm_s - none.tp_comm_s == pytest.approx(8 * (part.layers.tp + part.layers.tp_again))
    # Repeated exchanges are not hidden, except for the last of a block, which is not repeated.
    added_s = 8 * (part.layers.memory_f + part.layers.tp + part.layers.tp_again)
    assert selective.total_s - none.total_s == pytest.approx(added_s, rel=1e-3)


def test_repeated_messages_of_a_ring_are_not_attributed_to_tensor_parallelism() -> None:
    layout = Layout(cp=4)
    none, full = (estimate_step(setup_of(layout, recompute=RECOMPUTE[name]), EFF) for name in ("none", "full"))
    groups = axis_groups(layout, setup_of(layout).fabric, EFF)
    (part,) = rank_parts(micro_batch(setup_of(layout), groups, EFF), layout)
    assert part.layers.cp_again != 0
    assert (none.tp_comm_s, full.tp_comm_s) == (0.0, 0.0)
    assert full.cp_comm_s - none.cp_comm_s == pytest.approx(8 * (part.layers.cp + part.layers.cp_again))


def test_full_recomputation_ends_before_the_last_product_of_a_block() -> None:
    """Its input is the last value that the backward needs."""
    layout = Layout(dp_shard=8)
    setup = setup_of(layout, recompute=RECOMPUTE["full"])
    once = micro_batch(setup, axis_groups(layout, setup.fabric, EFF), EFF)
    (part,) = rank_parts(once, layout)
    last_s = gemm_s(Gemm(2048, 1024, 4096), once.rates, EFF)[0]
    assert estimate_step(setup, EFF).recompute_s == pytest.approx(8 * (part.layers.forward - 8 * last_s))


def test_shards_of_few_experts_are_padded() -> None:
    """FSDP2 divides 16 experts over 64 ranks by giving one to each of 16 ranks, and sends padding for the others."""
    model = replace(MODEL, experts=ExpertSpec(16, 2, 4096))
    units = {}
    for ranks in (16, 64):
        layout = Layout(dp_shard=ranks)
        setup = setup_of(layout, model=model)
        groups = axis_groups(layout, setup.fabric, EFF)
        units[ranks] = EngineStep(setup, micro_batch(setup, groups, EFF), groups, EFF)._stages[0][0].blocks[0][0]
    expert = 3 * 1024 * 4096
    assert [unit.own // expert for unit in units.values()] == [1, 1]
    assert units[64].gather_s > 3.5 * units[16].gather_s


def test_the_simulation_of_a_run_has_the_same_step() -> None:
    setup = setup_of(Layout(pp=2, dp_shard=8))
    parts = step_parts(setup, EFF)
    stage_s = [one.compute.time_s(1, 1) + one.scaleup.time_s(1, 1) + one.network.time_s(1, 1) for one in parts.stages]
    total_s = 8 * (max(stage_s) + parts.sends.time_s(1, 1) + parts.gradients_each_s) + parts.gradients_once_s
    total_s += parts.bubble * (sum(stage_s) - max(stage_s)) + parts.optimizer_s + parts.rest_s
    assert total_s == pytest.approx(estimate_step(setup, EFF).total_s)


def test_other_frameworks_compiled_blocks_and_tables_keep_the_closed_forms() -> None:
    setup = setup_of(Layout(dp_shard=8))
    groups = axis_groups(setup.layout, setup.fabric, EFF)
    counted = EngineStep(setup, micro_batch(setup, groups, EFF), groups, EFF).time().dp_comm_s
    assert estimate_step(setup, EFF).dp_comm_s == counted
    for other in (
        replace(setup, software=replace(EAGER, counted=False)),
        replace(setup, software=replace(EAGER, fused_kernels=True)),
        replace(setup, tabled=True),
        replace(setup, trainable=0.1),
    ):
        assert estimate_step(other, EFF).dp_comm_s < 0.9 * counted


def test_an_action_of_a_stage_with_nothing_to_exchange_takes_its_work() -> None:
    alone = Stage(((replace(BLOCK, gather_s=0.0, reduce_s=0.0),),), FsdpUnit(**NOTHING), (0.5, 0.25), (1.0, 0.0))
    clock = RankClock({0: alone}, setup_of(Layout()), EFF)
    assert clock.run([Action("forward", 0, 0), Action("backward", 0, 0)]).passes_s == (4.5, 6.25)
