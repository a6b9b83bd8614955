"""`comm.gradients: auto`: the format whose predicted step is the shortest, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainspec_cli.core.printable import format_duration
from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.this_machine import is_known, setup_of
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.training import CommSpec, WireFormat, WireFormats
from trainspec_cli.recipe.results.plan import Plan

CANDIDATES: tuple[WireFormat, ...] = ("full", "bf16", "int8")
"""The formats to choose from; where two take equally long, the first is chosen. int4
has cost a tiny llama up to 0.44% of its loss (docs/benchmarks.md): it is for a recipe to ask for."""


def choose_formats(plan: Plan, machine: Machine) -> WireFormats:
    """Return the formats of the plan's exchanges, with no `auto` left."""
    comm = plan.spec.comm
    if AUTO not in (comm.gradients, comm.across_nodes):
        return comm.fixed
    if hindrance := _hindrance(plan, machine):
        return replace(comm.fixed, reason=hindrance)
    setup = setup_of(plan, machine)
    eff = efficiency_of(plan.spec.cluster)

    def step_s(formats: WireFormats) -> float:
        return estimate_step(replace(setup, software=replace(setup.software, wire=formats)), eff).total_s

    full, *others = ((step_s(formats), formats) for formats in _candidates(comm))
    best = min([full, *others], key=lambda found: found[0])
    if best[1] == full[1]:
        least_s = min(seconds for seconds, _ in others)
        reason = f"encoding takes more than it saves: {format_duration(least_s)} a step at least, predicted,"
        return replace(full[1], reason=f"{reason} against {format_duration(full[0])}")
    reason = f"{format_duration(best[0])} a step predicted, against {format_duration(full[0])} in full"
    return replace(best[1], reason=reason)


def _candidates(comm: CommSpec) -> Iterator[WireFormats]:
    """Yield what the recipe leaves open; in full, what can be, is the first."""
    for inside in CANDIDATES if comm.gradients == AUTO else (comm.gradients,):
        if comm.across_nodes is None:
            yield WireFormats(inside, comm.parameters, inside)
            continue
        for across in CANDIDATES if comm.across_nodes == AUTO else (comm.across_nodes,):
            yield WireFormats(inside, comm.parameters, across)


def _hindrance(plan: Plan, machine: Machine) -> str:
    """Return why the planner cannot tell the formats' times apart."""
    cluster = plan.spec.cluster
    if plan.device == "cuda" and not is_known(plan, machine):
        return "the catalogue does not have this GPU, so that nothing says what encoding takes"
    if plan.device == "cpu" and cluster.num_nodes > 1 and not cluster.nic_gbit_per_s:
        return "nothing says how fast the links between the nodes are (cluster.nic_gbit_per_s)"
    return ""
