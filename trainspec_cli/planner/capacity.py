"""RunSpec and cluster -> the ranked layouts, and what was refused and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from trainspec_cli.balance.batch.division import largest_that_fits
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner import workload
from trainspec_cli.planner.blueprint import draw_blueprint
from trainspec_cli.planner.cut import cut_on_chip
from trainspec_cli.planner.hardware.cluster import describe_fabric, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency, peak_flops_per_s
from trainspec_cli.planner.hardware.topology import Fabric
from trainspec_cli.planner.memory.engine.run import outer_bytes_of
from trainspec_cli.planner.memory.frameworks import memory_limit_bytes
from trainspec_cli.planner.memory.predict import SURELY, expected_step_s, fit_probability, layer_memory, memory_within
from trainspec_cli.planner.run.batches import main_size, predict_sizes
from trainspec_cli.planner.search.search import (
    ABOUT,
    NEAR,
    SLOWER,
    TOO_LARGE,
    Estimated,
    Search,
    complexity,
    recompute_names,
    share_recomputed,
)
from trainspec_cli.planner.search.space import Space, asked_groups
from trainspec_cli.planner.setup import RECOMPUTE, Setup, Software, describe_software, moment_bytes
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.field_types import AUTO, AutoInt
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.framework import SumFormat
from trainspec_cli.recipe.keys.layout import SHARDINGS, Layout, Sharding
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.blueprint import Blueprint
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan

SHOWN = 10
COUNTED, SLACK = 40, 1.1
"""Layouts that are counted tensor by tensor, at most, and how far over the limit they may be by the search's rough
estimate: which of them fit is seen then."""
TRIED = 4
"""Layouts of one complexity that are counted tensor by tensor, at most."""
ERR = 1.02
"""The search's estimate of an expected step and that by every tensor and layer differ by less."""


def plan_capacity(spec: RunSpec, machine: Machine | None = None, shown: int = SHOWN) -> CapacityPlan:
    """Search every axis that `spec` leaves open; what it pins stays pinned.

    Raises RecipeError where neither the cluster nor the machine says what the accelerator is, and where the engine
    refuses what the recipe pins of the layout.
    """
    fabric = describe_fabric(spec.cluster, machine)
    eff = efficiency_of(spec.cluster)
    search = search_of(spec, fabric, eff)
    if problems := search.space.problems_of_pinned():
        raise RecipeError(problems)
    candidates = choose_candidates(search, spec, eff, shown)
    if not candidates and search.smallest is not None:
        candidates = [candidate_of(search.smallest, spec, eff)]
    safest = choose_safest(candidates, (counted(search, found, spec, eff) for found in search.safest()))
    refused = search.refused + Counter({SLOWER: search.considered - search.refused[TOO_LARGE] - len(candidates)})
    return CapacityPlan(
        params=workload.count_params(spec.model),
        adapter_params=workload.adapter_params(spec.model, spec.lora),
        active_params=workload.count_active_params(spec.model),
        flops_per_token=workload.flops_per_token(spec.model, spec.data.seq_len, spec.lora),
        world_size=fabric.num_devices,
        tokens_per_step=spec.batching.global_batch_size * _length(spec),
        candidates=tuple(candidates),
        usual=find_usual(search, candidates, spec, eff),
        rejected=dict(refused),
        safest=safest,
        assumptions=tuple(assumptions(spec, fabric)),
        considered=search.considered,
    )


def plan_best(spec: RunSpec, machine: Machine | None = None) -> Candidate | None:
    """Return the first layout of `plan_capacity` alone, in less time; None where nothing fits. Raises as it does."""
    eff = efficiency_of(spec.cluster)
    return find_best(search_of(spec, describe_fabric(spec.cluster, machine), eff), spec, eff)


def find_best(search: Search, spec: RunSpec, eff: Efficiency, most: int = COUNTED) -> Candidate | None:
    """Return the best layout that fits, of the first `most` counted tensor by tensor; None where none does."""
    found = choose_candidates(search, spec, eff, 1, most)
    return found[0] if found and found[0].fits else None


def choose_candidates(
    search: Search, spec: RunSpec, eff: Efficiency, shown: int, most: int = COUNTED
) -> list[Candidate]:
    """Return the best that fit when every tensor is counted: the search's own estimate is a rough one. Where none does,
    the best of those that do not.

    Layouts are counted until the next one is worse by its estimate, and by more than estimates err.
    """
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
    """Return a layout counted tensor by tensor, once for each search: the fastest, the simplest, the usual and the
    safest may be the same one."""
    if found.setup not in search.counted:
        search.counted[found.setup] = candidate_of(found, spec, eff)
    return search.counted[found.setup]


def choose_simplest(search: Search, fastest: Candidate, spec: RunSpec, eff: Efficiency) -> Candidate:
    """Return the simplest layout of those about as fast as the fastest, which predictions do not tell apart from it,
    and no less sure to fit; of those as simple, one with few pipeline stages."""
    limit_s = ABOUT * fastest.expected_step_s
    sure = min(fastest.fit_probability, SURELY)

    def count(found: Estimated) -> Candidate | None:
        """Return the layout counted tensor by tensor, if it may stand for the fastest."""
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
    """Return the layout that an expert would start from, to set the chosen one beside."""
    node = search.template.fabric.scaleup_devices
    for sharded in (True, False):
        found = search.fastest(partial(is_usual, scaleup_devices=node, sharded=sharded))
        if found and (found.recompute != "full" or not sharded):
            usual = counted(search, found, spec, eff)
            same = (one for one in candidates if one.layout == usual.layout and one.recompute == usual.recompute)
            return next(same, usual)
    return None


def is_usual(layout: Layout, scaleup_devices: int, *, sharded: bool) -> bool:
    """Return whether experts would start from such a layout; sequences stay whole.

    The state is sharded over all devices, where no layer needs to be recomputed for that. Else tensor parallelism fills
    a node, pipeline stages span nodes, and the rest is data-parallel with ZeRO-1 (arXiv:2104.04473, section 3, and the
    guides of Megatron-LM and NeMo).
    """
    if layout.cp > 1 or layout.splits_backward or layout.dp_replicate > 1:
        return False
    if sharded:
        return layout.tp == layout.pp == 1
    return layout.tp == scaleup_devices and layout.zero_stage == 1


def _fitting(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those that fit, the best first."""
    return sorted((one for one in candidates if one.fits), key=lambda candidate: candidate.expected_step_s)


def choose_safest(candidates: Sequence[Candidate], others: Iterable[Candidate]) -> Candidate | None:
    """Return the layout that fits most probably, of those whose step is a tenth longer than the best one's at most: the
    best one where it surely fits, else the fastest of those that do. None where nothing fits."""
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
    """Return the seconds of a start in vain over the steps of the run."""
    return spec.cluster.reliability.start_s / spec.train.max_steps


def template_of(spec: RunSpec, fabric: Fabric) -> Setup:
    compute = spec.precision.compute
    if compute == AUTO:
        compute = "bf16" if fabric.chip.bf16_tflops else "fp16"
    matmul = compute if spec.precision.matmul == "compute" else spec.precision.matmul
    return Setup(
        model=spec.model,
        layout=Layout(),
        fabric=fabric,
        seq_len=_length(spec),
        micro_batch_size=1.0,
        grad_accum=1,
        compute=compute,
        matmul=matmul,
        trainable=workload.trained_share(spec.model, spec.lora),
        sharded=workload.sharded_share(spec.model, spec.lora),
        lora=spec.lora,
        replica_groups=asked_groups(spec) or 0,
        outer_bytes=outer_bytes_of(spec),
    )


def software_of(spec: RunSpec, sharding: Sharding) -> Software:
    """Return the recipe's framework as software; the recipe says the formats, what is compiled, and the optimizer."""
    sums: SumFormat = "compute" if spec.precision.reduce == "bf16" else "fp32"
    return replace(
        describe_software(spec.framework, sharding, spec.compile, accumulate=sums, reduce=sums),
        wire=spec.comm.fixed,
        optimizer=spec.optim.kept_state,
        moment_bytes=moment_bytes(spec.model, spec.optim.kept_state, spec.lora),
    )


def softwares_of(spec: RunSpec) -> dict[Sharding, Software]:
    """Return the software of layouts that shard in each way: one object where two ways are alike, since searches keep
    what they have computed by object."""
    found: dict[Software, Software] = {}
    softwares = {sharding: software_of(spec, sharding) for sharding in SHARDINGS}
    return {sharding: found.setdefault(software, software) for sharding, software in softwares.items()}


def candidate_of(found: Estimated, spec: RunSpec, eff: Efficiency) -> Candidate:
    setup, stages = cut_on_chip(found.setup, found.recompute, eff)
    time = estimate_step(setup, eff)
    devices = setup.fabric.num_devices
    tokens_per_s = main_size(spec) * _length(spec) / time.total_s
    model_flops = workload.flops_per_token(spec.model, spec.data.seq_len, spec.lora)
    mfu = tokens_per_s * model_flops / devices / peak_flops_per_s(setup.fabric.chip, setup.matmul)
    attention = workload.mixing_flops_per_token(spec.model, spec.data.seq_len)
    again = share_recomputed(setup, model_flops - attention, attention)
    peak_bytes = max(stage.total_bytes for stage in stages)
    limit_bytes = memory_limit_bytes(setup.fabric.chip)
    probability = fit_probability(peak_bytes, limit_bytes)
    return Candidate(
        layout=setup.layout,
        micro_batch_size=int(setup.micro_batch_size),
        grad_accum_steps=setup.grad_accum,
        recompute=found.recompute,
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
        memory=stages,
        time=time,
        sized_steps=predict_sizes(setup, spec, eff),
    )


def setup_of(candidate: Candidate, spec: RunSpec, machine: Machine | None) -> Setup:
    """Return the setup that a candidate of this spec was estimated for."""
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


def blueprint_of(candidate: Candidate, spec: RunSpec, machine: Machine | None) -> Blueprint:
    """Return the communication blueprint of a candidate of this spec."""
    return draw_blueprint(setup_of(candidate, spec, machine), spec.cluster.fabric, efficiency_of(spec.cluster))


def largest_micro_batch(candidate: Candidate, setup: Setup, wanted: AutoInt) -> int:
    """Return the samples of the largest micro-batch that fits, which the scheduler may give a fast rank: up to `wanted`
    (`scheduler.max_micro_batch_size`), for auto up to twice the candidate's."""
    usual = candidate.micro_batch_size

    def fits(size: int) -> bool:
        tried = replace(setup, micro_batch_size=float(size))
        return memory_within(tried, candidate.recompute, candidate.memory_limit_bytes) is not None

    return largest_that_fits(usual, 2 * usual if wanted == AUTO else int(wanted), fits)


def assumptions(spec: RunSpec, fabric: Fabric) -> Iterator[str]:
    chip = fabric.chip
    yield "MFU counts attention over the causal half of the sequence and no recomputed work"
    yield "ranked by the step to expect with the chance to fit, by the error of memory predicted for published runs"
    if chip.vendor == "cpu":
        yield "the CPU's rates are those of a typical server core; nothing was measured here"
    elif not chip.matmul_bf16_tflops:
        yield f"{chip.name}: no measured matmul rate; a usual part of the peak is taken, by its board power"
    network = spec.cluster.fabric.tiers[1:]
    is_stated = spec.cluster.nic_gbit_per_s or (network and all(tier.gbit_per_s for tier in network))
    if fabric.num_devices > fabric.scaleup_devices and not is_stated:
        yield f"the cluster names no network between nodes: {fabric.nic_gbit_per_s:g} Gbit/s a device, as is usual"
    if main_size(spec) != spec.batching.global_batch_size:
        yield f"layouts are ranked by steps of {main_size(spec):,} samples, which train most of the run"
    if not spec.framework.counted:
        version = f" ({spec.framework.version})" * bool(spec.framework.version)
        yield f"the step and its memory are those of {spec.framework.name}{version}, by its published facts"
    if not spec.compile and not spec.framework.fused_kernels:
        yield "kernels are launched one by one (compile: false)"


def _length(spec: RunSpec) -> int:
    """Tokens a sample; 1 for images, whose samples are counted whole."""
    return 1 if spec.model.unit == "samples" else spec.data.seq_len
