"""Exact search: every layout in the space is either predicted, or proven to be too large or too slow.

A bound that no layout can beat (its mean stage's work, without bubble, data-parallel traffic or optimizer) drops those
that cannot enter the shown ones, before their memory is looked at where the layer's times are already known; memory
drops others, layers cut evenly; what is left is predicted in full, layers cut by their time. Layouts are ranked by the
step to expect with the probability that they fit (`memory/fit.py`); the safest of those that are not much slower than
the first are kept beside them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
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
"""Safest layouts that are kept, since which of them fit is seen when every tensor is counted."""
TOO_LARGE = "memory"
SLOWER = "slower than those shown"


@dataclass(frozen=True)
class Estimated:
    setup: Setup
    recompute: str
    step_time_s: float
    peak_bytes: float


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

    def run(self, space: Space) -> list[Estimated]:
        """Return the best, best first."""
        self._usable = memory_limit_bytes(self.template.fabric.chip)
        self._limit = self.slack * self._usable
        self._parts: dict[tuple[object, ...], MicroBatch] = {}
        self._memory: dict[tuple[object, ...], LayerMemory] = {}
        self._best: Ranked = []
        self._safest: Ranked = []
        self._least_s = math.inf
        for layout, micro, accum in space.layouts():
            base = self._setup(layout, micro, accum)
            for offload in self.offloads:
                for name in self.recomputes:
                    setup = replace(base, recompute=RECOMPUTE[name], offload_optimizer=offload)
                    if self._try(setup, name):
                        break  # heavier recomputation of a layout that surely fits is only slower
        self.refused.update(space.refused)
        return _in_order(self._best)

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

    def _try(self, setup: Setup, recompute: str) -> bool:
        """-> whether heavier recomputation is no use: this surely fits, or is already too slow."""
        self.considered += 1
        known = self._parts.get(part_key(setup))
        if known is not None and self._too_slow(setup, known):
            return True
        peak = peak_of(setup, self._layer_memory(setup, recompute))
        if peak > self._limit:
            self.refused[TOO_LARGE] += 1
            if self.smallest is None or peak < self.smallest.peak_bytes:
                self.smallest = Estimated(setup, recompute, 0.0, peak)
            return False
        once = self._micro_batch(setup)
        if known is None and self._too_slow(setup, once):
            return True
        step_s = self._step_s(setup, once)
        self._keep(Estimated(setup, recompute, step_s, peak))
        return fit_probability(peak, self._usable) >= SURELY

    def _keep(self, found: Estimated) -> None:
        """Take a layout up among the best, and among the safest, where it is one of them."""
        probability = fit_probability(found.peak_bytes, self._usable)
        expected_s = expected_step_s(found.step_time_s, probability, self.start_s)
        self._least_s = min(self._least_s, expected_s)
        self.refused[SLOWER] += len(self._best) == self.keep
        self._push(self._best, self.keep, (-expected_s,), found)
        if found.step_time_s <= ABOUT * self._least_s:
            self._push(self._safest, SAFEST, (min(probability, SURELY), -found.step_time_s), found)

    def _push(self, heap: Ranked, size: int, rank: tuple[float, ...], found: Estimated) -> None:
        push = heapq.heappush if len(heap) < size else heapq.heappushpop
        push(heap, (rank, -self.considered, found))

    def _step_s(self, setup: Setup, once: MicroBatch) -> float:
        """Seconds of a step, its layers cut into stages as if they were all the average one."""
        groups = axis_groups(setup.layout, setup.fabric, self.eff)
        if is_open(setup.layout, setup.model):
            setup = replace(setup, layout=cut(mean_times(once, setup), setup.layout))
        return assemble_step(setup, once, groups, self.eff).total_s

    def _too_slow(self, setup: Setup, once: MicroBatch) -> bool:
        """Whether a layout is neither one of the best, nor one of the safest that are about as fast."""
        slow = len(self._best) == self.keep and self._bound(setup, once) >= max(self._worst_s(), self._slowest_safe_s())
        self.refused[SLOWER] += slow
        return slow

    def _worst_s(self) -> float:
        return -self._best[0][0][0]

    def _slowest_safe_s(self) -> float:
        """Return the step beyond which no layout is wanted for being safe."""
        about_s = ABOUT * self._least_s
        if len(self._safest) < SAFEST:
            return about_s
        probability, negative_s = self._safest[0][0]
        return about_s if probability < SURELY else min(about_s, -negative_s)

    def _bound(self, setup: Setup, once: MicroBatch) -> float:
        """No schedule is faster than the mean stage's own work, waiting for the slowest device included."""
        layer, layout = once.layer, setup.layout
        work = setup.model.num_layers * (own_work_s(layer) + recompute_part_s(layer, setup))
        work += own_work_s(once.embedding) + own_work_s(once.head)
        return setup.grad_accum * work / layout.pp * (1 + waiting_share(setup, self.eff))

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
