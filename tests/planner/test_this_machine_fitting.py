"""What would fit: found by predicting it."""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import suggest
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan

SPEC = RunSpec(
    model=DecoderModel(4, 64, 2, 2, 32, 128, 512, tied_embeddings=True),
    data=DataSpec(seq_len=256, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16, micro_batch_size=8),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
)
MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
PLAN = plan(SPEC, MACHINE)


def made_up(plan: Plan) -> LocalPrediction:
    """20 bytes of states, shared by shards, 10 for every sample at a time, and 5 that nobody measures."""
    return LocalPrediction({}, {"states": 20 / plan.layout.dp_shard, "samples": 10.0 * plan.micro_batch_size}, {"x": 5})


def test_what_would_fit_is_found() -> None:
    assert suggest(PLAN, made_up, 105) == "batching.micro_batch_size=8"
    assert suggest(PLAN, made_up, 104) == "batching.micro_batch_size=4"
    assert suggest(PLAN, made_up, 34) == "layout.dp_replicate=1 layout.dp_shard=2 batching.micro_batch_size=1"
    assert suggest(PLAN, made_up, 24) == ""


def test_what_would_fit_of_a_batch_that_does_not_divide() -> None:
    """Seven samples on the rank that has most."""
    odd = plan(replace(SPEC, batching=BatchingSpec(13, micro_batch_size=8)), MACHINE)
    assert (odd.micro_batch_size, odd.grad_accum_steps) == (7, 1)
    assert suggest(odd, made_up, 95) == "batching.micro_batch_size=7"
    assert suggest(odd, made_up, 94) == "batching.micro_batch_size=4"
    assert suggest(odd, made_up, 64) == "batching.micro_batch_size=3"
    tried: list[tuple[int, int]] = []

    def never(plan: Plan) -> LocalPrediction:
        tried.append((plan.micro_batch_size, plan.grad_accum_steps))
        return made_up(plan)

    assert suggest(odd, never, 0) == ""
    assert tried == [(7, 1), (4, 2), (3, 3), (2, 4), (1, 7)] * 2
