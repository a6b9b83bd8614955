"""Determine the cost of disturbances and faults for a run with the rehearsed step times.

The consequences of a fault are computed as for `plan` and the supervisor: by simulating the scheduler (`disturb=`) and
failures (goodput)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.balance.disturbance import MAX_STEPS, Disturbance, NarrowLink, SlowDevice
from trainspec_cli.balance.job import DisturbedJob, describe_job
from trainspec_cli.balance.live import Situations
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.planner.planes import Failure, SprayedFabric
from trainspec_cli.planner.run import forecast, goodput
from trainspec_cli.recipe.keys.training import Fault, parse_faults
from trainspec_cli.run.recovery.watch import LEARNING_STEPS, step_deadline_s
from trainspec_cli.session.planning.disturbance import NamedDisturbance
from trainspec_cli.wings.emulated.planned import PlanToRehearse, Rehearsal, RehearsedStep
from trainspec_cli.wings.emulated.rehearsal import FaultCost, stage_of

FAILING = ("kill", "stop", "hang", "lose_node")
"""Faults that end a process."""
SLOW = ("slow", "throttle")
REHEARSED = (*FAILING, *SLOW, "lose_link", "lose_plane")


def check_faults(planned: PlanToRehearse, ranks: Sequence[int], *, disturbed: bool) -> tuple[Fault, ...]:
    """Return the recipe's faults. Raises RecipeError if a rehearsal of these ranks cannot determine the cost of a fault
    or of the disturbance."""
    faults = parse_faults(planned.spec.fault)
    plan = planned.plan
    rehearsed = {planned.kinds[stage_of(plan, rank)] for rank in ranks}
    if (faults or disturbed) and rehearsed != set(planned.kinds):
        message = (
            "a disturbance or fault requires the step time, but these ranks do not include every kind of pipeline stage"
        )
        raise RecipeError(Problem("usage", message, "--ranks", "use --ranks=ends"))
    for fault in faults:
        text = describe(fault)
        if fault.kind not in REHEARSED:
            message = f"a rehearsal cannot determine the cost of `{text}`"
            raise RecipeError(
                Problem("unsupported", message, "fault", f"use {', '.join(REHEARSED)}, or remove the faults: fault=''")
            )
        if fault.rank >= plan.group_size or not 0 < fault.steps <= MAX_STEPS or fault.step >= plan.total_steps:
            message = f"`{text}` is outside the run, which has {plan.total_steps:,} steps on ranks 0 to "
            message += f"{plan.group_size - 1:,}"
            hint = f"choose a rank and a step of the run, and a number of steps from 1 to {MAX_STEPS:,}"
            raise RecipeError(Problem("out_of_range", message, "fault", hint))
        if fault.kind == "lose_plane" and planned.spec.cluster.fabric.planes is None:
            message = "the cluster's network has only one plane, and without it, no node can reach another"
            raise RecipeError(Problem("unsupported", message, "fault", "fault='lose_node(step=40,rank=0)'"))
    return faults


def check_leaves(planned: PlanToRehearse, disturbed: NamedDisturbance | None) -> None:
    """Raise RecipeError if the run would continue on other nodes, because only the planned layout is rehearsed."""
    if disturbed and disturbed.disturbance.leaves and planned.plan.replica_groups == 1:
        message = "a run with one replica group continues on other nodes, which a rehearsal does not have"
        hint = "use fault='lose_node(step=40,rank=0)' instead"
        raise RecipeError(Problem("unsupported", message, "disturb", hint))


def describe(fault: Fault) -> str:
    """Return the fault as text, such as `slow(step=60,seconds=0.2,steps=5)`, without arguments that have their default
    values."""
    usual = Fault(fault.kind, -1)
    given = [f"{name}={value:g}" for name, value in vars(fault).items() if value != getattr(usual, name)]
    return f"{fault.kind}({','.join(given)})"


def rehearsed_job(planned: PlanToRehearse, step: RehearsedStep) -> DisturbedJob:
    """Return the job for simulating a disturbed run, with the rehearsed step in place of the planned one.

    The planner determines how times depend on the samples, and each part is scaled to its rehearsed time. The run keeps
    its layout, because no other layout has been rehearsed."""
    job = describe_job(planned.spec, planned.candidate, None)
    parts = job.cluster.parts
    size = planned.plan.micro_batch_size
    count = planned.plan.grad_accum_steps
    planned_s = [stage.scaleup.time_s(size, 1) + stage.network.time_s(size, 1) for stage in parts.stages]
    gradients_s = parts.gradients_each_s + parts.gradients_once_s / count
    stages = []
    gradients = 0.0
    for stage, within_s, (compute_s, exposed_s) in zip(parts.stages, planned_s, step.stages_s, strict=True):
        # As in the plan, distinguish exchanges inside layers from exchanges of data parallelism.
        share = within_s / (within_s + gradients_s) if within_s else 0.0
        factor = exposed_s * share / within_s if within_s else 0.0
        gradients = max(gradients, exposed_s * (1 - share))
        compute = stage.compute.scaled(compute_s / stage.compute.time_s(size, 1))
        scaled = replace(stage, compute=compute, scaleup=stage.scaleup.scaled(factor))
        stages.append(replace(scaled, network=stage.network.scaled(factor), launch_s=0.0))
    each = parts.gradients_each_s / gradients_s if gradients_s else 0.0
    sends_s = parts.sends.time_s(size, 1) * count
    passes_s = [sum(times_s) for times_s in step.stages_s]
    others_s = sum(passes_s) - max(passes_s)
    parts = replace(
        parts,
        stages=tuple(stages),
        bubble=step.parts_s["bubble"] / others_s if others_s else 0.0,
        sends=parts.sends.scaled(step.parts_s["hand_over"] / sends_s if sends_s else 0.0),
        gradients_each_s=gradients * each,
        gradients_once_s=gradients * (1 - each) * count,
        rest_s=0.0,
    )
    cluster = job.cluster.with_parts(parts)
    job = replace(job, cluster=cluster, layouts=None)
    # All other parts, such as the optimizer, take the same time in every step.
    rest_s = step.step_s - Situations(job, Disturbance()).at(1).even_s
    return replace(job, cluster=cluster.with_parts(replace(parts, rest_s=rest_s)))


def add_costs(
    planned: PlanToRehearse, done: Rehearsal, disturbed: NamedDisturbance | None, faults: Sequence[Fault]
) -> Rehearsal:
    """Add the costs of the disturbance and the faults. Without a step time, as when a rank ran out of memory, add
    nothing."""
    step = done.step
    if step is None:
        return done
    simulation = None
    if disturbed is not None:
        simulation = simulate(rehearsed_job(planned, step), disturbed.disturbance, disturbed.name)
    return replace(
        done,
        simulation=simulation,
        planned_simulation=planned.simulation,
        faults=tuple(cost_of(fault, planned, done, step) for fault in faults),
    )


def cost_of(fault: Fault, planned: PlanToRehearse, done: Rehearsal, step: RehearsedStep) -> FaultCost:
    """Return the cost of a fault that `check_faults` accepts."""
    planes = planned.spec.cluster.fabric.planes
    speed = 0.0
    if planes and fault.kind in ("lose_link", "lose_plane"):
        fabric = SprayedFabric(planes, planned.plan.world_size)
        fabric.change(Failure("plane" if fault.kind == "lose_plane" else "port", 0.0, fault.seconds), 1)
        speed = fabric.speed
    if fault.kind in SLOW or speed:
        return _cost_of_slowness(fault, planned, step, speed)
    # A node without a link to its only network plane is lost.
    return _cost_of_failure(fault, planned, done, step)


def _cost_of_slowness(fault: Fault, planned: PlanToRehearse, step: RehearsedStep, speed: float) -> FaultCost:
    """Simulate the scheduler with a slow rank or, if `speed` is above 0, with links of this relative speed."""
    job = rehearsed_job(planned, step)
    plan = planned.plan
    device = fault.group * plan.group_size + fault.rank
    if speed:
        # The links have reduced bandwidth for `seconds`.
        steps = max(1, math.ceil(fault.seconds / step.step_s))
        node = None if fault.kind == "lose_plane" else device // job.devices_per_node
        links = (NarrowLink(from_step=1, steps=steps, node=node, factor=1 / speed),)
        disturbance = Disturbance(steps=steps, noise=0.0, narrow_links=links)
    else:
        steps = fault.steps
        samples = plan.micro_batch_size * plan.grad_accum_steps
        later_s = fault.seconds * (samples if fault.kind == "throttle" else 1)
        computed_s = step.stages_s[stage_of(plan, fault.rank)][0] * plan.grad_accum_steps
        slow = SlowDevice(from_step=1, steps=steps, device=device, factor=1 + later_s / computed_s)
        disturbance = Disturbance(steps=steps, noise=0.0, slow_devices=(slow,))
    found = simulate(job, disturbance, fault.kind)
    return _as_cost(fault, planned, found.on.wall_s - steps * step.step_s)


def _cost_of_failure(fault: Fault, planned: PlanToRehearse, done: Rehearsal, step: RehearsedStep) -> FaultCost:
    """Simulate the run with and without the failure. After a failure, it restarts from its checkpoint or continues with
    the other replica groups."""
    spec = planned.spec
    # Use the rehearsed step, because it determines an `auto` interval.
    timed = replace(planned.candidate, step_time_s=step.step_s, sized_steps=())
    resilience = forecast.recovery_modes(spec.resilience, timed.layout.dp_replicate)[0]
    job = forecast.describe_job(spec, planned.capacity, timed, resilience, done.checkpoint_bytes)
    # On fewer nodes, assume the planned change of speed, because only this number of nodes has been rehearsed.
    planned_job = forecast.describe_job(spec, planned.capacity, planned.candidate, resilience)
    job = replace(job, speed_on=planned_job.speed_on)
    cluster = spec.cluster.reliability
    if fault.kind in ("stop", "hang"):
        floor_s = spec.resilience.hang_floor_s
        steps_s = [step.step_s] * LEARNING_STEPS
        cluster = replace(cluster, detect_s=math.inf if floor_s is None else step_deadline_s(steps_s, floor_s))
    # The fault strikes in the next step, during the gradient exchange that follows its backward passes.
    work_s = fault.step * job.step_time_s + step.step_s - step.parts_s["optimizer"]
    checkpoints = math.floor(work_s / job.interval_s)
    at_s = work_s + checkpoints * job.blocked_s
    if spec.resilience.mode == "none" or math.isinf(cluster.detect_s):
        lost_s = work_s - checkpoints * job.interval_s
        return replace(_as_cost(fault, planned, lost_s), wall_s=None, lost_steps=lost_s / step.step_s)
    usual = goodput.simulate(job, cluster, resilience, failures=())
    node = (fault.group * planned.plan.group_size + fault.rank) // planned.plan.devices_per_node
    loses_node = fault.kind in ("lose_node", "lose_link")
    failure = goodput.FailureAt(at_s, node, None if loses_node else fault.group)
    failed = goodput.simulate(job, cluster, resilience, failures=(failure,))
    parts_s = {cause: lost - usual.lost_s.get(cause, 0.0) for cause, lost in failed.lost_s.items()}
    return replace(
        _as_cost(fault, planned, failed.wall_s - usual.wall_s),
        lost_steps=parts_s.get("rework", 0.0) / step.step_s,
        pause_s=failed.pause_s,
        parts_s={cause: lost for cause, lost in parts_s.items() if lost},
    )


def _as_cost(fault: Fault, planned: PlanToRehearse, wall_s: float) -> FaultCost:
    devices = planned.plan.world_size
    money, _ = forecast.expect_money(planned.spec.cluster, devices, forecast.within(wall_s, 1.0), None)
    hours = wall_s * devices / forecast.SECONDS_PER_HOUR
    return FaultCost(describe(fault), wall_s, 0.0, 0.0, hours, None if money is None else money.value)
