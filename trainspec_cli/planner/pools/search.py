"""Search over the layouts of all pools together: each is placed in every way that there is, and the fastest are kept.

What leaves the search early is what cannot be among the kept, by a time that its step is never below, and what is
larger than a pool's memory by the estimate, which counts the samples or layers that the pool would have. What is left
is counted tensor by tensor, as layouts of one pool are.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from trainspec_cli.planner.capacity import SLACK, softwares_of, start_s_a_step, template_of
from trainspec_cli.planner.cut import is_open, room_within
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.frameworks import DEFAULT_MEMORY, peak_of, stage_memory
from trainspec_cli.planner.memory.predict import SURELY, expected_step_s, fit_probability, layer_memory, predict_memory
from trainspec_cli.planner.pipeline import layers_per_rank
from trainspec_cli.planner.pools.describe import Pool
from trainspec_cli.planner.pools.placement import NOT_WHOLE, Placement, placements
from trainspec_cli.planner.pools.step import PoolStep, Setups, Stopwatch
from trainspec_cli.planner.run.batches import main_size
from trainspec_cli.planner.search.costs import LayerMemories
from trainspec_cli.planner.search.search import SLOWER, TOO_LARGE, recompute_names
from trainspec_cli.planner.search.space import Space
from trainspec_cli.planner.setup import RECOMPUTE
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import MemoryBreakdown

KEPT = 2
"""Layouts of each way to use the pools that are kept for each that is shown: which fit is seen when every tensor is
counted."""


@dataclass(frozen=True)
class Placed:
    """A layout on all pools."""

    setups: Setups
    placement: Placement
    recompute: str
    step: PoolStep
    memory: tuple[tuple[MemoryBreakdown, ...], ...] = ()
    """The stages of each pool, once every tensor is counted."""

    def fullest_pool(self, pools: Sequence[Pool]) -> int:
        """Return the pool whose devices are nearest to their limit."""
        return max(range(len(pools)), key=lambda pool: self.peak_bytes(pool) / pools[pool].limit_bytes)

    def peak_bytes(self, pool: int) -> float:
        return max(stage.total_bytes for stage in self.memory[pool])


class _Unit(NamedTuple):
    """Candidates that are tried with each recomputation."""

    layout: Layout
    micro_batch_size: int
    micro_batches: int
    placement: Placement
    offloads: bool


@dataclass
class PoolSearch:
    """Ranks layouts over all `pools` by the step to expect."""

    spec: RunSpec
    pools: Sequence[Pool]
    eff: Efficiency
    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.watch, self.samples = Stopwatch(self.pools, self.eff), main_size(self.spec)
        self._softwares = softwares_of(self.spec)
        templates = [template_of(self.spec, pool.fabric) for pool in self.pools]
        compute = next((one.compute for one in templates if one.compute == "fp16"), templates[0].compute)
        matmul = compute if self.spec.precision.matmul == "compute" else templates[0].matmul
        self._templates = tuple(replace(one, compute=compute, matmul=matmul) for one in templates)
        self._memory = LayerMemories(layer_memory)
        self._best: dict[bool, list[tuple[float, int, Placed]]] = {False: [], True: []}
        """Heaps of the layouts with whole replicas on every pool, and of those whose pipelines go through the pools."""
        self._start_s, self._least_over = start_s_a_step(self.spec), float("inf")
        self._smallest: tuple[Setups, Placement, str] | None = None

    def run(self, shown: int) -> list[Placed]:
        """Return the best that fit when every tensor is counted, best first; where none does, the nearest."""
        self._try_all(KEPT * shown)
        counted = [placed for heap in self._best.values() for placed in self._count_some(heap, shown)]
        fitting = [placed for placed in counted if self._part(placed) <= 1]
        if fitting:
            return sorted(fitting, key=self.expected_s)
        return counted[:shown] or self._nearest()

    def _nearest(self) -> list[Placed]:
        """Return the layout that is least over a pool's memory by the estimate."""
        if self._smallest is None:
            return []
        setups, placement, name = self._smallest
        return [self.count(Placed(setups, placement, name, self.watch.step(setups, placement, self.samples)))]

    def _count_some(self, heap: list[tuple[float, int, Placed]], shown: int) -> Iterator[Placed]:
        """Yield layouts of a heap, best first, until so many fit when every tensor is counted."""
        ordered = [placed for *_, placed in sorted(heap, key=lambda item: item[:2], reverse=True)]
        fitting = 0
        for place, placed in enumerate(ordered):
            if fitting == shown:
                self.refused[SLOWER] += len(ordered) - place
                return
            counted = self.count(placed)
            fits = self._part(counted) <= 1
            fitting += fits
            self.refused[TOO_LARGE] += not fits
            yield counted

    def expected_s(self, placed: Placed) -> float:
        return expected_step_s(placed.step.time.total_s, self.fit_probability(placed), self._start_s)

    def fit_probability(self, placed: Placed) -> float:
        return fit_probability(self._part(placed), 1.0)

    def _part(self, placed: Placed) -> float:
        """Return the peak over the limit, of the pool that is nearest to its own."""
        pool = placed.fullest_pool(self.pools)
        return placed.peak_bytes(pool) / self.pools[pool].limit_bytes

    def _try_all(self, keep: int) -> None:
        """Try every layout, placed in every way, with each recomputation that the recipe leaves open."""
        # Fast links must reach as far in every pool, since all have the same layout.
        scaleup_devices = min(pool.fabric.scaleup_devices for pool in self.pools)
        space = Space(self.spec, self.pools[0].fabric.num_devices, scaleup_devices)
        names = recompute_names(self.spec.recompute)
        offloads = (False, True) if self.spec.offload == AUTO else (self.spec.offload == "optimizer",)
        units: list[tuple[float, int, _Unit]] = []
        for layout, micro, accum in space.layouts():
            placed = list(placements(layout, self.pools))
            self.refused[NOT_WHOLE] += not placed
            for placement, offload in product(placed, offloads):
                unit = _Unit(layout, micro, accum, placement, offload)
                lightest = self._setups(unit, names[0])
                bound_s = self.watch.bound_s(lightest, placement, self.samples)
                units.append((bound_s, len(units), unit))
        for *_, unit in sorted(units):  # the most promising first, so that the others leave early
            for name in names:
                if self._try(self._setups(unit, name), unit.placement, name, keep):
                    break  # heavier recomputation of a layout that surely fits is only slower
        self.refused.update(space.refused)

    def _setups(self, unit: _Unit, name: str) -> Setups:
        return tuple(
            replace(
                template,
                layout=unit.layout,
                micro_batch_size=float(unit.micro_batch_size),
                grad_accum=unit.micro_batches,
                recompute=RECOMPUTE[name],
                software=self._softwares[unit.layout.sharding],
                offload_optimizer=unit.offloads,
            )
            for template in self._templates
        )

    def _try(self, setups: Setups, placement: Placement, name: str, keep: int) -> bool:
        """-> whether heavier recomputation is no use: this surely fits, or is already too slow."""
        self.considered += 1
        best = self._best[bool(placement.order)]
        worst_s = -best[0][0] if len(best) == keep else float("inf")
        if self.watch.bound_s(setups, placement, self.samples) >= worst_s:
            self.refused[SLOWER] += 1
            return True
        least = self._least_part_of_stages if placement.order else self._least_part
        if (over := least(setups, placement, name)) > SLACK:
            return self._refuse(over, setups, placement, name)
        step = self.watch.step(setups, placement, self.samples)
        placed = Placed(setups, placement, name, step)
        parts = []  # the estimated peak over the limit, by pool
        for pool, setup in enumerate(self._of_step(placed)):
            layer = self._memory.of(setup, placed.recompute)
            counts = layers_per_rank(setup.model.num_layers, setup.layout)
            stages = stages_on(pool, placed.placement, setup.layout)
            fullest = {stages[0], max(stages, key=counts.__getitem__), stages[-1]}
            sizes = (stage_memory(setup, stage, counts[stage], layer, DEFAULT_MEMORY).total_bytes for stage in fullest)
            parts.append(max(sizes) / self.pools[pool].limit_bytes)
        over = max(parts)
        if over > SLACK:
            return self._refuse(over, setups, placement, name)
        probability = fit_probability(over, 1.0)
        expected_s = expected_step_s(step.time.total_s, probability, self._start_s)
        push = heapq.heappush if len(best) < keep else heapq.heappushpop
        self.refused[SLOWER] += len(best) == keep
        push(best, (-expected_s, -self.considered, placed))
        return probability >= SURELY

    def _refuse(self, over: float, setups: Setups, placement: Placement, name: str) -> bool:
        self.refused[TOO_LARGE] += 1
        if over < self._least_over:
            self._least_over = over
            self._smallest = (setups, placement, name)
        return False

    def _least_part(self, setups: Setups, _: Placement, name: str) -> float:
        """Return the estimated peak over the limit of the pool with the most memory, with whole micro-batches: those of
        the fastest pool are about as large, and another size of them is tried too."""
        most = max(range(len(self.pools)), key=lambda pool: self.pools[pool].limit_bytes)
        peak = peak_of(setups[most], self._memory.of(setups[most], name))
        return peak / self.pools[most].limit_bytes

    def _least_part_of_stages(self, setups: Setups, placement: Placement, name: str) -> float:
        """Return the layers of the model over those that the stages of all pools have room for by the estimate, each as
        the last of its pool, which keeps the fewest micro-batches."""
        room = 0.0
        for pool, (setup, described) in enumerate(zip(setups, self.pools, strict=True)):
            layer = self._memory.of(setup, name)
            last = stages_on(pool, placement, setup.layout)[-1]
            one, two = (stage_memory(setup, last, number, layer, DEFAULT_MEMORY).total_bytes for number in (1, 2))
            room += placement.ranks[pool] * max(0.0, 1 + (SLACK * described.limit_bytes - one) / (two - one))
        return SLACK * setups[0].model.num_layers / max(room, 1e-9)

    def _of_step(self, placed: Placed) -> Setups:
        """Return the setups with each pool's largest micro-batch."""
        step = placed.step
        return tuple(
            replace(setup, layout=step.layout, micro_batch_size=float(size), grad_accum=step.micro_batches)
            for setup, size in zip(placed.setups, step.largest, strict=True)
        )

    def count(self, placed: Placed) -> Placed:
        """Return a layout with its layers cut by each one's own time, and every tensor counted: the best cut where that
        fits, else the best that does by the estimate of memory, else the even one."""
        even = self._counted(placed, placed.setups[0].layout)
        if not is_open(placed.setups[0].layout, self.spec.model):
            return even
        limits = self._limits(placed.placement, placed.setups[0].layout.pp)
        for bounded in (False, True):
            fullest = even.fullest_pool(self.pools)
            room = room_within(self._of_step(even)[fullest], even.memory[fullest], limits) if bounded else None
            layout = self.watch.cut(placed.setups, placed.placement, room, alike=False)
            found = even if layout == placed.setups[0].layout else self._counted(placed, layout)
            if self._part(found) <= 1:
                return found
        return even

    def _limits(self, placement: Placement, stages: int) -> list[float]:
        """Return the bytes that each pipeline rank may take: its pool's, or the smallest of those that share it."""
        if placement.order:
            return [self.pools[pool].limit_bytes for pool in placement.pool_of_stage_rank]
        return [min(pool.limit_bytes for pool in self.pools)] * stages

    def _counted(self, placed: Placed, layout: Layout) -> Placed:
        setups = tuple(replace(setup, layout=layout) for setup in placed.setups)
        timed = replace(placed, setups=setups, step=self.watch.step_as_cut(setups, placed.placement, self.samples))
        known: dict[int, tuple[MemoryBreakdown, ...]] = {}
        memory = []
        for pool, setup in enumerate(self._of_step(timed)):
            size = timed.step.largest[pool]
            if size not in known:
                known[size] = predict_memory(setup, placed.recompute)
            stages = stages_on(pool, placed.placement, layout)
            memory.append(tuple(known[size][stage] for stage in stages))
        return replace(timed, memory=tuple(memory))


def stages_on(pool: int, placement: Placement, layout: Layout) -> list[int]:
    """Return the pipeline ranks that a pool holds."""
    if not placement.order:
        return list(range(layout.pp))
    return [rank for rank, at in enumerate(placement.pool_of_stage_rank) if at == pool]
