"""A step traced under fake tensors, against what is known of it in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.tracing import Trace

from trainspec_cli.planner.workload import count_params, flops_per_token
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.tools import trace_plan
from trainspec_cli.wings.certify.cases import Case, build_plan


def plan_of(family: str, **axes: int) -> Plan:
    return build_plan(Case(family, Layout(**axes), optimizer="adamw"), "cpu")


def test_sharding_divides_the_state_and_gathers_what_it_divided(trace: Trace) -> None:
    alone, sharded = trace(plan_of("dense")), trace(plan_of("dense", dp_shard=4))
    params = count_params(plan_of("dense").spec.model)
    assert alone.state_bytes == pytest.approx(12 * params, rel=0.05), "fp32 weights and two moments, and tables"
    assert sharded.state_bytes == pytest.approx(12 * params / 4, rel=0.1)
    assert {kind.split()[1] for kind in alone.comm_bytes} == {"all_reduce"}
    assert sharded.comm_bytes["dp_shard reduce_scatter"] == pytest.approx(4 * params, rel=0.02)
    assert sharded.flops == pytest.approx(alone.flops / 4), "each rank has a quarter of the samples"
    assert sharded.peak_memory_bytes < alone.peak_memory_bytes


@pytest.mark.slow
def test_a_world_that_is_not_there_is_traced() -> None:
    plan = plan_of("dense", dp_replicate=1, dp_shard=2, tp=2, pp=2)
    told = trace_plan(plan)
    assert told.state_bytes < 12 * count_params(plan.spec.model) / 4
    assert {"pp send", "pp receive", "dp_shard all_gather", "tp reduce_scatter"} <= told.comm_bytes.keys()


@pytest.mark.slow
def test_adapters_take_the_flops_that_are_planned(trace: Trace) -> None:
    """Frozen weights have no gradients; nor has the first layer's input, which the plan does not count off."""
    whole = build_plan(Case("dense", optimizer="adamw"), "cpu")
    few = replace(whole, spec=replace(whole.spec, lora=LoraSpec(rank=4)))
    traced, planned = (
        [trace(plan).flops for plan in (whole, few)],
        [flops_per_token(plan.spec.model, plan.spec.data.seq_len, plan.spec.lora) for plan in (whole, few)],
    )
    assert traced[1] / traced[0] == pytest.approx(planned[1] / planned[0], rel=0.05)


@pytest.mark.slow
def test_experts_travel(trace: Trace) -> None:
    assert trace(plan_of("moe", dp_shard=2, ep=2)).comm_bytes["ep all_to_all"] > 0
