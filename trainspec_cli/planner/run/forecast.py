"""The whole run of one layout: time, goodput, energy, carbon and money, each with its interval and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.memory.caching_allocator import grows_segments
from trainspec_cli.planner.memory.frameworks import DEFAULT_MEMORY, NF4_BYTES
from trainspec_cli.planner.planes import dip_share, ending_failures
from trainspec_cli.planner.pools.describe import cluster_of
from trainspec_cli.planner.run import goodput
from trainspec_cli.planner.run.batches import RunWork, expect_work
from trainspec_cli.planner.run.cost import add_costs, expect_carbon, expect_energy, expect_money, occupation
from trainspec_cli.planner.run.uncertainty import propagate, within
from trainspec_cli.planner.setup import moment_bytes
from trainspec_cli.planner.workload.adapters import quantised_params
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec
from trainspec_cli.recipe.keys.resilience import RecoveryMode, ResilienceSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import Assumption, Goodput, Interval, RunForecast
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.run.recovery import reliability
from trainspec_cli.run.recovery import reliability as cadence

SEEDS = 24
STEP_TIME_KNOWN_WITHIN = 1.7
"""Nine in ten measured step times lie between the predicted one divided by this and multiplied by it, for sources that
the efficiencies were not fitted to: 92% of the 178 published runs of vTrain, SimuMax and nanotron do, where x1.6 holds
88%, x1.5 81% and x1.27 53% (throughput_unseen.csv). Much of the error is a factor that all runs of a source share
(SimuMax is 29% too fast, vTrain 16%): nine in ten lie within x1.39 of their source's median error. Models with experts
have the same interval: all 12 in that table lie within x1.33, and 97% of the 131 that the efficiencies were fitted to
within x1.7."""
VALUE_BYTES = 4.0
"""A parameter in a checkpoint, in fp32. With AdamW's two moments it is 12; published checkpoints weigh 12.8 to 13.2."""
RESTART_KEYS = ("mtbf_device_hours", "detect_s", "swap_s", "start_s")
ELASTIC_KEYS = ("job_wide_fraction", "shrink_stall_s", "rejoin_stall_s", "heal_gb_per_s")
OWNED_KEYS = ("device_price_usd", "useful_years", "utilisation", "operation_ratio")
MEMORY_KNOWN_WITHIN = 1.1
"""Factor of a peak that is counted tensor by tensor. Traces of the engine's own steps lie within 2%; 6% are added for
the spread between like runs."""
MEMORY_ELSEWHERE_WITHIN = 1.3
"""The same of other frameworks: nine in ten of 26 peaks of nanotron, to which nothing was fitted, lie within x1.31."""
STORAGE_SOURCE = "a node, to checkpoint storage; BLOOM wrote 2.3 TB in 40 s from 48 nodes (stas00/ml-engineering)"


def forecast_run(
    spec: RunSpec, plan: CapacityPlan, candidate: Candidate, other: Candidate | None = None
) -> RunForecast:
    """Expect what `candidate` makes of the recipe, from its first step to its last.

    `other`: the best layout of the other way of recovering, to set beside it; None: `candidate` itself, where it can
    recover so. Raises RecipeError for a run that failures never let end.
    """
    wanted, *alternatives = recovery_modes(spec.resilience, candidate.layout.dp_replicate)
    chosen = expect_goodput(spec, plan, candidate, wanted)
    if chosen is None:
        path = "cluster.reliability.mtbf_device_hours"
        mtbf_s = reliability.job_mtbf_s(spec.cluster.reliability, plan.world_size)
        message = (
            f"with a failure every {mtbf_s:.3g} s (`{path}` over {plan.world_size:,} devices) no work is ever kept"
        )
        raise RecipeError(Problem("out_of_range", message, path, f"type a larger {path}, or fewer devices"))
    if other is not None:
        alternatives = [other_recovery(spec.resilience)]
    beside = other or candidate
    others = [useful for mode in alternatives if (useful := expect_goodput(spec, plan, beside, mode))]
    if beside.layout != candidate.layout:
        others = [replace(useful, layout=beside.layout.describe()) for useful in others]
    work = expect_work(spec, candidate)
    inputs = {"step_time_s": within(work.step_time_s, STEP_TIME_KNOWN_WITHIN), "goodput": chosen.goodput}
    wall_time_s = propagate(lambda of: work.steps * of["step_time_s"] / of["goodput"], inputs)
    energy, energy_parts, money, money_parts = _expect_costs(spec, plan, candidate, work, chosen, wall_time_s)
    return RunForecast(
        steps=work.steps,
        tokens=spec.train.max_steps * plan.tokens_per_step,
        wall_time_s=wall_time_s,
        goodput=chosen,
        energy_joules=energy,
        carbon_kg=expect_carbon(spec.cluster, energy),
        cost_usd=money,
        alternatives=tuple(others),
        energy_parts_joules=energy_parts,
        cost_parts_usd=money_parts,
        assumptions=gather_assumptions(spec, candidate),
        notes=tuple(_notes(spec, candidate, chosen)),
        batches=work.batches,
    )


def _expect_costs(
    spec: RunSpec, plan: CapacityPlan, candidate: Candidate, work: RunWork, useful: Goodput, wall_time_s: Interval
) -> tuple[Interval | None, dict[str, float], Interval | None, dict[str, float]]:
    """-> (energy, its parts, money, its parts), added up over the cluster's pools, each with its own power, waiting and
    price."""
    shares = [(spec.cluster, plan.world_size, work.time)]
    if candidate.pools:
        clusters = [cluster_of(spec.cluster, pool) for pool in spec.cluster.pools]
        shares = [(own, part.devices, part.time) for own, part in zip(clusters, candidate.pools, strict=True)]
    energies = []
    monies = []
    for cluster, devices, time in shares:
        energies.append(expect_energy(cluster, devices, wall_time_s, occupation(useful, time)))
        monies.append(expect_money(cluster, devices, wall_time_s, energies[-1][0]))
    return *add_costs(energies), *add_costs(monies)


def recovery_modes(wanted: ResilienceSpec, replica_groups: int) -> tuple[ResilienceSpec, ...]:
    """Return what the run does about failures, and what it could do instead. One replica group can only restart,
    and so does one of several runs."""
    if replica_groups == 1 or wanted.is_one_of_several:
        return (replace(wanted, mode="restart"),)
    return wanted, other_recovery(wanted)


def other_recovery(wanted: ResilienceSpec) -> ResilienceSpec:
    other: RecoveryMode = "elastic" if wanted.mode == "restart" else "restart"
    return replace(wanted, mode=other)


def expect_goodput(
    spec: RunSpec, plan: CapacityPlan, candidate: Candidate, resilience: ResilienceSpec
) -> Goodput | None:
    """Simulate the run SEEDS times under one way of recovering; the median, and the middle nine in ten.

    None where failures leave nothing of the work in more than one in twenty of them.
    """
    planes = spec.cluster.fabric.planes
    every = spec.cluster.reliability
    dips = dip_share(planes, every, plan.world_size) if planes else 0.0
    cluster = ending_failures(planes, every)
    spec = replace(spec, cluster=replace(spec.cluster, reliability=cluster))
    job = describe_job(spec, plan, candidate, resilience)
    outcomes = goodput.simulate_many(job, cluster, resilience, SEEDS)
    parts = [{cause: lost / outcome.wall_s for cause, lost in outcome.lost_s.items()} for outcome in outcomes]
    kept = [(1 - dips) * outcome.goodput for outcome in outcomes]
    if _quantile(kept, 0.05) <= 0:
        return None
    mtbf_s = reliability.job_mtbf_s(cluster, plan.world_size)
    saving = checkpoint_times(spec, plan)
    rollback_s = reliability.rollback_mtbf_s(resilience, cluster, mtbf_s, job.replica_groups)
    return Goodput(
        mode=resilience.mode,
        goodput=Interval(_quantile(kept, 0.5), _quantile(kept, 0.05), _quantile(kept, 0.95)),
        lost=_scale_lost(parts, 1 - _quantile(kept, 0.5) - dips) | ({"dip": dips} if dips else {}),
        failures=job.work_s / _quantile(kept, 0.5) / mtbf_s,
        mtbf_s=mtbf_s,
        checkpoint_interval_s=job.interval_s,
        checkpoint_interval_steps=cadence.checkpoint_interval_steps(job.interval_s, job.step_time_s),
        optimal_interval_s=cadence.checkpoint_interval_s(saving.blocked_s, saving.written_s, rollback_s),
        checkpoint_s=saving.blocked_s,
        checkpoint_bytes=checkpoint_bytes(spec, plan.params),
        restart_s=reliability.durations(cluster, job.state_bytes_per_device, job.load_s).restart_s,
        wall_time_s=job.work_s / _quantile(kept, 0.5),
    )


def describe_job(
    spec: RunSpec, plan: CapacityPlan, candidate: Candidate, resilience: ResilienceSpec
) -> goodput.SimulatedJob:
    """The run as the simulation sees it, with the recipe's checkpoint interval or else the best."""
    groups = candidate.layout.dp_replicate
    work = expect_work(spec, candidate)
    saving = checkpoint_times(spec, plan)
    steps = spec.checkpoint.interval_steps
    if steps is None or steps == AUTO:
        mtbf_s = reliability.job_mtbf_s(spec.cluster.reliability, plan.world_size)
        rollback_s = reliability.rollback_mtbf_s(resilience, spec.cluster.reliability, mtbf_s, groups)
        interval_of = cadence.auto_interval_s if steps == AUTO else cadence.checkpoint_interval_s
        best_s = interval_of(saving.blocked_s, saving.written_s, rollback_s)
        steps = cadence.checkpoint_interval_steps(min(best_s, work.work_s), work.step_time_s)
    return goodput.SimulatedJob(
        work_s=work.work_s,
        step_time_s=work.step_time_s,
        devices=plan.world_size,
        replica_groups=groups,
        interval_s=steps * work.step_time_s,
        blocked_s=saving.blocked_s,
        written_s=saving.written_s,
        state_bytes_per_device=checkpoint_bytes(spec, plan.params) / (plan.world_size / groups),
        load_s=saving.written_s,
    )


def checkpoint_bytes(spec: RunSpec, params: int) -> float:
    """Size of one checkpoint: parameters and optimizer state, which frozen ones (LoRA) have none of."""
    if not spec.lora.rank:
        return (VALUE_BYTES + moment_bytes(spec.model, spec.optim.kept_state, spec.lora)) * params
    quantised = quantised_params(spec.model, spec.lora)
    return VALUE_BYTES * (params - quantised) + NF4_BYTES * quantised


@dataclass(frozen=True)
class CheckpointTimes:
    blocked_s: float
    """Training waits this long: until it is written, or (`checkpoint.mode=async`) copied to host memory."""
    written_s: float
    """The time until it is whole on disk; reading it back takes as long."""


def checkpoint_times(spec: RunSpec, plan: CapacityPlan) -> CheckpointTimes:
    """All nodes share the writing, and all devices the copying."""
    size = checkpoint_bytes(spec, plan.params)
    cluster = spec.cluster
    written_s = size / (cluster.num_nodes * cluster.storage_gb_per_s * 1e9)
    copied_s = size / (plan.world_size * cluster.host_link_gb_per_s * 1e9)
    return CheckpointTimes(copied_s if spec.checkpoint.mode == "async" else written_s, written_s)


def _notes(spec: RunSpec, candidate: Candidate, useful: Goodput) -> list[str]:
    notes = []
    if spec.checkpoint.interval_steps is None:
        best = useful.checkpoint_interval_steps
        notes.append(f"checkpoint.interval_steps is null; this counts on {best}, the best interval")
    if spec.resilience.mode == "elastic" and candidate.layout.dp_replicate == 1:
        notes.append("resilience.mode=elastic needs layout.dp_replicate above 1: one group alone restarts")
    if spec.batching.schedule.kind == "noise":
        largest = spec.batching.schedule.max_global_batch_size
        notes.append(
            f"the batch follows what the run will measure; this counts on {spec.batching.global_batch_size:,} samples "
            f"a step throughout, and up to {largest:,} make fewer steps"
        )
    return notes


def _quantile(ordered: list[float], part: float) -> float:
    """Linear between the ordered values."""
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _scale_lost(parts: list[dict[str, float]], total: float) -> dict[str, float]:
    """Mean parts of the simulated runs, scaled so that they and the median goodput sum to 1."""
    causes = sorted({cause for part in parts for cause in part})
    mean = {cause: sum(part.get(cause, 0.0) for part in parts) / len(parts) for cause in causes}
    whole = sum(mean.values())
    return {cause: value * total / whole if whole else 0.0 for cause, value in mean.items() if value > 0}


def gather_assumptions(spec: RunSpec, candidate: Candidate) -> tuple[Assumption, ...]:
    """Return the assumptions that `forecast_run` uses, in the order of time, energy, money."""
    cluster = spec.cluster
    step_time_s = expect_work(spec, candidate).step_time_s
    elastic = ELASTIC_KEYS if candidate.layout.dp_replicate > 1 else ()
    spares = ("spare_nodes", "repair_s") if cluster.reliability.spare_nodes is not None else ()
    return (
        Assumption("step_time_s", step_time_s, STEP_TIME_KNOWN_WITHIN, "predicted; see trainspec backtest"),
        Assumption("peak_memory_bytes", candidate.peak_memory_bytes, *_memory_knowledge(spec)),
        Assumption("cluster.storage_gb_per_s", cluster.storage_gb_per_s, source=STORAGE_SOURCE),
        *_of("cluster.reliability", cluster.reliability, (*RESTART_KEYS, *spares, *elastic)),
        *_of_planes(spec),
        *_of_accelerators(cluster, "tdp_w"),
        *_of("cluster.power", cluster.power, ("busy", "waiting", "idle", "host")),
        *_of("cluster.site", cluster.site, ("pue", "carbon_g_per_kwh")),
        *_of_price(cluster),
    )


def _memory_knowledge(spec: RunSpec) -> tuple[float, str]:
    """-> (the factor within which a peak is known, what it counts besides the tensors)."""
    memory = DEFAULT_MEMORY
    chip = spec.cluster.accelerator
    grows = spec.framework.expandable_segments and (chip is None or grows_segments(chip.vendor))
    idle = memory.fragmentation
    again = memory.recompute_fragmentation
    of = "the activations"
    if grows:
        idle = memory.grown_fragmentation
        again = memory.grown_recompute_fragmentation
        of = "all tensors"
    source = (
        f"predicted, {memory.reserve:.0%} added for the spread between like runs; {idle:.0%} of {of} held idle "
        f"({idle + again:.0%} where all are recomputed), {memory.context_bytes / GIB:.1f} GiB for the device's "
        f"context, {memory.group_bytes / GIB:.2f} GiB for each communicator"
    )
    return MEMORY_KNOWN_WITHIN if spec.framework.counted else MEMORY_ELSEWHERE_WITHIN, source


def _of(path: str, spec: Any, keys: Iterable[str]) -> list[Assumption]:
    return [
        Assumption(
            key=f"{path}.{key}",
            value=getattr(spec, key),
            known_within=spec.known_within.get(key, 1.0),
            source=spec.sources.get(key, ""),
            verified=key not in spec.unverified,
        )
        for key in keys
    ]


def _of_planes(spec: RunSpec) -> list[Assumption]:
    fabric = spec.cluster.fabric
    if fabric.planes is None:
        return []
    keys = ("network_fraction", "fatal_fraction", "flap_s")
    found = ((key, fabric.sources.get(key, fabric.sources.get("default", ""))) for key in keys)
    return [
        Assumption(f"cluster.fabric.planes.{key}", getattr(fabric.planes, key), source=source) for key, source in found
    ]


def _of_accelerators(cluster: ClusterSpec, key: str, known_within: float = 1.0) -> list[Assumption]:
    """Of the cluster's accelerator, or of that of each pool."""
    found: list[tuple[str, AcceleratorSpec | None]] = [("cluster", cluster.accelerator)]
    if cluster.pools:
        found = [(f"cluster.pools.{place}", pool.accelerator) for place, pool in enumerate(cluster.pools)]
    return [
        assumption
        for path, accelerator in found
        for assumption in _of_accelerator(f"{path}.accelerator", accelerator, key, known_within)
    ]


def _of_accelerator(
    path: str, accelerator: AcceleratorSpec | None, key: str, known_within: float = 1.0
) -> list[Assumption]:
    if accelerator is None or not getattr(accelerator, key):
        return []
    sources = accelerator.sources or {}
    source = sources.get(key, sources.get("default", ""))
    return [Assumption(f"{path}.{key}", getattr(accelerator, key), known_within, source)]


def _of_price(cluster: ClusterSpec) -> list[Assumption]:
    if cluster.cost.owned:
        electricity = _of("cluster.site", cluster.site, ("electricity_usd_per_kwh",))
        return _of("cluster.cost", cluster.cost, OWNED_KEYS) + electricity
    if cluster.pools:
        return [assumption for place in range(len(cluster.pools)) for assumption in _of_pool_price(cluster, place)]
    if cluster.cost.price_usd_per_device_hour is not None:
        return _of("cluster.cost", cluster.cost, ("price_usd_per_device_hour",))
    within = cluster.cost.known_within.get("price_usd_per_device_hour", 1.0)
    return _of_accelerators(cluster, "price_usd_per_hour", within)


def _of_pool_price(cluster: ClusterSpec, place: int) -> list[Assumption]:
    pool = cluster.pools[place]
    path = f"cluster.pools.{place}"
    if pool.price_usd_per_device_hour is not None:
        return [Assumption(f"{path}.price_usd_per_device_hour", pool.price_usd_per_device_hour, source="the recipe")]
    if cluster.cost.price_usd_per_device_hour is not None:
        return _of("cluster.cost", cluster.cost, ("price_usd_per_device_hour",)) if place == 0 else []
    within = cluster.cost.known_within.get("price_usd_per_device_hour", 1.0)
    return _of_accelerator(f"{path}.accelerator", pool.accelerator, "price_usd_per_hour", within)
