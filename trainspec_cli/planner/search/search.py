"""Exact search: every layout in the space is either predicted, or proven to be too large or too slow.

Layouts are taken in the order of a bound that none of them can beat: its mean stage's work and the bubble of equal
stages, and for those that come first by that, what pipelines and data parallelism send at least. When the bound says
that no other can be the next best, the search is done; who asks for fewer layouts waits for fewer predictions. Memory
drops some of those taken, layers cut evenly; the others are predicted in full, layers cut by their time. Layouts are
ranked by the step to expect with the probability that they fit (`memory/predict.py`); the safest of those that are not
much slower than the first are kept beside them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trainspec_cli.balance.batch.division import micro_batches_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.frameworks import LayerMemory, mean_layer_memory, memory_limit_bytes, peak_of
from trainspec_cli.planner.memory.predict import SURELY, expected_step_s, fit_probability
from trainspec_cli.planner.search.costs import LayerMemories, costs_of
from trainspec_cli.planner.search.space import Space, one_group
from trainspec_cli.planner.setup import Setup, Software
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout, Sharding
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate

ABOUT = 1.1
"""A layout is about as fast as another whose step is this much shorter at most.

Predictions do not rank layouts more finely. Among published runs that differ in the layout alone, ln(predicted /
measured) spreads by 0.06 within the sweeps that the constants were fitted to (118 runs, most of bigscience's), and by
0.15 within those of vTrain (109 runs, arXiv:2312.12391), which no constant was fitted to. Of pairs predicted to differ
by less than 10%, the faster one was predicted to be so in 68%."""
NEAR = 1.05
"""Of layouts of one complexity, the one with the fewest stages is taken of those whose step is this much longer at
most."""
SAFEST = 4
"""Safest layouts that a search keeps, since which of them fit is seen when every tensor is counted."""
MANY_TOO_LARGE = 64
"""Layouts that were too large, after which a search that has found none looks at memory before it looks at time."""
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
    order: int
    """Options are counted as they are found."""
    layout: Layout
    micro_batch_size: int
    grad_accum: int
    recompute: int
    """Its place in `Search.recomputes`."""
    offload: bool
    counts_exchanges: bool = False
    """False: the bound is that of the work alone."""

    @property
    def shape(self) -> tuple[Layout, int, int]:
        return self.layout, self.micro_batch_size, self.grad_accum


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
    counted: dict[Setup, Candidate] = field(default_factory=dict)
    """Layouts that were counted tensor by tensor."""
    smallest: Estimated | None = None
    """The layout that takes the least memory, fitting or not, to be named when none fits."""

    def __post_init__(self) -> None:
        self._usable = memory_limit_bytes(self.template.fabric.chip)
        self._limit = self.slack * self._usable
        self._costs = costs_of(self.template, tuple(self.softwares.items()), self.eff)
        self._memory = LayerMemories(self.layer_memory)
        self._found: Ranked = []
        self._safest: Ranked = []
        self._least_s = math.inf
        self._orders = itertools.count()
        self._least_bytes: dict[tuple[Layout, int, bool], float] = {}
        self._all = sorted(self.bounded())
        self._options = list(self._all)
        """A heap of what may still be tried, the least bound first."""
        self.considered = len(self._options) * len(self.recomputes)
        self.refused.update(self.space.refused)

    def best(self) -> Iterator[Estimated]:
        """Yield what may fit, the shortest expected step first; as few layouts are predicted as that takes."""
        while self._options or self._found:
            if self._found and (not self._options or self._found[0][0][0] <= self._options[0].bound_s):
                yield heapq.heappop(self._found)[-1]
            else:
                self._take_next()

    def safest(self) -> list[Estimated]:
        """Return the layouts that fit most probably of those about as fast as the best, the safest first; of those that
        surely fit, the fastest."""
        while self._options and self._options[0].bound_s < self._slowest_safe_s():
            self._take_next()
        return [found for _, _, found in sorted(self._safest, key=lambda item: item[:2], reverse=True)]

    def as_simple(self, most: tuple[int, bool], limit_s: float) -> Iterator[list[Estimated]]:
        """Yield the layouts of complexity `most` or less that may fit and are expected to take `limit_s` or less: those
        of one complexity together, the fastest first; the simplest before the others."""
        alike: dict[tuple[int, bool], list[Estimated]] = defaultdict(list)
        within = (one for one in self._all if one.bound_s <= limit_s)
        options = [
            (least, one)
            for one in within
            if (least := complexity(self.space.spec, one.layout, self.recomputes[one.recompute], one.offload)) <= most
        ]
        options.sort(key=lambda pair: pair[0])
        for least, group in itertools.groupby(options, key=lambda pair: pair[0]):
            while alike and min(alike) < least:
                yield sorted(alike.pop(min(alike)), key=lambda one: one.expected_s)
            for found in (each for _, option in group for each in self._estimates(option, limit_s)):
                offload = found.setup.offload_optimizer
                alike[complexity(self.space.spec, found.setup.layout, found.recompute, offload)].append(found)
        for least in sorted(alike):
            yield sorted(alike[least], key=lambda one: one.expected_s)

    def fastest(self, keep: Callable[[Layout], bool]) -> Estimated | None:
        """Return the layout of the shortest expected step, of those kept that may fit; None where none does."""
        best: Estimated | None = None
        for option in self._all:
            limit_s = best.expected_s if best else math.inf
            if option.bound_s > limit_s:
                break
            if keep(option.layout):
                best = next(self._estimates(option, limit_s), best)
        return best

    def _estimates(self, option: Option, limit_s: float) -> Iterator[Estimated]:
        """Yield the lightest recomputation of an option with which it may fit, if it is within `limit_s`."""
        heavier: Option | None = option
        while heavier is not None and self.closer(heavier).bound_s <= limit_s:
            found = self._estimate(heavier)
            if found.peak_bytes <= self._limit:
                if found.expected_s <= limit_s:
                    yield found
                return
            heavier = self.heavier(heavier)

    def bounded(self) -> Iterator[Option]:
        """Yield what there is to try first: each layout with the lightest recomputation, and the step that it cannot
        beat by its work alone."""
        for layout, micro, accum in self.space.layouts():
            if self.samples is not None:
                accum = micro_batches_of(layout, micro, self.samples)
            bound_s = self._bound_s(layout, micro, accum, 0)
            for offload in self.offloads:
                yield Option(bound_s, next(self._orders), layout, micro, accum, 0, offload)

    def heavier(self, option: Option) -> Option | None:
        """Return the layout with the next recomputation, whose step is no shorter; None where there is none."""
        place = option.recompute + 1
        if place == len(self.recomputes):
            return None
        bound_s = self._bound_s(*option.shape, place)
        order = next(self._orders)
        return option._replace(bound_s=bound_s, order=order, recompute=place, counts_exchanges=False)

    def closer(self, option: Option) -> Option:
        """Return the option with the bound that counts exchanges too."""
        exchange_s = self._costs.least_exchange_s(*option.shape, self.recomputes[option.recompute])
        bound_s = option.bound_s + (1 + self._costs.waiting) * exchange_s
        return option._replace(bound_s=bound_s, counts_exchanges=True)

    def _take_next(self) -> None:
        """Predict the layout of the least bound; where that counts no exchanges yet, put it back with one that does.
        Where many were too large and none fits yet, those that are so with the smallest micro-batches go first."""
        option = self._options[0]
        none_fits = self._least_s == math.inf and self.refused[TOO_LARGE] >= MANY_TOO_LARGE
        if none_fits and self.least_bytes(option) > self._beyond_bytes:
            self.refused[TOO_LARGE] += 1
            self._leave(option)
        elif not option.counts_exchanges:
            heapq.heapreplace(self._options, self.closer(option))
        else:
            self._leave(option, surely_fits=self._take(option))

    def _leave(self, option: Option, *, surely_fits: bool = False) -> None:
        """Take the option off; a heavier recomputation of one that surely fits is only slower."""
        heapq.heappop(self._options)
        heavier = self.heavier(option)
        if heavier and not surely_fits:
            heapq.heappush(self._options, heavier)

    def least_bytes(self, option: Option) -> float:
        """Return what the layout takes with micro-batches of one sample (or as large as is asked for), which no size
        takes less than; more than may fit, where it is more."""
        key = option.layout, option.recompute, option.offload
        if key not in self._least_bytes:
            batching = self.space.spec.batching
            size = 1 if batching.micro_batch_size == AUTO else int(batching.micro_batch_size)
            number = micro_batches_of(option.layout, size, self.samples or batching.global_batch_size)
            shapes = [(size, number)]
            if batching.micro_batch_size == AUTO:  # gradients are not summed beside a single micro-batch's activations
                shapes += [(number, 1), (1, 1)] if number < 2 * option.layout.pp else [(number, 1)]
            tried = (option._replace(micro_batch_size=micro, grad_accum=accum) for micro, accum in shapes)
            self._least_bytes[key] = min(self.peak(each)[1] for each in tried)
        return self._least_bytes[key]

    def peak(self, option: Option) -> tuple[Setup, float]:
        """-> (the option's setup, its peak; one that does not fit is not looked at any closer)."""
        name = self.recomputes[option.recompute]
        setup = self._costs.setup(*option.shape, name, offload=option.offload)
        return setup, peak_of(setup, self._memory.of(setup, name), beyond_bytes=self._beyond_bytes)

    def _take(self, option: Option) -> bool:
        """Predict a layout, and take it up where it may fit. Return whether it surely does."""
        found = self._estimate(option)
        if found.peak_bytes > self._limit:
            self.refused[TOO_LARGE] += 1
            if found.peak_bytes < self._smallest_bytes:
                self.smallest = found
            return False
        probability = fit_probability(found.peak_bytes, self._usable)
        self._keep(found, probability, option.order)
        return probability >= SURELY

    def _estimate(self, option: Option) -> Estimated:
        """Return the option's memory, and where it may fit its step too."""
        name, (setup, peak) = self.recomputes[option.recompute], self.peak(option)
        if peak > self._limit:
            return Estimated(setup, name, peak)
        step_s = self._costs.steps.step_s(setup)
        probability = fit_probability(peak, self._usable)
        return Estimated(setup, name, peak, step_s, expected_step_s(step_s, probability, self.start_s))

    def _keep(self, found: Estimated, probability: float, order: int) -> None:
        """Take a layout up among those found, and among the safest where it is one of them."""
        self._least_s = min(self._least_s, found.expected_s)
        heapq.heappush(self._found, ((found.expected_s,), order, found))
        if found.step_time_s <= ABOUT * self._least_s:
            push = heapq.heappush if len(self._safest) < SAFEST else heapq.heappushpop
            # The least safe of those kept is on top of the heap: a safer one pushes it out. All that surely fit are
            # equally safe, and rank by speed.
            push(self._safest, ((min(probability, SURELY), -found.step_time_s), -order, found))

    @property
    def _smallest_bytes(self) -> float:
        return math.inf if self.smallest is None else self.smallest.peak_bytes

    @property
    def _beyond_bytes(self) -> float:
        """A layout that takes more neither fits nor is the smallest."""
        return max(self._limit, self._smallest_bytes)

    def _slowest_safe_s(self) -> float:
        """Return the step beyond which no layout is wanted for being safe."""
        about_s = ABOUT * self._least_s
        if len(self._safest) < SAFEST:
            return about_s
        probability, negative_s = self._safest[0][0]
        return about_s if probability < SURELY else min(about_s, -negative_s)

    def _bound_s(self, layout: Layout, micro: int, accum: int, recompute: int) -> float:
        """Return the step that no schedule is faster than: the mean stage's own work and its wait for others that are
        no heavier, waiting for the slowest device included."""
        work_s = self._costs.works_s(layout, micro, accum)[self.recomputes[recompute]]
        mean_s = work_s / layout.pp
        wait_s = min(1.0, self.eff.bubble) * layout.bubble_part * (work_s - mean_s)
        return (accum * mean_s + wait_s) * (1 + self._costs.waiting)


def complexity(spec: RunSpec, layout: Layout, recompute: str, offload: bool) -> tuple[int, bool]:
    """Return what makes a layout hard to foresee and to run, within a replica group: the axes besides one of data
    parallelism, a schedule of which no run is published, offload, and full recomputation, which does a third more work
    and counts as two axes."""
    layout, _ = one_group(spec, layout)
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp))
    mixed = layout.dp_shard > 1 and layout.dp_replicate > 1
    full = recompute == "full"
    return axes + mixed + layout.splits_backward + offload + 2 * full, full


def recompute_names(wanted: str) -> tuple[str, ...]:
    """Lightest first. Selective recomputation saves the score matrix, which fused attention never writes."""
    return ("none", "full") if wanted == "auto" else (wanted,)


def share_recomputed(setup: Setup, matmul_flops: float, attention_flops: float) -> float:
    """Forward FLOPs done again, over those of forward and backward. Frozen weights' backward is half of others'."""
    recompute = setup.recompute
    passes = 3.0 if setup.trainable >= 1.0 else 2.0
    again = recompute.matmul * matmul_flops / passes + recompute.attention * attention_flops / 3.0
    return recompute.layers * again / (matmul_flops + attention_flops)
