"""Find the fastest layout for a run with slow ranks, among all layouts that the planner knows and the engine can switch
to.

The search is an exact branch and bound: it visits layouts in order of a lower bound over all sample shares and layer
splits, until that bound reaches the fastest step found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf
from statistics import median_low

from trainspec_cli.balance.batch.division import micro_batches_of
from trainspec_cli.balance.decisions.balance import with_stages
from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.layout_memory import LayoutMemory, even_room
from trainspec_cli.balance.paced import PacedStep, PacedSteps, Paces, describe
from trainspec_cli.planner import this_machine
from trainspec_cli.planner.capacity import cut_on_chip, main_size, pin_layout, setup_of, softwares_of
from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.pipeline import Room
from trainspec_cli.planner.search.search import Steps
from trainspec_cli.planner.search.space import Space, open_layout
from trainspec_cli.planner.setup import Setup
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate, LayoutProposal, Plan
from trainspec_cli.recipe.rules.check import BUILT, KERNEL_RULES
from trainspec_cli.recipe.rules.run import describe_other_blocks, measurable_noise

WORTHWHILE = 0.1
"""The layout changes if that saves at least this fraction of a step. The margin is needed because planned times are
rough."""


class OtherLayouts:
    """The layouts that a run may switch to. Each run has one such object, which caches everything that does not depend
    on speeds."""

    def __init__(
        self, spec: RunSpec, setup: Setup, recompute: str, samples: int | None = None, *, is_rough: bool = False
    ):
        """`setup`: setup of the current layout. `samples`: samples per step; by default, the batch size during most of
        the run. `is_rough`: planned times are only rough on these devices, for example on a CPU."""
        self._is_rough = is_rough
        self._spec, self._samples = spec, samples or main_size(spec)
        self._keeps = spec.model.unit == "samples"
        self._softwares = softwares_of(spec)
        self._template = setup
        self.memory = LayoutMemory(spec.scheduler, recompute)
        self.steps = PacedSteps(
            Steps(setup.fabric, efficiency_of(spec.cluster)), self._samples, keeps_micro_batches=self._keeps
        )
        self._legal: dict[tuple[Layout, int], bool] = {}
        self._cut: dict[Setup, Setup] = {}
        self.present = self.setup_of(setup.layout, int(setup.micro_batch_size))
        self._home = self.present
        """The planned layout of the run."""

    @classmethod
    def of_plan(cls, plan: Plan, machine: Machine, samples: int | None = None) -> OtherLayouts:
        """Return the layouts of a run on this machine's devices; the layout of `plan` is the current one."""
        spec = replace(plan.spec, kernels=plan.kernels)
        is_rough = not this_machine.is_known(plan, machine)
        return cls(spec, this_machine.setup_of(plan, machine), plan.recompute, samples, is_rough=is_rough)

    @classmethod
    def of_candidate(cls, spec: RunSpec, candidate: Candidate, machine: Machine | None) -> OtherLayouts:
        """Return the layouts of a planned run; the layout of `candidate` is the current one."""
        return cls(spec, setup_of(candidate, spec, machine), candidate.recompute)

    def after(self, layout: Layout, micro_batch_size: int) -> OtherLayouts:
        """Return the layouts of the same run, with the given one as the current layout. The run returns to its planned
        layout when all ranks are equally fast."""
        changed = copy(self)  # the copy shares the caches
        changed.present = self.setup_of(layout, micro_batch_size)
        return changed

    def propose(self, paces: Sequence[float], links: LinkPaces | None = None) -> LayoutProposal | None:
        """Return the layout with the shortest expected step, if it is worth the change; None if there is no such
        layout, or if all ranks are equally fast.

        `paces`: slowdown of each global rank's compute; the median, and paces within `scheduler.change` of it, are
        treated as usual. `links`: slowdown of exchanges; by default they are as fast as planned. Savings that another
        layout would also bring on equally fast ranks do not count, because the planner has already considered them."""
        if self._spec.resilience.keeps_layout:
            return None  # replica groups and sites exchange parameters by their position, which depends on the layout
        relative = equalise_paces(paces, self._spec.scheduler.change)
        if set(relative) == {1.0} and (links is None or links.is_usual):
            return self._go_home()
        paced = Paces(relative, links)
        before = self.in_present(paced)
        if self.steps.planned_s(self.present) >= before.step_s * (1 - WORTHWHILE):
            return None  # even a layout that avoids the entire slowdown would save too little
        found = self._fastest(paced, before.step_s)
        if found is None:
            return None
        return self._proposal(before, found, self._expected_s(found), describe(paced, before, found))

    def _go_home(self) -> LayoutProposal | None:
        if axes_of(self._home.layout) == axes_of(self.present.layout):
            return None
        usual = Paces([1.0] * self._template.fabric.num_devices)
        before = self.in_present(usual)
        home = self.in_layout(self._home, usual)
        if home is None or home.step_s >= before.step_s:
            return None
        reason = f"all ranks are equally fast again; the planned layout is {self._home.layout.describe()}"
        return self._proposal(before, home, home.step_s, reason)

    def _proposal(self, before: PacedStep, found: PacedStep, expected_s: float, reason: str) -> LayoutProposal:
        setup = found.setup
        return LayoutProposal(
            layout=setup.layout,
            micro_batch_size=int(setup.micro_batch_size),
            grad_accum_steps=setup.grad_accum,
            largest_micro_batch_size=found.largest_micro_batch,
            largest_stage_layers=self.memory.largest_stage_layers(setup),
            before_s=before.step_s,
            expected_s=expected_s,
            reason=reason,
        )

    # The search for the fastest layout

    @cached_property
    def others(self) -> tuple[Setup, ...]:
        """Return all layouts (without layer splits) and micro-batch sizes from the planner's search that the engine
        supports and that may fit."""
        wanted = replace(open_layout(self._spec), stage_layers=None)
        batching = replace(self._spec.batching, global_batch_size=self._samples)
        fabric = self._template.fabric
        space = Space(replace(self._spec, layout=wanted, batching=batching), fabric.num_devices, fabric.scaleup_devices)
        setups = (self.setup_of(layout, micro) for layout, micro, _ in space.layouts())
        return tuple(setup for setup in dict.fromkeys(setups) if self.memory.may_fit(setup) and self.is_legal(setup))

    def setup_of(self, layout: Layout, micro_batch_size: int) -> Setup:
        return replace(
            self._template,
            layout=layout,
            micro_batch_size=float(micro_batch_size),
            grad_accum=micro_batches_of(layout, micro_batch_size, self._samples),
            software=self._softwares[layout.sharding],
        )

    def _fastest(self, paces: Paces, before_s: float) -> PacedStep | None:
        """Return the fastest other layout that is worth a change from steps of `before_s`."""
        best = None
        enough_s = before_s * (1 - WORTHWHILE)
        own = axes_of(self.present.layout)
        others = [setup for setup in self.others if axes_of(setup.layout) != own]
        bounds_s = [self.steps.bound_s(setup, paces, self.memory.most_samples(setup)) for setup in others]
        queue = [(bound_s, place, False) for place, bound_s in enumerate(bounds_s)]
        heapify(queue)
        while queue and queue[0][0] < enough_s:
            bound_s, place, is_planned = heappop(queue)
            setup = others[place]
            if not is_planned:  # the planned time is a tighter bound, but takes longer to compute
                bound_s = max(bound_s, self.steps.planned_s(setup))
                if bound_s * self._faster_anyhow(setup) < before_s * (1 - WORTHWHILE):
                    heappush(queue, (bound_s, place, True))
            elif found := self.worth(setup, paces, before_s, enough_s):
                best = found
                enough_s = found.step_s
        return best

    def worth(self, setup: Setup, paces: Paces, before_s: float, enough_s: float) -> PacedStep | None:
        """Return the step in another layout if it takes less than `enough_s` and is worth a change from steps of
        `before_s`, and if the engine can switch to the layout."""
        worthwhile_s = before_s * (1 - WORTHWHILE) / self._faster_anyhow(setup)
        found = self.in_layout(setup, paces, min(enough_s, worthwhile_s))
        return found if found and self.memory.may_move(self.present, found.setup) else None

    def _expected_s(self, step: PacedStep) -> float:
        """Return the expected time of a step in another layout. If planned times are rough, that layout's planned time
        is assumed to be no shorter than the current one's."""
        return step.step_s * (self._faster_anyhow(step.setup) if self._is_rough else 1.0)

    def _faster_anyhow(self, setup: Setup) -> float:
        """Return the planned speedup of another layout over the current one, at least 1, if all ranks run at their
        usual speed. This speedup does not count as a gain, because the current layout was chosen despite it."""
        uncut = replace(setup, layout=replace(setup.layout, stage_layers=None))
        return max(1.0, self.steps.planned_s(self.present) / self.steps.planned_s(uncut))

    def is_legal(self, setup: Setup) -> bool:
        """Return whether the engine supports the layout and can load the current state in it. The rules are those for
        `scheduler.changes`."""
        key = setup.layout, setup.grad_accum
        if key not in self._legal:
            spec = pin_layout(self._spec, setup.layout)
            problems = (problem for rule in (*BUILT, *KERNEL_RULES) for problem in rule(spec))
            keeps_blocks = not describe_other_blocks(spec, self.present.layout.tp, setup.layout.tp)
            self._legal[key] = keeps_blocks and not any(
                chain(problems, measurable_noise(spec, setup.layout, 1, key[1]))
            )
        return self._legal[key]

    # Step times of a layout with its best layer split and sample shares

    def in_present(self, paces: Paces) -> PacedStep:
        """Return the step in the current layout, with the best layer split that the scheduler may choose."""
        found = self._best_cut([self.present, *self._moved(paces)], self.present, paces, inf)
        assert found is not None, "the layout is in use, so its layer split fits"
        return found

    def _moved(self, paces: Paces) -> Iterator[Setup]:
        most = self.memory.largest_stage_layers(self.present)
        if most is not None:
            layers = self.present.model.num_layers
            yield from self._cuts(self.present, paces, even_room(layers, [most] * self.present.layout.pp))

    def in_layout(self, setup: Setup, paces: Paces, enough_s: float = inf) -> PacedStep | None:
        """Return the step in a layout that specifies no layer split. The split is the planned one or, if each rank has
        one stage, one based on the paces. None if it does not fit or takes `enough_s` or longer."""
        if setup not in self._cut:
            self._cut[setup], _ = cut_on_chip(setup, self.memory.recompute, efficiency_of(self._spec.cluster))
        planned = self._cut[setup]
        layout = setup.layout
        setups = [planned]
        if layout.pp > 1 and layout.num_stages == layout.pp:
            setups += self._cuts(planned, paces, self.memory.room(planned))
        return self._best_cut(setups, None, paces, enough_s)

    def _cuts(self, setup: Setup, paces: Paces, room: Room) -> Iterator[Setup]:
        """Yield the setup with the layer splits that suit the paces."""
        for counts in self.steps.cuts(setup, paces, room):
            yield replace(setup, layout=with_stages(setup.layout, counts))

    def _best_cut(
        self, setups: Sequence[Setup], in_force: Setup | None, paces: Paces, enough_s: float
    ) -> PacedStep | None:
        """Return the fastest step of less than `enough_s` among the layer splits that fit; the current split fits."""
        tried = [self.steps.best(setup, paces, self.memory.most_samples(setup)) for setup in dict.fromkeys(setups)]
        best = None
        for hoped in sorted(tried, key=lambda step: step.step_s):
            if hoped.step_s >= enough_s:
                break
            if hoped.setup != in_force and not self.memory.fits(hoped.setup):
                continue
            # `hoped` assumes the largest micro-batches that the recipe allows, `step` the largest that fit.
            step = self.steps.best(hoped.setup, paces, self.memory.largest_micro_batch(hoped.setup))
            if step.step_s < enough_s:
                best = step
                enough_s = step.step_s
        return best


def axes_of(layout: Layout) -> Layout:
    """Return the layout without its layer split, and without settings that have no effect because their axis is 1."""
    if layout.dp_shard == 1:
        layout = replace(layout, zero_stage=1)
    if layout.pp == 1:
        layout = replace(layout, pipeline_schedule="1f1b", virtual_stages=1)
    if layout.tp == 1:
        layout = replace(layout, sequence_parallel=False)
    return replace(layout, stage_layers=None)


def equalise_paces(paces: Sequence[float], change: float) -> tuple[float, ...]:
    """Return the paces relative to the median. All paces that differ from it by at most `change` become 1."""
    usual = median_low(paces)
    return tuple(1.0 if abs(pace / usual - 1) <= change else pace / usual for pace in paces)
