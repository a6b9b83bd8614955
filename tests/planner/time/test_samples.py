"""A step taken apart by who processes which samples: the parts are the whole, and grow as the estimate does."""

from dataclasses import replace

import pytest

from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.planner.capacity import plan_on_what_divides, setup_of
from trainspec_cli.planner.hardware.cluster import Fabric, axis_groups, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software
from trainspec_cli.planner.time.samples import StepParts, step_parts
from trainspec_cli.planner.time.step import data_parallel_s, estimate_step, micro_batch, rank_parts, recompute_part_s
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.session.recipe.load import load_for_planning

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
    return busy_s + waits_s + parts.sends.time_s(samples, micro_batches) + exchanged_s + parts.rest_s


def test_the_parts_of_a_step_sum_to_the_step(planned: tuple[RunSpec, Candidate]) -> None:
    spec, candidate = planned
    parts = step_parts(setup_of(candidate, spec, None), efficiency_of(spec.cluster))
    samples = candidate.micro_batch_size * candidate.grad_accum_steps
    assert assembled_s(parts, samples, candidate.grad_accum_steps) == pytest.approx(candidate.step_time_s, rel=1e-9)


def test_they_hold_for_another_number_of_micro_batches(planned: tuple[RunSpec, Candidate]) -> None:
    spec, candidate = planned
    setup, eff = setup_of(candidate, spec, None), efficiency_of(spec.cluster)
    more = candidate.grad_accum_steps + 3
    step_s = estimate_step(replace(setup, grad_accum=more), eff).total_s
    found_s = assembled_s(step_parts(setup, eff), candidate.micro_batch_size * more, more)
    assert found_s == pytest.approx(step_s, rel=1e-3)


# Which links each exchange takes

EFF, NONE = Efficiency(), Speed(0.0, 0.0)


def small_setup(layout: Layout, per_node: int = 8, **more: object) -> Setup:
    """A small decoder of eight layers on H100s; launching its kernels takes next to no time beside 4096 tokens."""
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    fabric = Fabric(chip, layout.world_size, per_node, per_node, 450.0, 400.0)
    model = DecoderModel(8, 2048, 16, 16, 128, 8192, 32_000)
    return replace(Setup(model, layout, fabric, 4096, 2.0, 4), **more)  # type: ignore[arg-type]


def test_gradients_cross_nodes_where_the_ranks_do() -> None:
    inside, across = (step_parts(small_setup(Layout(dp_shard=8), per_node), EFF) for per_node in (8, 4))
    assert (inside.gradients_tier, across.gradients_tier) == ("scaleup", "network")
    assert across.gradients_each_s > inside.gradients_each_s > 0


def test_sharded_parameters_are_exchanged_for_each_micro_batch_and_whole_ones_once() -> None:
    sharded = step_parts(small_setup(Layout(dp_shard=8)), EFF)
    whole = step_parts(small_setup(Layout(dp_replicate=8)), EFF)
    assert sharded.gradients_each_s > 10 * abs(sharded.gradients_once_s)
    assert whole.gradients_each_s == pytest.approx(0.0, abs=1e-12) and whole.gradients_once_s > 0
    setup = small_setup(Layout(dp_replicate=8))
    groups = axis_groups(setup.layout, setup.fabric, EFF)
    (stage,) = rank_parts(micro_batch(setup, groups, EFF), setup.layout)
    assert whole.gradients_once_s == pytest.approx(data_parallel_s(stage.whole, setup, groups, EFF))


def test_exchanges_inside_layers_take_the_links_of_their_axis() -> None:
    """Tensor parallelism inside a node; context parallelism of 4 over nodes of 4, with 2 tensor-parallel ranks."""
    (near,) = step_parts(small_setup(Layout(tp=8)), EFF).stages
    assert near.scaleup != NONE and near.network == NONE
    (both,) = step_parts(small_setup(Layout(tp=2, cp=4), per_node=4), EFF).stages
    assert both.scaleup != NONE and both.network != NONE
    (alone,) = step_parts(small_setup(Layout(dp_shard=8)), EFF).stages
    assert alone.scaleup == alone.network == NONE
    setup = small_setup(Layout(tp=2, cp=4), per_node=4)
    once = micro_batch(setup, axis_groups(setup.layout, setup.fabric, EFF), EFF)
    assert both.scaleup.time_s(2, 1) == pytest.approx(2 * (8 * once.layer.tp + once.head.tp))
    assert both.network.time_s(2, 1) == pytest.approx(8 * 3 * once.layer.cp)


def test_a_stage_computes_forward_backward_and_what_is_done_again() -> None:
    """Eight devices wait for nobody; sixteen wait 1% of the work for the slowest."""
    for recompute in ("none", "full"):
        setup = small_setup(Layout(dp_shard=8), recompute=RECOMPUTE[recompute])
        groups = axis_groups(setup.layout, setup.fabric, EFF)
        (whole,) = rank_parts(micro_batch(setup, groups, EFF), setup.layout)
        (stage,) = step_parts(setup, EFF).stages
        again_s = recompute_part_s(whole.layers, setup.recompute)
        time = whole.whole
        assert stage.compute.time_s(2, 1) == pytest.approx(time.forward + time.backward + again_s)
        assert stage.compute.fixed_s >= 0 and stage.compute.per_sample_s > 0
        wide = replace(setup, fabric=replace(setup.fabric, num_devices=16))
        (waiting,) = step_parts(wide, EFF).stages
        assert waiting.compute.per_sample_s == pytest.approx((1 + EFF.jitter) * stage.compute.per_sample_s)


def test_sends_between_stages_take_the_pipelines_links() -> None:
    near, far = (step_parts(small_setup(Layout(pp=8), per_node), EFF) for per_node in (8, 1))
    assert (near.sends_tier, far.sends_tier) == ("scaleup", "network")
    assert far.sends.per_sample_s > near.sends.per_sample_s > 0
    assert len(near.stages) == 8
    one = step_parts(small_setup(Layout(dp_shard=8)), EFF)
    assert (one.sends, one.bubble) == (NONE, 0.0)
    assert step_parts(small_setup(Layout(pp=8)), EFF).bubble == pytest.approx(EFF.bubble)
    interleaved = Layout(pp=4, dp_shard=2, pipeline_schedule="interleaved", virtual_stages=2)
    assert step_parts(small_setup(interleaved), EFF).bubble == pytest.approx(EFF.bubble / 2)


def test_between_steps_the_host_works_for_a_while_that_graphs_shorten() -> None:
    plain, graphed = (
        step_parts(small_setup(Layout(dp_shard=8), software=Software(graphs=graphs)), EFF) for graphs in (False, True)
    )
    assert plain.rest_s - graphed.rest_s == pytest.approx(EFF.step_s - EFF.step_graphed_s)
    assert plain.rest_s > EFF.step_s, "and the optimizer"
    (stage,), (launched,) = graphed.stages, plain.stages
    assert stage.launch_s == 0.0 < launched.launch_s
