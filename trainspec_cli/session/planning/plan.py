"""The plan of a recipe with its additional sections, for `trainspec plan` and for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from trainspec_cli.core.errors import MachineError, PlanError, Problem, RecipeError, TrainspecError
from trainspec_cli.core.wings import Point
from trainspec_cli.planner.blueprint import draw_blueprint
from trainspec_cli.planner.capacity import (
    advise,
    as_plan,
    pin_layout,
    plan_on_what_divides,
    plan_other_recovery,
    setup_of,
)
from trainspec_cli.planner.hardware.cluster import accelerator_of, chip_of, efficiency_of, on_pools
from trainspec_cli.planner.memory.engine.step import tensors_by_cause
from trainspec_cli.planner.plan import in_engine_format
from trainspec_cli.planner.planes import plan_planes
from trainspec_cli.planner.run.forecast import forecast_run
from trainspec_cli.recipe.compose.folders import DISTURB
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.recipe.rules.check import check_built, matrix_units, parts_for
from trainspec_cli.reporter.plan.labels import PlanReport, PlanSection
from trainspec_cli.session.recipe.load import Loaded, load_for_planning, this_machine, with_defaults, with_profile

if TYPE_CHECKING:
    from trainspec_cli.reporter.plan.trace import TraceReport
    from trainspec_cli.session.planning.disturbance import NamedDisturbance

PLAN_SECTIONS: Point[Callable[[RunSpec, CapacityPlan, Candidate], PlanSection | None]] = Point("plan_sections")
"""Returns a plug-in's section of the plan for the best layout of a recipe that uses the plug-in; None if the section is
empty."""


def plan_recipe(arguments: Sequence[str], *, trace: bool = False) -> PlanReport:
    """Plan a recipe on its cluster; `best` is None if nothing fits. Raises RecipeError for an invalid recipe."""
    arguments, defaults = with_defaults(arguments)
    loaded = load_for_planning(arguments)
    disturbed = None
    if names_disturbance(arguments):
        from trainspec_cli.session.planning.disturbance import load_disturbance  # deferred: only needed with `disturb=`

        disturbed = load_disturbance(arguments)
    return plan_loaded(loaded, defaults, disturbed, trace=trace)


def plan_loaded(
    loaded: Loaded,
    defaults: tuple[str, ...] = (),
    disturbed: NamedDisturbance | None = None,
    *,
    trace: bool = False,
) -> PlanReport:
    """Plan a loaded recipe. Raises the same errors as `plan_recipe`."""
    if len(loaded.spec.cluster.pools) > 1:
        if disturbed or trace:
            asked = "disturb=" if disturbed else "--trace"
            message = f"{asked} needs one kind of node, and `cluster.pools` has several"
            hint = f"leave out {asked}, or choose one cluster, such as cluster=h100"
            raise RecipeError(Problem("unsupported", message, "cluster.pools", hint))
        # This loads a separate search, which other plans do not need.
        from trainspec_cli.planner.pools.plan import advise_pools, compare_pools, plan_pools

        spec = on_pools(loaded.spec, loaded.spec.cluster.pools)
        try:
            capacity = plan_pools(spec)
            compared = compare_pools(spec, capacity)
        except TrainspecError as error:
            raise type(error)(loaded.composed.locate(error.problems)) from error
        best = capacity.best
        if best is None:
            capacity = replace(capacity, advice=tuple(advise_pools(spec, compared)))
        run = forecast_run(spec, capacity, best) if best else None
        return PlanReport(spec, capacity, run, defaults=defaults, pools=compared)
    spec = on_pools(loaded.spec, loaded.spec.cluster.pools)
    machine = None
    if spec.cluster.accelerator is None:  # without an accelerator, the cluster is this machine
        machine = this_machine(spec)
        spec = replace(spec, cluster=replace(spec.cluster, accelerator=accelerator_of(machine)))
        spec = in_engine_format(spec, machine) if machine.gpu_names else spec
    if machine and spec.framework.counted and (problems := list(matrix_units(spec, machine))):
        raise MachineError(loaded.composed.locate(problems))
    spec, profile = with_profile(spec, machine)
    try:
        spec, capacity = plan_on_what_divides(spec, machine)
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error
    if machine is not None:
        capacity = replace(capacity, assumptions=(*chip_of(machine)[1], *capacity.assumptions))
    best = capacity.best
    if best is None:
        capacity = replace(capacity, advice=tuple(advise(spec, machine)))
    run = forecast_run(spec, capacity, best, plan_other_recovery(spec, machine), machine) if best else None
    blueprint = None
    if best and capacity.world_size > 1:
        setup = setup_of(best, spec, machine)
        blueprint = draw_blueprint(setup, spec.cluster.fabric, efficiency_of(spec.cluster))
    return PlanReport(
        spec,
        capacity,
        run,
        blueprint=blueprint,
        defaults=defaults,
        planes=plan_planes(spec.cluster, capacity.world_size) if spec.cluster.fabric.planes else None,
        sections=_sections(spec, capacity, best) if best else (),
        simulation=disturbed.simulate(spec, capacity, best, machine) if disturbed and best else None,
        trace=_trace(spec, capacity) if trace and capacity.candidates else None,
        profile=profile,
    )


def require_fit(planned: PlanReport) -> Candidate:
    """Return the best layout. If nothing fits, raises PlanError, which suggests a change that would help."""
    if planned.best:
        return planned.best
    devices = f"{planned.capacity.world_size:,} {planned.device}"
    message = f"no layout of {planned.spec.model.name or 'the model'} fits on {devices}"
    raise PlanError(Problem(code="does_not_fit", message=message, hint="; ".join(planned.capacity.advice)))


# Optional sections of a plan, which require additional imports


def names_disturbance(arguments: Sequence[str]) -> bool:
    """Return whether the command line contains `disturb=`."""
    from trainspec_cli.recipe.compose.values import find_argument

    return find_argument(arguments, DISTURB) is not None


def _sections(spec: RunSpec, capacity: CapacityPlan, best: Candidate) -> tuple[PlanSection, ...]:
    found = (make(spec, capacity, best) for make in parts_for(PLAN_SECTIONS, spec))
    return tuple(section for section in found if section)


def _trace(spec: RunSpec, capacity: CapacityPlan) -> TraceReport:
    """Trace the first candidate. Raises RecipeError if the engine does not support the model."""
    from trainspec_cli.reporter.plan.trace import compare_trace
    from trainspec_cli.run.tools import trace_plan

    candidate = capacity.candidates[0]
    if problems := check_built(pin_layout(spec, candidate.layout)):
        raise RecipeError(problems)
    compute: Literal["bf16", "fp32"] = "fp32" if spec.precision.compute == "fp32" else "bf16"
    traced = as_plan(spec, candidate, capacity, compute)
    return compare_trace(candidate, capacity, trace_plan(traced), tensors_by_cause(traced))
