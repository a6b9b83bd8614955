"""The step of a layout whose ranks compute at measured speeds: with the best shares and cut, and a bound below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainspec_cli.planner.cut import cut, is_open, mean_times, planned_times
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import axis_groups
from trainspec_cli.planner.search.search import part_key
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.samples import assemble_parts
from trainspec_cli.planner.time.step import (
    LayersPart,
    MicroBatch,
    assemble_step,
    micro_batch,
    recompute_part_s,
    waiting_share,
)
from trainspec_cli.policy.balance import best_division
from trainspec_cli.policy.division import Division, even_division
from trainspec_cli.policy.partition import Counts, cut_by_times
from trainspec_cli.policy.partition_problem import LayerTimes, Room
from trainspec_cli.policy.speeds import Speed
from trainspec_cli.scheduler.cluster import Cluster, Condition, Floats
from trainspec_cli.spec.recipe.layout import Layout

AXES = {"tp": 2, "cp": 3, "ep": 2}
"""How many passes of a layer's forward exchanges a micro-batch makes, forward and back."""


@dataclass(frozen=True)
class PacedStep:
    """A step at measured speeds."""

    setup: Setup
    """With its cut into stages."""
    division: Division
    step_s: float


class Paces:
    """How many times as long as usual each global rank computes."""

    def __init__(self, paces: Sequence[float]):
        self._paces = np.asarray(paces, float)
        self._grids: dict[tuple[int, int], Floats] = {}
        self._rows: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}

    def grid(self, layout: Layout) -> Floats:
        """Return the pace of each pipeline rank of each data-parallel one: (pp, dp). Ranks that share the work on the
        same samples (tensor and context parallelism) wait for the slowest of them."""
        key = layout.pp, layout.tp * layout.cp
        if key not in self._grids:
            self._grids[key] = self._paces.reshape(layout.pp, -1, key[1]).max(2)
        return self._grids[key]

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
    """The steps of one model on one fabric, of so many samples each."""

    def __init__(self, eff: Efficiency, samples: int, *, keeps_micro_batches: bool):
        """`keeps_micro_batches`: what a step computes depends on which samples share a micro-batch (batch norm)."""
        self._eff, self._samples, self._keeps = eff, samples, keeps_micro_batches
        self._parts: dict[tuple[object, ...], MicroBatch] = {}
        self._planned_s: dict[tuple[Layout, float], float] = {}

    def best(self, setup: Setup, paces: Paces, largest: int) -> PacedStep:
        """Return the step in the setup's layout and cut, with the best shares of micro-batches of `largest` samples at
        most. It is not expected to take less than the planned cut does on ranks of the usual speed."""
        layout, fabric = setup.layout, setup.fabric
        parts, grid = assemble_parts(setup, *self._once_and_twice(setup), self._eff), paces.grid(layout)
        cluster = Cluster(parts, layout, fabric.num_devices // fabric.devices_per_node, fabric.devices_per_node, 1)
        usual, ranks = np.ones_like(grid), layout.data_parallel_size
        condition = Condition(grid, usual, usual, np.ones(ranks), 1.0)
        even = even_division(layout, int(setup.micro_batch_size), keeps_micro_batches=self._keeps)
        number = even.count_micro_batches(self._samples)
        fixed_s, each_s = cluster.lines(condition, number, self._samples / ranks)
        speeds = _speeds(fixed_s / number, each_s)
        division = best_division(
            even, self._samples, speeds, largest, parts.gradients_each_s, keeps_micro_batches=self._keeps
        ).division
        counts = np.array(division.counts(self._samples), float)
        turns = np.full(ranks, float(division.count_micro_batches(self._samples)))
        step_s = cluster.seconds(condition, counts, turns, in_step=even.in_step).total_s
        uncut = replace(setup, layout=replace(layout, stage_layers=None))
        return PacedStep(setup, division, max(step_s, self.planned_s(uncut)))

    def cuts(self, setup: Setup, paces: Paces, room: Room) -> Iterator[Counts]:
        """Yield the best cuts into one stage a rank for the slowest rank of each stage, and for their mean."""
        grid, times = paces.grid(setup.layout), self.layer_times(setup)
        for own in (grid.max(1), grid.mean(1)):
            if counts := cut_by_times(times, setup.layout, (1 / own).tolist(), room):
                yield counts

    def layer_times(self, setup: Setup) -> LayerTimes:
        """Return the planned times of a micro-batch in each layer, the embedding and the head."""
        return planned_times(self.micro_batch(setup), setup)

    def _once_and_twice(self, setup: Setup) -> tuple[MicroBatch, MicroBatch]:
        """Return a micro-batch of the setup's size, and one of twice that."""
        return self.micro_batch(setup), self.micro_batch(replace(setup, micro_batch_size=2 * setup.micro_batch_size))

    def micro_batch(self, setup: Setup) -> MicroBatch:
        key = part_key(setup)
        if key not in self._parts:
            self._parts[key] = micro_batch(setup, axis_groups(setup.layout, setup.fabric, self._eff), self._eff)
        return self._parts[key]

    def bound_s(self, setup: Setup, paces: Paces, largest: int) -> float:
        """Return seconds that a step in the setup's layout takes at least, however its layers are cut and its samples
        are shared: what all ranks compute together, without waiting, in micro-batches of `largest` samples."""
        compute_s, comm_s = self._least_each_s(setup, largest)
        speeds, least, numbers = paces.rows(setup.layout)
        rates = np.minimum(speeds / compute_s, setup.layout.pp / (least * compute_s + comm_s))
        return self._samples / float((numbers * rates).sum()) * (1 + waiting_share(setup, self._eff))

    def planned_s(self, setup: Setup) -> float:
        """Return the seconds of a step on ranks of the usual speed, by the planner; its layers cut as if they were all
        the average one, unless the setup says how."""
        key = setup.layout, setup.micro_batch_size
        if key not in self._planned_s:
            once = self.micro_batch(setup)
            if is_open(setup.layout, setup.model):
                setup = replace(setup, layout=cut(mean_times(once, setup), setup.layout))
            groups = axis_groups(setup.layout, setup.fabric, self._eff)
            self._planned_s[key] = assemble_step(setup, once, groups, self._eff).total_s
        return self._planned_s[key]

    def _least_each_s(self, setup: Setup, largest: int) -> tuple[float, float]:
        """Return the least that a sample takes through the whole model and back: computing, and exchanges in layers."""
        once, twice = self._once_and_twice(setup)
        size, most = setup.micro_batch_size, max(largest, setup.micro_batch_size)
        compute_s = comm_s = 0.0
        for number, one, two, again in _parts_of(once, twice):
            part_s = [_compute_s(part, setup) if again else _passes_s(part) for part in (one, two)]
            compute_s += number * _least_s(*part_s, size, most)
            for axis, passes in AXES.items():
                exchanged_s = (passes * getattr(part.comm, axis) for part in (one, two))
                comm_s += number * _least_s(*exchanged_s, size, most)
        return compute_s, comm_s


def _parts_of(once: MicroBatch, twice: MicroBatch) -> Iterator[tuple[int, LayersPart, LayersPart, bool]]:
    """Yield each part of the model, how many there are of it, and whether it is done again in the backward."""
    for before, one, two in zip(once.before, once.kinds, twice.kinds, strict=True):
        yield before[-1], one, two, True
    yield 1, once.embedding, twice.embedding, False
    yield 1, once.head, twice.head, False


def _passes_s(part: LayersPart) -> float:
    return part.time.forward + part.time.backward


def _compute_s(part: LayersPart, setup: Setup) -> float:
    return _passes_s(part) + recompute_part_s(part, setup)


def _least_s(once_s: float, twice_s: float, size: float, most: float) -> float:
    """Return what a sample takes at least, by the line through the times of `size` samples and twice as many, in
    micro-batches of `most` samples."""
    fixed_s = min(once_s, max(0.0, 2 * once_s - twice_s))
    return once_s / size - fixed_s * (1 / size - 1 / most)


def _speeds(fixed_s: Floats, each_s: Floats) -> list[Speed]:
    """Return the speeds of ranks; those that are alike are one object."""
    kinds, places = np.unique(np.stack([fixed_s, each_s]), axis=1, return_inverse=True)
    known = [Speed(fixed, each) for fixed, each in kinds.T.tolist()]
    return [known[place] for place in places.ravel().tolist()]
