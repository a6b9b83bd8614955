"""Plan a run on a cluster with several pools, and compare it with plans on fewer pools."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from trainspec_cli.core.printable import format_duration
from trainspec_cli.planner.capacity import (
    OFFLOADED,
    OPEN,
    SHOWN,
    SLACK,
    capacity_of,
    choose_safest,
    main_size,
    plan_on_what_divides,
    rate_candidate,
    sizes_to_predict,
    softwares_of,
    start_s_a_step,
    template_of,
)
from trainspec_cli.planner.capacity import assumptions as assumptions_of
from trainspec_cli.planner.hardware.cluster import efficiency_of, on_pools, pool_names
from trainspec_cli.planner.hardware.rates import Efficiency, peak_flops_per_s
from trainspec_cli.planner.memory.predict import (
    SURELY,
    expected_step_s,
    fit_probability,
    layer_memory,
    peak_of,
    predict_memory,
    room_within,
    stage_memory,
)
from trainspec_cli.planner.pipeline import is_open, layers_per_rank
from trainspec_cli.planner.pools.step import (
    NOT_WHOLE,
    Placement,
    Pool,
    PoolStep,
    Setups,
    Stopwatch,
    describe_pools,
    placements,
)
from trainspec_cli.planner.run.forecast import forecast_run
from trainspec_cli.planner.search.search import SLOWER, TOO_LARGE, LayerMemories, recompute_names
from trainspec_cli.planner.search.space import Space
from trainspec_cli.planner.setup import RECOMPUTE
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.blueprint import PoolChoice, PoolsPlan
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, MemoryBreakdown, PoolPart, SizedStep

KEPT = 2
"""Number of layouts kept per shown layout, for each way to use the pools. More are kept than shown because some may
turn out not to fit once every tensor is counted."""


@dataclass(frozen=True)
class Placed:
    """A layout on all pools."""

    setups: Setups
    placement: Placement
    recompute: str
    step: PoolStep
    memory: tuple[tuple[MemoryBreakdown, ...], ...] = ()
    """The memory of the stages in each pool, once every tensor has been counted."""

    def fullest_pool(self, pools: Sequence[Pool]) -> int:
        """Return the pool whose devices are closest to their limit."""
        return max(range(len(pools)), key=lambda pool: self.peak_bytes(pool) / pools[pool].limit_bytes)

    def peak_bytes(self, pool: int) -> float:
        return max(stage.total_bytes for stage in self.memory[pool])


class _Unit(NamedTuple):
    """A layout to try with each kind of recomputation."""

    layout: Layout
    micro_batch_size: int
    micro_batches: int
    placement: Placement
    offloads: bool


@dataclass
class PoolSearch:
    """Ranks layouts over all `pools` by expected step time."""

    spec: RunSpec
    pools: Sequence[Pool]
    eff: Efficiency
    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.pools, self.eff)
        self.samples = main_size(self.spec)
        self._softwares = softwares_of(self.spec)
        templates = [template_of(self.spec, pool.fabric) for pool in self.pools]
        compute = next((one.compute for one in templates if one.compute == "fp16"), templates[0].compute)
        matmul = compute if self.spec.precision.matmul == "compute" else templates[0].matmul
        self._templates = tuple(replace(one, compute=compute, matmul=matmul) for one in templates)
        self._memory = LayerMemories(layer_memory)
        self._best: dict[bool, list[tuple[float, int, Placed]]] = {False: [], True: []}
        """Heaps of layouts: one for complete replicas on every pool, one for pipelines that span the pools."""
        self._start_s = start_s_a_step(self.spec)
        self._least_over = float("inf")
        self._smallest: tuple[Setups, Placement, str] | None = None

    def run(self, shown: int) -> list[Placed]:
        """Return the best layouts that fit when every tensor is counted, best first. If none fits, return the one that
        comes closest."""
        self._try_all(KEPT * shown)
        counted = [placed for heap in self._best.values() for placed in self._count_some(heap, shown)]
        fitting = [placed for placed in counted if self._part(placed) <= 1]
        if fitting:
            return sorted(fitting, key=self.expected_s)
        if counted or self._smallest is None:
            return counted[:shown]
        setups, placement, name = self._smallest
        return [self.count(Placed(setups, placement, name, self.watch.step(setups, placement, self.samples)))]

    def _count_some(self, heap: list[tuple[float, int, Placed]], shown: int) -> Iterator[Placed]:
        """Yield layouts from a heap, best first, until `most` of them fit when every tensor is counted."""
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
        """Return the ratio of peak memory to the limit in the pool where it is highest."""
        pool = placed.fullest_pool(self.pools)
        return placed.peak_bytes(pool) / self.pools[pool].limit_bytes

    def _try_all(self, keep: int) -> None:
        """Try every layout in every placement, with each kind of recomputation that the recipe leaves open."""
        # All pools have the same layout, so the smallest scale-up domain counts.
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
        for *_, unit in sorted(units):  # the most promising ones come first, so that others can be dropped early
            for name in names:
                if self._try(self._setups(unit, name), unit.placement, name, keep):
                    break  # if a layout is certain to fit, a heavier recomputation would only be slower
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
        """Try one kind of recomputation. Return whether heavier ones are pointless, because this one is certain to fit
        or is already too slow."""
        self.considered += 1
        best = self._best[bool(placement.order)]
        worst_s = -best[0][0] if len(best) == keep else float("inf")
        if self.watch.bound_s(setups, placement, self.samples) >= worst_s:
            self.refused[SLOWER] += 1
            return True
        # Ratio of the layout's smallest estimated memory to the available memory.
        if placement.order:
            # Ratio of the model's layers to those that fit on the stages of all pools. Each stage is treated as the
            # last one of its pool, which keeps the fewest micro-batches.
            room = 0.0
            for pool, (setup, described) in enumerate(zip(setups, self.pools, strict=True)):
                layer = self._memory.of(setup, name)
                last = stages_on(pool, placement, setup.layout)[-1]
                first, second = (stage_memory(setup, last, number, layer).total_bytes for number in (1, 2))
                more = (SLACK * described.limit_bytes - first) / (second - first)
                room += placement.ranks[pool] * max(0.0, 1 + more)
            over = SLACK * setups[0].model.num_layers / max(room, 1e-9)
        else:
            # Use the pool with the most memory, with full micro-batches. The fastest pool's micro-batches have about
            # that size, and other sizes are tried as well.
            most = max(range(len(self.pools)), key=lambda pool: self.pools[pool].limit_bytes)
            over = peak_of(setups[most], self._memory.of(setups[most], name)) / self.pools[most].limit_bytes
        if over > SLACK:
            return self._refuse(over, setups, placement, name)
        step = self.watch.step(setups, placement, self.samples)
        placed = Placed(setups, placement, name, step)
        parts = []  # ratio of the estimated peak to the limit, for each pool
        for pool, setup in enumerate(self._of_step(placed)):
            layer = self._memory.of(setup, placed.recompute)
            counts = layers_per_rank(setup.model.num_layers, setup.layout)
            stages = stages_on(pool, placed.placement, setup.layout)
            fullest = {stages[0], max(stages, key=counts.__getitem__), stages[-1]}
            sizes = (stage_memory(setup, stage, counts[stage], layer).total_bytes for stage in fullest)
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

    def _of_step(self, placed: Placed) -> Setups:
        """Return the setups with each pool's largest micro-batch."""
        step = placed.step
        return tuple(
            replace(setup, layout=step.layout, micro_batch_size=float(size), grad_accum=step.micro_batches)
            for setup, size in zip(placed.setups, step.largest, strict=True)
        )

    def count(self, placed: Placed) -> Placed:
        """Return a layout with its layers split by time and every tensor counted. The best layer split is used if it
        fits, otherwise the best one that fits according to the memory estimate, otherwise the even one."""
        even = self._counted(placed, placed.setups[0].layout)
        if not is_open(placed.setups[0].layout, self.spec.model):
            return even
        # The memory limit of each pipeline rank: its pool's limit, or the lowest limit among the pools that share it.
        limits = [self.pools[pool].limit_bytes for pool in placed.placement.pool_of_stage_rank]
        limits = limits or [min(pool.limit_bytes for pool in self.pools)] * placed.setups[0].layout.pp
        for bounded in (False, True):
            fullest = even.fullest_pool(self.pools)
            room = room_within(self._of_step(even)[fullest], even.memory[fullest], limits) if bounded else None
            layout = self.watch.cut(placed.setups, placed.placement, room, alike=False)
            found = even if layout == placed.setups[0].layout else self._counted(placed, layout)
            if self._part(found) <= 1:
                return found
        return even

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
    """Return the pipeline ranks on a pool."""
    if not placement.order:
        return list(range(layout.pp))
    return [rank for rank, at in enumerate(placement.pool_of_stage_rank) if at == pool]


SAME = 5e-3
"""Choices that differ by less than this fraction are treated as equally fast or equally cheap."""


def plan_pools(spec: RunSpec, shown: int = SHOWN) -> CapacityPlan:
    """Search the layouts over all pools of `spec`'s cluster. Raises RecipeError in the same cases as
    `plan_capacity`."""
    pools = describe_pools(spec.cluster)
    eff = efficiency_of(spec.cluster)
    search = PoolSearch(spec, pools, eff)
    candidates = [_candidate(placed, search) for placed in search.run(shown)]
    return capacity_of(
        spec,
        sum(pool.devices for pool in pools),
        candidates,
        rejected=dict(+search.refused),
        safest=choose_safest(candidates, ()),
        assumptions=tuple(_assumptions(spec, pools)),
        considered=search.considered,
    )


def _candidate(placed: Placed, search: PoolSearch) -> Candidate:
    pools = search.pools
    step = placed.step
    setup = replace(placed.setups[0], layout=step.layout, grad_accum=step.micro_batches)
    fullest = placed.fullest_pool(pools)
    peaks = [pool.devices * peak_flops_per_s(pool.fabric.chip, setup.matmul) for pool in pools]
    # If every pool has every stage, use each stage's memory on the pool that is closest to its limit.
    memory = placed.memory[fullest]
    if placed.placement.order:
        of_pool = [iter(stages) for stages in placed.memory]
        memory = tuple(next(of_pool[pool]) for pool in placed.placement.pool_of_stage_rank)
    return rate_candidate(
        search.spec,
        setup,
        step.time,
        placed.recompute,
        peak_flops=sum(peaks) / setup.fabric.num_devices,
        memory=memory,
        peak_bytes=placed.peak_bytes(fullest),
        limit_bytes=pools[fullest].limit_bytes,
        probability=search.fit_probability(placed),
        sized_steps=tuple(
            SizedStep(size, search.watch.step_as_cut(placed.setups, placed.placement, size).time)
            for size in sizes_to_predict(search.spec)
        ),
        pools=tuple(_part(placed, pools, pool) for pool in range(len(pools))),
    )


def _part(placed: Placed, pools: Sequence[Pool], pool: int) -> PoolPart:
    step = placed.step
    ranks = stages_on(pool, placed.placement, placed.step.layout)
    layers = layers_per_rank(placed.setups[0].model.num_layers, step.layout)
    return PoolPart(
        pool=pools[pool].name,
        accelerator=pools[pool].fabric.chip.name,
        devices=pools[pool].devices,
        stages=len(ranks),
        layers=sum(layers[rank] for rank in ranks),
        samples=step.samples[pool],
        micro_batch_size=step.largest[pool],
        time=step.of_pools[pool],
        waiting_s=step.waiting_s[pool],
        peak_memory_bytes=placed.peak_bytes(pool),
        memory_limit_bytes=pools[pool].limit_bytes,
    )


def _assumptions(spec: RunSpec, pools: Sequence[Pool]) -> Iterator[str]:
    """Yield the assumptions about the layouts, each only once even if it holds for several pools."""
    names = pool_names(spec.cluster.pools)
    alone = ((on_pools(spec, [spec.cluster.pools[names.index(pool.name)]]), pool.fabric) for pool in pools)
    yield from dict.fromkeys(line for on_one, fabric in alone for line in assumptions_of(on_one, fabric))
    if pools[0].link_gbit_per_s is None:
        yield "pools are connected by the slower pool's NICs (cluster.pool_link_gbit_per_s)"
    yield "tensor-, context- and expert-parallel groups stay in one pool; there is no blueprint across pools"
    yield "a cluster with several pools can only be planned: the engine cannot place ranks by kind of node"


# Comparison with plans on fewer pools


def compare_pools(spec: RunSpec, capacity: CapacityPlan) -> PoolsPlan:
    """Compare the plan on all pools with the best plan on each single pool and, with three or more pools, with the best
    plan on all but one."""
    pools = spec.cluster.pools
    names = pool_names(pools)
    every = range(len(pools))
    fewer = [[place] for place in every]
    if len(pools) > 2:
        fewer = [*([place for place in every if place != left] for left in every), *fewer]
    # The best plan for each way to divide the work among all pools; the better one comes first.
    best: dict[str, Candidate | None] = {}
    for candidate in capacity.candidates:
        if candidate.fits:
            best.setdefault(division_of(candidate), candidate)
    ways = best or {"samples": None}
    choices = [_choice(spec, capacity, candidate, names, division) for division, candidate in ways.items()]
    for places in fewer:
        some = on_pools(spec, [pools[place] for place in places])
        if len(places) > 1:
            alone = plan_pools(some, shown=1)
        else:
            some, alone = plan_on_what_divides(some)
        division = division_of(alone.best) if alone.best and alone.best.pools else "alone"
        choices.append(_choice(some, alone, alone.best, [names[place] for place in places], division))
    return PoolsPlan(tuple(choices), _verdict(choices, len(pools)))


def advise_pools(spec: RunSpec, compared: PoolsPlan) -> Iterator[str]:
    """Yield advice if no layout over all pools fits: fewer pools, or a change to the recipe."""
    for choice in compared.choices:
        if choice.layout is not None and choice.step_time_s is not None:
            step = format_duration(choice.step_time_s)
            yield f"{_name(choice)} fits, with {step} per step in {choice.layout.describe()}"
    for words, changed in (("layout=auto recompute=auto", OPEN[1](spec)), ("offload=optimizer", OFFLOADED[1](spec))):
        if changed != spec and (best := plan_pools(changed, shown=1).best):
            yield f"{words} fits, with {format_duration(best.step_time_s)} per step in {best.layout.describe()}"


def division_of(candidate: Candidate) -> str:
    """Return what a candidate divides among the pools: the `samples` of a step, or the model's `layers`."""
    return "layers" if candidate.pipelines_cross_pools else "samples"


def _choice(
    spec: RunSpec, capacity: CapacityPlan, best: Candidate | None, names: Sequence[str], division: str
) -> PoolChoice:
    if best is None:
        return PoolChoice(tuple(names), capacity.world_size, division, None, None, None, None, None, None)
    run = forecast_run(spec, capacity, best)
    return PoolChoice(
        pools=tuple(names),
        devices=capacity.world_size,
        division=division,
        layout=best.layout,
        step_time_s=best.step_time_s,
        tokens_per_s=best.tokens_per_s,
        wall_time_s=run.wall_time_s.value,
        usd_per_token=run.cost_usd.value / run.tokens if run.cost_usd else None,
        joules_per_token=run.energy_joules.value / run.tokens if run.energy_joules else None,
    )


def _verdict(choices: Sequence[PoolChoice], pools: int) -> str:
    """Describe whether, and by how much, fewer pools are faster or cheaper per token."""
    whole = next(choice for choice in choices if len(choice.pools) == pools)
    fewer = [choice for choice in choices if len(choice.pools) < pools and choice.tokens_per_s]
    if not whole.tokens_per_s:
        fitting = max(fewer, key=lambda choice: choice.tokens_per_s or 0.0, default=None)
        return (
            f"no layout over all pools fits; {_name(fitting)} is the fastest that does" if fitting else "nothing fits"
        )
    said = [_compare("faster", "slower", _gains(fewer, whole, "tokens_per_s"))]
    said.append(_compare("cheaper per token", "more expensive per token", _gains(fewer, whole, "usd_per_token")))
    return "; ".join(line for line in said if line)


def _gains(fewer: Sequence[PoolChoice], whole: PoolChoice, figure: str) -> tuple[PoolChoice, float] | None:
    """Return the best choice of fewer pools according to `figure`, and its improvement ratio over all pools; None if
    unknown."""
    of_all = getattr(whole, figure)
    known = [(choice, getattr(choice, figure)) for choice in fewer]
    ratios = [(choice, own / of_all if figure == "tokens_per_s" else of_all / own) for choice, own in known if own]
    return max(ratios, key=lambda pair: pair[1], default=None) if of_all else None


def _compare(better: str, worse: str, best: tuple[PoolChoice, float] | None) -> str:
    if best is None:
        return ""
    choice, ratio = best
    name = _name(choice)
    if 1 - SAME < ratio <= 1 + SAME:
        return f"{name} is neither {better} nor {worse} than all pools"
    who, other = (name, "all pools") if ratio > 1 else ("all pools", name)
    more = ratio if ratio > 1 else 1 / ratio
    part = more - 1 if better == "faster" else 1 - 1 / more  # increase in the rate, or reduction in the price
    return f"{who} {'is' if ratio > 1 else 'are'} {part:.1%} {better} than {other}"


def _name(choice: PoolChoice) -> str:
    return " + ".join(choice.pools) + (" alone" if len(choice.pools) == 1 else "")
