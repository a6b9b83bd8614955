"""Exact search: every layout in the space is either predicted, or proven to be too large or too slow.

Layouts are taken in the order of a bound that none of them can beat (its mean stage's work and the bubble of equal
stages, without data-parallel traffic or optimizer), until the bound says that no other can be the next best; who asks
for fewer layouts waits for fewer predictions. Memory drops some of those taken, layers cut evenly; the others are
predicted in full, layers cut by their time. Layouts are ranked by the step to expect with the probability that they fit
(`memory/fit.py`); the safest of those that are not much slower than the first are kept beside them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.fit import SURELY, expected_step_s, fit_probability
from trainspec_cli.planner.memory.frameworks import LayerMemory, mean_layer_memory, memory_limit_bytes, peak_of
from trainspec_cli.planner.search.costs import axes_of_layer, costs_of
from trainspec_cli.planner.search.space import Space
from trainspec_cli.planner.setup import Setup, Software
from trainspec_cli.policy.batch.division import micro_batches_of
from trainspec_cli.spec.recipe.layout import Layout, Sharding

ABOUT = 1.1
"""A layout is about as fast as another whose step is this much shorter at most."""
SAFEST = 4
"""Safest layouts that a search keeps, since which of them fit is seen when every tensor is counted."""
TOO_LARGE = "memory"
SLOWER = "slower than those shown"


@dataclass(frozen=True)
class Estimated:
    setup: Setup
    recompute: str
    peak_bytes: float
    step_time_s: float = math.inf
    expected_s: float = math.inf
    """The step to expect with the probability that the layout fits."""


class Option(NamedTuple):
    """A layout with a recomputation and an offload that may be tried."""

    bound_s: float
    """No step of it is shorter."""
    number: int
    """Layouts are counted as the space yields them."""
    layout: Layout
    micro_batch_size: int
    grad_accum: int
    recompute: str
    offload: bool

    @property
    def alike(self) -> tuple[int, bool]:
        """What options that differ in the recomputation alone have in common."""
        return self.number, self.offload


Ranked = list[tuple[tuple[float, ...], int, Estimated]]
"""A heap of layouts, the least rank first: (rank, order of finding, layout)."""


@dataclass
class Search:
    """Ranks layouts of `template`'s model on its fabric, in one space of them."""

    space: Space
    template: Setup
    softwares: dict[Sharding, Software]
    """The software, by what data parallelism shards."""
    recomputes: tuple[str, ...]
    offloads: tuple[bool, ...]
    eff: Efficiency
    layer_memory: Callable[[Setup, str], LayerMemory] = lambda setup, _recompute: mean_layer_memory(setup)
    """Returns the memory of a layer under a recomputation."""
    samples: int | None = None
    """Samples of the step that layouts are ranked by; None: of the run's first, which the space divides."""
    slack: float = 1.0
    """Factor of the limit: a layout that is over by less may fit when it is counted more closely."""
    start_s: float = 0.0
    """Seconds of a start in vain over the steps of the run."""
    refused: Counter[str] = field(default_factory=Counter)
    smallest: Estimated | None = None
    """The layout that takes the least memory, fitting or not, to be named when none fits."""

    def __post_init__(self) -> None:
        self._usable = memory_limit_bytes(self.template.fabric.chip)
        self._limit = self.slack * self._usable
        self._costs = costs_of(self.template, tuple(self.softwares.items()), self.eff)
        self._memory: dict[tuple[object, ...], LayerMemory] = {}
        self._found: Ranked = []
        self._safest: Ranked = []
        self._least_s = math.inf
        self._surely: set[tuple[int, bool]] = set()
        self._options = sorted(self.bounded(), key=lambda option: option.bound_s)[::-1]
        self.considered = len(self._options)
        self.refused.update(self.space.refused)

    def best(self) -> Iterator[Estimated]:
        """Yield what may fit, the shortest expected step first; as few layouts are predicted as that takes."""
        while self._options or self._found:
            if self._found and (not self._options or self._found[0][0][0] <= self._options[-1].bound_s):
                yield heapq.heappop(self._found)[-1]
            else:
                self._take(self._options.pop())

    def safest(self) -> list[Estimated]:
        """Return the layouts that fit most probably of those about as fast as the best, the safest first; of those that
        surely fit, the fastest."""
        while self._options and self._options[-1].bound_s < self._slowest_safe_s():
            self._take(self._options.pop())
        return [found for _, _, found in sorted(self._safest, key=lambda item: item[:2], reverse=True)]

    def bounded(self) -> Iterator[Option]:
        """Yield what there is to try, with the step that it cannot beat."""
        for number, (layout, micro, accum) in enumerate(self.space.layouts()):
            if self.samples is not None:
                accum = micro_batches_of(layout, micro, self.samples)
            works_s = self._costs.works_s(layout, micro, accum)
            for name in self.recomputes:
                bound_s = self._bound_s(layout, accum, works_s[name])
                for offload in self.offloads:
                    yield Option(bound_s, number, layout, micro, accum, name, offload)

    def _take(self, option: Option) -> None:
        """Predict a layout, and take it up where it may fit."""
        if option.alike in self._surely:
            return  # heavier recomputation of a layout that surely fits is only slower
        shape = option.layout, option.micro_batch_size, option.grad_accum
        setup = self._costs.setup(*shape, option.recompute, offload=option.offload)
        layer = self._layer_memory(setup, option.recompute)
        peak = peak_of(setup, layer, beyond_bytes=max(self._limit, self._smallest_bytes))
        if peak > self._limit:
            self.refused[TOO_LARGE] += 1
            if peak < self._smallest_bytes:
                self.smallest = Estimated(setup, option.recompute, peak)
            return
        probability = fit_probability(peak, self._usable)
        if probability >= SURELY:
            self._surely.add(option.alike)
        step_s = self._costs.step_s(setup)
        expected_s = expected_step_s(step_s, probability, self.start_s)
        self._keep(Estimated(setup, option.recompute, peak, step_s, expected_s), probability)

    def _keep(self, found: Estimated, probability: float) -> None:
        """Take a layout up among those found, and among the safest where it is one of them."""
        self._least_s = min(self._least_s, found.expected_s)
        order = len(self._options)
        heapq.heappush(self._found, ((found.expected_s,), -order, found))
        if found.step_time_s <= ABOUT * self._least_s:
            push = heapq.heappush if len(self._safest) < SAFEST else heapq.heappushpop
            push(self._safest, ((min(probability, SURELY), -found.step_time_s), order, found))

    @property
    def _smallest_bytes(self) -> float:
        return math.inf if self.smallest is None else self.smallest.peak_bytes

    def _slowest_safe_s(self) -> float:
        """Return the step beyond which no layout is wanted for being safe."""
        about_s = ABOUT * self._least_s
        if len(self._safest) < SAFEST:
            return about_s
        probability, negative_s = self._safest[0][0]
        return about_s if probability < SURELY else min(about_s, -negative_s)

    def _bound_s(self, layout: Layout, accum: int, work_s: float) -> float:
        """Return the step that no schedule is faster than: the mean stage's own work and its wait for others that are
        no heavier, waiting for the slowest device included."""
        mean_s = work_s / layout.pp
        wait_s = min(1.0, self.eff.bubble) * layout.bubble_part * (work_s - mean_s)
        return (accum * mean_s + wait_s) * (1 + self._costs.waiting)

    def _layer_memory(self, setup: Setup, recompute: str) -> LayerMemory:
        key = (*axes_of_layer(setup.layout), setup.micro_batch_size, recompute, id(setup.software))
        if key not in self._memory:
            self._memory[key] = self.layer_memory(setup, recompute)
        return self._memory[key]


def recompute_names(wanted: str) -> tuple[str, ...]:
    """Lightest first. Selective recomputation saves the score matrix, which fused attention never writes."""
    return ("none", "full") if wanted == "auto" else (wanted,)


def share_recomputed(setup: Setup, matmul_flops: float, attention_flops: float) -> float:
    """Forward FLOPs done again, over those of forward and backward. Frozen weights' backward is half of others'."""
    recompute, passes = setup.recompute, 3.0 if setup.trainable >= 1.0 else 2.0
    again = recompute.matmul * matmul_flops / passes + recompute.attention * attention_flops / 3.0
    return recompute.layers * again / (matmul_flops + attention_flops)
