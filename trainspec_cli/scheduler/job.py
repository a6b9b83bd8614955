"""A planned run as its simulation knows it, and a step of it with any division of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from trainspec_cli.planner.capacity import describe_fabric, efficiency_of, largest_micro_batch, setup_of
from trainspec_cli.planner.search.auto import replica_groups_of
from trainspec_cli.planner.time.samples import step_parts
from trainspec_cli.policy.division import Division, Portion, even_division, take_portion
from trainspec_cli.policy.scheduling import reporting_interval
from trainspec_cli.scheduler.cluster import Cluster, Condition, StepSeconds
from trainspec_cli.scheduler.ideal import RankRows
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.prediction import Candidate

READ_S = 1.0
"""A step's text is read in this time where it was not read ahead: an assumption."""


@dataclass(frozen=True)
class DisturbedJob:
    """A planned run as the simulation knows it."""

    cluster: Cluster
    layout: Layout
    """Each replica group has it."""
    even: Division
    """A replica group divides its samples so where its ranks are equally fast."""
    batching: BatchingSpec
    groups: tuple[RankRows, ...]
    largest_micro_batch: int
    change: float
    """A change of a speed is confirmed from this fraction on."""
    change_s: float
    """A change of shares costs so much, and `COST_STEPS` at most."""
    keeps_micro_batches: bool
    num_nodes: int
    devices_per_node: int

    def interval(self, step_s: float) -> int:
        """Return how many steps of `step_s` lie between two exchanges of the ranks' speeds."""
        return reporting_interval(self.layout.world_size, step_s)

    def portions(self, weights: Sequence[float]) -> list[Portion]:
        """Return the samples of each group that is there."""
        total, groups = self.batching.global_batch_size, len(self.groups)
        return [take_portion(self.batching, total, weights, groups, 0, place) for place in range(len(weights))]


def describe_job(spec: RunSpec, candidate: Candidate, machine: Machine | None) -> DisturbedJob:
    """Return the job of a candidate that was planned for this spec."""
    fabric, setup = describe_fabric(spec.cluster, machine), setup_of(candidate, spec, machine)
    number, layout = replica_groups_of(spec, candidate), candidate.layout
    own = replace(layout, dp_replicate=layout.dp_replicate // number)
    size, most = own.data_parallel_size, largest_micro_batch(candidate, setup, spec.scheduler.max_micro_batch_size)
    compiles = spec.compile and most > candidate.micro_batch_size
    return DisturbedJob(
        cluster=Cluster(
            step_parts(setup, efficiency_of(spec.cluster)),
            layout,
            spec.cluster.num_nodes,
            fabric.devices_per_node,
            number,
        ),
        layout=own,
        even=even_division(own, candidate.micro_batch_size),
        batching=spec.batching,
        groups=tuple(RankRows(slice(group * size, (group + 1) * size), size) for group in range(number)),
        largest_micro_batch=most,
        change=spec.scheduler.change,
        change_s=inf if compiles or spec.model.unit == "samples" else READ_S,
        keeps_micro_batches=spec.model.unit == "samples",
        num_nodes=spec.cluster.num_nodes,
        devices_per_node=fabric.devices_per_node,
    )


@dataclass(frozen=True)
class Taken:
    """The samples of a present group's data-parallel ranks in a step."""

    counts: tuple[int, ...]
    micro_batches: int


def take(portions: Sequence[Portion], divisions: Sequence[Division]) -> list[Taken]:
    return [
        Taken(division.counts(portion.samples), division.count_micro_batches(portion.samples))
        for portion, division in zip(portions, divisions, strict=True)
    ]


def seconds_of(job: DisturbedJob, condition: Condition, present: Sequence[int], taken: Sequence[Taken]) -> StepSeconds:
    """Return the times of a step; ranks of a group that is away process nothing."""
    counts, micro_batches = np.zeros((2, job.cluster.ranks))
    for group, own in zip(present, taken, strict=True):
        counts[job.groups[group].rows], micro_batches[job.groups[group].rows] = own.counts, own.micro_batches
    return job.cluster.seconds(condition, counts, micro_batches)
