"""Exact search: every layout in the space is either predicted, or proven to be too large or too slow.

Layouts are taken in the order of a bound that none of them can beat (its mean stage's work and the bubble of equal
stages, without data-parallel traffic or optimizer), until the bound says that no other can be among those shown. Memory
drops some of those taken, layers cut evenly; the others are predicted in full, layers cut by their time. Layouts are
ranked by the step to expect with the probability that they fit (`memory/fit.py`); the safest of those that are not much
slower than the first are kept beside them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from trainspec_cli.planner.cut import cut, is_open, mean_times
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import axis_groups
from trainspec_cli.planner.memory.fit import SURELY, expected_step_s, fit_probability
from trainspec_cli.planner.memory.frameworks import LayerMemory, mean_layer_memory, memory_limit_bytes, peak_of
from trainspec_cli.planner.search.space import Space
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software
from trainspec_cli.planner.time.compute import EIGHT_BIT
from trainspec_cli.planner.time.step import (
    MicroBatch,
    assemble_step,
    micro_batch,
    own_work_s,
    recompute_part_s,
    waiting_share,
)
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
    step_time_s: float
    peak_bytes: float


@dataclass(frozen=True)
class Option:
    """A layout with a recomputation and an offload that may be tried."""

    bound_s: float
    """No step of it is shorter."""
    number: int
    """Layouts are counted as the space yields them."""
    base: Setup
    recompute: str
    offload: bool

    @property
    def setup(self) -> Setup:
        return replace(self.base, recompute=RECOMPUTE[self.recompute], offload_optimizer=self.offload)

    @property
    def alike(self) -> tuple[int, bool]:
        """What options that differ in the recomputation alone have in common."""
        return self.number, self.offload


Ranked = list[tuple[tuple[float, ...], int, Estimated]]
"""A heap of layouts, the worst first: (rank, order of finding, layout)."""


@dataclass
class Search:
    """Ranks layouts of `template`'s model on its fabric. Keeps the `keep` that fit with the shortest expected step."""

    template: Setup
    softwares: dict[Sharding, Software]
    """The software, by what data parallelism shards."""
    recomputes: tuple[str, ...]
    offloads: tuple[bool, ...]
    eff: Efficiency
    keep: int = 10
    keep_safest: int = SAFEST
    """Of the safest layouts; 0 where only the best are wanted."""
    layer_memory: Callable[[Setup, str], LayerMemory] = lambda setup, _recompute: mean_layer_memory(setup)
    """Returns the memory of a layer under a recomputation."""
    samples: int | None = None
    """Samples of the step that layouts are ranked by; None: of the run's first, which the space divides."""
    slack: float = 1.0
    """Factor of the limit: a layout that is over by less may fit when it is counted more closely."""
    start_s: float = 0.0
    """Seconds of a start in vain over the steps of the run."""
    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    smallest: Estimated | None = None
    """The layout that takes the least memory, fitting or not, to be named when none fits."""

    def __post_init__(self) -> None:
        self._usable = memory_limit_bytes(self.template.fabric.chip)
        self._limit = self.slack * self._usable
        self._parts: dict[tuple[object, ...], MicroBatch] = {}
        self._works_s: dict[tuple[int, str], float] = {}
        self._memory: dict[tuple[object, ...], LayerMemory] = {}
        self._best: Ranked = []
        self._safest: Ranked = []
        self._least_s = math.inf

    def run(self, space: Space) -> list[Estimated]:
        """Return the best, best first. A search is run once."""
        surely: set[tuple[int, bool]] = set()
        bounded = sorted(self.bounded(space), key=lambda option: option.bound_s)
        for place, option in enumerate(bounded):
            if self._is_too_slow(option.bound_s):
                self.considered += len(bounded) - place
                self.refused[SLOWER] += len(bounded) - place
                break
            if option.alike in surely:
                continue  # heavier recomputation of a layout that surely fits is only slower
            if self._surely_fits(option):
                surely.add(option.alike)
        self.refused.update(space.refused)
        return _in_order(self._best)

    def bounded(self, space: Space) -> Iterator[Option]:
        """Yield what there is to try, with the step that it cannot beat."""
        for number, (layout, micro, accum) in enumerate(space.layouts()):
            base = self._setup(layout, micro, accum)
            once = self._micro_batch(base)
            for name in self.recomputes:
                bound_s = self._bound_s(base, once, name)
                for offload in self.offloads:
                    yield Option(bound_s, number, base, name, offload)

    @property
    def safest(self) -> list[Estimated]:
        """Layouts that fit most probably of those about as fast as the best, the safest first; of those that surely
        fit, the fastest."""
        return _in_order(self._safest)

    def _setup(self, layout: Layout, micro: int, accum: int) -> Setup:
        if self.samples is not None:
            accum = micro_batches_of(layout, micro, self.samples)
        return replace(
            self.template,
            layout=layout,
            micro_batch_size=float(micro),
            grad_accum=accum,
            software=self.softwares[layout.sharding],
        )

    def _surely_fits(self, option: Option) -> bool:
        """Predict a layout, and take it up where it is one of the best. Return whether it fits without a doubt."""
        self.considered += 1
        setup, recompute = option.setup, option.recompute
        peak = peak_of(setup, self._layer_memory(setup, recompute))
        if peak > self._limit:
            self.refused[TOO_LARGE] += 1
            if self.smallest is None or peak < self.smallest.peak_bytes:
                self.smallest = Estimated(setup, recompute, 0.0, peak)
            return False
        self._keep(Estimated(setup, recompute, self._step_s(setup, self._micro_batch(setup)), peak))
        return fit_probability(peak, self._usable) >= SURELY

    def _keep(self, found: Estimated) -> None:
        """Take a layout up among the best, and among the safest, where it is one of them."""
        probability = fit_probability(found.peak_bytes, self._usable)
        expected_s = expected_step_s(found.step_time_s, probability, self.start_s)
        self._least_s = min(self._least_s, expected_s)
        self.refused[SLOWER] += len(self._best) == self.keep
        self._push(self._best, self.keep, (-expected_s,), found)
        if self.keep_safest and found.step_time_s <= ABOUT * self._least_s:
            self._push(self._safest, self.keep_safest, (min(probability, SURELY), -found.step_time_s), found)

    def _push(self, heap: Ranked, size: int, rank: tuple[float, ...], found: Estimated) -> None:
        push = heapq.heappush if len(heap) < size else heapq.heappushpop
        push(heap, (rank, -self.considered, found))

    def _step_s(self, setup: Setup, once: MicroBatch) -> float:
        """Seconds of a step, its layers cut into stages as if they were all the average one."""
        groups = axis_groups(setup.layout, setup.fabric, self.eff)
        if is_open(setup.layout, setup.model):
            setup = replace(setup, layout=cut(mean_times(once, setup), setup.layout))
        return assemble_step(setup, once, groups, self.eff).total_s

    def _is_too_slow(self, bound_s: float) -> bool:
        """Return whether no layout with this bound is one of the best, nor of the safest that are about as fast."""
        return len(self._best) == self.keep and bound_s >= max(self._worst_s(), self._slowest_safe_s())

    def _worst_s(self) -> float:
        return -self._best[0][0][0]

    def _slowest_safe_s(self) -> float:
        """Return the step beyond which no layout is wanted for being safe."""
        if not self.keep_safest:
            return 0.0
        about_s = ABOUT * self._least_s
        if len(self._safest) < self.keep_safest:
            return about_s
        probability, negative_s = self._safest[0][0]
        return about_s if probability < SURELY else min(about_s, -negative_s)

    def _bound_s(self, base: Setup, once: MicroBatch, recompute: str) -> float:
        """No schedule is faster than the mean stage's own work and its wait for others that are no heavier, waiting for
        the slowest device included."""
        layout = base.layout
        work_s = self._work_s(base, once, recompute)
        mean_s = work_s / layout.pp
        wait_s = min(1.0, self.eff.bubble) * layout.bubble_part * (work_s - mean_s)
        return (base.grad_accum * mean_s + wait_s) * (1 + waiting_share(base, self.eff))

    def _work_s(self, base: Setup, once: MicroBatch, recompute: str) -> float:
        """Return the seconds of a micro-batch in all stages together."""
        key = (id(once), recompute)
        if key not in self._works_s:
            again_s = recompute_part_s(once.layer, replace(base, recompute=RECOMPUTE[recompute]))
            layers_s = base.model.num_layers * (own_work_s(once.layer) + again_s)
            self._works_s[key] = layers_s + own_work_s(once.embedding) + own_work_s(once.head)
        return self._works_s[key]

    def _micro_batch(self, setup: Setup) -> MicroBatch:
        key = part_key(setup)
        if key not in self._parts:
            groups = axis_groups(setup.layout, setup.fabric, self.eff)
            self._parts[key] = micro_batch(setup, groups, self.eff)
        return self._parts[key]

    def _layer_memory(self, setup: Setup, recompute: str) -> LayerMemory:
        key = (*axes_of_layer(setup.layout), setup.micro_batch_size, recompute, id(setup.software))
        if key not in self._memory:
            self._memory[key] = self.layer_memory(setup, recompute)
        return self._memory[key]


def _in_order(heap: Ranked) -> list[Estimated]:
    """Return the layouts of a heap, best first; of equal ones the first that was found."""
    return [found for _, _, found in sorted(heap, key=lambda item: item[:2], reverse=True)]


def part_key(setup: Setup) -> tuple[object, ...]:
    """Return what a micro-batch's time depends on, of setups that differ in layout and micro-batches alone."""
    layout = setup.layout
    accum = setup.grad_accum if setup.matmul in EIGHT_BIT else setup.grad_accum > 1
    gathered = layout.shards_parameters
    return *axes_of_layer(layout), layout.pp == 1, gathered, setup.micro_batch_size, accum, id(setup.software)


def axes_of_layer(layout: Layout) -> tuple[object, ...]:
    """The axes that cut a layer."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel


def recompute_names(wanted: str) -> tuple[str, ...]:
    """Lightest first. Selective recomputation saves the score matrix, which fused attention never writes."""
    return ("none", "full") if wanted == "auto" else (wanted,)


def share_recomputed(setup: Setup, matmul_flops: float, attention_flops: float) -> float:
    """Forward FLOPs done again, over those of forward and backward. Frozen weights' backward is half of others'."""
    recompute, passes = setup.recompute, 3.0 if setup.trainable >= 1.0 else 2.0
    again = recompute.matmul * matmul_flops / passes + recompute.attention * attention_flops / 3.0
    return recompute.layers * again / (matmul_flops + attention_flops)
