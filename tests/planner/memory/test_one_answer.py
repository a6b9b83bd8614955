"""A run has one figure for its memory, wherever it comes from; a search drops no layout that fits by that figure."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from trainspec_cli.core.printable import GIB, format_bytes
from trainspec_cli.planner.capacity import SLACK, as_plan, plan_capacity, search_of, setup_of
from trainspec_cli.planner.hardware.cluster import accelerator_of, describe_fabric, efficiency_of
from trainspec_cli.planner.memory.predict import layer_memory, memory_limit_bytes, peak_of, predict_memory
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import device_limit_bytes, predict_device
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.text import describe_prediction
from trainspec_cli.session.recipe.load import load_for_planning


def machine(name: str, gib: float) -> Machine:
    return Machine("node", 64, 2**40, gpu_names=(name,) * 8, gpu_memory_bytes=int(gib * GIB), bf16=True, fp8=True)


H100S = machine("NVIDIA H100 80GB HBM3", 79.65)
A100S = machine("NVIDIA A100-SXM4-80GB", 79.2)
SMALL_A100S = machine("NVIDIA A100-SXM4-40GB", 39.5)


def spec_of(*arguments: str) -> RunSpec:
    spec = load_for_planning(["cluster.num_nodes=1", *arguments]).spec
    return replace(spec, cluster=replace(spec.cluster, accelerator=None, devices_per_node=8))


PAIRS = {
    "zero 1": (("recipe=llama3_8b", "layout.zero_stage=1"), H100S),
    "offloaded": (("recipe=qwen3_8b", "offload=auto"), SMALL_A100S),
    "compressed": (("recipe=qwen3_8b", "comm.gradients=int8", "layout.pp=1"), H100S),
}
MORE_PAIRS = {
    "sharded": (("recipe=llama3_8b",), H100S),
    "stages": (("recipe=qwen3_8b", "layout.pp=2"), H100S),
    "small": (("recipe=qwen3_1_7b",), SMALL_A100S),
    "state space": (("recipe=mamba2_1b",), A100S),
    "convolutions": (("recipe=resnet50",), H100S),
    "experts": (("recipe=gpt_oss_20b",), H100S),
}


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        *(pytest.param(*pair, id=name) for name, pair in PAIRS.items()),
        *(pytest.param(*pair, id=name, marks=pytest.mark.slow) for name, pair in MORE_PAIRS.items()),
    ],
)
def test_plan_launch_and_a_described_cluster_give_one_figure(recipe: tuple[str, ...], found: Machine) -> None:
    spec = spec_of(*recipe)
    capacity = plan_capacity(spec, found)
    best = capacity.best
    assert best is not None
    figure = best.peak_memory_bytes
    assert figure == best.fullest_memory.total_bytes
    assert figure == max(stage.total_bytes for stage in predict_memory(setup_of(best, spec, found), best.recompute))
    launched = as_plan(spec, best, capacity, "bf16")
    prediction = predict_device(launched, found)
    assert prediction.needed_bytes == pytest.approx(figure, rel=1e-12)
    assert device_limit_bytes(launched, found) == best.memory_limit_bytes
    assert format_bytes(figure) in describe_prediction(prediction, launched.tokens_per_step)
    described = replace(spec, cluster=replace(spec.cluster, accelerator=accelerator_of(found)))
    stages = predict_memory(setup_of(best, described, None), best.recompute)
    assert max(stage.total_bytes for stage in stages) == figure


def test_a_launch_takes_the_offload_that_the_search_has_chosen() -> None:
    spec = spec_of("recipe=qwen3_14b", "offload=auto")
    planned = plan(spec, SMALL_A100S)
    assert planned.offload == "optimizer"
    assert predict_device(planned, SMALL_A100S).needed_bytes <= device_limit_bytes(planned, SMALL_A100S)


OPEN = ("layout.dp_shard=auto", "layout.dp_replicate=auto", "layout.tp=auto", "layout.cp=auto", "layout.pp=auto")


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        ("qwen3_0_6b", "true"),
        *(
            pytest.param(recipe, compiled, marks=pytest.mark.slow)
            for recipe in ("qwen3_8b", "llama3_70b", "mixtral_8x7b")
            for compiled in ("true", "false")
        ),
    ],
)
def test_the_searchs_estimate_refuses_nothing_that_fits(recipe: str, compiled: str) -> None:
    """Layouts drawn from the whole space, with and without recomputation. With whole logits of large micro-batches
    the estimate once was 11 times the count, which makes logits in chunks."""
    spec = load_for_planning([f"recipe={recipe}", "cluster=h100", f"compile={compiled}", *OPEN]).spec
    search = search_of(spec, describe_fabric(spec.cluster, None), efficiency_of(spec.cluster))
    limit_bytes = memory_limit_bytes(search.template.fabric.chip)
    fitting = 0
    for option in random.Random(2).sample(list(search.bounded()), 24):
        for number, name in enumerate(search.recomputes):
            setup, rough_bytes = search.peak(option._replace(recompute=number))
            if rough_bytes > SLACK * limit_bytes:
                assert max(stage.total_bytes for stage in predict_memory(setup, name)) > limit_bytes, setup.layout
            else:
                fitting += 1
    assert fitting > 5


def test_the_searchs_estimate_counts_gradients_that_replicas_exchange_once_a_step() -> None:
    """Two replicas of eight shards, 32 micro-batches: whole sums of gradients, without which a layout that takes 99 GiB
    would surely fit, and its recomputation would not be tried. Groups that exchange between themselves keep shards."""
    layout = ("layout=fsdp", "layout.dp_shard=8", "layout.dp_replicate=2", "batching.micro_batch_size=1")
    arguments = ("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=2", *layout, "compile=false")
    spec = load_for_planning(arguments).spec
    best = plan_capacity(spec).best
    assert best is not None and best.recompute == "full"
    setup = setup_of(best, spec, None)
    assert peak_of(setup, layer_memory(setup, "full")) == pytest.approx(best.peak_memory_bytes, rel=0.1)
    whole_bytes = 4 * count_params(spec.model)
    assert best.fullest_memory.gradients_bytes > whole_bytes
    inside = replace(spec.layout, dp_replicate=1)
    grouped = plan_capacity(replace(spec, layout=inside, resilience=ResilienceSpec(mode="elastic", replica_groups=2)))
    assert grouped.best is not None and grouped.best.fullest_memory.gradients_bytes < whole_bytes
