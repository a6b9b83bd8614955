"""Find what bounds a plan's step, and predict the step after one change, such as faster links or another layout.

Predictions for GPUs use the catalogue, and those for a CPU use a probe. Results are fractions and factors to apply to a
measured step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import best_candidate, pin_layout
from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.search.space import Space, open_layout
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.this_machine import (
    curve_parts_s,
    gpu_parts_s,
    is_known,
    is_predictable,
    predict_local,
    setup_of,
)
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import Curve, MachineProbe, MatmulCurves, Passes
from trainspec_cli.recipe.rules.check import check_built
from trainspec_cli.recipe.rules.run import measurable_noise
from trainspec_cli.reporter.diagnosis.conclude import (
    COMPUTING,
    EXCHANGES,
    FASTER,
    UNPLANNED,
    WAITING,
    Outlook,
    PlannedChange,
)
from trainspec_cli.reporter.diagnosis.evidence import COMPUTE_PARTS

MEMORY = "memory bandwidth"
BUBBLE = "the pipeline's bubble"
CALLS = "calls of small operations"
WIDER = "twice the links' bandwidth"
SOONER = "half the links' latency"
ALONE = "this report relies on measurements alone"
Parts = Mapping[str, float]


def look_ahead(plan: Plan, machine: Machine, probe: MachineProbe | None) -> Outlook:
    """Return the planner's view of a run's step on its machine. `probe`: measurements for a machine without GPUs."""
    whole = plan.as_one_group
    may_change = plan.replica_groups == 1 and not plan.spec.resilience.keeps_layout
    if is_known(whole, machine):
        try:
            return _on_gpus(whole, machine, may_change=may_change)
        except RecipeError as error:
            return Outlook(f"the planner cannot predict this run: {error}; {ALONE}")
    if plan.device == "cuda":
        name = machine.gpu_names[0] if machine.gpu_names else "the device of this run"
        return Outlook(f"the catalogue has no accelerator like {name}: {ALONE}")
    if not is_predictable(whole):
        return Outlook(f"the planner cannot predict this kind of run on a CPU: {ALONE}")
    if probe is None:
        return Outlook(f"the cache has no probe of this run's machine: {ALONE}")
    return _on_cpu(whole, machine, probe, may_change=may_change)


def _factors(before: Parts, after: Parts) -> dict[str, float]:
    return {part: after[part] / seconds for part, seconds in before.items() if seconds > 0}


def _shares(seconds: Parts) -> dict[str, float]:
    total_s = sum(seconds.values())
    return {name: each / total_s for name, each in seconds.items()}


# GPUs


def _on_gpus(plan: Plan, machine: Machine, *, may_change: bool) -> Outlook:
    setup = setup_of(plan, machine)
    eff = efficiency_of(plan.spec.cluster)
    before = _planned_parts(setup, eff)
    fabric = setup.fabric
    sooner = replace(eff, collective_latency_s=eff.collective_latency_s / 2, hop_latency_s=eff.hop_latency_s / 2)
    rates = (field.name for field in fields(fabric.chip) if field.name.endswith(RATES))
    fast_chip = replace(fabric.chip, **{name: 2 * getattr(fabric.chip, name) for name in rates})
    near_tiers = tuple(replace(tier, latency_s=_half(tier.latency_s)) for tier in fabric.described)
    near = replace(fabric, described=near_tiers, link_latency_s=_half(fabric.link_latency_s))
    wide_tiers = tuple(replace(tier, gbit_per_s=2 * tier.gbit_per_s) for tier in fabric.described)
    links = {name: 2 * getattr(fabric, name) for name in ("link_gb_per_s", "nic_gbit_per_s")}
    wide = replace(fabric, described=wide_tiers, **links)
    others: list[tuple[str, Setup, Efficiency]] = [
        # A chip with twice the rates is assumed to also halve each kernel's fixed time.
        (FASTER, replace(setup, fabric=replace(fabric, chip=fast_chip)), replace(eff, kernel_s=eff.kernel_s / 2)),
        (WIDER, replace(setup, fabric=wide), eff),
        (SOONER, replace(setup, fabric=near), sooner),
    ]
    if may_change:
        # The layout that the planner ranks first, unless nothing fits or it is the current one.
        open_spec = replace(plan.spec, layout=open_layout(plan.spec), offload=plan.offload)
        best = best_candidate(open_spec, machine, plan.devices_per_node)
        if best and (other := _other(plan, best.layout, best.micro_batch_size, best.grad_accum_steps, best.recompute)):
            others.append((_describe_change(plan, other), setup_of(other, machine), eff))
    changes = (PlannedChange(what, _factors(before, _planned_parts(one, its))) for what, one, its in others)
    basis = f"the breakdown and the suggestions are predictions for {fabric.num_devices} x {fabric.chip.name}"
    time = estimate_step(setup, eff)
    bounds_s = {
        COMPUTING: time.matmul_s + time.attention_s + time.recompute_s,
        MEMORY: time.memory_bound_s + time.optimizer_s,
    }
    exposed_s = {
        EXCHANGES: time.tp_comm_s + time.cp_comm_s + time.ep_comm_s + time.pp_comm_s + time.dp_comm_s,
        BUBBLE: time.bubble_s,
    }
    exposed = _shares(exposed_s) if sum(exposed_s.values()) else {EXCHANGES: 1.0}
    return Outlook(basis, _shares(bounds_s), tuple(changes), exposed)


def _planned_parts(setup: Setup, eff: Efficiency) -> dict[str, float]:
    """Return the planned time in seconds by part. Waiting for late ranks is proportional to the work."""
    parts = gpu_parts_s(setup, eff)
    return parts | {WAITING: parts["forward"] + parts["backward"]}


RATES = ("_tflops", "_tb_per_s", "_exponentials_per_s", "tdp_w")
"""Suffixes of the accelerator keys whose values are doubled: the rates, and the power, so that the clock does not
drop."""


def _half(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 2


# CPUs


NOTHING = Curve((1.0,), (0.0,))
NO_PASSES = Passes(NOTHING, NOTHING)


def _on_cpu(plan: Plan, machine: Machine, probe: MachineProbe, *, may_change: bool) -> Outlook:
    before = _curve_parts(plan, probe)
    exchanges = ((WIDER, _with_links(probe, 0.5, 1.0)), (SOONER, _with_links(probe, 1.0, 0.5)))
    changes = [one for one in UNPLANNED if one.change == FASTER]
    for what, other_probe in exchanges:
        factors = _factors(before, _curve_parts(plan, other_probe))
        changes.append(PlannedChange(what, {"exposed_comm": factors.get("exposed_comm", 1.0)}))
    if may_change and (other := _fastest_probed(plan, machine, probe)):
        factors = _factors(before, _curve_parts(other, probe))
        changes.append(PlannedChange(_describe_change(plan, other), factors))
    disturbed = ", disturbed by other programs" if probe.is_disturbed else ""
    basis = f"the breakdown and the suggestions are based on the probe of this machine{disturbed}"
    # Find what bounds the passes and the optimizer step from the time saved without matrix multiplications and
    # attention, and from the time saved without operations that move memory. The rest is call overhead.
    no_products = replace(
        probe,
        matmul=MatmulCurves(NOTHING, NOTHING, NOTHING),
        attention=NO_PASSES,
        attention_narrow=NO_PASSES,
    )
    no_traffic = replace(
        probe,
        norm=NO_PASSES,
        rope=NO_PASSES,
        swiglu=NO_PASSES,
        loss=NOTHING,
        add=NOTHING,
        cast=NOTHING,
        optimizer=NOTHING,
    )
    parts_of = (_curve_parts(plan, one) for one in (probe, no_products, no_traffic))
    whole_s, other_s, still_s = (sum(parts[part] for part in COMPUTE_PARTS) for parts in parts_of)
    bounds_s = {COMPUTING: whole_s - other_s, MEMORY: whole_s - still_s, CALLS: other_s + still_s - whole_s}
    return Outlook(basis, _shares(bounds_s), tuple(changes))


def _curve_parts(plan: Plan, probe: MachineProbe) -> dict[str, float]:
    """Return the planned time in seconds by part. Exposed communication excludes waiting, which is proportional to the
    work."""
    parts = curve_parts_s(plan, probe)
    known = {part: parts[part] for part in (*COMPUTE_PARTS, "exposed_comm")}
    return known | {WAITING: parts["forward"] + parts["backward"]}


def _with_links(probe: MachineProbe, transfers: float, latency: float) -> MachineProbe:
    """Return the probe with the time per exchanged byte multiplied by `transfers`, and the latency by `latency`.

    On a busy machine, an exchange may have been measured as faster than an empty one; its bytes are then treated as
    free."""

    def changed(curve: Curve) -> Curve:
        call_s = curve.seconds[0]
        moved_s = (max(0.0, seconds - call_s) for seconds in curve.seconds)
        return replace(curve, seconds=tuple(latency * call_s + transfers * each for each in moved_s))

    def small(parts_s: Parts) -> dict[str, float]:
        return {**parts_s, "exposed_comm": latency * parts_s["exposed_comm"]}

    return replace(
        probe,
        all_reduce=changed(probe.all_reduce),
        all_gather=changed(probe.all_gather),
        reduce_scatter=changed(probe.reduce_scatter),
        empty_step_s=small(probe.empty_step_s),
        empty_block_s=small(probe.empty_block_s),
    )


def _fastest_probed(plan: Plan, machine: Machine, probe: MachineProbe) -> Plan | None:
    """Return the plan in the layout that is fastest according to the probe, among those that the engine supports and
    that fit; None if it is the current one."""
    wanted = replace(open_layout(plan.spec), cp=1, tp=1, pp=1, ep=1, stage_layers=None)
    space = Space(replace(plan.spec, layout=wanted), plan.world_size, plan.devices_per_node)
    limit_bytes = machine.memory_bytes / plan.devices_per_node
    best = None
    best_s = predict_local(plan, probe).step_time_s
    for layout, micro_batch_size, micro_batches in space.layouts():
        spec = pin_layout(plan.spec, layout)
        other = _other(plan, layout, micro_batch_size, micro_batches, plan.recompute)
        if other is None or check_built(spec) or [*measurable_noise(spec, layout, 1, micro_batches)]:
            continue
        predicted = predict_local(other, probe)
        if predicted.needed_bytes <= limit_bytes and predicted.step_time_s < best_s:
            best = other
            best_s = predicted.step_time_s
    return best


# Another layout


def _other(plan: Plan, layout: Layout, micro_batch_size: int, micro_batches: int, recompute: str) -> Plan | None:
    """Return the plan in another layout; None if all recipe keys stay the same."""
    other = replace(
        plan,
        layout=layout,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=micro_batches,
        recompute=recompute,  # type: ignore[arg-type]
    )
    return other if _keys(other) != _keys(plan) else None


def _keys(plan: Plan) -> dict[str, object]:
    """Return the values that determine a layout, keyed by recipe key."""
    layout = plan.layout
    names = [*MESH_AXES, "ep", *(["zero_stage"] if layout.dp_shard > 1 else [])]
    names += ["pipeline_schedule", "virtual_stages"] if layout.pp > 1 else []
    keys: dict[str, object] = {f"layout.{name}": getattr(layout, name) for name in names}
    return keys | {"batching.micro_batch_size": plan.micro_batch_size, "recompute": plan.recompute}


def _describe_change(plan: Plan, other: Plan) -> str:
    """Return text such as `another layout: layout.dp_shard=4 layout.tp=2`."""
    now = _keys(plan)
    return (
        f"another layout: {' '.join(f'{key}={value}' for key, value in _keys(other).items() if now.get(key) != value)}"
    )
