"""Rank a recipe's layouts on a cluster, and count the rejected ones by reason. Also plan the other recovery mode, and
advise on a run that does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Literal

from trainspec_cli.balance.batch.batch import run_phases, schedule_batches
from trainspec_cli.balance.batch.division import largest_that_fits, micro_batches_of
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.planner import workload
from trainspec_cli.planner.hardware.cluster import Fabric, axis_groups, chip_of, describe_fabric, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency, peak_flops_per_s
from trainspec_cli.planner.memory.engine.step import outer_bytes_of
from trainspec_cli.planner.memory.predict import (
    SURELY,
    expected_step_s,
    fit_probability,
    layer_memory,
    memory_limit_bytes,
    memory_within,
    predict_memory,
    room_within,
)
from trainspec_cli.planner.pipeline import cut, is_open
from trainspec_cli.planner.search.search import (
    ABOUT,
    NEAR,
    SLOWER,
    TOO_LARGE,
    Estimated,
    Search,
    complexity,
    recompute_names,
)
from trainspec_cli.planner.search.space import Space, asked_groups, one_group, open_layout
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software, describe_software, moment_bytes
from trainspec_cli.planner.time.step import estimate_step, micro_batch, planned_times
from trainspec_cli.recipe.field_types import AUTO, AutoInt
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.framework import SumFormat
from trainspec_cli.recipe.keys.layout import SHARDINGS, Layout, LayoutSpec, Sharding
from trainspec_cli.recipe.keys.resilience import RecoveryMode, ResilienceSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import (
    ALWAYS_ASSUMED,
    Candidate,
    CapacityPlan,
    MemoryBreakdown,
    Plan,
    PoolPart,
    SizedStep,
    StepTime,
)
from trainspec_cli.recipe.rules.check import BUILT, KERNEL_RULES, apply, check

SHOWN = 10

COUNTED = 40
"""Maximum number of layouts whose memory is counted tensor by tensor."""
SLACK = 1.1
"""Factor by which the search's rough memory estimate may exceed the limit; the exact count then decides whether the
layout fits."""
TRIED = 4
"""Maximum number of layouts of the same complexity whose memory is counted tensor by tensor."""
ERR = 1.02
"""The search's estimate of the expected step time differs from the exact one by less than this factor."""


def plan_capacity(spec: RunSpec, machine: Machine | None = None, shown: int = SHOWN) -> CapacityPlan:
    """Search every axis that `spec` leaves open.

    Raises RecipeError if neither the cluster nor the machine names the accelerator, or if the engine rejects a pinned
    part of the layout."""
    fabric = describe_fabric(spec.cluster, machine)
    eff = efficiency_of(spec.cluster)
    search = search_of(spec, fabric, eff)
    if spec.framework.counted:
        pinned = apply((*BUILT, *KERNEL_RULES), spec)
        if problems := [problem for problem in pinned if problem not in search.space.anyhow]:
            raise RecipeError(problems)
    candidates = choose_candidates(search, spec, eff, shown)
    if not candidates and search.smallest is not None:
        candidates = [candidate_of(search.smallest, spec, eff)]
    safest = choose_safest(candidates, (counted(search, found, spec, eff) for found in search.safest()))
    refused = search.refused + Counter({SLOWER: search.considered - search.refused[TOO_LARGE] - len(candidates)})
    return capacity_of(
        spec,
        fabric.num_devices,
        candidates,
        usual=find_usual(search, candidates, spec, eff),
        rejected=dict(refused),
        safest=safest,
        assumptions=tuple(assumptions(spec, fabric)),
        considered=search.considered,
    )


def capacity_of(
    spec: RunSpec,
    devices: int,
    candidates: Sequence[Candidate],
    *,
    rejected: dict[str, int],
    safest: Candidate | None,
    assumptions: tuple[str, ...],
    considered: int,
    usual: Candidate | None = None,
) -> CapacityPlan:
    """Return a plan with these candidates, and with the model's properties, which do not depend on the layout."""
    return CapacityPlan(
        params=workload.count_params(spec.model),
        adapter_params=workload.adapter_params(spec.model, spec.lora),
        active_params=workload.count_active_params(spec.model),
        flops_per_token=workload.flops_per_token(spec.model, spec.data.seq_len, spec.lora),
        world_size=devices,
        tokens_per_step=spec.batching.global_batch_size * sample_tokens(spec),
        candidates=tuple(candidates),
        usual=usual,
        rejected=rejected,
        safest=safest,
        assumptions=assumptions,
        considered=considered,
    )


def plan_best(spec: RunSpec, machine: Machine | None = None) -> Candidate | None:
    """Return only the first layout of `plan_capacity`, in less time; None if nothing fits. Raises the same errors."""
    eff = efficiency_of(spec.cluster)
    return find_best(search_of(spec, describe_fabric(spec.cluster, machine), eff), spec, eff)


def find_best(search: Search, spec: RunSpec, eff: Efficiency, most: int = COUNTED) -> Candidate | None:
    """Return the best layout that fits, or None. Memory is counted tensor by tensor only for the first `most`
    layouts."""
    found = choose_candidates(search, spec, eff, 1, most)
    return found[0] if found and found[0].fits else None


def choose_candidates(
    search: Search, spec: RunSpec, eff: Efficiency, shown: int, most: int = COUNTED
) -> list[Candidate]:
    """Return the best layouts that fit when every tensor is counted, because the search's estimate is only rough. If
    none fits, return the best of those that do not.

    Layouts are counted until the next one's estimate is worse by more than the estimate's error."""
    candidates: list[Candidate] = []
    for item in islice(search.best(), most):
        known = _fitting(candidates)
        if len(known) >= shown and item.expected_s > ERR * known[shown - 1].expected_step_s:
            break
        candidates.append(counted(search, item, spec, eff))
    fitting = _fitting(candidates)
    search.refused[TOO_LARGE] += len(candidates) - len(fitting)
    if not fitting:
        return candidates[:shown]
    chosen = choose_simplest(search, fitting[0], spec, eff)
    return [chosen, *(candidate for candidate in fitting if candidate is not chosen)][:shown]


def counted(search: Search, found: Estimated, spec: RunSpec, eff: Efficiency) -> Candidate:
    """Return a layout whose memory is counted tensor by tensor. Results are cached, because the fastest, simplest,
    usual and safest layout may be the same."""
    if found.setup not in search.counted:
        search.counted[found.setup] = candidate_of(found, spec, eff)
    return search.counted[found.setup]


def choose_simplest(search: Search, fastest: Candidate, spec: RunSpec, eff: Efficiency) -> Candidate:
    """Return the simplest of the layouts that are at least as likely to fit as the fastest one and about as fast
    (predictions cannot tell them apart). Among equally simple ones, prefer the one with the fewest pipeline stages."""
    limit_s = ABOUT * fastest.expected_step_s
    sure = min(fastest.fit_probability, SURELY)

    def count(found: Estimated) -> Candidate | None:
        """Return the layout with its memory counted tensor by tensor, if it may replace the fastest one."""
        candidate = counted(search, found, spec, eff)
        is_good = candidate.fits and candidate.expected_step_s <= limit_s and candidate.fit_probability >= sure
        return candidate if is_good else None

    most = complexity(spec, fastest.layout, fastest.recompute, fastest.offload == "optimizer")
    for alike in search.as_simple(most, limit_s):
        first = next(filter(None, map(count, alike[:TRIED])), None)
        if first is not None:
            near = [one for one in alike if one.expected_s <= NEAR * first.expected_step_s]
            fewer = [one for one in near if one.setup.layout.pp < first.layout.pp]
            fewer.sort(key=lambda one: (one.setup.layout.pp, one.expected_s))
            return next(filter(None, map(count, fewer[:TRIED])), first)
    return fastest


def find_usual(search: Search, candidates: Sequence[Candidate], spec: RunSpec, eff: Efficiency) -> Candidate | None:
    """Return the layout that an expert would start from, for comparison. It has no context parallelism.

    The state is sharded over all devices if that needs no recomputation. Otherwise, tensor parallelism fills a node,
    pipeline stages span nodes, and the rest is data-parallel with ZeRO-1 (arXiv:2104.04473, section 3, and the guides
    of Megatron-LM and NeMo)."""
    node = search.template.fabric.scaleup_devices

    def is_usual(layout: Layout, *, sharded: bool) -> bool:
        if layout.cp > 1 or layout.splits_backward or layout.dp_replicate > 1:
            return False
        return layout.tp == layout.pp == 1 if sharded else layout.tp == node and layout.zero_stage == 1

    for sharded in (True, False):
        found = search.fastest(partial(is_usual, sharded=sharded))
        if found and (found.recompute != "full" or not sharded):
            usual = counted(search, found, spec, eff)
            same = (one for one in candidates if one.layout == usual.layout and one.recompute == usual.recompute)
            return next(same, usual)
    return None


def _fitting(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that fit, best first."""
    return sorted((one for one in candidates if one.fits), key=lambda candidate: candidate.expected_step_s)


def choose_safest(candidates: Sequence[Candidate], others: Iterable[Candidate]) -> Candidate | None:
    """Return the layout that is most likely to fit among those whose step takes at most 10% longer than the best one's.
    This is the best one if it is certain to fit. Otherwise, if several are certain to fit, this is the fastest of them.
    None if nothing fits."""
    if not candidates or not candidates[0].fits:
        return None
    if candidates[0].fit_probability >= SURELY:
        return candidates[0]
    slowest_s = ABOUT * candidates[0].step_time_s
    about = [candidate for candidate in (*candidates, *others) if candidate.step_time_s <= slowest_s]
    return max(about, key=lambda candidate: (min(candidate.fit_probability, SURELY), -candidate.step_time_s))


def search_of(spec: RunSpec, fabric: Fabric, eff: Efficiency) -> Search:
    return Search(
        space=Space(spec, fabric.num_devices, fabric.scaleup_devices),
        template=template_of(spec, fabric),
        softwares=softwares_of(spec),
        recomputes=recompute_names(spec.recompute),
        offloads=(False, True) if spec.offload == AUTO else (spec.offload == "optimizer",),
        eff=eff,
        layer_memory=layer_memory,
        samples=main_size(spec),
        slack=SLACK,
        start_s=start_s_a_step(spec),
    )


def start_s_a_step(spec: RunSpec) -> float:
    """Return the duration of a failed start in seconds, divided by the number of steps in the run."""
    return spec.cluster.reliability.start_s / spec.train.max_steps


def template_of(spec: RunSpec, fabric: Fabric) -> Setup:
    compute = spec.precision.compute
    if compute == AUTO:
        compute = "bf16" if fabric.chip.bf16_tflops else "fp16"
    matmul = compute if spec.precision.matmul == "compute" else spec.precision.matmul
    trainable = 1.0
    if adapters := workload.adapter_params(spec.model, spec.lora):
        trainable = adapters / workload.count_params(spec.model)
    return Setup(
        model=spec.model,
        layout=Layout(),
        fabric=fabric,
        seq_len=sample_tokens(spec),
        micro_batch_size=1.0,
        grad_accum=1,
        compute=compute,
        matmul=matmul,
        trainable=trainable,
        sharded=1.0 - workload.quantised_params(spec.model, spec.lora) / workload.count_params(spec.model),
        lora=spec.lora,
        groups=spec.optim.groups,
        replica_groups=asked_groups(spec) or 0,
        outer_bytes=outer_bytes_of(spec),
    )


def software_of(spec: RunSpec, sharding: Sharding) -> Software:
    """Return the `Software` of the recipe's framework, with the recipe's formats, compilation and optimizer."""
    sums: SumFormat = "compute" if spec.precision.reduce == "bf16" else "fp32"
    return replace(
        describe_software(spec.framework, sharding, spec.compile, accumulate=sums, reduce=sums),
        wire=spec.comm.fixed,
        optimizer=spec.optim.kept_state,
        moment_bytes=moment_bytes(spec.model, spec.optim.kept_state, spec.lora),
    )


def softwares_of(spec: RunSpec) -> dict[Sharding, Software]:
    """Return the `Software` for each type of sharding. Equal ones share one object, because searches cache results by
    object."""
    found: dict[Software, Software] = {}
    softwares = {sharding: software_of(spec, sharding) for sharding in SHARDINGS}
    return {sharding: found.setdefault(software, software) for sharding, software in softwares.items()}


def candidate_of(found: Estimated, spec: RunSpec, eff: Efficiency) -> Candidate:
    setup, stages = cut_on_chip(found.setup, found.recompute, eff)
    chip = setup.fabric.chip
    peak_bytes = max(stage.total_bytes for stage in stages)
    limit_bytes = memory_limit_bytes(chip)
    sized_steps = []
    # The layout and micro-batch size stay the same; only the number of micro-batches changes.
    for samples in sizes_to_predict(spec):
        sized = replace(setup, grad_accum=micro_batches_of(setup.layout, setup.micro_batch_size, samples))
        sized_steps.append(SizedStep(samples, estimate_step(sized, eff)))
    return rate_candidate(
        spec,
        setup,
        estimate_step(setup, eff),
        found.recompute,
        peak_flops=peak_flops_per_s(chip, setup.matmul),
        memory=stages,
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        probability=fit_probability(peak_bytes, limit_bytes),
        sized_steps=tuple(sized_steps),
    )


def rate_candidate(
    spec: RunSpec,
    setup: Setup,
    time: StepTime,
    recompute: str,
    *,
    peak_flops: float,
    memory: tuple[MemoryBreakdown, ...],
    peak_bytes: float,
    limit_bytes: float,
    probability: float,
    sized_steps: tuple[SizedStep, ...],
    pools: tuple[PoolPart, ...] = (),
) -> Candidate:
    """Return a layout with its rates. `peak_flops`: mean peak FLOP/s per device."""
    devices = setup.fabric.num_devices
    tokens_per_s = main_size(spec) * sample_tokens(spec) / time.total_s
    model_flops = workload.flops_per_token(spec.model, spec.data.seq_len, spec.lora)
    mfu = tokens_per_s * model_flops / devices / peak_flops
    # Recomputed forward FLOPs relative to those of forward and backward. The backward through frozen weights takes half
    # as long.
    recomputed = setup.recompute
    attention = workload.mixing_flops_per_token(spec.model, spec.data.seq_len)
    products = model_flops - attention
    passes = 3.0 if setup.trainable >= 1.0 else 2.0
    again = recomputed.matmul * products / passes + recomputed.attention * attention / 3.0
    again /= products + attention
    return Candidate(
        layout=setup.layout,
        micro_batch_size=int(setup.micro_batch_size),
        grad_accum_steps=setup.grad_accum,
        recompute=recompute,
        offload="optimizer" if setup.offload_optimizer else "none",
        step_time_s=time.total_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / devices,
        mfu=mfu,
        hfu=mfu * (1 + again),
        peak_memory_bytes=peak_bytes,
        memory_limit_bytes=limit_bytes,
        fit_probability=probability,
        expected_step_s=expected_step_s(time.total_s, probability, start_s_a_step(spec)),
        memory=memory,
        time=time,
        sized_steps=sized_steps,
        pools=pools,
    )


def setup_of(candidate: Candidate, spec: RunSpec, machine: Machine | None) -> Setup:
    """Return the setup that was used to estimate a candidate of this spec."""
    template = template_of(spec, describe_fabric(spec.cluster, machine))
    return replace(
        template,
        layout=candidate.layout,
        micro_batch_size=float(candidate.micro_batch_size),
        grad_accum=candidate.grad_accum_steps,
        recompute=RECOMPUTE[candidate.recompute],
        software=software_of(spec, candidate.layout.sharding),
        offload_optimizer=candidate.offload == "optimizer",
    )


def largest_micro_batch(candidate: Candidate, setup: Setup, wanted: AutoInt) -> int:
    """Return the size, in samples, of the largest micro-batch that fits and that the scheduler may assign to a fast
    rank: up to `wanted` (`scheduler.max_micro_batch_size`) or, if that is auto, up to twice the candidate's size."""
    usual = candidate.micro_batch_size

    def fits(size: int) -> bool:
        tried = replace(setup, micro_batch_size=float(size))
        return memory_within(tried, candidate.recompute, candidate.memory_limit_bytes) is not None

    return largest_that_fits(usual, 2 * usual if wanted == AUTO else int(wanted), fits)


def assumptions(spec: RunSpec, fabric: Fabric) -> Iterator[str]:
    chip = fabric.chip
    yield from ALWAYS_ASSUMED
    if chip.vendor == "cpu":
        yield "the CPU's rates are those of a typical server core; none was measured on this machine"
    elif not chip.matmul_bf16_tflops:
        yield f"{chip.name}: no measured matmul rate; a fraction of the peak is assumed, based on its board power"
    network = spec.cluster.fabric.tiers[1:]
    is_stated = spec.cluster.nic_gbit_per_s or (network and all(tier.gbit_per_s for tier in network))
    if fabric.num_devices > fabric.scaleup_devices and not is_stated:
        yield f"the cluster specifies no network between nodes: {fabric.nic_gbit_per_s:g} Gbit/s per device is assumed"
    if main_size(spec) != spec.batching.global_batch_size:
        yield f"layouts are ranked for {main_size(spec):,} samples per step, the batch size for most of the run"
    if not spec.framework.counted:
        version = f" ({spec.framework.version})" * bool(spec.framework.version)
        yield f"step time and memory are those of {spec.framework.name}{version}, from its published description"
    if not spec.compile and not spec.framework.fused_kernels:
        yield "kernels are launched one by one (compile: false)"


def sample_tokens(spec: RunSpec) -> int:
    """Return the number of tokens per sample; 1 for images, which are counted as samples."""
    return 1 if spec.model.unit == "samples" else spec.data.seq_len


def cut_on_chip(setup: Setup, recompute: str, eff: Efficiency) -> tuple[Setup, tuple[MemoryBreakdown, ...]]:
    """Return (the setup, each stage's memory). If the recipe leaves the layer split open, layers are split by planned
    times.

    The best layer split is used if it fits on the device, otherwise the best one that fits according to the memory
    estimate, otherwise the even one."""
    if not is_open(setup.layout, setup.model):
        return setup, predict_memory(setup, recompute)
    groups = axis_groups(setup.layout, setup.fabric, eff)
    times = planned_times(micro_batch(setup, groups, eff), setup)
    limit_bytes = memory_limit_bytes(setup.fabric.chip)
    best = replace(setup, layout=cut(times, setup.layout))
    if taken := memory_within(best, recompute, limit_bytes):
        return best, taken
    even = predict_memory(setup, recompute)
    bounded = replace(setup, layout=cut(times, setup.layout, room_within(setup, even)))
    taken = None if bounded == setup else memory_within(bounded, recompute, limit_bytes)
    return (bounded, taken) if taken else (setup, even)


PREDICTED_SIZES = 6
"""Number of batch sizes that are predicted if the batch changes; the others are interpolated."""


def sizes_to_predict(spec: RunSpec) -> Sequence[int]:
    """Return the sizes of a changing batch, smallest first; empty for a constant batch. If there are many, return the
    first, the last and some in between."""
    sizes = sorted({phase.step_samples for phase in run_phases(schedule_batches(spec))})
    if sizes == [spec.batching.global_batch_size]:
        return ()
    last = len(sizes) - 1
    return [
        sizes[place]
        for place in sorted({round(place * last / (PREDICTED_SIZES - 1)) for place in range(PREDICTED_SIZES)})
    ]


def main_size(spec: RunSpec) -> int:
    """Return the batch size that applies to most of the run's samples. Layouts are chosen for it."""
    phases = run_phases(schedule_batches(spec))
    return max(phases, key=lambda phase: phase.steps * phase.step_samples).step_samples


def is_searched(spec: RunSpec, machine: Machine, device: str) -> bool:
    """Return whether the recipe leaves anything to the planner and the detected GPUs' chip is known."""
    choices = (*vars(spec.layout).values(), spec.batching.micro_batch_size, spec.recompute, spec.offload)
    return device == "cuda" and AUTO in choices and chip_of(machine)[0] is not None


def best_candidate(spec: RunSpec, machine: Machine, num_devices: int) -> Candidate | None:
    """Return the candidate that `plan` ranks first, with the number of micro-batches in the run's first step; None if
    nothing fits."""
    cluster = replace(spec.cluster, accelerator=None, devices_per_node=num_devices)
    best = plan_best(replace(spec, cluster=cluster), machine)
    return best and replace(best, grad_accum_steps=first_micro_batches(spec, best))


def first_micro_batches(spec: RunSpec, candidate: Candidate) -> int:
    """Return the number of micro-batches in the run's first step. A candidate's number applies to the main batch size
    (`main_size`)."""
    return micro_batches_of(candidate.layout, candidate.micro_batch_size, spec.batching.global_batch_size)


def as_plan(spec: RunSpec, candidate: Candidate, capacity: CapacityPlan, compute: Literal["bf16", "fp32"]) -> Plan:
    """Return a candidate as a plan for the engine."""
    nodes = spec.cluster.num_nodes
    layout, groups = one_group(spec, candidate.layout)
    return Plan(
        spec=spec,
        layout=layout,
        replica_groups=groups,
        device="cuda",
        num_nodes=nodes,
        devices_per_node=capacity.world_size // nodes,
        compute=compute,
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=first_micro_batches(spec, candidate),
        recompute=candidate.recompute,  # type: ignore[arg-type]
        offload=candidate.offload,
        comm=spec.comm.fixed,
        params=capacity.params,
        adapter_params=capacity.adapter_params,
        flops_per_token=capacity.flops_per_token,
    )


def pin_layout(spec: RunSpec, layout: Layout) -> RunSpec:
    """Return the recipe with this layout pinned; the layout covers all replicas."""
    layout, groups = one_group(spec, layout)
    resilience = replace(spec.resilience, replica_groups=groups) if groups > 1 else spec.resilience
    return replace(spec, layout=asked_for(layout), resilience=resilience)


def asked_for(layout: Layout) -> LayoutSpec:
    """Return a layout in the form of a recipe."""
    return LayoutSpec(**{field.name: getattr(layout, field.name) for field in fields(LayoutSpec)})


ODD_PARTS = (1, 3, 5, 7, 9, 11, 13, 15)
"""Device counts to try are a power of two times one of these factors, because the odd factor may divide the number of
layers or the batch."""


def plan_on_what_divides(spec: RunSpec, machine: Machine | None = None) -> tuple[RunSpec, CapacityPlan]:
    """Return (`spec` on the used nodes, its plan). If no layout over all nodes divides the batch evenly, the plan is
    the fastest one on all nodes or on one of the next smaller node counts; the remaining nodes become spares."""
    fabric = describe_fabric(spec.cluster, machine)
    whole = plan_capacity(spec, machine)
    samples = spec.batching.global_batch_size
    layouts = Space(spec, fabric.num_devices, fabric.scaleup_devices).layouts()
    if any(samples % layout.data_parallel_size == 0 for layout, _, _ in layouts):
        return spec, whole
    cluster = spec.cluster
    counts = set()
    for odd in ODD_PARTS:
        devices = odd
        while devices * 2 <= fabric.num_devices:
            devices *= 2
        if devices <= fabric.num_devices and devices % fabric.devices_per_node == 0:
            counts.add(devices // fabric.devices_per_node)
    best = (spec, whole)
    for nodes in sorted(counts - {cluster.num_nodes}, reverse=True)[:TRIED]:
        left = cluster.num_nodes - nodes
        spares = (cluster.reliability.spare_nodes or 0) + left
        reliability = replace(cluster.reliability, spare_nodes=spares)
        fewer = replace(spec, cluster=replace(cluster, num_nodes=nodes, reliability=reliability))
        plan = plan_capacity(fewer, machine)
        if _tokens_per_s(plan) > _tokens_per_s(best[1]):
            note = (
                f"no layout divides a batch of {samples:,} evenly over all "
                f"{cluster.num_nodes:,} nodes: {nodes:,} are used, {left:,} are spares"
            )
            best = fewer, replace(plan, assumptions=(note, *plan.assumptions))
    return best


def _tokens_per_s(plan: CapacityPlan) -> float:
    return plan.best.tokens_per_s if plan.best else 0.0


def plan_other_recovery(spec: RunSpec, machine: Machine | None) -> Candidate | None:
    """Return the best layout of the same run under the other recovery mode: replica groups that shrink and heal
    (`resilience=elastic`), or a restart of all processes.

    The open parts of the recipe are searched again, because each mode has a different best layout. None on a single
    node, if the recipe disables recovery, or if nothing fits."""
    if spec.resilience.mode == "none" or spec.resilience.is_one_of_several or spec.cluster.num_nodes == 1:
        return None
    return plan_best(replace(spec, resilience=other_recovery(spec.resilience)), machine)


def other_recovery(wanted: ResilienceSpec) -> ResilienceSpec:
    other: RecoveryMode = "elastic" if wanted.mode == "restart" else "restart"
    return replace(wanted, mode=other)


ADVISED = 16
"""Maximum number of layouts whose memory is counted tensor by tensor in search of one that fits."""
MORE_NODES = (2, 4, 8, 16, 32, 64)
RANK = 16
"""Rank of the suggested adapters."""
Change = tuple[str, Callable[[RunSpec], RunSpec]]
"""(an override, the function that applies it to a recipe)"""
OPEN: Change = (
    "layout=auto recompute=auto",
    lambda spec: replace(spec, layout=open_layout(spec), recompute=AUTO),
)
OFFLOADED: Change = ("offload=optimizer", lambda spec: replace(spec, offload="optimizer"))
ADAPTERS: Change = (f"lora.rank={RANK}", lambda spec: replace(spec, lora=replace(spec.lora, rank=RANK)))
BESIDE_NF4: Change = (
    f"lora.rank={RANK} lora.base=nf4",
    lambda spec: spec if spec.lora.rank else replace(spec, lora=replace(spec.lora, rank=RANK, base="nf4")),
)
QUANTISED: Change = (
    "lora.base=nf4",
    lambda spec: replace(spec, lora=replace(spec.lora, base="nf4")) if spec.lora.rank else spec,
)
ADAPTERS_NOTE = "training adapters on an `init.from` checkpoint, not all weights"
SINGLE: tuple[Change, ...] = (
    ("recompute=full", lambda spec: spec if spec.recompute == AUTO else replace(spec, recompute="full")),
    (
        "batching.micro_batch_size=1",
        lambda spec: (
            spec
            if spec.batching.micro_batch_size in (1, AUTO)
            else replace(spec, batching=replace(spec.batching, micro_batch_size=1))
        ),
    ),
    OPEN,
    OFFLOADED,
    ADAPTERS,
)
TOGETHER = ((OPEN, OFFLOADED), (OPEN, ADAPTERS))
"""Pairs of changes to try if neither change suffices alone."""
IN_4_BITS = ((BESIDE_NF4,), (QUANTISED,), (OPEN, BESIDE_NF4), (OPEN, QUANTISED))
"""Changes to try if adapters with an unquantised base do not fit."""


def advise(spec: RunSpec, machine: Machine | None = None) -> Iterator[str]:
    """Yield changes that make the run fit, smallest first, and the smallest sufficient number of nodes."""
    fabric = describe_fabric(spec.cluster, machine)
    eff = efficiency_of(spec.cluster)
    fitting: set[str] = set()
    with_adapters = False
    for changes in (*((change,) for change in SINGLE), *TOGETHER, *IN_4_BITS):
        if fitting & {words for words, _ in changes} or (changes in IN_4_BITS and with_adapters):
            continue
        changed = spec
        for _, change in changes:
            changed = change(changed)
        found = _find_fastest(changed, spec, fabric, eff)
        if found:
            fitting |= {changes[0][0]} if len(changes) == 1 else set()
            has_adapters = bool({ADAPTERS, BESIDE_NF4} & set(changes))
            with_adapters |= has_adapters or QUANTISED in changes
            note = f", {ADAPTERS_NOTE}" if has_adapters else ""
            yield _describe(" ".join(words for words, _ in changes), found) + note
    words, open_all = OPEN
    for factor in MORE_NODES:  # this is the smallest number that helps; more nodes would help too
        nodes = spec.cluster.num_nodes * factor
        larger = replace(spec, cluster=replace(spec.cluster, num_nodes=nodes))
        fabric_of_all = replace(fabric, num_devices=fabric.num_devices * factor)
        if found := _find_fastest(open_all(larger), spec, fabric_of_all, eff):
            yield _describe(f"cluster.num_nodes={nodes} {words}", found)
            break


def _find_fastest(changed: RunSpec, spec: RunSpec, fabric: Fabric, eff: Efficiency) -> Candidate | None:
    """Return the best layout of a changed recipe that fits. None if none fits, if nothing changed, or if the changed
    recipe is rejected."""
    if changed == spec or len(check(changed)) > len(check(spec)):
        return None
    return find_best(search_of(changed, fabric, eff), changed, eff, ADVISED)


def _describe(words: str, found: Candidate) -> str:
    peak = format_bytes(found.peak_memory_bytes)
    chance = f"{min(found.fit_probability, 0.99):.0%}"
    return f"{words} fits at {chance}, with {peak} per device and {format_duration(found.step_time_s)} per step"
