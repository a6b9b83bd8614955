"""What searches compute once is what each layout would be given by itself."""

from __future__ import annotations

from dataclasses import replace

from tests.planner.search.test_search import run_of
from trainspec_cli.planner.capacity import softwares_of, template_of
from trainspec_cli.planner.hardware.cluster import axis_groups, describe_fabric
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.pipeline import cut, is_open
from trainspec_cli.planner.search.search import Costs, costs_of
from trainspec_cli.planner.search.space import Space
from trainspec_cli.planner.setup import changed
from trainspec_cli.planner.time.step import assemble_step, mean_times, micro_batch
from trainspec_cli.recipe.keys.layout import Layout

EFF = Efficiency()


def test_a_step_of_shared_parts_is_that_of_the_layout_alone() -> None:
    spec = run_of("mixtral_8x7b", nodes=2, batch=64)
    template = template_of(spec, describe_fabric(spec.cluster, None))
    costs = costs_of(template, tuple(softwares_of(spec).items()), EFF)
    for layout, micro, accum in list(Space(spec, 16, 8).layouts())[::7]:
        setup = costs.setup(layout, micro, accum, "full")
        groups = axis_groups(layout, setup.fabric, EFF)
        once = micro_batch(setup, groups, EFF)
        whole = replace(setup, layout=cut(mean_times(once, setup), layout)) if is_open(layout, spec.model) else setup
        assert costs.steps.step_s(setup) == assemble_step(whole, once, groups, EFF).total_s


def test_searches_that_differ_in_what_they_may_choose_share_the_costs() -> None:
    spec = run_of("llama3_8b", nodes=2, batch=64)
    fabric = describe_fabric(spec.cluster, None)
    one, other = (costs_of(template_of(spec, fabric), tuple(softwares_of(spec).items()), EFF) for _ in range(2))
    eight = replace(spec, precision=replace(spec.precision, matmul="fp8"))
    assert one is other
    assert costs_of(template_of(eight, fabric), tuple(softwares_of(eight).items()), EFF) is not one


def test_searches_that_differ_in_replica_groups_share_all_but_the_exchanges() -> None:
    """Groups exchange once more, over their own ranks."""
    spec = run_of("llama3_8b", nodes=2, batch=64)
    fabric = describe_fabric(spec.cluster, None)
    softwares = tuple(softwares_of(spec).items())
    plain = template_of(spec, fabric)
    grouped = replace(plain, replica_groups=2)
    one, two = (costs_of(template, softwares, EFF) for template in (plain, grouped))
    layout = Layout(dp_replicate=16, dp_shard=1)
    assert one.works_s(layout, 1, 1) is two.works_s(layout, 1, 1)
    assert one.least_exchange_s(layout, 1, 1, "none") != two.least_exchange_s(layout, 1, 1, "none")
    alone = Costs(grouped, dict(softwares), EFF)
    assert two.least_exchange_s(layout, 1, 1, "none") == alone.least_exchange_s(layout, 1, 1, "none")
    assert two.steps.step_s(two.setup(layout, 1, 1)) == alone.steps.step_s(alone.setup(layout, 1, 1))


def test_a_record_is_changed_as_replace_does() -> None:
    spec = run_of("llama3_8b", nodes=2, batch=64)
    setup = template_of(spec, describe_fabric(spec.cluster, None))
    assert changed(setup, grad_accum=3, layout=Layout(tp=2)) == replace(setup, grad_accum=3, layout=Layout(tp=2))
    assert changed(setup.layout, pp=4) == replace(setup.layout, pp=4)
    assert hash(changed(setup, grad_accum=3)) == hash(replace(setup, grad_accum=3))
    assert setup.grad_accum == 1
