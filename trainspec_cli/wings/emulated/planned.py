"""Plan a recipe, rehearse some of its ranks, and compare their memory and step time with the plan."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from trainspec_cli.core.errors import Interrupted, Problem, RecipeError
from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.capacity import as_plan, pin_layout, setup_of
from trainspec_cli.planner.hardware.cluster import (
    axis_groups,
    describe_fabric,
    efficiency_of,
    group_of_ranks,
    send_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.engine.step import engine_peak, is_counted, run_of
from trainspec_cli.planner.memory.predict import CONTEXT_BYTES, GROUP_BYTES, RESERVE, communicators
from trainspec_cli.planner.pipeline import Action, Kind, TimedAction, cut_layers, replay
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import estimate_step, micro_batch
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import Simulation
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, MemoryBreakdown, Plan, StepTime
from trainspec_cli.recipe.rules.check import check_built
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.session.planning.plan import plan_recipe, require_fit
from trainspec_cli.wings.emulated.rehearsal import (
    FaultCost,
    PipelineSeconds,
    RankRehearsal,
    equal_ranks,
    rehearse,
    stage_of,
)

AT_ONCE = 2
"""Number of ranks to rehearse at the same time. Each rank needs up to 1 GB of host memory."""


LEFT_OUT = {
    **dict.fromkeys(("launch_s", "step_s", "step_graphed_s"), 0.0),
    **dict.fromkeys(("jitter", "contention", "expert_imbalance"), 0.0),
}
"""Effects that a rehearsal does not include: the host's work, waiting for slower devices, kernels slowed by concurrent
exchanges, and experts that get more tokens than others."""


@dataclass(frozen=True)
class PlanToRehearse:
    """A plan, and the memory that it predicts for its ranks, in bytes."""

    plan: Plan
    spec: RunSpec
    candidate: Candidate
    """The planned layout."""
    capacity: CapacityPlan
    simulation: Simulation | None
    """The planned run under the disturbance named on the command line."""
    device: str
    device_bytes: float
    """The device's total memory."""
    outside_bytes: float
    """The memory that is not available to the allocator: the device's context and the buffers of communicators."""
    tensors_bytes: tuple[float, ...]
    """The maximum total size of a rank's tensors with eager blocks, by pipeline rank."""
    allocator_bytes: tuple[float, ...]
    """The memory held by the allocator, by pipeline rank: `tensors_bytes` plus fragmentation and the pools of other
    streams. The plan's reserve is not included."""
    step_s: float
    """Planned step time in seconds, with the recipe's kernels and compilation."""
    time: StepTime
    """Planned step time by part, with eager blocks and without the effects in `LEFT_OUT`."""
    kinds: tuple[int, ...]
    """For each pipeline rank, the first rank whose stages do the same work."""
    fused_saves_bytes: tuple[float, ...]
    """Memory that the plan expects compiled blocks and fused kernels to save in the recipe's run."""


@dataclass(frozen=True)
class RehearsedRank:
    """A rank's rehearsal and its plan, both with eager blocks."""

    rehearsed: RankRehearsal
    equal_ranks: int
    """Number of ranks that do the same work, including this one."""
    planned_tensors_bytes: float
    planned_allocator_bytes: float
    fused_saves_bytes: float


STEP_PARTS = {
    "compute": ("matmul_s", "attention_s", "memory_bound_s", "recompute_s"),
    "exposed_comm": ("tp_comm_s", "cp_comm_s", "ep_comm_s", "dp_comm_s"),
    "hand_over": ("pp_comm_s",),
    "bubble": ("bubble_s",),
    "optimizer": ("optimizer_s",),
    "other": ("data_s", "host_s"),
}
"""The parts of a rehearsed step's time -> the corresponding parts of the plan (`StepTime`)."""
PART_NAMES = {
    "compute": "compute",
    "exposed_comm": "exposed communication",
    "hand_over": "messages between stages",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "other": "other",
    "all": "step",
}


@dataclass(frozen=True)
class RehearsedStep:
    """The virtual time of a step with eager blocks, and its planned time, in seconds by part (`STEP_PARTS`)."""

    rank: int
    """The rehearsed rank with the most work. The parts are those of this rank. Its `bubble` is the time spent waiting
    for other stages."""
    stages_s: tuple[tuple[float, float], ...]
    """For each pipeline rank: the time of compute and of exposed communication in an average micro-batch, in
    seconds."""
    parts_s: dict[str, float]
    planned_parts_s: dict[str, float]
    step_s: float
    planned_s: float


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
    """Planned step time with the recipe's kernels and compilation; the rehearsed steps use eager blocks instead."""
    ranks: tuple[RehearsedRank, ...]
    step: RehearsedStep | None = None
    """The rehearsed step time. None if the chip is unknown, a rank ran out of memory, or a kind of pipeline stage was
    not rehearsed."""
    checkpoint_bytes: float = 0.0
    """Size of a checkpoint; 0 if `step` is None."""
    simulation: Simulation | None = None
    """The run under the disturbance from the command line, simulated with rehearsed steps."""
    planned_simulation: Simulation | None = None
    """The run under the disturbance from the command line, simulated with planned steps."""
    faults: tuple[FaultCost, ...] = ()
    """The costs of the recipe's faults."""


def plan_to_rehearse(arguments: Sequence[str], memory_gib: float | None) -> PlanToRehearse:
    """Plan a recipe on its cluster; `memory_gib` replaces the chip's memory in the rehearsal.

    Raises RecipeError if the recipe is invalid or cannot be rehearsed, and PlanError if no layout fits.
    """
    planned = plan_recipe(arguments)
    if planned.pools is not None:
        message = "a rehearsal needs one kind of node, and `cluster.pools` has several"
        raise RecipeError(Problem("unsupported", message, "cluster.pools", "choose one cluster, such as cluster=h100"))
    best = require_fit(planned)
    spec = planned.spec
    if problems := check_built(pin_layout(spec, best.layout)):
        raise RecipeError(problems)
    compute: Literal["bf16", "fp32"] = "fp32" if spec.precision.compute == "fp32" else "bf16"
    plan = as_plan(spec, best, planned.capacity, compute)
    in_groups = GROUP_BYTES * communicators(setup_of(best, spec, None))

    def held(memory: MemoryBreakdown) -> float:
        """Return the memory that the allocator is expected to hold, without the plan's reserve."""
        return memory.total_bytes / (1 + RESERVE) - memory.context_bytes - in_groups

    by_rank = [held(memory) for memory in best.memory]
    tensors = [
        memory.total_bytes - memory.context_bytes - in_groups - memory.fragmentation_bytes for memory in best.memory
    ]
    saved = [0.0] * plan.layout.pp
    if is_counted(spec.model, plan.offload):
        # The recipe's run may have compiled blocks and fused kernels, which a rehearsal does not have.
        as_planned = tensors
        eager = replace(plan, spec=replace(spec, compile=False))
        # Count each pipeline rank separately, because for some ranks, a plan uses the peak of an earlier, fuller rank.
        run = run_of(eager)
        peaks = [engine_peak(run, stage) for stage in range(plan.layout.pp)]
        tensors = [sum(peak.values()) + memory.feedback_bytes for peak, memory in zip(peaks, best.memory, strict=True)]
        saved = [one - other for one, other in zip(tensors, as_planned, strict=True)]
        by_rank = [size + more + peak.idle_bytes for size, more, peak in zip(by_rank, saved, peaks, strict=True)]
    eager_setup = setup_of(best, replace(spec, compile=False), None)
    eff = efficiency_of(spec.cluster)
    device_bytes = best.memory_limit_bytes if memory_gib is None else memory_gib * GIB
    outside_bytes = CONTEXT_BYTES + in_groups
    if device_bytes <= outside_bytes:
        message = f"--memory-gib {memory_gib:g} leaves no memory for tensors"
        hint = f"specify more than {outside_bytes / GIB:.2f}: the device's context and communicators need that much"
        raise RecipeError(Problem("usage", message, "--memory-gib", hint))
    return PlanToRehearse(
        plan=plan,
        spec=spec,
        candidate=best,
        capacity=planned.capacity,
        simulation=planned.simulation,
        device=planned.device,
        device_bytes=device_bytes,
        outside_bytes=outside_bytes,
        tensors_bytes=tuple(tensors),
        allocator_bytes=tuple(by_rank),
        step_s=best.time.total_s,
        time=estimate_step(eager_setup, replace(eff, **LEFT_OUT)),
        kinds=_kinds_of_ranks(eager_setup, eff),
        fused_saves_bytes=tuple(saved),
    )


def rehearse_ranks(
    planned: PlanToRehearse, ranks: Sequence[int], steps: int, on_rank: Callable[[int], None]
) -> Rehearsal:
    """Rehearse ranks, one per core and at most `AT_ONCE` at a time. `on_rank` is called before each rank, in any
    thread. Raises MachineError and Interrupted."""
    plan = planned.plan
    requests = StopRequests()

    def run(rank: int) -> RehearsedRank:
        if requests.count:
            raise Interrupted("the rehearsal was interrupted", code="interrupted")
        on_rank(rank)
        stage = stage_of(plan, rank)
        try:
            found = rehearse(plan, rank, steps, planned.device_bytes - planned.outside_bytes, requests)
        except BaseException:
            requests.add()  # This also ends the processes of the other ranks.
            raise
        expected = (planned.tensors_bytes, planned.allocator_bytes, planned.fused_saves_bytes)
        return RehearsedRank(found, equal_ranks(plan), *(sizes[stage] for sizes in expected))

    with on_stop_signal(requests.add), ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(run, rank) for rank in ranks]
        errors = [error for future in futures if (error := future.exception())]
    if errors:
        # The first error is the cause; the other ranks were interrupted because of it.
        raise min(errors, key=lambda error: isinstance(error, Interrupted))
    done = [future.result() for future in futures]
    found = [one.rehearsed for one in done]
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
        time_step(planned, found),
        size_checkpoint(planned, found),
    )


def _kinds_of_ranks(setup: Setup, eff: Efficiency) -> tuple[int, ...]:
    """Return for each pipeline rank the first pipeline rank with the same work: the same number of layers of each kind
    per stage, and the same embedding and head."""
    layout = setup.layout
    once = micro_batch(setup, axis_groups(layout, setup.fabric, eff), eff)
    stages = cut_layers(once.num_layers, layout)
    firsts: dict[object, int] = {}
    kinds = []
    for rank in range(layout.pp):
        own = layout.stages_of_rank(rank)
        work = tuple(once.numbers([stages[stage]]) for stage in own)
        kinds.append(firsts.setdefault((work, 0 in own, layout.num_stages - 1 in own), rank))
    return tuple(kinds)


def time_step(planned: PlanToRehearse, ranks: Sequence[RankRehearsal]) -> RehearsedStep | None:
    """Return the time of a step, computed by replaying the schedule with the times of the ranks' passes. Ranks of the
    same kind take the same time. If several ranks of a stage were rehearsed, the slowest one counts."""
    plan = planned.plan
    layout = plan.layout
    hand_over_s = 0.0
    bubble_s = 0.0
    if layout.pp == 1:
        timed = [rank for rank in ranks if rank.time_s]
        if not timed:
            return None
        slowest = max(timed, key=lambda rank: sum(rank.time_s.values()))
        busy_s = _by_part(slowest.time_s)
        stages_s = [(busy_s["compute"], busy_s["exposed_comm"])]
    else:
        by_kind: dict[int, tuple[RankRehearsal, PassSeconds]] = {}
        for rank in ranks:
            kind = planned.kinds[stage_of(plan, rank.rank)]
            if rank.pipeline is not None:
                passes = PassSeconds(rank.pipeline, plan.grad_accum_steps)
                if kind not in by_kind or passes.busy_s > by_kind[kind][1].busy_s:
                    by_kind[kind] = rank, passes
        if by_kind.keys() != set(planned.kinds):
            return None
        by_rank = [by_kind[kind] for kind in planned.kinds]
        slowest, passes = max(by_rank, key=lambda one: one[1].busy_s)
        busy_s = passes.parts_s
        stages_s = [(one.parts_s["compute"], one.parts_s["exposed_comm"]) for _, one in by_rank]
        step_s = replay_step(plan, [one[1] for one in by_rank])
        bubble_s = replay_step(plan, [one[1] for one in by_rank], hands_over=False) - passes.busy_s
        hand_over_s = step_s - bubble_s - passes.busy_s
    parts_s = dict.fromkeys(STEP_PARTS, 0.0) | busy_s | {"hand_over": hand_over_s, "bubble": bubble_s}
    planned_s = {part: sum(getattr(planned.time, name) for name in names) for part, names in STEP_PARTS.items()}
    count = plan.grad_accum_steps
    each_s = tuple((compute_s / count, exposed_s / count) for compute_s, exposed_s in stages_s)
    return RehearsedStep(slowest.rank, each_s, parts_s, planned_s, sum(parts_s.values()), planned.time.total_s)


def size_checkpoint(planned: PlanToRehearse, ranks: Sequence[RankRehearsal]) -> float:
    """Return the size of a checkpoint in bytes, computed from one rank of each kind of pipeline stage; 0 if a kind is
    missing. Replicas hold the same state."""
    plan = planned.plan
    per_stage = plan.group_size // plan.layout.pp
    by_kind = {planned.kinds[stage_of(plan, rank.rank)]: rank.checkpoint_bytes for rank in ranks}
    held = sum(by_kind.get(kind, math.nan) for kind in planned.kinds)
    return 0.0 if math.isnan(held) else held * per_stage / plan.layout.dp_replicate


def _by_part(time_s: Mapping[str, float]) -> dict[str, float]:
    """Return a step's time by `STEP_PARTS`, given its time by the `PARTS` of the step events."""
    parts_s = dict.fromkeys(STEP_PARTS, 0.0)
    for name, seconds in time_s.items():
        part = "compute" if name in ("forward", "backward") else name
        parts_s[part if part in parts_s else "other"] += seconds
    return parts_s


class PassSeconds:
    """The times of a pipeline rank's passes, in a step with any number of micro-batches."""

    def __init__(self, measured: PipelineSeconds, micro_batches: int):
        self.measured = measured
        rehearsed = measured.micro_batches
        # The first and last micro-batches differ from the others: in them, parameters are gathered, and gradients are
        # created and reduced. Every micro-batch that was not rehearsed is represented by one from the middle.
        first = rehearsed // 2
        last = micro_batches - (rehearsed - first)
        self.like = [
            number if number < first else number - micro_batches + rehearsed if number >= last else first
            for number in range(micro_batches)
        ]
        self.passes = {(one.kind, one.stage, one.micro_batch): one for one in measured.actions}
        self.parts_s = _by_part(measured.rest_s)
        # Count each rehearsed micro-batch once for every micro-batch of the step that it represents.
        times = Counter(self.like)
        for one in measured.actions:
            self.parts_s["compute"] += times[one.micro_batch] * one.compute_s
            self.parts_s["exposed_comm"] += times[one.micro_batch] * one.exposed_s
        self.busy_s = sum(self.parts_s.values())
        """Total time in seconds, without waiting for other stages."""

    def seconds(self, kind: Kind, stage: int, micro_batch: int) -> float:
        one = self.passes[kind, stage, self.like[micro_batch]]
        return one.compute_s + one.exposed_s


def replay_step(plan: Plan, ranks: Sequence[PassSeconds], *, hands_over: bool = True) -> float:
    """Return the duration in seconds of a step in which the pipeline ranks' passes take these times.

    A step ends when the last rank reaches the agreement on the gradient norm. The work after it, such as the optimizer,
    counts as part of the next step."""
    layout = plan.layout
    timeline = replay_passes(plan, ranks, hands_over=hands_over)
    ends = []
    for rank in range(layout.pp):
        measured = ranks[rank].measured
        ends.append(timeline[rank][-1].end_s + sum(measured.rest_s.values()) - measured.after_agreement_s)
    return max(ends)


def replay_passes(plan: Plan, ranks: Sequence[PassSeconds], *, hands_over: bool = True) -> list[list[TimedAction]]:
    """Return the passes of each pipeline rank in a step, starting at the previous step's agreement on the gradient
    norm. Without `hands_over`, messages between stages take no time."""
    layout = plan.layout
    cluster = plan.spec.cluster
    fabric = describe_fabric(cluster, None)
    eff = efficiency_of(cluster)
    per_stage = plan.group_size // layout.pp

    @cache
    def hand_over_s(sender: int, receiver: int) -> float:
        group = group_of_ranks(fabric, (sender * per_stage, receiver * per_stage), eff)
        return send_s(group, ranks[sender].measured.message_bytes, eff) if hands_over else 0.0

    # The passes of ranks of the same kind differ only in their stage numbers.
    own = [layout.stages_of_rank(rank) for rank in range(layout.pp)]
    rehearsed = [sorted({one.stage for one in rank.measured.actions}) for rank in ranks]

    def action_s(action: Action) -> float:
        rank = layout.rank_of_stage(action.stage)
        stage = rehearsed[rank][own[rank].index(action.stage)]
        return ranks[rank].seconds(action.kind, stage, action.micro_batch)

    begins_s = [rank.measured.after_agreement_s for rank in ranks]
    return replay(layout, plan.grad_accum_steps, action_s, hand_over_s, begins_s)
