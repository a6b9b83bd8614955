"""What layouts of one model on one fabric have in common, computed once: micro-batches, groups, and slowest ranks.

Searches that differ in what they may choose, and not in the model, the software and the fabric, share it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from trainspec_cli.planner.cut import cut, is_open, mean_times
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import Fabric, Group, axis_groups
from trainspec_cli.planner.memory.frameworks import LayerMemory
from trainspec_cli.planner.setup import RECOMPUTE, Recompute, Setup, Software, changed
from trainspec_cli.planner.time.compute import EIGHT_BIT
from trainspec_cli.planner.time.step import (
    MicroBatch,
    TimedRank,
    exchanges_of,
    layer_s,
    micro_batch,
    own_work_s,
    pipeline_sends_s,
    recompute_part_s,
    slowest_rank,
    step_of_rank,
    waiting_share,
)
from trainspec_cli.recipe.keys.layout import Layout, Sharding


class Steps:
    """Steps of one model on one fabric. Layouts share micro-batches and slowest ranks, each of which is timed once: the
    planner's search, the search at measured speeds and that over pools time thousands of layouts with them."""

    def __init__(self, fabric: Fabric, eff: Efficiency):
        self.fabric = fabric
        self.eff = eff
        self._parts: dict[tuple[object, ...], MicroBatch] = {}
        self._groups: dict[tuple[object, ...], dict[str, Group]] = {}
        self._slowest: dict[tuple[object, ...], TimedRank] = {}

    def micro_batch(self, setup: Setup, key: tuple[object, ...] | None = None) -> MicroBatch:
        """`key`: the setup's `part_key`, where it is known."""
        key = key or part_key(setup)
        if key not in self._parts:
            self._parts[key] = micro_batch(setup, self.groups(setup.layout), self.eff)
        return self._parts[key]

    def groups(self, layout: Layout) -> dict[str, Group]:
        key = layout.tp, layout.cp, layout.ep, layout.etp, layout.dp_shard, layout.dp_replicate, layout.pp
        if key not in self._groups:
            self._groups[key] = axis_groups(layout, self.fabric, self.eff)
        return self._groups[key]

    def step_s(self, setup: Setup) -> float:
        """Return the seconds of a step. Layers without a cut are cut as if they were all the average one."""
        layout = setup.layout
        part = part_key(setup)
        once = self.micro_batch(setup, part)
        # The slowest rank does not depend on how samples are spread: layouts that differ in that alone share it.
        cuts = layout.pp, layout.pipeline_schedule, layout.virtual_stages, layout.stage_layers
        key = *part, *cuts, setup.recompute, layout.bubble_of(setup.grad_accum)
        if key not in self._slowest:
            is_cut = not is_open(layout, setup.model)
            as_cut = setup if is_cut else replace(setup, layout=cut(mean_times(once, setup), layout))
            self._slowest[key] = slowest_rank(once, as_cut, self.eff)
        return step_of_rank(self._slowest[key], setup, once.rates, self.groups(layout), self.eff).total_s


class Costs:
    """Times of layouts of `template`'s model on its fabric, and bounds on them."""

    def __init__(self, template: Setup, softwares: dict[Sharding, Software], eff: Efficiency) -> None:
        self.template = template
        self.softwares = softwares
        self.eff = eff
        self.steps = Steps(template.fabric, eff)
        self.waiting = waiting_share(template, eff)
        """Share of a step's work that waiting for the slowest device adds."""
        self._works_s: dict[tuple[object, ...], dict[str, float]] = {}
        self._least_exchange_s: dict[tuple[object, ...], float] = {}
        self._densities: dict[tuple[object, ...], _Density] = {}

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
        """Return the work of one micro-batch in all layers, the embedding and the head, by what is recomputed."""
        part = self._part(layout, micro, accum)
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
        """Return what a step's exchanges add to the work of its mean stage at least: its pipeline's sends, and of data
        parallelism's what no rank can hide."""
        part = self._part(layout, micro, accum)
        spread = layout.pp, layout.virtual_stages, layout.dp_shard, layout.dp_replicate, layout.zero_stage
        key = *part, *spread, accum, recompute
        if key not in self._least_exchange_s:
            setup = self.setup(layout, micro, accum, recompute)
            stage_s = self.works_s(layout, micro, accum)[recompute] / layout.pp
            if (dense := (*part, recompute)) not in self._densities:
                self._densities[dense] = _Density.of(self.steps.micro_batch(setup, part), setup.recompute)
            groups = self.steps.groups(layout)
            sends_s = pipeline_sends_s(setup, groups["pp"], self.eff)
            exposed_s = self._densities[dense].least_exposed_s(stage_s, setup, groups, self.eff)
            self._least_exchange_s[key] = sends_s + exposed_s
        return self._least_exchange_s[key]

    def _part(self, layout: Layout, micro: int, accum: int) -> tuple[object, ...]:
        return _part_key(layout, micro, accum, self.template.matmul, self.softwares[layout.sharding])


class _Density(NamedTuple):
    """Of a micro-batch's work: the parameters that a second of layers has at least, and what the ends take."""

    params_per_s: float
    expert_params_per_s: float
    ends_s: float
    ends_again_s: float
    """What recomputing the ends would take: exchanges are timed as if it were done, and hide beside it too."""

    @classmethod
    def of(cls, once: MicroBatch, again: Recompute) -> _Density:
        kinds_s = [(kind, layer_s(kind, again)) for kind in once.kinds]
        ends = once.embedding, once.head
        return cls(
            # A stage may have layers of any kind: only the kind with the fewest parameters for its work bounds them
            # all.
            min(kind.params / time_s for kind, time_s in kinds_s),
            min(kind.expert_params / time_s for kind, time_s in kinds_s),
            sum(map(own_work_s, ends)),
            sum(recompute_part_s(end, again) for end in ends),
        )

    def least_exposed_s(self, stage_s: float, setup: Setup, groups: dict[str, Group], eff: Efficiency) -> float:
        """Return the seconds of data parallelism's exchanges that no rank can hide which works as long as the mean
        stage; the slowest one works no less, and what of that is not the ends are layers."""
        layers_s = max(0.0, stage_s - self.ends_s)
        sent = exchanges_of(self.params_per_s * layers_s, self.expert_params_per_s * layers_s, setup, groups, eff)
        beside_s = eff.dp_overlap * (stage_s + self.ends_again_s) if setup.software.overlap_dp else 0.0
        each_s = max(0.0, sent.forward_s + sent.backward_s - beside_s)
        return sent.times * each_s + max(0.0, sent.across_s - beside_s / 2)


class LayerMemories:
    """A layer's memory by a recomputation, estimated once for all layouts that cut a layer alike."""

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
    """Return the costs that searches with the same of all these share. Searches that differ in the replica groups alone
    share all but the exchanges."""
    # How replicas are grouped changes what they exchange, but no micro-batch: two searches of one plan differ so.
    alike = replace(template, replica_groups=1)
    if template == alike:
        return Costs(template, dict(softwares), eff)
    costs = copy(costs_of(alike, softwares, eff))
    costs.template = template
    costs._least_exchange_s = {}
    return costs


def part_key(setup: Setup) -> tuple[object, ...]:
    """Return what a micro-batch's time depends on, of setups that differ in layout and micro-batches alone."""
    return _part_key(setup.layout, setup.micro_batch_size, setup.grad_accum, setup.matmul, setup.software)


def _part_key(layout: Layout, micro: float, accum: int, matmul: str, software: Software) -> tuple[object, ...]:
    # Weights are cast to 8 bits once a step, and micro-batches share that cost. In other formats it matters only
    # whether gradients of several micro-batches are added up.
    counted = accum if matmul in EIGHT_BIT else accum > 1
    return *axes_of_layer(layout), layout.pp == 1, layout.shards_parameters, micro, counted, id(software)


def axes_of_layer(layout: Layout) -> tuple[object, ...]:
    """The axes that cut a layer."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel
