"""Step time over several pools: each pool's time on its accelerator and links, and the wait for the slowest.

If every pool has complete replicas, samples are divided by each pool's time for a micro-batch, as by the live scheduler
(`balance/decisions/balance.py`). If each pool has separate stages, layers are divided by speed (`planner/pipeline.py`),
and the slowest stage sets the pipeline's pace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise, permutations, product, takewhile

from trainspec_cli.balance.batch.division import Division, even_division, micro_batches_of
from trainspec_cli.balance.decisions.balance import best_division
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.hardware.cluster import (
    Crossing,
    Fabric,
    Group,
    axis_groups,
    cluster_of,
    describe_fabric,
    network_bytes_per_s,
    pool_names,
    send_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.predict import memory_limit_bytes
from trainspec_cli.planner.pipeline import Room, cut, is_open
from trainspec_cli.planner.search.search import Steps
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import (
    EIGHT_BIT,
    MicroBatch,
    TimedRank,
    assemble_step,
    bubble_s,
    layer_s,
    mean_times,
    own_work_s,
    planned_times,
    rank_parts,
    step_of_rank,
    waiting_share,
    weigh_times,
)
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import StepTime


@dataclass(frozen=True)
class Pool:
    """A pool of nodes of one kind."""

    name: str
    devices: int
    fabric: Fabric
    """The fabric of a cluster of the same size that has only this kind of device."""
    link_gbit_per_s: float | None
    """A device's share of the link between pools; None if the pools' NICs are used."""

    @property
    def limit_bytes(self) -> float:
        return memory_limit_bytes(self.fabric.chip)


def describe_pools(cluster: ClusterSpec) -> tuple[Pool, ...]:
    """Return the pools of a cluster. Raises RecipeError if values of accelerators or links are missing or invalid."""
    total = sum(pool.num_nodes * pool.devices_per_node for pool in cluster.pools)
    link = cluster.pool_link_gbit_per_s
    if link is not None and cluster.oversubscription is not None:
        link /= cluster.oversubscription
    found = []
    for place, (name, pool) in enumerate(zip(pool_names(cluster.pools), cluster.pools, strict=True)):
        try:
            fabric = describe_fabric(cluster_of(cluster, pool), None)
        except RecipeError as error:  # so that errors name the pool's keys
            own = f"cluster.pools.{place}.accelerator"
            problems = []
            for problem in error.problems:
                texts = (problem.message, problem.path, problem.hint)
                message, path, hint = (text.replace("cluster.accelerator", own) for text in texts)
                problems.append(replace(problem, message=message, path=path, hint=hint))
            raise RecipeError(problems) from error
        fabric = replace(fabric, num_devices=total)
        found.append(Pool(name, pool.num_nodes * pool.devices_per_node, fabric, link))
    return tuple(found)


DATA_AXES = ("dp", "dp_shard", "dp_replicate", "expert_dp")
NOT_WHOLE = "a pool's devices do not form complete groups of the layout"
MESSAGE_BYTES = 1e6
"""Message size that is used to find the slowest of several links between stages."""


@dataclass(frozen=True)
class Placement:
    ranks: tuple[int, ...]
    """Number of data-parallel ranks in each pool or, if `order` is set, of pipeline ranks."""
    order: tuple[int, ...] = ()
    """The order of the pools along each pipeline; empty if every pool has complete replicas."""

    @property
    def pool_of_stage_rank(self) -> list[int]:
        """Return the pool of each pipeline rank, if pipelines span several pools."""
        return [pool for pool in self.order for _ in range(self.ranks[pool])]


def placements(layout: Layout, pools: Sequence[Pool]) -> Iterator[Placement]:
    """Yield the placements of a layout over all devices of `pools`."""
    replica = layout.tp * layout.cp * layout.pp
    ranks = tuple(pool.devices // replica for pool in pools)
    shards_within = 1 < layout.dp_shard < layout.data_parallel_size
    # Complete replicas on every pool: each pipeline stage has complete nodes of every pool.
    if all(
        pool.devices % replica == 0
        and (layout.pp == 1 or pool.devices // layout.pp % pool.fabric.devices_per_node == 0)
        and pool.devices // layout.pp % (layout.ep * layout.etp) == 0
        and not (shards_within and own % layout.dp_shard)
        for pool, own in zip(pools, ranks, strict=True)
    ):
        yield Placement(ranks)
    width = layout.tp * layout.cp * layout.data_parallel_size
    if layout.pp >= len(pools) and all(pool.devices % width == 0 for pool in pools):
        ranks = tuple(pool.devices // width for pool in pools)
        unlike = {
            tuple((pools[pool].fabric, ranks[pool]) for pool in order): order
            for order in reversed([*permutations(range(len(pools)))])
        }
        yield from (Placement(ranks, order) for order in unlike.values())


def groups_of(
    layout: Layout, placement: Placement, pools: Sequence[Pool], eff: Efficiency
) -> tuple[dict[str, Group], ...]:
    """Return the groups of each axis for the ranks of each pool. Groups that span pools are as fast as their slowest
    link."""
    own = [axis_groups(layout, pool.fabric, eff) for pool in pools]
    if placement.order:
        slowest = max((groups["pp"] for groups in own), key=lambda group: send_s(group, MESSAGE_BYTES, eff))
        joint = {"pp": _joined(slowest, placement, pools, eff)}
    else:
        axes = [axis for axis in DATA_AXES if axis != "dp_shard" or layout.dp_shard == layout.data_parallel_size]
        slow = {axis: min((groups[axis] for groups in own), key=lambda group: group.ring_bytes_per_s) for axis in axes}
        joint = {axis: _joined(group, placement, pools, eff) for axis, group in slow.items()}
    return tuple(groups | joint for groups in own)


def _joined(group: Group, placement: Placement, pools: Sequence[Pool], eff: Efficiency) -> Group:
    """Return a group that spans the pools, including the link between them if the recipe describes it."""
    link = pools[0].link_gbit_per_s
    if link is None or group.size == 1:
        return group
    kind = min((pool.fabric.nic_kind for pool in pools), key=lambda kind: network_bytes_per_s(1.0, kind, eff))
    smallest = min(pool.devices for pool in pools)
    devices = pools[0].fabric.num_devices
    inside = 1 if placement.order else max(1, group.size * smallest // devices)
    return replace(group, outer=(*group.outer, Crossing(inside, network_bytes_per_s(link, kind, eff))))


Setups = tuple[Setup, ...]
"""One setup for each pool, all with the same layout and micro-batch."""
BETWEEN = 0.99
"""At any micro-batch size, a sample takes at least this fraction of its time at the best of the halved sizes; tests
check this for all sizes."""


@dataclass(frozen=True)
class PoolStep:
    """One step over several pools."""

    layout: Layout
    """The layout, with its layers split into stages."""
    time: StepTime
    """The step time, which is that of the pool that all others wait for."""
    of_pools: tuple[StepTime, ...]
    """The step time of each pool, including its wait for others."""
    waiting_s: tuple[float, ...]
    """The time that each pool spends waiting for others."""
    micro_batches: int
    largest: tuple[int, ...]
    """Number of samples in each pool's largest micro-batch."""
    samples: tuple[int, ...]
    """Number of samples of the step in each pool."""


@dataclass(frozen=True)
class _Work:
    """Time in seconds of one micro-batch through the full model on one device."""

    kinds_s: tuple[float, ...]
    """Time in seconds of all layers of each kind."""
    embedding_s: float
    head_s: float

    @classmethod
    def of(cls, once: MicroBatch, setup: Setup) -> _Work:
        numbers = once.numbers([range(once.num_layers)])
        kinds_s = (number * layer_s(kind, setup.recompute) for kind, number in zip(once.kinds, numbers, strict=True))
        return cls(tuple(kinds_s), own_work_s(once.embedding), own_work_s(once.head))

    @property
    def layers_s(self) -> float:
        return sum(self.kinds_s)

    @property
    def total_s(self) -> float:
        return self.layers_s + self.embedding_s + self.head_s


def _of_pools(counts: Sequence[int], placement: Placement) -> list[Sequence[int]]:
    """Return the sample counts of each pool's data-parallel ranks."""
    return [counts[first:end] for first, end in pairwise(accumulate(placement.ranks, initial=0))]


class Stopwatch:
    """Predicts step times over pools, and caches the micro-batch times that many layouts share."""

    def __init__(self, pools: Sequence[Pool], eff: Efficiency):
        self.pools = pools
        self._eff = eff
        self._steps = [Steps(pool.fabric, eff) for pool in pools]
        self._least_s: dict[tuple[object, ...], float] = {}

    def step(self, setups: Setups, placement: Placement, samples: int) -> PoolStep:
        """Return the step for `samples`. If the layer split is left open, all layers are treated as equal."""
        layout = self.cut(setups, placement)
        return self.step_as_cut(tuple(replace(setup, layout=layout) for setup in setups), placement, samples)

    def step_as_cut(self, setups: Setups, placement: Placement, samples: int) -> PoolStep:
        """Return the step for `samples`. Without a specified split, layers are split evenly."""
        groups = groups_of(setups[0].layout, placement, self.pools, self._eff)
        timed = self._through_pools if placement.order else self._over_pools
        return timed(setups, placement, groups, samples)

    def bound_s(self, setups: Setups, placement: Placement, samples: int) -> float:
        """Return a lower bound on the step time over all layer splits. Of the waiting, it includes only that while
        pipelines fill and drain; of the exchanges, only those within a micro-batch."""
        least = self._least_through_pools if placement.order else self._least_over_pools
        return least(setups, placement, samples) * (1 + waiting_share(setups[0], self._eff))

    def _least_over_pools(self, setups: Setups, placement: Placement, samples: int) -> float:
        """Return the bound for complete replicas: each sample takes its time at the best micro-batch size, spread
        evenly over the pipeline's ranks."""
        layout = setups[0].layout
        ranks = placement.ranks
        sample_s = [self._least_sample_s(pool, setup, samples) / layout.pp for pool, setup in enumerate(setups)]
        if layout.pp == 1:
            return samples / sum(own / each for own, each in zip(ranks, sample_s, strict=True))
        division = self.divide(setups, placement, samples)
        micro_batches = division.count_micro_batches(samples)
        others = (layout.pp - 1) * min(self._fills(layout), micro_batches) / micro_batches
        most = map(max, _of_pools(division.counts(samples), placement))
        return max(own * each * (1 + others) for own, each in zip(most, sample_s, strict=True))

    def _least_sample_s(self, pool: int, setup: Setup, samples: int) -> float:
        """Return the shortest time of a sample in micro-batches up to the layout's size, trying each halved size.
        Several micro-batches add their gradients, and weights are cast to 8 bits once per step. A sample is therefore
        fastest in a single micro-batch or, with 8 bits, in many."""
        key = (pool, *self._steps[pool].key_of(setup), setup.recompute)
        if key in self._least_s:
            return self._least_s[key]
        least_s = math.inf
        numbers = (1, samples) if setup.matmul in EIGHT_BIT else (1,)
        sizes = takewhile(bool, (int(setup.micro_batch_size) >> halved for halved in count()))
        for size, micro_batches in product(sizes, numbers):
            sized = replace(setup, micro_batch_size=float(size), grad_accum=micro_batches)
            least_s = min(least_s, _Work.of(self._steps[pool].micro_batch(sized), sized).total_s / size)
        self._least_s[key] = BETWEEN * least_s
        return self._least_s[key]

    def _least_through_pools(self, setups: Setups, placement: Placement, samples: int) -> float:
        """Return the bound for pipelines across pools. The slowest rank takes at least the speed-weighted mean of all
        ranks, to which each layer adds its smallest weighted time. The total over all ranks is at least the sum of each
        layer's smallest time."""
        layout = setups[0].layout
        pools = range(len(setups))
        micro_batches = micro_batches_of(layout, setups[0].micro_batch_size, samples)
        sized = [replace(setup, grad_accum=micro_batches) for setup in setups]
        works = [_Work.of(self._steps[pool].micro_batch(setup), setup) for pool, setup in enumerate(sized)]
        pool_of = placement.pool_of_stage_rank
        first, last = (pool_of[layout.rank_of_stage(stage)] for stage in (0, layout.num_stages - 1))
        together = sum(1 / works[pool].layers_s for pool in pool_of)
        weights = [1 / (works[pool].layers_s * together) for pool in pools]
        kinds_s: list[tuple[float, ...]] = list(zip(*(work.kinds_s for work in works), strict=True))
        pace_s = sum(min(weights[pool] * kind_s[pool] for pool in pools) for kind_s in kinds_s)
        pace_s += weights[first] * works[first].embedding_s + weights[last] * works[last].head_s
        whole_s = sum(min(kind_s) for kind_s in kinds_s) + works[first].embedding_s + works[last].head_s
        fills = min(self._fills(layout), micro_batches)
        return (micro_batches - fills) * pace_s + fills * whole_s

    def _fills(self, layout: Layout) -> float:
        """Return the waiting time of the slowest rank in a step, as a number of other ranks' micro-batches."""
        return self._eff.bubble * layout.bubble_part

    def cut(self, setups: Setups, placement: Placement, room: Room | None = None, *, alike: bool = True) -> Layout:
        """Return the layout with its layers split by the planned times. `alike`: treat all layers as equal to the
        average.

        If each pool has separate stages, these get layers according to their speed. If every pool has complete
        replicas, all pools have the same stages, because they sum their gradients; the stages are split by the times of
        the largest pool."""
        layout = setups[0].layout
        if not is_open(layout, setups[0].model):
            return layout
        largest = max(range(len(self.pools)), key=lambda pool: self.pools[pool].devices)
        times_of = mean_times if alike else planned_times
        times = [times_of(self._steps[pool].micro_batch(setup), setup) for pool, setup in enumerate(setups)]
        work_s = [sum(time.layers_s) for time in times]
        speeds = [work_s[largest] / work_s[pool] for pool in placement.pool_of_stage_rank]
        return cut(times[largest], layout, room, speeds)

    # Complete replicas on every pool

    def _over_pools(
        self, setups: Setups, placement: Placement, groups: Sequence[dict[str, Group]], samples: int
    ) -> PoolStep:
        division = self.divide(setups, placement, samples)
        counts = division.counts(samples)
        micro_batches = division.count_micro_batches(samples)
        of_ranks = _of_pools(counts, placement)
        most = [max(own) for own in of_ranks]
        own = [
            self._own_step(pool, setup, groups[pool], most[pool], micro_batches) for pool, setup in enumerate(setups)
        ]
        held_up_s = self._in_turns_s(setups, most, micro_batches) if division.in_step else [0.0] * len(own)
        totals_s = [time.total_s + held for time, held in zip(own, held_up_s, strict=True)]
        slowest = max(range(len(own)), key=totals_s.__getitem__)
        step_s = totals_s[slowest]
        waiting_s = tuple(step_s - time.total_s for time in own)
        of_pools = tuple(replace(time, host_s=time.host_s + wait) for time, wait in zip(own, waiting_s, strict=True))
        return PoolStep(
            layout=setups[0].layout,
            time=of_pools[slowest],
            of_pools=of_pools,
            waiting_s=waiting_s,
            micro_batches=micro_batches,
            largest=tuple(max(1, -(-count // micro_batches)) for count in most),
            samples=tuple(map(sum, of_ranks)),
        )

    def divide(self, setups: Setups, placement: Placement, samples: int) -> Division:
        """Return how the live scheduler would divide a step's samples among data-parallel ranks at the planned speeds,
        in micro-batches no larger than the layout's."""
        size = int(setups[0].micro_batch_size)
        keeps = setups[0].model.unit == "samples"
        even = even_division(setups[0].layout, size, keeps_micro_batches=keeps)
        speeds = [self._speed(pool, setup) for pool, setup in enumerate(setups)]
        of_ranks = [speed for speed, ranks in zip(speeds, placement.ranks, strict=True) for _ in range(ranks)]
        return best_division(even, samples, of_ranks, size, 0.0, keeps_micro_batches=keeps).division

    def _speed(self, pool: int, setup: Setup) -> Speed:
        """Return a linear model of a micro-batch's time, through its times at the layout's size and at half that
        size."""
        size = int(setup.micro_batch_size)
        small, large = (size // 2, size) if size > 1 else (1, 2)
        small_s = self._seconds(pool, setup, small)
        large_s = self._seconds(pool, setup, large)
        sample_s = min((large_s - small_s) / (large - small), large_s / large)
        return Speed(large_s - large * sample_s, sample_s)

    def _seconds(self, pool: int, setup: Setup, size: int) -> float:
        """Return the time in seconds of a micro-batch of `size` samples on a pool's slowest pipeline rank."""
        sized = replace(setup, micro_batch_size=float(size))
        once = self._steps[pool].micro_batch(sized)
        return max(rank.time_s(sized) for rank in rank_parts(once, sized.layout))

    def _own_step(
        self, pool: int, setup: Setup, groups: dict[str, Group], samples: int, micro_batches: int
    ) -> StepTime:
        """Return the step time of a pool whose ranks divide `samples` into the given number of micro-batches, some of
        which have one more sample than the others. Empty micro-batches take no time."""
        each, larger = divmod(samples, micro_batches)
        if not each:
            return self._sized(pool, setup, groups, 1, max(1, larger))
        whole = self._sized(pool, setup, groups, each, micro_batches)
        if not larger:
            return whole
        share = larger / micro_batches
        return weigh_times((whole, self._sized(pool, setup, groups, each + 1, micro_batches)), (1 - share, share))

    def _sized(self, pool: int, setup: Setup, groups: dict[str, Group], size: int, micro_batches: int) -> StepTime:
        sized = replace(setup, micro_batch_size=float(size), grad_accum=micro_batches)
        return assemble_step(sized, self._steps[pool].micro_batch(sized), groups, self._eff)

    def _in_turns_s(self, setups: Setups, samples: Sequence[int], micro_batches: int) -> list[float]:
        """Return how long each pool waits in a step if ranks synchronise in every micro-batch and run larger ones
        first."""
        shapes = [divmod(count, micro_batches) for count in samples]
        own_s = [0.0] * len(setups)
        slowest_s = 0.0
        for first, end in pairwise(sorted({0, micro_batches, *(larger for _, larger in shapes)})):
            turn_s = [
                self._seconds(pool, setup, each + (first < larger)) if each + (first < larger) else 0.0
                for pool, (setup, (each, larger)) in enumerate(zip(setups, shapes, strict=True))
            ]
            slowest_s += (end - first) * max(turn_s)
            own_s = [passed + (end - first) * seconds for passed, seconds in zip(own_s, turn_s, strict=True)]
        return [slowest_s - seconds for seconds in own_s]

    # Separate stages on each pool

    def _through_pools(
        self, setups: Setups, placement: Placement, groups: Sequence[dict[str, Group]], samples: int
    ) -> PoolStep:
        layout = setups[0].layout
        eff = self._eff
        micro_batches = micro_batches_of(layout, setups[0].micro_batch_size, samples)
        setups = tuple(replace(setup, grad_accum=micro_batches) for setup in setups)
        onces = [self._steps[pool].micro_batch(setup) for pool, setup in enumerate(setups)]
        by_pool = [rank_parts(once, layout) for once in onces]
        pool_of = placement.pool_of_stage_rank
        ranks = [by_pool[pool][rank] for rank, pool in enumerate(pool_of)]
        times_s = [rank.time_s(setups[pool]) for rank, pool in zip(ranks, pool_of, strict=True)]
        drain_s = eff.bubble * bubble_s(times_s, layout, micro_batches)
        pace_s = max(times_s)
        steps = []
        waits = []
        for pool, setup in enumerate(setups):
            own = [rank for rank, at in enumerate(pool_of) if at == pool]
            slowest = max(own, key=times_s.__getitem__)
            wait_s = micro_batches * (pace_s - times_s[slowest])
            timed = TimedRank(ranks[slowest], times_s[slowest], drain_s + wait_s)
            steps.append(step_of_rank(timed, setup, onces[pool].rates, groups[pool], eff))
            waits.append(wait_s)
        first = pool_of[times_s.index(pace_s)]
        unlike = [pool for pool in range(len(setups)) if self.pools[pool].fabric != self.pools[first].fabric]
        last = max((first, *unlike), key=lambda pool: steps[pool].total_s)
        step_s = steps[last].total_s
        late_s = [max(0.0, step_s - time.total_s) for time in steps]
        of_pools = tuple(replace(time, host_s=time.host_s + late) for time, late in zip(steps, late_s, strict=True))
        return PoolStep(
            layout=layout,
            time=of_pools[last],
            of_pools=of_pools,
            waiting_s=tuple(wait + late for wait, late in zip(waits, late_s, strict=True)),
            micro_batches=micro_batches,
            largest=(int(setups[0].micro_batch_size),) * len(setups),
            samples=(samples,) * len(setups),
        )
