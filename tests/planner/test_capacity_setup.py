"""What a candidate was estimated for, and the micro-batches that fit beside its own."""

from dataclasses import replace

import pytest

from trainspec_cli.planner.capacity import largest_micro_batch, plan_on_what_divides, setup_of
from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.memory.predict import predict_memory
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.session.recipe.load import load_for_planning

SHORT = ["recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=2", "data.seq_len=1024", "batching.micro_batch_size=2"]


def planned(*arguments: str) -> tuple[RunSpec, Candidate]:
    spec, capacity = plan_on_what_divides(load_for_planning([*SHORT, *arguments]).spec)
    assert capacity.best is not None
    return spec, capacity.best


@pytest.mark.parametrize("offload", ["none", "optimizer", "auto"])
def test_the_setup_of_a_candidate_is_the_one_that_it_was_estimated_for(offload: str) -> None:
    spec, candidate = planned(f"offload={offload}")
    setup = setup_of(candidate, spec, None)
    assert estimate_step(setup, efficiency_of(spec.cluster)).total_s == candidate.step_time_s
    assert setup.offload_optimizer == (offload == "optimizer")


def test_the_largest_micro_batch_is_what_fits_up_to_twice_the_planned_one() -> None:
    spec, candidate = planned("layout.zero_stage=3", "layout.dp_shard=16")
    setup = setup_of(candidate, spec, None)
    assert largest_micro_batch(candidate, setup, AUTO) == 4
    tight = replace(candidate, memory_limit_bytes=candidate.peak_memory_bytes)
    assert largest_micro_batch(tight, setup, AUTO) == 2


def test_a_micro_batch_that_is_asked_for_is_given_as_far_as_it_fits() -> None:
    spec, candidate = planned("layout.zero_stage=3", "layout.dp_shard=16")
    setup = setup_of(candidate, spec, None)
    assert [largest_micro_batch(candidate, setup, wanted) for wanted in (2, 3, 6)] == [2, 3, 6]
    fits = largest_micro_batch(candidate, setup, 4096)
    assert 6 < fits < 4096
    most_bytes = [
        max(stage.total_bytes for stage in predict_memory(replace(setup, micro_batch_size=size), candidate.recompute))
        for size in (fits, fits + 1)
    ]
    assert most_bytes[0] <= candidate.memory_limit_bytes < most_bytes[1]
