"""A step taken apart by who processes which samples: the parts are the whole, and grow as the estimate does."""

from dataclasses import replace

import pytest

from trainspec_cli.planner.capacity import efficiency_of, setup_of
from trainspec_cli.planner.search.variants import plan_on_what_divides
from trainspec_cli.planner.time.samples import StepParts, step_parts
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.session.load import load_for_planning
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.prediction import Candidate

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
