"""Resolve every `auto` in a RunSpec for this machine, which results in a Plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, cast

from trainspec_cli.balance.batch.batch import count_steps, schedule_batches
from trainspec_cli.balance.batch.division import count_micro_batches, turns_of
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import format_duration
from trainspec_cli.planner import workload
from trainspec_cli.planner.blueprint import draw_blueprint
from trainspec_cli.planner.capacity import best_candidate, cut_on_chip, is_searched
from trainspec_cli.planner.hardware.cluster import chip_of, efficiency_of, is_derived
from trainspec_cli.planner.pipeline import LayerTimes, cut, is_open
from trainspec_cli.planner.search.space import asked_groups, one_group
from trainspec_cli.planner.this_machine import is_known, setup_of
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.planner.workload import head_work, layer_works
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec, PipelineSchedule
from trainspec_cli.recipe.keys.model import ModelSpec
from trainspec_cli.recipe.keys.run import Offload, Recompute, RunSpec
from trainspec_cli.recipe.keys.training import WireFormat, WireFormats
from trainspec_cli.recipe.results.plan import Plan, PlannedLayout
from trainspec_cli.recipe.rules.layout import (
    changed_specs,
    exchanged,
    fixed_groups,
    joined,
    size_of,
    wanted_groups,
    whole_hosts,
)
from trainspec_cli.recipe.rules.run import measurable_noise

MAX_MICRO_BATCH_TOKENS = 8192
"""`micro_batch_size: auto` chooses the largest number of samples with at most this many tokens in total."""
FILLING = 4
"""Number of micro-batches per pipeline stage that `auto` chooses if the batch is large enough; stages then wait for a
fifth of the time."""


def plan(spec: RunSpec, machine: Machine) -> Plan:
    """Resolve `spec` on `machine`. Raises RecipeError if sizes do not divide evenly, or if the layout lacks exchanges
    that the recipe compresses or measures."""
    device = spec.cluster.device
    if device == AUTO:
        device = "cuda" if machine.gpu_names else "cpu"
    devices_per_node = spec.cluster.devices_per_node
    if devices_per_node == AUTO:
        processes = len(machine.gpu_names)
        if device != "cuda":
            # Use as few processes as the layout and the replica groups allow. On CPUs, one process with all cores is
            # faster than several that share them (1.4 times as fast as two, for the quickstart on two cores).
            asked = {axis: size_of(spec.layout, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
            data_parallel = max(asked["dp_replicate"] * asked["dp_shard"], asked["ep"])
            in_all = data_parallel * asked["cp"] * asked["tp"] * asked["pp"] * fixed_groups(spec)
            processes = math.ceil(in_all / spec.cluster.num_nodes)
        devices_per_node = processes
    layout, groups, micro_batch_size, grad_accum_steps, memory = _choose(spec, machine, device, devices_per_node)
    problems = [*measurable_noise(spec, layout, groups, grad_accum_steps), *exchanged(spec, layout, groups)]
    if problems := [*problems, *joined(spec, layout, device)]:
        raise RecipeError(problems)
    compute = resolve_compute(spec, machine)
    # The data sheet's dense bf16 rate of the detected GPU, or of the GPU named in the recipe. A derived chip has no
    # such rate, only a lower bound, relative to which every run would look efficient.
    chip = None
    if device == "cuda" and compute == "bf16" and not is_derived(machine):
        chip = chip_of(machine)[0] if machine.gpu_names else spec.cluster.accelerator
    peak_flops = chip.bf16_tflops * 1e12 if chip and chip.bf16_tflops else None
    drafted = Plan(
        spec=spec,
        layout=layout,
        replica_groups=groups,
        device=device,
        num_nodes=spec.cluster.num_nodes,
        devices_per_node=devices_per_node,
        compute=compute,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=grad_accum_steps,
        recompute=memory[0],
        offload=memory[1],
        kernels=spec.kernels,
        steps=None if spec.batching.schedule.kind == "constant" else count_steps(schedule_batches(spec)),
        params=workload.count_params(spec.model),
        adapter_params=workload.adapter_params(spec.model, spec.lora),
        flops_per_token=workload.flops_per_token(spec.model, spec.data.seq_len, spec.lora),
        peak_flops=peak_flops,
        peak_source=f"dense bf16 peak from the data sheet of {chip.name}" if chip and peak_flops else "",
    )
    drafted = replace(drafted, layout=_cut_layers(drafted, machine))
    drafted = replace(drafted, comm=choose_formats(drafted, machine))
    # The blueprint contains the placement and environment of all nodes in the run; it treats replica groups as
    # replicas.
    fabric = spec.cluster.fabric
    blueprint = None
    if drafted.num_nodes > 1 and fabric.tiers:
        blueprint = draw_blueprint(setup_of(drafted.as_one_group, machine), fabric, efficiency_of(spec.cluster))
    drafted = replace(drafted, changes=tuple(_plan_changes(drafted, machine)), blueprint=blueprint)
    if all(layout.pp == 1 for layout in (drafted.layout, *(change.layout for change in drafted.changes))):
        return drafted
    times = relative_times(spec.model, micro_batch_tokens(drafted), spec.data.seq_len, drafted.layout)
    return replace(drafted, layer_flops=tuple(times.layers_s), head_flops=times.head_s)


def _plan_changes(plan: Plan, machine: Machine) -> Iterator[PlannedLayout]:
    """Resolve the layouts that the recipe switches to. Raises RecipeError in the same cases as `plan`."""
    for change, changed in zip(plan.spec.scheduler.changes, changed_specs(plan.spec), strict=True):
        layout = resolve_layout(changed.layout, plan.group_size, f"the layout from step {change.step} on")
        micro_batch_size, grad_accum_steps = resolve_batch(plan.spec, layout)
        if problems := list(measurable_noise(plan.spec, layout, plan.replica_groups, grad_accum_steps)):
            raise RecipeError(problems)
        planned = PlannedLayout(change.step, layout, micro_batch_size, grad_accum_steps)
        cut_layout = _cut_layers(replace(plan.with_layout(planned), spec=changed), machine)
        yield replace(planned, layout=cut_layout)


def _cut_layers(plan: Plan, machine: Machine) -> Layout:
    """Split the layers into pipeline stages by planned times on known GPUs, and otherwise by FLOPs."""
    spec = plan.spec
    layout = plan.layout
    if not is_open(layout, spec.model):
        return layout
    if is_known(plan, machine):
        setup, _ = cut_on_chip(setup_of(plan, machine), plan.recompute, efficiency_of(spec.cluster))
        return replace(layout, stage_layers=setup.layout.stage_layers)
    return cut(relative_times(spec.model, micro_batch_tokens(plan), spec.data.seq_len, layout), layout)


def micro_batch_tokens(plan: Plan) -> float:
    """Return the number of tokens in a rank's largest micro-batch."""
    return plan.micro_batch_size * plan.spec.data.seq_len / plan.layout.cp


def _choose(
    spec: RunSpec, machine: Machine, device: str, devices_per_node: int
) -> tuple[Layout, int, int, int, tuple[Recompute, Offload]]:
    """Return (layout of a group, number of groups, micro-batch size, gradient accumulation, (recompute, offload)). On
    known GPUs, a search chooses them, if anything fits."""
    best = None
    if is_searched(spec, machine, device):
        best = best_candidate(in_engine_format(spec, machine), machine, devices_per_node)
    if best is not None:
        layout, groups = one_group(spec, best.layout)
        memory = cast("Recompute", best.recompute), best.offload
        return layout, groups, best.micro_batch_size, best.grad_accum_steps, memory
    groups = wanted_groups(spec)
    if problems := list(whole_hosts(spec.cluster.num_nodes, groups)):
        raise RecipeError(problems)
    processes = _divide(spec.cluster.num_nodes * devices_per_node, groups, "resilience.replica_groups", "groups")
    counts_groups = groups > 1 and asked_groups(spec) is None and spec.layout.dp_replicate != AUTO
    layout = resolve_layout(replace(spec.layout, dp_replicate=1) if counts_groups else spec.layout, processes)
    sizes = resolve_batch(spec, replace(layout, dp_replicate=layout.dp_replicate * groups))
    recompute: Recompute = "none" if spec.recompute == AUTO else spec.recompute
    offload: Offload = "none" if spec.offload == AUTO else spec.offload
    return layout, groups, *sizes, (recompute, offload)


def resolve_compute(spec: RunSpec, machine: Machine) -> Literal["bf16", "fp32"]:
    wanted = spec.precision.compute
    if wanted == AUTO:
        return "bf16" if machine.bf16 else "fp32"
    if wanted in ("fp16", "tf32"):
        message = f"the engine computes in bf16 or fp32, not in {wanted}"
        raise RecipeError(Problem("unsupported", message, "precision.compute", "precision.compute=auto"))
    return "bf16" if wanted == "bf16" else "fp32"


def in_engine_format(spec: RunSpec, machine: Machine) -> RunSpec:
    """Return the spec with the engine's compute format if the recipe leaves it open. On a GPU without bf16, this is
    fp32, while the capacity planner would use fp16."""
    if spec.precision.compute != AUTO:
        return spec
    return replace(spec, precision=replace(spec.precision, compute=resolve_compute(spec, machine)))


def resolve_layout(wanted: LayoutSpec, world_size: int, name: str = "the layout") -> Layout:
    """Resolve the open axes: those of model parallelism become 1, and the remaining ranks go to dp_shard or, without
    sharding, to dp_replicate (DDP). `name`: name of the layout in errors."""
    cp, tp, pp, ep, etp = (size_of(wanted, axis) for axis in ("cp", "tp", "pp", "ep", "etp"))
    data_parallel = _divide(world_size, cp * tp * pp, "layout", "cp x tp x pp")
    replicate = wanted.dp_replicate
    shard = wanted.dp_shard
    if replicate == AUTO and shard == AUTO:
        replicate = data_parallel
        shard = 1
    elif replicate == AUTO:
        replicate = _divide(data_parallel, int(shard), "layout.dp_shard", "dp_shard")
    elif shard == AUTO:
        shard = _divide(data_parallel, int(replicate), "layout.dp_replicate", "dp_replicate")
    usual: PipelineSchedule = "1f1b" if wanted.virtual_stages in (AUTO, 1) else "interleaved"
    schedule = usual if wanted.pipeline_schedule == AUTO else wanted.pipeline_schedule
    chunks = (2 if schedule == "interleaved" else 1) if wanted.virtual_stages == AUTO else int(wanted.virtual_stages)
    layout = Layout(
        dp_replicate=int(replicate),
        dp_shard=int(shard),
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        zero_stage=3 if wanted.zero_stage == AUTO else wanted.zero_stage,
        etp=etp,
        sequence_parallel=wanted.sequence_parallel and tp > 1,
        pipeline_schedule=schedule,
        virtual_stages=chunks,
        stage_layers=wanted.stage_layers,
        context_method=wanted.context_method,
    )
    if layout.world_size != world_size:
        message = f"{name}, {layout.describe()}, takes {layout.world_size} processes, but the cluster has {world_size}"
        hint = f"make the axes' product {world_size}, or leave one of them auto"
        raise RecipeError(Problem("not_divisible", message, "layout", hint))
    return layout


def resolve_batch(spec: RunSpec, layout: Layout) -> tuple[int, int]:
    """Return (samples in the largest micro-batch, number of micro-batches) for the rank with the most samples."""
    per_rank = math.ceil(spec.batching.global_batch_size / layout.data_parallel_size)
    micro = spec.batching.micro_batch_size
    if micro == AUTO:
        micro = choose_micro_batch(per_rank, spec.data.seq_len, layout)
    accum = count_micro_batches(per_rank, int(micro), turns_of(layout))
    return math.ceil(per_rank / accum), accum


def choose_micro_batch(per_rank: int, seq_len: int, layout: Layout) -> int:
    """Return the largest suitable micro-batch size. A pipeline needs enough micro-batches to fill its stages."""
    filling = 1 if layout.pp == 1 else min(per_rank, FILLING * layout.pp)
    small_enough = range(1, min(per_rank, MAX_MICRO_BATCH_TOKENS // seq_len) + 1)
    numbers = (math.ceil(per_rank / size) for size in small_enough)
    return math.ceil(per_rank / min((number for number in numbers if number >= filling), default=per_rank))


def _divide(total: int, part: int, path: str, what: str) -> int:
    if total % part:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        near = sorted(divisors, key=lambda n: abs(n - part))[:3]
        message = f"{total} is not divisible by {part} ({what})"
        hint = f"nearby sizes that divide {total}: {', '.join(map(str, sorted(near)))}"
        raise RecipeError(Problem("not_divisible", message, path, hint))
    return total // part


# Plans without a search


def relative_times(model: ModelSpec, tokens: float, seq_len: int, layout: Layout) -> LayerTimes:
    """Return the layers' forward FLOPs instead of times; the backward pass is proportional to the forward pass in
    every layer."""
    layers = layer_works(model, tokens, seq_len, layout)
    kinds = {id(works): sum(work.flops for work in works) for works in layers}
    head = head_work(model, tokens, layout)
    return LayerTimes([kinds[id(works)] for works in layers], 0.0, head.flops if head else 0.0)


CANDIDATES: tuple[WireFormat, ...] = ("full", "bf16", "int8")
"""The formats to choose from; among equally fast formats, the first one is chosen. int4 raised a tiny llama's loss by
up to 0.44% (docs/benchmarks.md), so it has to be requested in the recipe."""


def choose_formats(plan: Plan, machine: Machine) -> WireFormats:
    """Return the formats of the plan's exchanges, with every `auto` resolved."""
    comm = plan.spec.comm
    if AUTO not in (comm.gradients, comm.across_nodes):
        return comm.fixed
    # The reason why the planner cannot compare the times of the formats; empty if it can.
    hindrance = ""
    cluster = plan.spec.cluster
    if plan.device == "cuda" and not is_known(plan, machine):
        hindrance = "this GPU is not in the catalogue, so the time to encode is unknown"
    elif plan.device == "cpu" and cluster.num_nodes > 1 and not cluster.nic_gbit_per_s:
        hindrance = "the bandwidth between nodes is unknown (set cluster.nic_gbit_per_s)"
    if hindrance:
        return replace(comm.fixed, reason=hindrance)
    setup = setup_of(plan, machine)
    eff = efficiency_of(plan.spec.cluster)

    def step_s(formats: WireFormats) -> float:
        return estimate_step(replace(setup, software=replace(setup.software, wire=formats)), eff).total_s

    # All combinations for the formats left open, starting with uncompressed ones where possible.
    formats = []
    for inside in CANDIDATES if comm.gradients == AUTO else (comm.gradients,):
        across = CANDIDATES if comm.across_nodes == AUTO else (comm.across_nodes or inside,)
        formats += [WireFormats(inside, comm.parameters, beyond) for beyond in across]
    full, *others = ((step_s(each), each) for each in formats)
    best = min([full, *others], key=lambda found: found[0])
    if best[1] == full[1]:
        least_s = min(seconds for seconds, _ in others)
        reason = f"encoding takes more time than it saves: at least {format_duration(least_s)} per step predicted,"
        return replace(full[1], reason=f"{reason} against {format_duration(full[0])}")
    reason = f"{format_duration(best[0])} per step predicted, against {format_duration(full[0])} uncompressed"
    return replace(best[1], reason=reason)
