"""Plan a recipe, rehearse some of its ranks, and compare their memory with the plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.capacity import as_plan, pin_layout, setup_of
from trainspec_cli.planner.memory.engine.step import is_counted, rank_peaks, run_of
from trainspec_cli.planner.memory.predict import CONTEXT_BYTES, GROUP_BYTES, communicators
from trainspec_cli.recipe.results.plan import MemoryBreakdown, Plan
from trainspec_cli.recipe.rules.check import check_built
from trainspec_cli.session.planning.plan import plan_recipe, require_fit
from trainspec_cli.wings.emulated.rehearsal import RankRehearsal, refuse, rehearse


@dataclass(frozen=True)
class PlanToRehearse:
    """A plan, and what it says of its ranks' memory; in bytes."""

    plan: Plan
    device: str
    device_bytes: float
    """The device's memory."""
    outside_bytes: float
    """The part of it that the allocator does not have: the device's context and the buffers of communicators."""
    tensors_bytes: tuple[float, ...]
    """The highest sum of a rank's tensors with eager blocks, by pipeline rank."""
    allocator_bytes: tuple[float, ...]
    """The same with fragmentation and the plan's reserve."""
    step_s: float
    """Seconds of a step, with the recipe's kernels and compilation."""
    fused_saves_bytes: tuple[float, ...]
    """How much less the recipe's run is planned to need, with its compiled blocks and fused kernels."""
    host_s: float
    """The part of `step_s` for the host's own work and for waiting for slower devices: a rehearsal has neither."""


@dataclass(frozen=True)
class RehearsedRank:
    """A rank's rehearsal and its plan, both with eager blocks."""

    rehearsed: RankRehearsal
    planned_tensors_bytes: float
    planned_allocator_bytes: float
    fused_saves_bytes: float


@dataclass(frozen=True)
class Rehearsal:
    layout: str
    world_size: int
    micro_batch_size: int
    micro_batches: int
    recompute: str
    steps: int
    device: str
    device_bytes: float
    outside_bytes: float
    planned_step_s: float
    """With the recipe's kernels and compilation; the rehearsed steps have eager blocks."""
    ranks: tuple[RehearsedRank, ...]


def plan_to_rehearse(arguments: Sequence[str], memory_gib: float | None) -> PlanToRehearse:
    """Plan a recipe on its cluster; `memory_gib` replaces the chip's memory in the rehearsal.

    Raises RecipeError if the recipe is wrong or cannot be rehearsed, PlanError if no layout fits.
    """
    planned = plan_recipe(arguments)
    if planned.pools is not None:
        message = "a rehearsal needs one kind of node, and `cluster.pools` has several"
        raise RecipeError(Problem("unsupported", message, "cluster.pools", "name one cluster: cluster=h100"))
    best = require_fit(planned)
    spec = planned.spec
    if problems := check_built(pin_layout(spec, best.layout)):
        raise RecipeError(problems)
    compute: Literal["bf16", "fp32"] = "fp32" if spec.precision.compute == "fp32" else "bf16"
    plan = as_plan(spec, best, planned.capacity, compute)
    refuse(plan)
    in_groups = GROUP_BYTES * communicators(setup_of(best, spec, None))

    def allocated(memory: MemoryBreakdown) -> float:
        return memory.total_bytes - memory.context_bytes - in_groups

    by_rank = [allocated(memory) for memory in best.memory]
    tensors = [allocated(memory) - memory.fragmentation_bytes for memory in best.memory]
    saved = [0.0] * plan.layout.pp
    if is_counted(spec.model, plan.offload):
        # The recipe's run may have compiled blocks and fused kernels; a rehearsal has neither.
        as_planned = tensors
        eager = replace(plan, spec=replace(spec, compile=False))
        peaks = zip(rank_peaks(run_of(eager)), best.memory, strict=True)
        tensors = [sum(peak.values()) + memory.feedback_bytes for peak, memory in peaks]
        saved = [one - other for one, other in zip(tensors, as_planned, strict=True)]
        by_rank = [size + more for size, more in zip(by_rank, saved, strict=True)]
    device_bytes = best.memory_limit_bytes if memory_gib is None else memory_gib * GIB
    outside_bytes = CONTEXT_BYTES + in_groups
    if device_bytes <= outside_bytes:
        message = f"--memory-gib {memory_gib:g} leaves no memory for tensors"
        hint = f"give more than {outside_bytes / GIB:.2f}: the device's context and communicators need that much"
        raise RecipeError(Problem("usage", message, "--memory-gib", hint))
    return PlanToRehearse(
        *(plan, planned.device, device_bytes, outside_bytes, tuple(tensors), tuple(by_rank), best.time.total_s),
        tuple(saved),
        best.time.host_s,
    )


def rehearse_ranks(
    planned: PlanToRehearse, ranks: Sequence[int], steps: int, on_rank: Callable[[int], None]
) -> Rehearsal:
    """Rehearse ranks one after another; `on_rank` is called before each. Raises MachineError, Interrupted."""
    plan = planned.plan
    done = []
    for rank in ranks:
        on_rank(rank)
        stage = rank * plan.layout.pp // plan.world_size
        found = rehearse(plan, rank, steps, planned.device_bytes - planned.outside_bytes)
        expected = (planned.tensors_bytes, planned.allocator_bytes, planned.fused_saves_bytes)
        done.append(RehearsedRank(found, *(sizes[stage] for sizes in expected)))
    return Rehearsal(
        plan.layout.describe(),
        plan.world_size,
        plan.micro_batch_size,
        plan.grad_accum_steps,
        plan.recompute,
        steps,
        planned.device,
        planned.device_bytes,
        planned.outside_bytes,
        planned.step_s,
        tuple(done),
    )
