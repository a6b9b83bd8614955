"""The plan of a run that continues with fewer nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.session.launching import changes as fewer_nodes
from trainspec_cli.session.launching.changes import plan_on_fewer
from trainspec_cli.session.recipe.load import load, plan_on

THREE = ("recipe=tiny", "model.num_layers=6", "cluster.num_nodes=3", "cluster.devices_per_node=2", "run.dir=/run")


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.session.planning.predict.known_probe", lambda *_: None)


def plan_of(machine: Machine, *arguments: str) -> Plan:
    return plan_on(load([*THREE, *arguments]), machine)


@pytest.mark.parametrize(
    ("arguments", "nodes", "layout"),
    [
        ((), 2, Layout(dp_replicate=4)),
        (("layout.dp_replicate=6", "layout.dp_shard=1"), 2, Layout(dp_replicate=4)),
        (("layout=fsdp",), 2, Layout(dp_shard=4)),
        (("layout.dp_shard=6", "layout.dp_replicate=1"), 1, Layout(dp_shard=2)),
        (("layout.dp_shard=3", "layout.dp_replicate=2"), 2, Layout(dp_shard=4)),
        (("layout.tp=2",), 1, Layout(tp=2, sequence_parallel=True)),
        (("layout.pp=3", "layout.dp_replicate=2"), 2, Layout(pp=2, dp_replicate=2)),
        (("layout.pp=6",), 2, Layout(pp=4)),
    ],
)
def test_the_layout_is_the_recipes_as_far_as_it_divides_the_nodes(
    here: Machine, arguments: tuple[str, ...], nodes: int, layout: Layout
) -> None:
    before = plan_of(here, *arguments)
    fewer = plan_on_fewer(before, nodes, machine=here)
    assert fewer is not None
    assert replace(fewer.layout, stage_layers=None, sequence_parallel=layout.sequence_parallel) == layout
    assert (fewer.num_nodes, fewer.devices_per_node, fewer.layout.world_size) == (nodes, 2, 2 * nodes)
    assert (fewer.spec.cluster.num_nodes, fewer.spec.batching) == (nodes, before.spec.batching)
    batch = before.spec.batching.global_batch_size
    assert fewer.micro_batch_size * fewer.grad_accum_steps * fewer.layout.data_parallel_size >= batch


def test_kernels_stay_and_planned_changes_of_layout_do_not(here: Machine) -> None:
    before = plan_of(here, "scheduler.changes=[{step: 5, dp_shard: 6, dp_replicate: 1}]")
    assert before.changes
    before = replace(before, kernels=replace(before.kernels, adamw="for_loop"))
    fewer = plan_on_fewer(before, 2, machine=here)
    assert fewer is not None
    assert (fewer.kernels.adamw, fewer.changes) == ("for_loop", ())


def test_a_layout_that_needs_the_node_has_no_plan_without_it_unless_memory_is_predicted(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six devices in pairs of three: four leave no group of three."""
    before = plan_of(here, "layout.cp=3", "layout.dp_replicate=2", "data.seq_len=48")
    assert plan_on_fewer(before, 2, machine=here) is None
    predict = fewer_nodes.predict
    predicted = object()
    monkeypatch.setattr(
        fewer_nodes, "predict", lambda *given, **more: replace(predict(*given, **more), prediction=predicted)
    )
    fewer = plan_on_fewer(before, 2, machine=here)
    assert fewer is not None
    assert fewer.layout == Layout(dp_replicate=4, sequence_parallel=False)


def test_a_plan_that_does_not_fit_is_none(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainspec_cli.core.errors import PlanError

    def refuse(*given: object, **more: object) -> Plan:
        assert more == {"force": False}
        raise PlanError("it does not fit")

    before = plan_of(here)
    monkeypatch.setattr(fewer_nodes, "predict", refuse)
    assert plan_on_fewer(before, 2, machine=here) is None


def test_a_layout_that_cannot_read_the_8_bit_state_is_passed_over(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four devices have no group of three for the three heads, so that the only plans left are without tp."""
    three = ("model.num_heads=3", "model.num_kv_heads=3", "model.head_dim=16", "model.ffn_size=192")
    layout = ("layout.tp=3", "layout.dp_replicate=2", "model.vocab_size=513", "layout.sequence_parallel=false")
    predict, predicted = fewer_nodes.predict, object()
    monkeypatch.setattr(
        fewer_nodes, "predict", lambda *given, **more: replace(predict(*given, **more), prediction=predicted)
    )
    for optimizer, has_plan in (("adamw", True), ("adamw8bit", False)):
        before = plan_of(here, *three, *layout, f"optim={optimizer}")
        assert (plan_on_fewer(before, 2, machine=here) is not None) == has_plan
