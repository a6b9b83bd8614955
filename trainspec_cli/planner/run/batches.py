"""The steps of a run whose batch changes: how many of each size, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from trainspec_cli.balance.batch.batch import run_phases, schedule_batches
from trainspec_cli.balance.batch.division import micro_batches_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import BatchForecast
from trainspec_cli.recipe.results.plan import Candidate, SizedStep, StepTime

PREDICTED_SIZES = 6
"""Sizes of a changing batch that are predicted; those between them are interpolated."""


@dataclass(frozen=True)
class RunWork:
    """The undisturbed work of a run."""

    steps: int
    time: StepTime
    """The mean step."""
    step_time_s: float
    batches: tuple[BatchForecast, ...] = ()
    """The steps of each size; empty where the batch is constant, or nobody knows yet how it will change."""

    @property
    def work_s(self) -> float:
        return self.steps * self.step_time_s


def predict_sizes(setup: Setup, spec: RunSpec, eff: Efficiency) -> tuple[SizedStep, ...]:
    """Predict steps of the sizes that the run will have, smallest first; none where the first is the only one.

    Layout and micro-batch stay, and the number of micro-batches follows the size.
    """

    def predict(samples: int) -> SizedStep:
        micro_batches = micro_batches_of(setup.layout, setup.micro_batch_size, samples)
        return SizedStep(samples, estimate_step(replace(setup, grad_accum=micro_batches), eff))

    return tuple(map(predict, sizes_to_predict(spec)))


def sizes_to_predict(spec: RunSpec) -> Sequence[int]:
    """Return the sizes of a batch that changes, or some of many; none of one that does not."""
    sizes = sorted({phase.step_samples for phase in run_phases(schedule_batches(spec))})
    return () if sizes == [spec.batching.global_batch_size] else _spread(sizes)


def main_size(spec: RunSpec) -> int:
    """Return the size of the steps that train most of the run's samples: layouts are chosen for it."""
    phases = run_phases(schedule_batches(spec))
    return max(phases, key=lambda phase: phase.steps * phase.step_samples).step_samples


def _spread(sizes: Sequence[int]) -> Sequence[int]:
    """Return the first, the last and some between."""
    last = len(sizes) - 1
    places = {round(place * last / (PREDICTED_SIZES - 1)) for place in range(PREDICTED_SIZES)}
    return [sizes[place] for place in sorted(places)]


def expect_work(spec: RunSpec, candidate: Candidate) -> RunWork:
    """Add up the steps of `candidate` over the sizes of the run."""
    if not candidate.sized_steps:
        return RunWork(spec.train.max_steps, candidate.time, candidate.step_time_s)
    phases = run_phases(schedule_batches(spec))
    times = [_interpolate(candidate.sized_steps, phase.step_samples) for phase in phases]
    steps = sum(phase.steps for phase in phases)
    shares = [phase.steps / steps for phase in phases]
    mean = weigh_times(times, shares)
    batches = tuple(
        BatchForecast(phase.step_samples, phase.steps, time.total_s) for phase, time in zip(phases, times, strict=True)
    )
    return RunWork(steps, mean, mean.total_s, batches)


def _interpolate(sized: Sequence[SizedStep], samples: int) -> StepTime:
    """Linear between the sizes that were predicted: a step is a fixed part and so much for each micro-batch."""
    for below, above in pairwise(sized):
        if samples <= above.samples:
            part = (samples - below.samples) / (above.samples - below.samples)
            return weigh_times((below.time, above.time), (1 - part, part))
    return sized[-1].time


def weigh_times(times: Sequence[StepTime], shares: Sequence[float]) -> StepTime:
    """Return the mean of steps, part by part."""
    names = [field.name for field in fields(StepTime)]
    return StepTime(
        **{
            name: sum(share * float(getattr(time, name)) for time, share in zip(times, shares, strict=True))
            for name in names
        }
    )
