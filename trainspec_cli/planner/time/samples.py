"""Step time as a function of each rank's number of samples, by stage, micro-batch and exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.planner.hardware.cluster import Group, axis_groups
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import (
    PASSES,
    MicroBatch,
    RankParts,
    assemble_step,
    between_steps_s,
    bubble_s,
    data_parallel_s,
    host_wait_s,
    micro_batch,
    optimizer_s,
    pipeline_sends_s,
    rank_parts,
    runs_eagerly,
    slowest_rank,
    step_of_rank,
    waiting_share,
)

Tier = Literal["scaleup", "network"]
"""scaleup: links inside a scale-up domain. network: links between domains."""


@dataclass(frozen=True)
class StageTime:
    """Time of one micro-batch in one pipeline stage, forward and backward."""

    compute: Speed
    scaleup: Speed
    """Time of exchanges inside layers (tensor, context, expert parallelism) over the links of a scale-up domain."""
    network: Speed
    """Time of exchanges that cross domains."""
    launch_s: float
    """Time to launch the kernels, which is a lower bound on the stage's time."""


@dataclass(frozen=True)
class StepParts:
    """The parts of a layout's step, from which step times for other divisions of the samples follow."""

    stages: tuple[StageTime, ...]
    bubble: float
    """Waiting time of the slowest stage while the pipeline fills and drains, as a fraction of the other stages'
    micro-batch time."""
    sends: Speed
    """Time in seconds to send activations between stages, per micro-batch."""
    sends_tier: Tier
    gradients_each_s: float
    """Time in seconds of data-parallel exchanges, per micro-batch."""
    gradients_once_s: float
    """Time in seconds of data-parallel exchanges that happen once per step."""
    gradients_tier: Tier
    optimizer_s: float
    """Time of the update on a device of normal speed."""
    rest_s: float
    """Other time per step: between steps, and for the sends that fill and drain the pipeline. It also includes the
    difference between an eager step of the engine (`EngineStep`) and these closed forms, which may be negative."""


def step_parts(setup: Setup, eff: Efficiency) -> StepParts:
    """Return the parts of a step. With the setup's micro-batches, they sum to `estimate_step`.

    A micro-batch's time is assumed to be linear in its samples; the line passes through the times at the setup's size
    and at twice that size."""
    groups = axis_groups(setup.layout, setup.fabric, eff)
    return assemble_parts(setup, micro_batch(setup, groups, eff), micro_batch(_twice(setup), groups, eff), eff)


def assemble_parts(setup: Setup, once: MicroBatch, twice: MicroBatch, eff: Efficiency) -> StepParts:
    """Return `step_parts`, based on a micro-batch of the setup's size and one of twice that size."""
    groups = axis_groups(setup.layout, setup.fabric, eff)
    stages = rank_parts(once, setup.layout)
    larger = rank_parts(twice, setup.layout)
    scale = 1 + waiting_share(setup, eff)
    times = [stage.time_s(setup) for stage in stages]
    slowest = stages[times.index(max(times))].whole
    waits_s = sum(times) - max(times)
    each_s, once_s = _each_and_once(lambda one: data_parallel_s(slowest, one, groups, eff), setup)
    sends_each_s, fill_sends_s = _each_and_once(lambda one: pipeline_sends_s(one, groups["pp"], eff), setup)
    sends_twice_s, _ = _each_and_once(lambda one: pipeline_sends_s(one, groups["pp"], eff), _twice(setup))
    # Most stages of a pipeline are equal, so each distinct pair of parts is timed only once.
    pairs = list(zip(stages, larger, strict=True))
    kinds = {pair: _stage_time(*pair, setup, groups, eff, scale) for pair in set(pairs)}
    uncounted_s = 0.0
    if runs_eagerly(setup):
        closed = step_of_rank(slowest_rank(once, setup, eff), setup, once.rates, groups, eff)
        uncounted_s = assemble_step(setup, once, groups, eff).total_s - closed.total_s
    return StepParts(
        stages=tuple(kinds[pair] for pair in pairs),
        bubble=eff.bubble * bubble_s(times, setup.layout, setup.grad_accum) / waits_s if waits_s else 0.0,
        sends=_through(sends_each_s, sends_twice_s, setup.micro_batch_size).scaled(scale),
        sends_tier=_tier(groups["pp"]),
        gradients_each_s=scale * each_s,
        gradients_once_s=scale * once_s,
        gradients_tier=_tier(groups["dp"]),
        optimizer_s=scale * optimizer_s(slowest, setup, once.rates, groups, eff),
        rest_s=scale * fill_sends_s + between_steps_s(setup, eff) + uncounted_s,
    )


def _twice(setup: Setup) -> Setup:
    return replace(setup, micro_batch_size=2 * setup.micro_batch_size)


def _stage_time(
    stage: RankParts, twice: RankParts, setup: Setup, groups: dict[str, Group], eff: Efficiency, scale: float
) -> StageTime:
    size = setup.micro_batch_size
    links: dict[Tier, Speed] = {"scaleup": Speed(0.0, 0.0), "network": Speed(0.0, 0.0)}
    for axis, passes in PASSES.items():
        tier = _tier(groups[axis])
        own = _through(passes * getattr(stage.whole, axis), passes * getattr(twice.whole, axis), size)
        links[tier] = Speed(links[tier].fixed_s + own.fixed_s, links[tier].per_sample_s + own.per_sample_s)
    compute = _through(stage.compute_s(setup), twice.compute_s(setup), size)
    launch_s = host_wait_s(stage.whole, 0.0, setup, eff)
    return StageTime(
        compute.scaled(scale), links["scaleup"].scaled(scale), links["network"].scaled(scale), scale * launch_s
    )


def _through(once_s: float, twice_s: float, size: float) -> Speed:
    """Return the line through the times of `size` and 2 x `size` samples. Its constant part is at least 0."""
    fixed_s = fixed_part_s(once_s, twice_s)
    return Speed(fixed_s, (once_s - fixed_s) / size)


def fixed_part_s(once_s: float, twice_s: float) -> float:
    """Return the part of a micro-batch's time that does not grow with its samples, in seconds, given its time and that
    of twice the samples. It is 0 if twice the samples take more than twice as long."""
    return min(once_s, max(0.0, 2 * once_s - twice_s))


def _each_and_once(time_s: Callable[[Setup], float], setup: Setup) -> tuple[float, float]:
    """Split a time into a part per micro-batch and a fixed remainder."""
    # Micro-batches are equal, so the second one shows the cost of each; the remainder is incurred once.
    one, two = (time_s(replace(setup, grad_accum=count)) for count in (1, 2))
    return two - one, 2 * one - two


def _tier(group: Group) -> Tier:
    return "network" if group.crosses else "scaleup"
