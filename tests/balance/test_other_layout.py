"""Which layout suits ranks of unequal speed: against every legal one of a small cluster, and what is never proposed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from balance.test_simulation_figures import CHIP, SPEC
from lab.drawing import slow_after

from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.layout_memory import LayoutMemory
from trainspec_cli.balance.other_layout import WORTHWHILE, OtherLayouts, axes_of, equalise_paces
from trainspec_cli.balance.paced import PacedStep, Paces
from trainspec_cli.planner.capacity import pin_layout, plan_capacity
from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.memory.predict import memory_limit_bytes, predict_memory
from trainspec_cli.planner.search.space import Space, open_layout
from trainspec_cli.planner.time.samples import step_parts
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec, SchedulerSpec
from trainspec_cli.recipe.rules.check import check_built

TENSOR = LayoutSpec(dp_shard=1, tp=8)
PIPELINE = LayoutSpec(dp_shard=2, pp=4, zero_stage=1)
DATA = LayoutSpec(dp_shard=8, zero_stage=3)


def spec_of(layout: LayoutSpec, devices: int = 8, memory_gb: float = 80, **changes: object) -> RunSpec:
    chip = replace(CHIP, memory_gb=memory_gb)
    cluster = ClusterSpec(num_nodes=1, devices_per_node=devices, accelerator=chip)
    batching = BatchingSpec(global_batch_size=24)
    return replace(SPEC, cluster=cluster, layout=layout, batching=batching, compile=True, **changes)  # type: ignore[arg-type]


def others_of(spec: RunSpec) -> OtherLayouts:
    return OtherLayouts.of_candidate(spec, plan_capacity(spec, None).candidates[0], None)


def slow(ranks: int = 8, **paces: float) -> list[float]:
    """`slow(r5=2.1)`: rank 5 takes 2.1 times as long."""
    return [paces.get(f"r{rank}", 1.0) for rank in range(ranks)]


def fastest_of_all(others: OtherLayouts, spec: RunSpec, paces: list[float]) -> PacedStep | None:
    """Look at every layout that the planner enumerates and the engine builds, one by one."""
    paced = Paces(equalise_paces(paces, spec.scheduler.change))
    before_s = others.in_present(paced).step_s
    wide = replace(spec, layout=replace(open_layout(spec), stage_layers=None))
    devices = spec.cluster.num_nodes * int(spec.cluster.devices_per_node)
    legal = {
        others.setup_of(layout, micro)
        for layout, micro, _ in Space(wide, devices, devices).layouts()
        if not check_built(pin_layout(spec, layout)) and axes_of(layout) != axes_of(others.present.layout)
    }
    found = [others.worth(setup, paced, before_s, float("inf")) for setup in legal]
    return min((one for one in found if one is not None), key=lambda one: one.step_s, default=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "paces"),
    slow_after(
        1,
        [
            (LayoutSpec(dp_shard=1, tp=4), slow(4, r2=2.1)),
            (LayoutSpec(dp_shard=2, tp=2, zero_stage=1), slow(4, r0=1.6, r3=3.0)),
            (LayoutSpec(dp_shard=1, pp=4), slow(4, r0=1.6, r1=1.6, r3=3.0)),
            (LayoutSpec(dp_shard=4, zero_stage=3), slow(4, r2=2.1)),
        ],
    ),
    ids=["tp", "tp x dp", "pp", "dp"],
)
def test_no_legal_layout_is_faster(layout: LayoutSpec, paces: list[float]) -> None:
    spec = spec_of(layout, devices=4)
    others = others_of(spec)
    proposal, best = others.propose(paces), fastest_of_all(others, spec, paces)
    assert (proposal is None) == (best is None)
    if proposal is not None and best is not None:
        assert proposal.expected_s == pytest.approx(best.step_s, rel=1e-12)
        assert proposal.expected_s < proposal.before_s * (1 - WORTHWHILE)


def test_some_of_these_runs_change_their_layout_and_some_do_not() -> None:
    proposals = [others_of(spec_of(layout)).propose(slow(r5=2.1)) for layout in (TENSOR, DATA)]
    assert proposals[0] is not None and proposals[1] is None


def test_a_slow_rank_of_a_tensor_parallel_group_is_given_samples_of_its_own() -> None:
    """Eight ranks wait for one that takes 2.1 times as long; as data-parallel ranks, that one takes fewer samples."""
    proposal = others_of(spec_of(TENSOR)).propose(slow(r5=2.1))
    assert proposal is not None and proposal.layout.tp == 1 and proposal.layout.data_parallel_size == 8
    assert "rank 5 " in proposal.reason and " 2.1 times " in proposal.reason
    assert "1 instead of 8 ranks" in proposal.reason and "shrinks" in proposal.reason
    assert proposal.micro_batch_size <= proposal.largest_micro_batch_size <= 2 * proposal.micro_batch_size
    assert proposal.micro_batch_size * proposal.grad_accum_steps * 8 >= 24
    planned = proposal.planned_from(7)
    assert (planned.step, planned.layout) == (7, proposal.layout)


def test_no_layout_is_proposed_that_cannot_read_the_8_bit_state() -> None:
    spec = spec_of(TENSOR, optim=OptimSpec(lr=1e-3, name="adamw8bit"))
    row = spec.model.ffn_size  # type: ignore[union-attr]
    uneven = replace(spec, model=replace(spec.model, ffn_size=row - row % 2048 + 8))  # type: ignore[type-var]
    assert {setup.layout.tp for setup in others_of(uneven).others} == {8}
    assert {setup.layout.tp for setup in others_of(spec_of(TENSOR)).others} > {1, 8}


def narrow(scaleup: float = 1.0, network: float = 1.0, *, rank: int = 5) -> LinkPaces:
    """The links of one rank of eight take this many times as long."""
    one = [tuple(pace if place == rank else 1.0 for place in range(8)) for pace in (scaleup, network)]
    return LinkPaces(*one)


def test_a_narrow_link_of_a_tensor_parallel_group_leads_to_a_layout_that_exchanges_less_over_it() -> None:
    others = others_of(spec_of(TENSOR))
    proposal = others.propose([1.0] * 8, narrow(20.0))
    assert proposal is not None and proposal.layout.tp < 8
    assert proposal.reason.startswith(
        "the exchanges of rank 5 inside its scale-up domain take 20 times as long as usual"
    )
    assert proposal.expected_s < proposal.before_s * (1 - WORTHWHILE)
    assert others.propose([1.0] * 8, narrow(1.0)) is None, "as fast as usual"
    assert others.propose([1.0] * 8, narrow(network=20.0)) is None, "nothing leaves the domain"


def test_narrow_links_and_slow_ranks_are_both_told_of() -> None:
    proposal = others_of(spec_of(TENSOR)).propose(slow(r5=2.1), narrow(3.0, rank=6))
    assert proposal is not None
    assert proposal.reason.startswith(
        "the computation of rank 5 takes 2.1 times as long as usual and "
        "the exchanges of rank 6 inside its scale-up domain take 3 times as long as usual; as "
    )


def test_narrow_links_lengthen_the_exchanges_that_use_them_and_no_others() -> None:
    spec, usual = spec_of(PIPELINE), Paces([1.0] * 8)
    others = others_of(spec)
    parts = step_parts(others.present, efficiency_of(spec.cluster))
    layout = others.present.layout  # pp=4 dp_shard=2
    found = Paces([1.0] * 8, narrow(3.0, 7.0)).condition(layout, parts)
    assert (found.compute == 1).all()
    assert found.scaleup.tolist() == [[1, 1], [1, 1], [1, 3], [1, 1]]
    assert found.network.tolist() == [[1, 1], [1, 1], [1, 7], [1, 1]]
    assert (found.sends.tolist(), found.gradients) == ([1, 3], 3)
    at_usual = usual.condition(layout, parts)
    assert (at_usual.scaleup == 1).all() and (at_usual.sends == 1).all() and at_usual.gradients == 1
    wide, slow_links = (others.in_present(paces).step_s for paces in (usual, Paces([1.0] * 8, narrow(50.0))))
    assert wide < slow_links


def test_no_layout_takes_less_than_the_bound_by_which_it_is_left_out() -> None:
    chance = random.Random(3)
    others = others_of(spec_of(PIPELINE))
    for _ in range(2):
        paces = Paces([chance.choice([1.0, 1.0, 1.3, 2.0, 4.0]) for _ in range(8)], narrow(chance.choice([1.0, 9.0])))
        for setup in chance.sample(others.others, 30):
            found = others.in_layout(setup, paces)
            most = others.memory.most_samples(setup)
            bounds_s = others.steps.bound_s(setup, paces, most), others.steps.planned_s(setup)
            assert found is None or max(bounds_s) <= found.step_s * (1 + 1e-9)


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE])
@pytest.mark.parametrize("pace", [0.5, 1.0, 7.0])
def test_ranks_that_are_equally_fast_change_nothing(layout: LayoutSpec, pace: float) -> None:
    others = others_of(spec_of(layout))
    assert others.propose([pace] * 8) is None
    assert others.propose([pace * (1 + 0.06 * (rank % 2)) for rank in range(8)]) is None, "within scheduler.change"


def test_only_the_ratio_of_paces_counts() -> None:
    others = others_of(spec_of(TENSOR))
    assert others.propose(slow(r5=2.0)) == others.propose([3 * pace for pace in slow(r5=2.0)])


@pytest.mark.parametrize("memory_gb", slow_after(2, [3, 3.6, 4.5, 6, 10]))
def test_what_memory_does_not_hold_is_never_proposed(memory_gb: float) -> None:
    """Two layers' worth of memory more or less decides which layouts there are, and whether the state can move."""
    spec = spec_of(TENSOR, memory_gb=memory_gb)
    others = others_of(spec)
    proposal = others.propose(slow(r5=3.0))
    if proposal is not None:
        setup = others.setup_of(proposal.layout, proposal.largest_micro_batch_size)
        limit_bytes = memory_limit_bytes(setup.fabric.chip)
        assert max(stage.total_bytes for stage in predict_memory(setup, "none")) <= limit_bytes
        assert others.memory.may_move(others.present, setup)


def test_less_memory_leaves_fewer_layouts() -> None:
    """Both states together must fit while one becomes the other."""
    found = [others_of(spec_of(TENSOR, memory_gb=size)).propose(slow(r5=3.0)) for size in (2.2, 80)]
    assert found[0] is None and found[1] is not None


def test_replica_groups_keep_their_layout() -> None:
    spec = spec_of(LayoutSpec(dp_replicate=2, dp_shard=1, tp=4))
    elastic = replace(spec, resilience=ResilienceSpec(mode="elastic", replica_groups=2))
    candidate = plan_capacity(spec, None).candidates[0]
    assert OtherLayouts.of_candidate(spec, candidate, None).propose(slow(r5=3.0)) is not None
    assert OtherLayouts.of_candidate(elastic, candidate, None).propose(slow(r5=3.0)) is None


def test_a_bounded_micro_batch_bounds_what_a_fast_rank_may_take() -> None:
    spec = spec_of(TENSOR, scheduler=SchedulerSpec(max_micro_batch_size=96))
    proposal = others_of(spec).propose(slow(r5=2.1))
    assert proposal is not None and proposal.largest_micro_batch_size <= 96


def test_when_all_ranks_are_equally_fast_again_the_planned_layout_is_gone_back_to() -> None:
    others = others_of(spec_of(LayoutSpec(dp_shard=2, tp=4, zero_stage=1)))
    slower = next(
        setup for setup in others.others if others.steps.planned_s(setup) > 1.2 * others.steps.planned_s(others.present)
    )
    changed = others.after(slower.layout, int(slower.micro_batch_size))
    back = changed.propose([1.0] * 8)
    assert back is not None and axes_of(back.layout) == axes_of(others.present.layout)
    assert back.expected_s < back.before_s and back.reason.startswith("all ranks are equally fast again")
    assert others.propose([1.0] * 8) is None


def test_paces_within_the_change_that_is_confirmed_count_as_usual() -> None:
    assert equalise_paces([2.0, 2.1, 2.0, 1.9, 4.0], 0.1) == (1.0, 1.0, 1.0, 1.0, 2.0)
    assert equalise_paces([1.0, 1.0, 1.0, 0.5], 0.1) == (1.0, 1.0, 1.0, 0.5), "a fast rank is one too"


@pytest.mark.slow
def test_a_layout_to_which_memory_allows_no_way_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert others_of(spec_of(TENSOR)).propose(slow(r5=3.0)) is not None
    monkeypatch.setattr(LayoutMemory, "may_move", lambda self, before, after: False)
    assert others_of(spec_of(TENSOR)).propose(slow(r5=3.0)) is None


def test_a_rank_holds_its_old_and_its_new_state_together_on_the_way() -> None:
    """Half of the layers on each rank before, and all of them after: the states alone."""
    others = others_of(spec_of(LayoutSpec(dp_shard=1, pp=2), devices=2))
    half, whole = others.setup_of(Layout(pp=2), 1), others.setup_of(Layout(dp_replicate=2, zero_stage=1), 1)
    (*_, old), (new,) = others.memory.of_stages(half), others.memory.of_stages(whole)
    kept_bytes = old.parameters_bytes + old.optimizer_bytes + old.fragmentation_bytes + old.context_bytes
    needed_gb = (kept_bytes + new.parameters_bytes + new.optimizer_bytes + 2**27) / 0.97 / 2**30

    def may_move(memory_gb: float) -> bool:
        fabric = replace(half.fabric, chip=replace(half.fabric.chip, memory_gb=memory_gb))
        return others.memory.may_move(replace(half, fabric=fabric), replace(whole, fabric=fabric))

    assert may_move(1.5 * needed_gb) and not may_move(0.9 * needed_gb)


def test_where_the_cut_alone_changes_a_rank_gets_its_new_layers() -> None:
    """Of 8 layers [4, 4] become [6, 2]: the first rank gets two of its six; of another layout each rank gets all."""
    others = others_of(spec_of(LayoutSpec(dp_shard=1, pp=2), devices=2))
    before, after = (others.setup_of(Layout(pp=2, stage_layers=cut), 1) for cut in (None, (6, 2)))
    first, second = others.memory.of_stages(after)
    assert others.memory.moved_bytes(before, after) == pytest.approx(
        (first.parameters_bytes + first.optimizer_bytes) / 3
    )
    other = others.setup_of(Layout(dp_replicate=2, zero_stage=1), 1)
    whole = max(stage.parameters_bytes + stage.optimizer_bytes for stage in (first, second))
    assert others.memory.moved_bytes(other, after) == pytest.approx(whole)
