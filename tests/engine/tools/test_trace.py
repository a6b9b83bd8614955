"""A step traced under fake tensors, against what is known of it in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.launch.measuring import trace_plan
from trainspec_cli.planner.workload import count_params, flops_per_token
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.lora import LoraSpec


def trace(family: str, **axes):
    plan = build_plan(Case(family, Layout(**axes), optimizer="adamw"), "cpu")
    return plan, trace_plan(plan), count_params(plan.spec.model)


def test_sharding_divides_the_state_and_gathers_what_it_divided():
    _, alone, params = trace("dense")
    _, sharded, _ = trace("dense", dp_shard=4)
    assert alone.state_bytes == pytest.approx(12 * params, rel=0.05), "fp32 weights and two moments, and tables"
    assert sharded.state_bytes == pytest.approx(12 * params / 4, rel=0.1)
    assert {kind.split()[1] for kind in alone.comm_bytes} == {"all_reduce"}
    assert sharded.comm_bytes["dp_shard reduce_scatter"] == pytest.approx(4 * params, rel=0.02)
    assert sharded.flops == pytest.approx(alone.flops / 4), "each rank has a quarter of the samples"
    assert sharded.peak_memory_bytes < alone.peak_memory_bytes


def test_a_world_that_is_not_there_is_traced():
    _, told, params = trace("dense", dp_replicate=1, dp_shard=2, tp=2, pp=2)
    assert told.state_bytes < 12 * params / 4
    assert {"pp send", "pp receive", "dp_shard all_gather", "tp reduce_scatter"} <= told.comm_bytes.keys()


def test_adapters_take_the_flops_that_are_planned():
    """Frozen weights have no gradients; nor has the first layer's input, which the plan does not count off."""
    whole = build_plan(Case("dense", optimizer="adamw"), "cpu")
    few = replace(whole, spec=replace(whole.spec, lora=LoraSpec(rank=4)))
    traced, planned = (
        [trace_plan(plan).flops for plan in (whole, few)],
        [flops_per_token(plan.spec.model, plan.spec.data.seq_len, plan.spec.lora) for plan in (whole, few)],
    )
    assert traced[1] / traced[0] == pytest.approx(planned[1] / planned[0], rel=0.05)


def test_experts_travel():
    _, told, _ = trace("moe", dp_shard=2, ep=2)
    assert told.comm_bytes["ep all_to_all"] > 0
