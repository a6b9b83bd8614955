"""The best that could be made of a disturbed cluster: shares by the true speeds, in real numbers and whole samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainspec_cli.balance.batch.division import Division, even_division, weighted_counts
from trainspec_cli.balance.decisions.balance import best_division, solve_counts, solve_in_step
from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.balance.disturbance import Event, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.planner.pipeline import Counts, LayerTimes, Room, cut_by_times
from trainspec_cli.planner.search.search import Steps
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.samples import StepParts, Tier, assemble_parts, fixed_part_s
from trainspec_cli.planner.time.step import (
    PASSES,
    LayersPart,
    MicroBatch,
    planned_times,
    recompute_part_s,
    waiting_share,
)
from trainspec_cli.recipe.keys.layout import Layout

# The true times of a disturbed cluster's steps, by data-parallel rank and pipeline stage.


Floats = NDArray[np.float64]
LEAST_S = 1e-12
"""A sample takes so long at least, where launching kernels hides all of it."""


@dataclass(frozen=True)
class Condition:
    """How much longer everything takes in a step. Arrays are of (stages, data-parallel ranks)."""

    compute: Floats
    scaleup: Floats
    network: Floats
    sends: Floats
    """Factors of the messages of each data-parallel rank's pipeline."""
    gradients: float

    @property
    def over_usual_links(self) -> Condition:
        """Return the same with exchanges that take as long as usual."""
        usual = np.ones(self.compute.shape)
        return Condition(self.compute, usual, usual, usual[0], 1.0)


@dataclass(frozen=True)
class StepSeconds:
    """A step's true times."""

    passes_s: Floats
    """(stages, ranks): what each computes and exchanges inside layers, over all micro-batches."""
    ranks_s: Floats
    """Each data-parallel rank's pipeline, filling and draining included."""
    exchanged_s: float
    """Time of the ranks' exchanges."""
    total_s: float


class Cluster:
    def __init__(self, parts: StepParts, layout: Layout, num_nodes: int, devices_per_node: int, replica_groups: int):
        """`layout` is of all replica groups together, whose devices lie one group after the other."""
        self.parts = parts
        self._layout = layout
        self.ranks, self._stages = layout.data_parallel_size, len(parts.stages)
        self._num_nodes = num_nodes
        self._per_node = devices_per_node
        self._groups = replica_groups
        apart = layout.ep * layout.etp // (layout.cp * layout.tp)
        self._exchanging_rows = max(1, apart)
        """So many neighbouring ranks exchange experts' tokens in every layer: each waits for the slowest of them."""
        speeds = [[stage.compute, stage.scaleup, stage.network] for stage in parts.stages]
        self._fixed_s = np.array([[speed.fixed_s for speed in stage] for stage in speeds])
        self._per_sample_s = np.array([[speed.per_sample_s for speed in stage] for stage in speeds])
        self._launch_s = np.array([[stage.launch_s] for stage in parts.stages])

    def paces(self, events: Sequence[Event]) -> Floats:
        """Return how many times as long as usual each device computes; what is slow twice is slower yet."""
        paces = np.ones(self._num_nodes * self._per_node)
        for event in events:
            if isinstance(event, SlowDevice):
                paces[event.device] *= event.factor
            elif isinstance(event, SlowNode):
                paces[self._devices_of(event.node)] *= event.factor
        return paces

    def condition(self, events: Sequence[Event]) -> Condition:
        """Return what these events at once amount to. Devices that compute one micro-batch together wait for the
        slowest."""
        links = self.link_paces(events)
        by_place = self._by_place
        of_tier: dict[Tier, Floats] = {"scaleup": by_place(links.scaleup), "network": by_place(links.network)}
        return Condition(
            compute=by_place(self.paces(events)),
            scaleup=of_tier["scaleup"],
            network=of_tier["network"],
            sends=of_tier[self.parts.sends_tier].max(0),
            gradients=float(of_tier[self.parts.gradients_tier].max()),
        )

    def link_paces(self, events: Sequence[Event]) -> LinkPaces:
        """Return how many times as long as usual the exchanges take in which each device takes part."""
        usual = np.ones(self._num_nodes * self._per_node)
        paces: dict[Tier, Floats] = {"scaleup": usual, "network": usual.copy()}
        for event in events:
            if isinstance(event, NarrowLink):
                devices = range(len(usual)) if event.node is None else self._devices_of(event.node)
                paces[event.tier][devices] *= event.factor
        return LinkPaces(tuple(paces["scaleup"].tolist()), tuple(paces["network"].tolist()))

    def _devices_of(self, node: int) -> range:
        return range(node * self._per_node, (node + 1) * self._per_node)

    def _by_place(self, paces: Sequence[float] | Floats) -> Floats:
        """Return the slowest device's pace of each stage and data-parallel rank."""
        rows: Floats = np.asarray(paces).reshape(self._groups, self._stages, self.ranks // self._groups, -1).max(3)
        return rows.swapaxes(0, 1).reshape(self._stages, self.ranks)

    def of_devices(self, of_places: Floats) -> Floats:
        """Return for each device what holds for its stage and data-parallel rank."""
        own = of_places.reshape(self._stages, self._groups, -1).swapaxes(0, 1)
        return np.repeat(own.ravel(), self._layout.cp * self._layout.tp)

    def seconds(
        self, condition: Condition, counts: Floats, micro_batches: Floats, *, in_step: bool = False
    ) -> StepSeconds:
        """Return a step's times where each rank has so many samples in so many micro-batches; a rank with none of
        either is away.

        `in_step`: ranks have whole samples and wait for one another in each micro-batch, of which the larger come
        first. Without it they wait at the end, as ranks do whose micro-batches all take the same time.
        """
        parts = self.parts
        factors = np.stack([condition.compute, condition.scaleup, condition.network], axis=1)  # (stages, 3, ranks)
        fixed_s = np.einsum("skr,sk->sr", factors, self._fixed_s)
        growing_s = np.einsum("skr,sk->sr", factors, self._per_sample_s)
        device_s = fixed_s * micro_batches + growing_s * counts
        device_s = self._with_experts(device_s)
        # Kernels cannot run before they are launched, however fast the device is.
        passes_s = np.maximum(device_s, self._launch_s * micro_batches)
        # A rank that is away has no micro-batches: nothing is divided by 0.
        turns = np.maximum(micro_batches, 1)
        waits_s = (device_s.sum(0) - device_s.max(0)) / turns * parts.bubble
        sends_s = condition.sends * (parts.sends.fixed_s * micro_batches + parts.sends.per_sample_s * counts)
        ranks_s = passes_s.max(0) + waits_s + sends_s
        most = float(micro_batches.max())
        exchanged_s = condition.gradients * (most * parts.gradients_each_s + parts.gradients_once_s)
        slowest_s = self._in_step_s(fixed_s, growing_s, counts, micro_batches) if in_step else float(ranks_s.max())
        return StepSeconds(passes_s, ranks_s, exchanged_s, slowest_s + exchanged_s + parts.rest_s)

    def _in_step_s(self, fixed_s: Floats, growing_s: Floats, counts: Floats, micro_batches: Floats) -> float:
        """Return the sum over the micro-batches of each's slowest rank, in a pipeline of one stage."""
        each, larger = np.divmod(counts, np.maximum(micro_batches, 1))
        passes_s = 0.0
        for turn in range(int(micro_batches.max())):
            sizes = each + (turn < larger)
            device_s = self._with_experts(fixed_s * (turn < micro_batches) + growing_s * sizes)
            passes_s += float(np.maximum(device_s, self._launch_s * (turn < micro_batches)).max())
        return passes_s

    def _with_experts(self, device_s: Floats) -> Floats:
        together = self._exchanging_rows
        if together == 1:
            return device_s
        # Ranks that exchange experts' tokens meet in every layer, and go at the pace of the slowest of them.
        blocks = device_s.reshape(self._stages, -1, together).max(2)
        return np.repeat(blocks, together, axis=1)

    def lines(self, condition: Condition, micro_batches: int, samples: float) -> tuple[Floats, Floats]:
        """Return how each rank's time depends on its samples, at so many micro-batches: the time of none, and what each
        sample adds, by the line to the time of `samples`, a usual number."""
        turns = np.full(self.ranks, float(micro_batches))
        # A step's time is not linear in the samples, since a stage is never faster than its launches: the line goes
        # through the usual number, near which shares lie.
        empty_s = self.seconds(condition, np.zeros(self.ranks), turns).ranks_s
        full_s = self.seconds(condition, np.full(self.ranks, samples), turns).ranks_s
        return empty_s, np.maximum((full_s - empty_s) / samples, LEAST_S)


TRIED = 64
"""Numbers of micro-batches, of which the `ROUNDED` best are solved for whole samples."""
ROUNDED = 4
HALVINGS = 60


@dataclass(frozen=True)
class Ideal:
    whole_s: float
    real_s: float


@dataclass(frozen=True)
class RankRows:
    """The data-parallel ranks of a replica group."""

    rows: slice
    size: int


def best_step(
    cluster: Cluster,
    condition: Condition,
    groups: Sequence[RankRows],
    samples: int,
    even: Division,
    largest_micro_batch: int,
    *,
    keeps_micro_batches: bool,
) -> Ideal:
    """Return the shortest step of `samples` over the groups that are there, of any share and number of micro-batches
    of at most `largest_micro_batch` samples; `even` is each group's usual division."""
    ranks = sum(group.size for group in groups)
    _, each_s = cluster.lines(condition, even.count_micro_batches(samples // len(groups)), samples / ranks)
    rates = [float((1 / each_s[group.rows]).sum()) for group in groups]
    # samples, and micro-batches
    whole = np.zeros((2, cluster.ranks))
    real = np.zeros((2, cluster.ranks))
    for group, own in zip(groups, weighted_counts(samples, rates), strict=True):
        exact = samples * rates[groups.index(group)] / sum(rates)
        usual = even.count_micro_batches(own)
        wanted = list(_numbers(own, group.size, usual, largest_micro_batch, even.turns))
        wanted = [usual] if keeps_micro_batches else wanted
        best_whole = math.inf
        best_real = math.inf
        found = [
            (number, *_in_reals(cluster, condition, group, exact, number, largest_micro_batch)) for number in wanted
        ]
        for rank, (number, seconds_s, counts) in enumerate(sorted(found, key=lambda item: item[1])):
            if seconds_s < best_real:
                best_real, real[:, group.rows] = seconds_s, (counts, np.full(group.size, number))
            if rank < ROUNDED and own <= number * largest_micro_batch * group.size:
                speeds = _speeds(cluster, condition, group, number, samples / ranks)
                if even.in_step:
                    rounded = solve_in_step(own, number, speeds, largest_micro_batch)
                else:
                    rounded = solve_counts(own, number, speeds, number * largest_micro_batch)
                taken_s = _group_s(cluster, condition, group, np.array(rounded, float), number, in_step=even.in_step)
                if taken_s < best_whole:
                    best_whole, whole[:, group.rows] = taken_s, (rounded, np.full(group.size, number))
    whole_s = cluster.seconds(condition, *whole, in_step=even.in_step).total_s
    return Ideal(whole_s, cluster.seconds(condition, *real).total_s)


def _numbers(samples: int, ranks: int, usual: int, largest: int, turns: int) -> Iterator[int]:
    """Numbers of micro-batches, in whole turns: from the fewest that hold the samples to twice the usual number."""
    fewest = math.ceil(math.ceil(samples / (largest * ranks)) / turns) * turns
    most = max(2 * usual, fewest + turns)
    stride = max(1, math.ceil((most - fewest) / turns / TRIED)) * turns
    yield from range(fewest, most + 1, stride)
    if (usual - fewest) % stride and usual >= fewest:
        yield usual


def _in_reals(
    cluster: Cluster, condition: Condition, group: RankRows, samples: float, number: int, largest: int
) -> tuple[float, Floats]:
    """Return a step's seconds and the shares, in real numbers of samples, with which all ranks end at once."""
    lines = cluster.lines(condition, number, samples / group.size)
    fixed_s, each_s = (part[group.rows] for part in lines)
    low_s = float(fixed_s.min())
    high_s = float((fixed_s + number * largest * each_s).max())
    # Ranks that all end at once hold more samples the later that is: the time is found by bisection.
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        held = float(np.clip((middle_s - fixed_s) / each_s, 0, number * largest).sum())
        low_s, high_s = (low_s, middle_s) if held >= samples else (middle_s, high_s)
    counts = np.clip((high_s - fixed_s) / each_s, 0, number * largest)
    if counts.sum() < samples * (1 - 1e-9):
        return math.inf, counts  # so few micro-batches do not hold them
    return _group_s(cluster, condition, group, counts, number), counts


def _speeds(cluster: Cluster, condition: Condition, group: RankRows, number: int, samples: float) -> list[Speed]:
    lines = cluster.lines(condition, number, samples)
    fixed_s, each_s = (part[group.rows].tolist() for part in lines)
    return [Speed(fixed / number, each) for fixed, each in zip(fixed_s, each_s, strict=True)]


def _group_s(
    cluster: Cluster, condition: Condition, group: RankRows, counts: Floats, number: int, *, in_step: bool = False
) -> float:
    """Return a step's seconds as the ranks of one group alone would make it."""
    division = np.zeros((2, cluster.ranks))
    division[:, group.rows] = counts, np.full(group.size, number)
    return cluster.seconds(condition, *division, in_step=in_step).total_s


# The step of a layout whose ranks compute at measured speeds: with the best shares and cut, and a bound below it.


@dataclass(frozen=True)
class PacedStep:
    """A step at measured speeds."""

    setup: Setup
    """With its cut into stages."""
    division: Division
    step_s: float
    largest_micro_batch: int
    """Samples of a micro-batch, at most: the division keeps to it."""


class Paces:
    """How many times as long as usual each global rank computes, and its exchanges take."""

    def __init__(self, paces: Sequence[float], links: LinkPaces | None = None):
        """Without `links` exchanges take as long as usual."""
        usual = (1.0,) * len(paces)
        self.compute, self.links = tuple(paces), links or LinkPaces(usual, usual)
        self._by_part = {
            part: np.asarray(of_ranks, float) for part, of_ranks in [("compute", paces), *vars(self.links).items()]
        }
        self._grids: dict[tuple[str, int, int], Floats] = {}
        self._rows: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}

    def grid(self, layout: Layout, part: Literal["compute"] | Tier = "compute") -> Floats:
        """Return the pace of each pipeline rank of each data-parallel one: (pp, dp). Ranks that share the work on the
        same samples (tensor and context parallelism) wait for the slowest of them."""
        key = part, layout.pp, layout.tp * layout.cp
        if key not in self._grids:
            self._grids[key] = self._by_part[part].reshape(layout.pp, -1, key[2]).max(2)
        return self._grids[key]

    def condition(self, layout: Layout, parts: StepParts) -> Condition:
        """Return how much longer the parts of a step take."""
        return Condition(
            compute=self.grid(layout),
            scaleup=self.grid(layout, "scaleup"),
            network=self.grid(layout, "network"),
            sends=self.grid(layout, parts.sends_tier).max(0),
            gradients=float(self.grid(layout, parts.gradients_tier).max()),
        )

    def rows(self, layout: Layout) -> tuple[Floats, Floats, Floats]:
        """Return the kinds of data-parallel ranks: the sum of their pipeline ranks' speeds, the least of their paces,
        and how many there are of each."""
        key = layout.pp, layout.tp * layout.cp
        if key not in self._rows:
            grid = self.grid(layout)
            kinds = np.stack([(1 / grid).sum(0), grid.min(0)])
            found, numbers = np.unique(kinds, axis=1, return_counts=True)
            self._rows[key] = found[0], found[1], numbers.astype(float)
        return self._rows[key]


class PacedSteps:
    """The planner's `steps` on ranks that compute at measured speeds, with `samples` in each step."""

    def __init__(self, steps: Steps, samples: int, *, keeps_micro_batches: bool):
        """`keeps_micro_batches`: what a step computes depends on which samples share a micro-batch (batch norm)."""
        self._steps = steps
        self._samples = samples
        self._keeps = keeps_micro_batches
        self._planned_s: dict[tuple[Layout, float], float] = {}

    def best(self, setup: Setup, paces: Paces, largest: int) -> PacedStep:
        """Return the step in the setup's layout and cut, with the best shares of micro-batches of `largest` samples at
        most. It is not expected to take less than the planned cut does on ranks of the usual speed."""
        layout = setup.layout
        fabric = setup.fabric
        parts = assemble_parts(setup, *self._once_and_twice(setup), self._steps.eff)
        cluster = Cluster(parts, layout, fabric.num_devices // fabric.devices_per_node, fabric.devices_per_node, 1)
        condition = paces.condition(layout, parts)
        ranks = layout.data_parallel_size
        even = even_division(layout, int(setup.micro_batch_size), keeps_micro_batches=self._keeps)
        number = even.count_micro_batches(self._samples)
        fixed_s, each_s = cluster.lines(condition, number, self._samples / ranks)
        speeds = _shared_speeds(fixed_s / number, each_s)
        # The division that the live scheduler would decide on at these speeds, by the same function.
        division = best_division(
            even, self._samples, speeds, largest, parts.gradients_each_s, keeps_micro_batches=self._keeps
        ).division
        counts = np.array(division.counts(self._samples), float)
        turns = np.full(ranks, float(division.count_micro_batches(self._samples)))
        step_s = cluster.seconds(condition, counts, turns, in_step=even.in_step).total_s
        # The lines through two sizes err by a little: without this floor an undisturbed run could seem to gain by a
        # change.
        uncut = replace(setup, layout=replace(layout, stage_layers=None))
        return PacedStep(setup, division, max(step_s, self.planned_s(uncut)), largest)

    def cuts(self, setup: Setup, paces: Paces, room: Room) -> Iterator[Counts]:
        """Yield the best cuts into one stage a rank for the slowest rank of each stage, and for their mean."""
        grid = paces.grid(setup.layout)
        times = self.layer_times(setup)
        for own in (grid.max(1), grid.mean(1)):
            if counts := cut_by_times(times, setup.layout, (1 / own).tolist(), room):
                yield counts

    def layer_times(self, setup: Setup) -> LayerTimes:
        """Return the planned times of a micro-batch in each layer, the embedding and the head."""
        return planned_times(self._steps.micro_batch(setup), setup)

    def _once_and_twice(self, setup: Setup) -> tuple[MicroBatch, MicroBatch]:
        """Return a micro-batch of the setup's size, and one of twice that."""
        twice = replace(setup, micro_batch_size=2 * setup.micro_batch_size)
        return self._steps.micro_batch(setup), self._steps.micro_batch(twice)

    def bound_s(self, setup: Setup, paces: Paces, largest: int) -> float:
        """Return seconds that a step in the setup's layout takes at least, however its layers are cut and its samples
        are shared: what all ranks compute together, without waiting, in micro-batches of `largest` samples."""
        compute_s, comm_s = self._least_each_s(setup, largest)
        speeds, least, numbers = paces.rows(setup.layout)
        rates = np.minimum(speeds / compute_s, setup.layout.pp / (least * compute_s + comm_s))
        return self._samples / float((numbers * rates).sum()) * (1 + waiting_share(setup, self._steps.eff))

    def planned_s(self, setup: Setup) -> float:
        """Return the seconds of a step on ranks of the usual speed, by the planner; its layers cut as if they were all
        the average one, unless the setup says how."""
        key = setup.layout, setup.micro_batch_size
        if key not in self._planned_s:
            self._planned_s[key] = self._steps.step_s(setup)
        return self._planned_s[key]

    def _least_each_s(self, setup: Setup, largest: int) -> tuple[float, float]:
        """Return the least that a sample takes through the whole model and back: computing, and exchanges in layers."""
        once, twice = self._once_and_twice(setup)
        size = setup.micro_batch_size
        most = max(largest, setup.micro_batch_size)
        compute_s = comm_s = 0.0
        for number, one, two, again in _parts_of(once, twice):
            once_s, twice_s = (
                part.forward + part.backward + (recompute_part_s(part, setup.recompute) if again else 0.0)
                for part in (one, two)
            )
            compute_s += number * _least_s(once_s, twice_s, size, most)
            for axis, passes in PASSES.items():
                once_s, twice_s = (passes * getattr(part, axis) for part in (one, two))
                comm_s += number * _least_s(once_s, twice_s, size, most)
        return compute_s, comm_s


def _parts_of(once: MicroBatch, twice: MicroBatch) -> Iterator[tuple[int, LayersPart, LayersPart, bool]]:
    """Yield each part of the model, how many there are of it, and whether it is done again in the backward."""
    for before, one, two in zip(once.before, once.kinds, twice.kinds, strict=True):
        yield before[-1], one, two, True
    yield 1, once.embedding, twice.embedding, False
    yield 1, once.head, twice.head, False


def _least_s(once_s: float, twice_s: float, size: float, most: float) -> float:
    """Return what a sample takes at least, by the line through the times of `size` samples and twice as many, in
    micro-batches of `most` samples."""
    return once_s / size - fixed_part_s(once_s, twice_s) * (1 / size - 1 / most)


def _shared_speeds(fixed_s: Floats, each_s: Floats) -> list[Speed]:
    """Return the speeds of ranks; those that are alike are one object."""
    kinds, places = np.unique(np.stack([fixed_s, each_s]), axis=1, return_inverse=True)
    known = [Speed(fixed, each) for fixed, each in kinds.T.tolist()]
    return [known[place] for place in places.ravel().tolist()]


def describe(paces: Paces, before: PacedStep, found: PacedStep) -> str:
    """`rank 5 computes 2.1 times as long as usual; as tp=2 dp_shard=4, 2 and not 8 ranks wait for it in every layer`:
    why another layout is faster."""
    ways = [
        ("rank {} computes", paces.compute),
        ("the exchanges of rank {} inside its scale-up domain take", paces.links.scaleup),
        ("the exchanges of rank {} between scale-up domains take", paces.links.network),
    ]
    odds = [_describe_odd(what, of_ranks) for what, of_ranks in ways if set(of_ranks) != {1.0}]
    odd = odds[0][0]  # the rank that differs most, in computing where any does
    before_layout = before.setup.layout
    layout = found.setup.layout
    waiting = (before_layout.tp * before_layout.cp, layout.tp * layout.cp)
    row = odd // (layout.tp * layout.cp) % layout.data_parallel_size
    share = found.division.weights[row] * layout.data_parallel_size / sum(found.division.weights)
    effects = []
    if waiting[1] < waiting[0]:
        effects.append(f"{waiting[1]} and not {waiting[0]} ranks wait for it in every layer")
    if share < 1:
        effects.append(f"its share of the samples shrinks to {share:.0%} of an even one")
    if layout.stage_layers and layout.num_stages == layout.pp:
        rank = odd // (layout.world_size // layout.pp)
        effects.append(f"its stage has {layout.stage_layers[rank]} of {sum(layout.stage_layers)} layers")
    why = "; ".join(effects) or "less of a step waits for it"
    return f"{' and '.join(text for _, text in odds)}; as {layout.describe()}, {why}"


def _describe_odd(what: str, paces: Sequence[float]) -> tuple[int, str]:
    odd = max(range(len(paces)), key=lambda rank: max(paces[rank], 1 / paces[rank]))
    slow = sum(pace > 1 for pace in paces)
    pace = paces[odd]
    others = f", and {slow - 1:,} more are slow" if slow > 1 else ""
    return odd, f"{what.format(odd)} {pace:{'.2g' if pace < 100 else ',.0f'}} times as long as usual{others}"
