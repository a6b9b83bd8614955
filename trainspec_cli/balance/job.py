"""A planned run as the simulation sees it, in each possible layout, and its steps with any division of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from trainspec_cli.balance.batch.division import Division, Portion, even_division, take_portion
from trainspec_cli.balance.cluster import Cluster, Condition, StepSeconds
from trainspec_cli.balance.decisions.balance import LayerScheduler, expected_pause_s, with_stages
from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.decisions.shares import reporting_interval
from trainspec_cli.balance.ideal import RankRows
from trainspec_cli.balance.other_layout import OtherLayouts
from trainspec_cli.balance.paced import Paces
from trainspec_cli.planner.capacity import largest_micro_batch, setup_of
from trainspec_cli.planner.hardware.cluster import efficiency_of, group_of
from trainspec_cli.planner.pipeline import Counts
from trainspec_cli.planner.search.space import one_group
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.samples import step_parts
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import BatchingSpec
from trainspec_cli.recipe.results.plan import Candidate, LayoutProposal

READ_S = 1.0
"""Assumed time in seconds to read the text of a step that was not prefetched."""


@dataclass(frozen=True)
class DisturbedJob:
    """A planned run as the simulation sees it, in one layout."""

    cluster: Cluster
    layout: Layout
    """The layout of each replica group."""
    even: Division
    """The division of a replica group whose ranks are equally fast."""
    batching: BatchingSpec
    groups: tuple[RankRows, ...]
    largest_micro_batch: int
    change: float
    """The smallest relative change of a speed that is confirmed."""
    change_s: float
    """Cost in seconds of changing sample shares, capped at `COST_STEPS` steps."""
    keeps_micro_batches: bool
    num_nodes: int
    devices_per_node: int
    shares_change: bool = True
    """True if the scheduler may change the sample shares of ranks and groups."""
    late_steps: int = 0
    """Number of steps by which changes are delayed beyond the next step."""
    layouts: JobLayouts | None = None
    """The layer splits and layouts that the run may change to; None if it keeps its layout."""

    def interval(self, step_s: float) -> int:
        """Return how many steps of `step_s` there are between two exchanges of the ranks' speeds."""
        return reporting_interval(self.layout.world_size, step_s)

    def portions(self, weights: Sequence[float]) -> list[Portion]:
        """Return the samples of each present group."""
        total = self.batching.global_batch_size
        groups = len(self.groups)
        return [take_portion(self.batching, total, weights, groups, 0, place) for place in range(len(weights))]


def describe_job(spec: RunSpec, candidate: Candidate, machine: Machine | None) -> DisturbedJob:
    """Return the job of a candidate that was planned for this spec."""
    setup = setup_of(candidate, spec, machine)
    _, number = one_group(spec, candidate.layout)
    most = largest_micro_batch(candidate, setup, spec.scheduler.max_micro_batch_size)
    job = _job_of(spec, setup, number, most)
    if number > 1 or spec.resilience.keeps_layout:
        return job  # runs with replica groups or sites keep their layout
    others = OtherLayouts.of_candidate(spec, candidate, machine)
    return replace(job, layouts=JobLayouts(spec, others, others.memory.largest_stage_layers(setup)))


def _job_of(spec: RunSpec, setup: Setup, replica_groups: int, largest: int) -> DisturbedJob:
    layout = setup.layout
    fabric = setup.fabric
    own = replace(layout, dp_replicate=layout.dp_replicate // replica_groups)
    size = own.data_parallel_size
    keeps = spec.model.unit == "samples"
    compiles = spec.compile and largest > setup.micro_batch_size
    return DisturbedJob(
        cluster=Cluster(
            step_parts(setup, efficiency_of(spec.cluster)),
            layout,
            spec.cluster.num_nodes,
            fabric.devices_per_node,
            replica_groups,
        ),
        layout=own,
        even=even_division(own, int(setup.micro_batch_size), keeps_micro_batches=keeps),
        batching=spec.batching,
        groups=tuple(RankRows(slice(group * size, (group + 1) * size), size) for group in range(replica_groups)),
        largest_micro_batch=largest,
        change=spec.scheduler.change,
        change_s=inf if compiles or keeps else READ_S,
        keeps_micro_batches=keeps,
        num_nodes=spec.cluster.num_nodes,
        devices_per_node=fabric.devices_per_node,
        shares_change="shares" in spec.scheduler.may_change,
        # Replica groups wait for one another in each step, so a step is recorded before the next one starts.
        late_steps=int(spec.cluster.device != "cpu" and replica_groups == 1),
    )


@dataclass(frozen=True)
class JobLayouts:
    """The layer splits and layouts that a simulated run may change to."""

    spec: RunSpec
    others: OtherLayouts
    most_layers: int | None
    """Maximum number of layers on a pipeline rank; None if layers cannot move."""

    def layer_scheduler(self, job: DisturbedJob) -> LayerScheduler | None:
        """Return the scheduler that moves layers, for the current layout."""
        if self.most_layers is None or "layers" not in self.spec.scheduler.may_change:
            return None
        times = self.others.steps.layer_times(self.others.present)
        return LayerScheduler(job.layout, times, self.most_layers, job.even, job.largest_micro_batch, job.change)

    def propose(self, paces: Sequence[float], links: LinkPaces) -> LayoutProposal | None:
        return self.others.propose(paces, links) if "layout" in self.spec.scheduler.may_change else None

    def best_cut(self, paces: Sequence[float], links: LinkPaces) -> Counts | None:
        """Return the best layer split at these paces; None for the even one."""
        return self.others.in_present(Paces(paces, links)).setup.layout.stage_layers

    def with_cut(self, counts: Counts) -> DisturbedJob:
        """Return the job with another layer split."""
        present = self.others.present
        layout = with_stages(present.layout, counts)
        return self._job(replace(present, layout=layout), self.others.memory.largest_micro_batch(present))

    def with_layout(self, proposal: LayoutProposal) -> DisturbedJob:
        setup = self.others.setup_of(proposal.layout, proposal.micro_batch_size)
        return self._job(setup, proposal.largest_micro_batch_size)

    def _job(self, setup: Setup, largest: int) -> DisturbedJob:
        others = self.others.after(setup.layout, int(setup.micro_batch_size))
        layouts = JobLayouts(self.spec, others, others.memory.largest_stage_layers(setup))
        return replace(_job_of(self.spec, setup, 1, largest), layouts=layouts)

    def pause_s(self, after: JobLayouts, step_s: float) -> float:
        """Return the duration in seconds of a change to another layer split or layout: the time to transfer a rank's
        state over the links between all ranks, plus an allowance for building the new stages and for a slower first
        step."""
        before = self.others.present
        setup = after.others.present
        fabric = setup.fabric
        links = group_of(fabric, fabric.num_devices, 1, efficiency_of(self.spec.cluster))
        bytes_per_s = links.nic_bytes_per_s if links.crosses else links.link_bytes_per_s
        return self.others.memory.moved_bytes(before, setup) / bytes_per_s + expected_pause_s(step_s)


@dataclass(frozen=True)
class RankCounts:
    """The samples of the data-parallel ranks of one present group in a step."""

    counts: tuple[int, ...]
    micro_batches: int


def assign_samples(portions: Sequence[Portion], divisions: Sequence[Division]) -> list[RankCounts]:
    return [
        RankCounts(division.counts(portion.samples), division.count_micro_batches(portion.samples))
        for portion, division in zip(portions, divisions, strict=True)
    ]


def seconds_of(
    job: DisturbedJob, condition: Condition, present: Sequence[int], taken: Sequence[RankCounts]
) -> StepSeconds:
    """Return the durations of a step's parts. Ranks of absent groups process no samples."""
    counts, micro_batches = np.zeros((2, job.cluster.ranks))
    for group, own in zip(present, taken, strict=True):
        counts[job.groups[group].rows], micro_batches[job.groups[group].rows] = own.counts, own.micro_batches
    return job.cluster.seconds(condition, counts, micro_batches, in_step=job.even.in_step)
