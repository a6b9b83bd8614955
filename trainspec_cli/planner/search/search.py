"""Exact search: every layout in the space is either predicted or proven to be too large or too slow.

Layouts are processed in order of a lower bound on their step time: the mean stage's work plus the bubble of equal
stages. For the first ones, the bound also includes the minimum communication for pipeline and data parallelism. The
search ends when the bound shows that no other layout can be the next best, so requesting fewer layouts takes fewer
predictions. Layouts that are too large with an even layer split are dropped. The others are predicted in full, with
layers split by time. Layouts are ranked by expected step time, which takes into account the probability that they fit
(`memory/predict.py`). The safest layouts among those that are not much slower than the first are also kept."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from trainspec_cli.balance.batch.division import micro_batches_of
from trainspec_cli.planner.hardware.cluster import Fabric, Group, axis_groups
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.predict import (
    SURELY,
    LayerMemory,
    expected_step_s,
    fit_probability,
    mean_layer_memory,
    memory_limit_bytes,
    peak_of,
)
from trainspec_cli.planner.pipeline import cut, is_open
from trainspec_cli.planner.search.space import Space, one_group
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software, changed
from trainspec_cli.planner.time.data_parallel import exchanges_of
from trainspec_cli.planner.time.step import (
    EIGHT_BIT,
    MicroBatch,
    TimedRank,
    layer_s,
    mean_times,
    micro_batch,
    own_work_s,
    pipeline_sends_s,
    recompute_part_s,
    slowest_rank,
    step_of_rank,
    waiting_share,
)
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout, Sharding
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate


class Steps:
    """Step times of one model on one fabric. Micro-batches and slowest ranks that several layouts share are timed only
    once, because the planner's search, the search at measured speeds and the search over pools time thousands of
    layouts."""

    def __init__(self, fabric: Fabric, eff: Efficiency):
        self.fabric = fabric
        self.eff = eff
        self._parts: dict[tuple[object, ...], MicroBatch] = {}
        self._groups: dict[tuple[object, ...], dict[str, Group]] = {}
        self._slowest: dict[tuple[object, ...], TimedRank] = {}

    def micro_batch(self, setup: Setup, key: tuple[object, ...] | None = None) -> MicroBatch:
        """Return the times of one micro-batch, which are cached. `key`: the setup's cache key, if known."""
        key = key or self.key_of(setup)
        if key not in self._parts:
            self._parts[key] = micro_batch(setup, self.groups(setup.layout), self.eff)
        return self._parts[key]

    def key_of(self, setup: Setup) -> tuple[object, ...]:
        return part_key(setup.layout, setup.micro_batch_size, setup.grad_accum, setup.matmul, setup.software)

    def groups(self, layout: Layout) -> dict[str, Group]:
        key = layout.tp, layout.cp, layout.ep, layout.etp, layout.dp_shard, layout.dp_replicate, layout.pp
        if key not in self._groups:
            self._groups[key] = axis_groups(layout, self.fabric, self.eff)
        return self._groups[key]

    def step_s(self, setup: Setup) -> float:
        """Return the duration of a step in seconds. If the layout has no layer split, layers are split as if all were
        average."""
        layout = setup.layout
        part = self.key_of(setup)
        once = self.micro_batch(setup, part)
        # The slowest rank does not depend on how samples are distributed, so layouts that differ only in that respect
        # share it.
        cuts = layout.pp, layout.pipeline_schedule, layout.virtual_stages, layout.stage_layers
        key = *part, *cuts, setup.recompute, layout.bubble_of(setup.grad_accum)
        if key not in self._slowest:
            is_cut = not is_open(layout, setup.model)
            as_cut = setup if is_cut else replace(setup, layout=cut(mean_times(once, setup), layout))
            self._slowest[key] = slowest_rank(once, as_cut, self.eff)
        return step_of_rank(self._slowest[key], setup, once.rates, self.groups(layout), self.eff).total_s


class Costs:
    """Step times, and bounds on step times, for layouts of the model in `template` on its fabric."""

    def __init__(self, template: Setup, softwares: dict[Sharding, Software], eff: Efficiency) -> None:
        self.template = template
        self.softwares = softwares
        self.eff = eff
        self.steps = Steps(template.fabric, eff)
        self.waiting = waiting_share(template, eff)
        """Time added by waiting for the slowest device, as a fraction of a step's work."""
        self._works_s: dict[tuple[object, ...], dict[str, float]] = {}
        self._least_exchange_s: dict[tuple[object, ...], float] = {}
        self._densities: dict[tuple[object, ...], tuple[float, float, float, float]] = {}

    def setup(self, layout: Layout, micro: int, accum: int, recompute: str = "none", *, offload: bool = False) -> Setup:
        return changed(
            self.template,
            layout=layout,
            micro_batch_size=float(micro),
            grad_accum=accum,
            software=self.softwares[layout.sharding],
            recompute=RECOMPUTE[recompute],
            offload_optimizer=offload,
        )

    def works_s(self, layout: Layout, micro: int, accum: int) -> dict[str, float]:
        """Return the work of one micro-batch in all layers, the embedding and the head, for each type of
        recomputation."""
        part = part_key(layout, micro, accum, self.template.matmul, self.softwares[layout.sharding])
        if part not in self._works_s:
            once = self.steps.micro_batch(self.setup(layout, micro, accum), part)
            number = once.num_layers
            embedding_s = own_work_s(once.embedding)
            head_s = own_work_s(once.head)
            self._works_s[part] = {
                name: number * layer_s(once.layer, again) + embedding_s + head_s for name, again in RECOMPUTE.items()
            }
        return self._works_s[part]

    def least_exchange_s(self, layout: Layout, micro: int, accum: int, recompute: str) -> float:
        """Return the minimum time that a step's exchanges add to the work of its mean stage: the pipeline's sends, and
        the data-parallel communication that no rank can hide."""
        part = part_key(layout, micro, accum, self.template.matmul, self.softwares[layout.sharding])
        spread = layout.pp, layout.virtual_stages, layout.dp_shard, layout.dp_replicate, layout.zero_stage
        key = *part, *spread, accum, recompute
        if key not in self._least_exchange_s:
            setup = self.setup(layout, micro, accum, recompute)
            stage_s = self.works_s(layout, micro, accum)[recompute] / layout.pp
            groups = self.steps.groups(layout)
            sends_s = pipeline_sends_s(setup, groups["pp"], self.eff)
            # Layers have at least this many parameters per second of a micro-batch's work; embedding and head are
            # added. A stage may have layers of any kind, so the bound comes from the kind with the fewest parameters
            # per unit of work.
            if (dense := (*part, recompute)) not in self._densities:
                once = self.steps.micro_batch(setup, part)
                kinds_s = [(kind, layer_s(kind, setup.recompute)) for kind in once.kinds]
                ends = once.embedding, once.head
                self._densities[dense] = (
                    min(kind.params / time_s for kind, time_s in kinds_s),
                    min(kind.expert_params / time_s for kind, time_s in kinds_s),
                    sum(map(own_work_s, ends)),
                    # Embedding and head may hide exchanges too; to keep this a lower bound, assume that they are
                    # recomputed.
                    sum(recompute_part_s(end, setup.recompute) for end in ends),
                )
            params_per_s, experts_per_s, ends_s, ends_again_s = self._densities[dense]
            # The slowest rank works at least as long as the mean stage, which consists of layers except for embedding
            # and head.
            layers_s = max(0.0, stage_s - ends_s)
            sent = exchanges_of(params_per_s * layers_s, experts_per_s * layers_s, setup, groups, self.eff)
            beside_s = self.eff.dp_overlap * (stage_s + ends_again_s) if setup.software.overlap_dp else 0.0
            each_s = max(0.0, sent.forward_s + sent.backward_s - beside_s)
            exposed_s = sent.times * each_s + max(0.0, sent.across_s - beside_s / 2)
            self._least_exchange_s[key] = sends_s + exposed_s
        return self._least_exchange_s[key]


class LayerMemories:
    """A layer's memory with a specific recomputation, estimated once for all layouts that split a layer in the same
    way."""

    def __init__(self, estimate: Callable[[Setup, str], LayerMemory]):
        self._estimate = estimate
        self._known: dict[tuple[object, ...], LayerMemory] = {}

    def of(self, setup: Setup, recompute: str) -> LayerMemory:
        key = (*axes_of_layer(setup.layout), setup.micro_batch_size, recompute, id(setup.software))
        if key not in self._known:
            self._known[key] = self._estimate(setup, recompute)
        return self._known[key]


@lru_cache(maxsize=4)
def costs_of(template: Setup, softwares: tuple[tuple[Sharding, Software], ...], eff: Efficiency) -> Costs:
    """Return the costs, which searches with equal arguments share. Searches that differ only in their replica groups
    share everything except the exchanges."""
    # Replica groups change exchanges but not micro-batches. The two searches for one plan differ only in replica
    # groups.
    alike = replace(template, replica_groups=1)
    if template == alike:
        return Costs(template, dict(softwares), eff)
    costs = copy(costs_of(alike, softwares, eff))
    costs.template = template
    costs._least_exchange_s = {}
    return costs


def part_key(layout: Layout, micro: float, accum: int, matmul: str, software: Software) -> tuple[object, ...]:
    """Return the values that determine a micro-batch's time, for setups that differ only in layout and
    micro-batches."""
    # Weights are cast to 8 bits once per step, at a cost that micro-batches share. In other formats, it only matters
    # whether gradients of several micro-batches are added.
    counted = accum if matmul in EIGHT_BIT else accum > 1
    # The schedule and the method of context parallelism determine what the engine's exchanges overlap with.
    of_exchanges = layout.splits_backward, layout.context_method
    return (
        *axes_of_layer(layout),
        *of_exchanges,
        layout.pp == 1,
        layout.shards_parameters,
        micro,
        counted,
        id(software),
    )


def axes_of_layer(layout: Layout) -> tuple[object, ...]:
    """Return the axes that split a layer."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel


ABOUT = 1.1
"""A layout is about as fast as another one if its step takes at most this many times as long.

Predictions cannot rank layouts more finely. Among published runs that differ only in layout, the spread of ln(predicted
/ measured) is 0.06 within the sweeps used to fit the constants (118 runs, most of them from bigscience). It is 0.15
within the sweeps of vTrain (109 runs, arXiv:2312.12391), which were not used for any fit. Among pairs predicted to
differ by less than 10%, the prediction identified the faster one 68% of the time."""
NEAR = 1.05
"""Among layouts of the same complexity, the one with the fewest stages is chosen if its step takes at most this many
times as long."""
SAFEST = 4
"""How many of the safest layouts a search keeps. Several are kept because some may turn out not to fit once every
tensor is counted."""
MANY_TOO_LARGE = 64
"""After this many layouts that are too large, a search that has not found a fitting one checks memory before time."""
TOO_LARGE = "memory"
SLOWER = "slower than those shown"


@dataclass(frozen=True)
class Estimated:
    setup: Setup
    recompute: str
    peak_bytes: float
    step_time_s: float = math.inf
    expected_s: float = math.inf
    """The expected step time, which takes into account the probability that the layout fits."""


class Option(NamedTuple):
    """A layout with a choice of recomputation and offloading, as an option in the search."""

    bound_s: float
    """Lower bound on its step time."""
    order: int
    """The option's number, in order of discovery."""
    layout: Layout
    micro_batch_size: int
    grad_accum: int
    recompute: int
    """Index of its recomputation in `Search.recomputes`."""
    offload: bool
    counts_exchanges: bool = False
    """If False, the bound includes only the work, not the exchanges."""

    @property
    def shape(self) -> tuple[Layout, int, int]:
        return self.layout, self.micro_batch_size, self.grad_accum


Ranked = list[tuple[tuple[float, ...], int, Estimated]]
"""A heap of layouts, lowest rank first: (rank, order of discovery, layout)."""


@dataclass
class Search:
    """Ranks the layouts of one space, for the model in `template` on its fabric."""

    space: Space
    template: Setup
    softwares: dict[Sharding, Software]
    """The `Software` for each type of sharding."""
    recomputes: tuple[str, ...]
    offloads: tuple[bool, ...]
    eff: Efficiency
    layer_memory: Callable[[Setup, str], LayerMemory] = lambda setup, _recompute: mean_layer_memory(setup)
    """Function that returns a layer's memory with a specific recomputation."""
    samples: int | None = None
    """Number of samples in the step that determines the ranking of layouts; None for the number in the run's first
    step."""
    slack: float = 1.0
    """Factor applied to the limit: a layout that exceeds it by less than this factor may fit when counted exactly."""
    start_s: float = 0.0
    """Duration of a failed start in seconds, divided by the number of steps in the run."""
    refused: Counter[str] = field(default_factory=Counter)
    counted: dict[Setup, Candidate] = field(default_factory=dict)
    """Layouts whose memory has already been counted tensor by tensor."""
    smallest: Estimated | None = None
    """The layout that needs the least memory, whether it fits or not. It is shown if none fits."""

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
        """A heap of the options to try, with the lowest bound first."""
        self.considered = len(self._options) * len(self.recomputes)
        self.refused.update(self.space.refused)

    def best(self) -> Iterator[Estimated]:
        """Yield layouts that may fit, shortest expected step first, with as few predictions as possible."""
        while self._options or self._found:
            if self._found and (not self._options or self._found[0][0][0] <= self._options[0].bound_s):
                yield heapq.heappop(self._found)[-1]
            else:
                self._predict_next()

    def safest(self) -> list[Estimated]:
        """Return the layouts that are most likely to fit among those about as fast as the best, safest first. Among
        those that are certain to fit, return the fastest."""
        while self._options:
            slowest_s = ABOUT * self._least_s
            if len(self._safest) == SAFEST and self._safest[0][0][0] >= SURELY:
                slowest_s = min(slowest_s, -self._safest[0][0][1])
            if self._options[0].bound_s >= slowest_s:  # do not prefer a slower layout just because it is safe
                break
            self._predict_next()
        return [found for _, _, found in sorted(self._safest, key=lambda item: item[:2], reverse=True)]

    def as_simple(self, most: tuple[int, bool], limit_s: float) -> Iterator[list[Estimated]]:
        """Yield the layouts of complexity up to `most` that may fit and whose expected step takes at most `limit_s`.
        The simplest come first and, within the same complexity, the fastest."""
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
        """Return the layout with the shortest expected step among those that may fit and where `keep` is true; None
        if there is none."""
        best: Estimated | None = None
        for option in self._all:
            limit_s = best.expected_s if best else math.inf
            if option.bound_s > limit_s:
                break
            if keep(option.layout):
                best = next(self._estimates(option, limit_s), best)
        return best

    def _estimates(self, option: Option, limit_s: float) -> Iterator[Estimated]:
        """Yield the option with the least recomputation that may fit, provided that its step is within `limit_s`."""
        heavier: Option | None = option
        while heavier is not None and self.closer(heavier).bound_s <= limit_s:
            found = self._estimate(heavier)
            if found.peak_bytes <= self._limit:
                if found.expected_s <= limit_s:
                    yield found
                return
            heavier = self.heavier(heavier)

    def bounded(self) -> Iterator[Option]:
        """Yield the initial options: each layout with the lightest recomputation and the bound that follows from its
        work."""
        for layout, micro, accum in self.space.layouts():
            if self.samples is not None:
                accum = micro_batches_of(layout, micro, self.samples)
            bound_s = self._bound_s(layout, micro, accum, 0)
            for offload in self.offloads:
                yield Option(bound_s, next(self._orders), layout, micro, accum, 0, offload)

    def heavier(self, option: Option) -> Option | None:
        """Return the layout with the next heavier recomputation, whose step is not shorter, or None."""
        place = option.recompute + 1
        if place == len(self.recomputes):
            return None
        bound_s = self._bound_s(*option.shape, place)
        order = next(self._orders)
        return option._replace(bound_s=bound_s, order=order, recompute=place, counts_exchanges=False)

    def closer(self, option: Option) -> Option:
        """Return the option with a bound that includes exchanges."""
        exchange_s = self._costs.least_exchange_s(*option.shape, self.recomputes[option.recompute])
        bound_s = option.bound_s + (1 + self._costs.waiting) * exchange_s
        return option._replace(bound_s=bound_s, counts_exchanges=True)

    def _predict_next(self) -> None:
        """Predict the layout with the lowest bound. If that bound does not include exchanges, put the layout back with
        a bound that does. If many layouts were too large and none fits yet, first drop those that are too large even
        with the smallest micro-batches."""
        option = self._options[0]
        none_fits = self._least_s == math.inf and self.refused[TOO_LARGE] >= MANY_TOO_LARGE
        if none_fits and self.least_bytes(option) > self._beyond_bytes:
            self.refused[TOO_LARGE] += 1
            self._leave(option)
        elif not option.counts_exchanges:
            heapq.heapreplace(self._options, self.closer(option))
        else:
            self._leave(option, surely_fits=self._predict(option))

    def _leave(self, option: Option, *, surely_fits: bool = False) -> None:
        """Remove the option from the heap, and add its layout with a heavier recomputation, unless this option is
        certain to fit."""
        heapq.heappop(self._options)
        heavier = self.heavier(option)
        if heavier and not surely_fits:
            heapq.heappush(self._options, heavier)

    def least_bytes(self, option: Option) -> float:
        """Return the layout's memory with micro-batches of one sample (or of the pinned size), which is a lower bound
        for all sizes. If it does not fit, the result is some number above the limit."""
        key = option.layout, option.recompute, option.offload
        if key not in self._least_bytes:
            batching = self.space.spec.batching
            size = 1 if batching.micro_batch_size == AUTO else int(batching.micro_batch_size)
            number = micro_batches_of(option.layout, size, self.samples or batching.global_batch_size)
            shapes = [(size, number)]
            # With a single micro-batch, gradients and activations are not kept at the same time.
            if batching.micro_batch_size == AUTO:
                shapes += [(number, 1), (1, 1)] if number < 2 * option.layout.pp else [(number, 1)]
            tried = (option._replace(micro_batch_size=micro, grad_accum=accum) for micro, accum in shapes)
            self._least_bytes[key] = min(self.peak(each)[1] for each in tried)
        return self._least_bytes[key]

    def peak(self, option: Option) -> tuple[Setup, float]:
        """Return (the option's setup, its peak memory). If a rough peak does not fit, it is not refined."""
        name = self.recomputes[option.recompute]
        setup = self._costs.setup(*option.shape, name, offload=option.offload)
        return setup, peak_of(setup, self._memory.of(setup, name), beyond_bytes=self._beyond_bytes)

    def _predict(self, option: Option) -> bool:
        """Predict a layout, and record it if it may fit. Return whether it is certain to fit."""
        found = self._estimate(option)
        if found.peak_bytes > self._limit:
            self.refused[TOO_LARGE] += 1
            if self.smallest is None or found.peak_bytes < self.smallest.peak_bytes:
                self.smallest = found
            return False
        probability = fit_probability(found.peak_bytes, self._usable)
        self._least_s = min(self._least_s, found.expected_s)
        heapq.heappush(self._found, ((found.expected_s,), option.order, found))
        if found.step_time_s <= ABOUT * self._least_s:
            push = heapq.heappush if len(self._safest) < SAFEST else heapq.heappushpop
            # The least safe of the kept layouts is on top of the heap, and a safer one replaces it. Layouts that are
            # certain to fit are treated as equally safe and are ranked by speed.
            push(self._safest, ((min(probability, SURELY), -found.step_time_s), -option.order, found))
        return probability >= SURELY

    def _estimate(self, option: Option) -> Estimated:
        """Return the option's memory and, if it may fit, its step."""
        name = self.recomputes[option.recompute]
        setup, peak = self.peak(option)
        if peak > self._limit:
            return Estimated(setup, name, peak)
        step_s = self._costs.steps.step_s(setup)
        probability = fit_probability(peak, self._usable)
        return Estimated(setup, name, peak, step_s, expected_step_s(step_s, probability, self.start_s))

    @property
    def _beyond_bytes(self) -> float:
        """Return the memory above which a layout neither fits nor is the smallest one so far."""
        return max(self._limit, math.inf if self.smallest is None else self.smallest.peak_bytes)

    def _bound_s(self, layout: Layout, micro: int, accum: int, recompute: int) -> float:
        """Return a lower bound on the step over all schedules: the mean stage's work and the bubble of equal stages,
        including the wait for the slowest device."""
        work_s = self._costs.works_s(layout, micro, accum)[self.recomputes[recompute]]
        mean_s = work_s / layout.pp
        wait_s = min(1.0, self.eff.bubble) * layout.bubble_part * (work_s - mean_s)
        return (accum * mean_s + wait_s) * (1 + self._costs.waiting)


def complexity(spec: RunSpec, layout: Layout, recompute: str, offload: bool) -> tuple[int, bool]:
    """Return the complexity of a layout within a replica group. It counts axes beyond one data-parallel axis, a
    schedule without published runs, offloading, and full recomputation. The latter does a third more work, and counts
    as two axes."""
    layout, _ = one_group(spec, layout)
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp))
    mixed = layout.dp_shard > 1 and layout.dp_replicate > 1
    full = recompute == "full"
    return axes + mixed + layout.splits_backward + offload + 2 * full, full


def recompute_names(wanted: str) -> tuple[str, ...]:
    """Return the kinds of recomputation to try, lightest first. Selective recomputation exists to avoid storing the
    score matrix, which fused attention never writes."""
    return ("none", "full") if wanted == "auto" else (wanted,)
