"""Forecast a layout's full run: time, goodput, energy, carbon and money, with intervals and assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from trainspec_cli.balance.batch.batch import run_phases, schedule_batches
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.capacity import other_recovery
from trainspec_cli.planner.fewer import speeds_on_fewer
from trainspec_cli.planner.hardware.cluster import cluster_of
from trainspec_cli.planner.hardware.rates import MEASURED_CHIPS
from trainspec_cli.planner.memory.caching_allocator import GROWS_SEGMENTS
from trainspec_cli.planner.memory.engine.units import frozen_params
from trainspec_cli.planner.memory.predict import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    GROUP_BYTES,
    GROWN_FRAGMENTATION,
    GROWN_RECOMPUTE_FRAGMENTATION,
    NF4_BYTES,
    RECOMPUTE_FRAGMENTATION,
    RESERVE,
)
from trainspec_cli.planner.planes import dip_share, ending_failures
from trainspec_cli.planner.run import goodput
from trainspec_cli.planner.setup import moment_bytes
from trainspec_cli.planner.time.step import weigh_times
from trainspec_cli.planner.workload import quantised_params
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec, CostSpec, Machine
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.forecast import Assumption, BatchForecast, Goodput, Interval, RunForecast
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, StepTime
from trainspec_cli.run.recovery import reliability
from trainspec_cli.run.recovery import reliability as cadence


def within(value: float, factor: float) -> Interval:
    """Return the 90% interval from `value` / `factor` to `value` x `factor`."""
    return Interval(value, value / factor, value * factor)


def propagate(result: Callable[[Mapping[str, float]], float], inputs: Mapping[str, Interval]) -> Interval:
    """Return the interval of a positive `result` whose inputs have independent errors.

    Each input is moved to its bounds while the others stay fixed, and the logarithms of the changes are added in
    quadrature. This is exact for products of log-normal factors, and otherwise accurate to first order."""
    middle = {name: interval.value for name, interval in inputs.items()}
    value = result(middle)
    if value <= 0:
        return Interval(value, value, value)
    down = up = 0.0
    for name, interval in inputs.items():
        ends = [result({**middle, name: end}) / value for end in (interval.low, interval.high)]
        changes = [math.log(end) for end in ends if end > 0]
        down += min(0.0, *changes, 0.0) ** 2
        up += max(0.0, *changes, 0.0) ** 2
    return Interval(value, value * math.exp(-math.sqrt(down)), value * math.exp(math.sqrt(up)))


SEEDS = 24
STEP_TIME_KNOWN_WITHIN = 1.45
"""90% of measured step times are within this factor of the predicted one, for sources that were not used to fit the
efficiencies. Of the 178 published runs of vTrain, SimuMax and nanotron, x1.45 covers 95%, x1.4 92%, x1.35 86% and x1.25
70% (throughput_unseen.csv). Much of the error is a factor common to all runs of a source: SimuMax's machine multiplies
large bf16 matrices at 49% of the peak (its configs/system/b200_bf16_ceperm.json), where other B200 reach 78%. 90% of
the runs are within x1.32 of their source's median error. Models with experts have the same interval: all 12 in that
table are within x1.25, and of the 131 that were used for the fit, 92% are within x1.45."""
UNMEASURED_CHIP_WITHIN = 1.5
"""The same for a chip without measured runs: x1.45 combined with x1.14 and x1.10. 90% of the step times of 14 known
chips stay within x1.14 if only the headline figures of their data sheets are used, and the median errors of 21 of the
23 measured chips, which were used for the fit, are within x1.10."""
VALUE_BYTES = 4.0
"""Bytes per parameter in a checkpoint, in fp32. AdamW's two moments bring the total to 12; published checkpoints have
12.8 to 13.2."""
RESTART_KEYS = ("mtbf_device_hours", "detect_s", "swap_s", "start_s", "repair_s")
ELASTIC_KEYS = ("job_wide_fraction", "shrink_stall_s", "rejoin_stall_s", "heal_gb_per_s")
OWNED_KEYS = ("device_price_usd", "useful_years", "utilisation", "operation_ratio")
MEMORY_KNOWN_WITHIN = 1.1
"""Uncertainty factor of a peak that is counted tensor by tensor. Traces of the engine's steps are within 2%; 6% is
added for the spread between identical runs."""
MEMORY_ELSEWHERE_WITHIN = 1.3
"""Uncertainty factor of a peak for other frameworks: 90% of 26 nanotron peaks, which were not used for the fit, are
within x1.31."""
NOTED_LOSS = 0.05
"""Without spares, a forecast that loses more than this fraction of its time to missing nodes mentions them."""
STORAGE_SOURCE = "a node, to checkpoint storage; BLOOM wrote 2.3 TB in 40 s from 48 nodes (stas00/ml-engineering)"


def forecast_run(
    spec: RunSpec,
    plan: CapacityPlan,
    candidate: Candidate,
    other: Candidate | None = None,
    machine: Machine | None = None,
) -> RunForecast:
    """Forecast the recipe's run with `candidate`, from the first step to the last. `machine`: see `plan_capacity`.

    `other`: the best layout of the other recovery mode, for comparison; if None, `candidate` is used, provided that it
    supports that mode. Raises RecipeError for a run that never ends because of failures."""
    wanted, *alternatives = recovery_modes(spec.resilience, candidate.layout.dp_replicate)
    chosen = expect_goodput(spec, plan, candidate, wanted, machine)
    if chosen is None:
        path = "cluster.reliability.mtbf_device_hours"
        mtbf_s = reliability.job_mtbf_s(spec.cluster.reliability, plan.world_size)
        message = (
            f"the run never makes progress: a failure every {mtbf_s:.3g} s (`{path}` over {plan.world_size:,} devices)"
        )
        raise RecipeError(Problem("out_of_range", message, path, f"set a larger {path}, or fewer devices"))
    if other is not None:
        alternatives = [other_recovery(spec.resilience)]
    beside = other or candidate
    others = [useful for mode in alternatives if (useful := expect_goodput(spec, plan, beside, mode, machine))]
    if beside.layout != candidate.layout:
        others = [replace(useful, layout=beside.layout.describe()) for useful in others]
    work = expect_work(spec, candidate)
    inputs = {"step_time_s": within(work.step_time_s, _step_time_knowledge(spec)[0]), "goodput": chosen.goodput}
    wall_time_s = propagate(lambda of: work.steps * of["step_time_s"] / of["goodput"], inputs)
    # Costs are summed over the cluster's pools, each of which has its own power, waiting time and price.
    shares = [(spec.cluster, plan.world_size, work.time)]
    if candidate.pools:
        clusters = [cluster_of(spec.cluster, pool) for pool in spec.cluster.pools]
        shares = [(own, part.devices, part.time) for own, part in zip(clusters, candidate.pools, strict=True)]
    energies = []
    monies = []
    for cluster, devices, time in shares:
        energies.append(expect_energy(cluster, devices, wall_time_s, occupation(chosen, time)))
        monies.append(expect_money(cluster, devices, wall_time_s, energies[-1][0]))
    energy, energy_parts = add_costs(energies)
    money, money_parts = add_costs(monies)
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


def recovery_modes(wanted: ResilienceSpec, replica_groups: int) -> tuple[ResilienceSpec, ...]:
    """Return the run's recovery mode, followed by the alternatives. With a single replica group, or if this is one of
    several runs, only a restart is possible."""
    if replica_groups == 1 or wanted.is_one_of_several:
        return (replace(wanted, mode="restart"),)
    return wanted, other_recovery(wanted)


def expect_goodput(
    spec: RunSpec,
    plan: CapacityPlan,
    candidate: Candidate,
    resilience: ResilienceSpec,
    machine: Machine | None = None,
) -> Goodput | None:
    """Simulate the run SEEDS times with one recovery mode; return the median and the middle 90%.

    None if the run keeps none of its work in more than 5% of the simulations.
    """
    planes = spec.cluster.fabric.planes
    every = spec.cluster.reliability
    dips = dip_share(planes, every, plan.world_size) if planes else 0.0
    cluster = ending_failures(planes, every) if planes else every
    spec = replace(spec, cluster=replace(spec.cluster, reliability=cluster))
    job = describe_job(spec, plan, candidate, resilience, machine=machine)
    outcomes = goodput.simulate_many(job, cluster, resilience, SEEDS)
    parts = [{cause: lost / outcome.wall_s for cause, lost in outcome.lost_s.items()} for outcome in outcomes]
    # Average the time parts over the simulated runs, and scale them so that they and the median goodput sum to 1.
    causes = sorted({cause for part in parts for cause in part})
    mean = {cause: sum(part.get(cause, 0.0) for part in parts) / len(parts) for cause in causes}
    whole = sum(mean.values())
    kept = [(1 - dips) * outcome.goodput for outcome in outcomes]
    if _quantile(kept, 0.05) <= 0:
        return None
    total = 1 - _quantile(kept, 0.5) - dips
    lost = {cause: value * total / whole if whole else 0.0 for cause, value in mean.items() if value > 0}
    mtbf_s = reliability.job_mtbf_s(cluster, plan.world_size)
    blocked_s, written_s = checkpoint_times(spec, plan)
    rollback_s = reliability.rollback_mtbf_s(resilience, cluster, mtbf_s, job.replica_groups)
    return Goodput(
        mode=resilience.mode,
        goodput=Interval(_quantile(kept, 0.5), _quantile(kept, 0.05), _quantile(kept, 0.95)),
        lost=lost | ({"dip": dips} if dips else {}),
        failures=job.work_s / _quantile(kept, 0.5) / mtbf_s,
        mtbf_s=mtbf_s,
        checkpoint_interval_s=job.interval_s,
        checkpoint_interval_steps=cadence.checkpoint_interval_steps(job.interval_s, job.step_time_s),
        optimal_interval_s=cadence.checkpoint_interval_s(blocked_s, written_s, rollback_s),
        checkpoint_s=blocked_s,
        checkpoint_bytes=checkpoint_bytes(spec, plan.params),
        restart_s=reliability.durations(cluster, job.state_bytes_per_device, job.load_s).restart_s,
        wall_time_s=job.work_s / _quantile(kept, 0.5),
    )


def describe_job(
    spec: RunSpec,
    plan: CapacityPlan,
    candidate: Candidate,
    resilience: ResilienceSpec,
    size_bytes: float | None = None,
    machine: Machine | None = None,
) -> goodput.SimulatedJob:
    """Return the run in the form that the simulation needs, with the recipe's checkpoint interval or, if that is open,
    the best one. `size_bytes`: the size of a checkpoint, if it is known more accurately than from
    `checkpoint_bytes`."""
    groups = candidate.layout.dp_replicate
    work = expect_work(spec, candidate)
    size_bytes = size_bytes or checkpoint_bytes(spec, plan.params)
    blocked_s, written_s = checkpoint_times(spec, plan, size_bytes)
    steps = spec.checkpoint.interval_steps
    if steps is None or steps == AUTO:
        mtbf_s = reliability.job_mtbf_s(spec.cluster.reliability, plan.world_size)
        rollback_s = reliability.rollback_mtbf_s(resilience, spec.cluster.reliability, mtbf_s, groups)
        interval_of = cadence.auto_interval_s if steps == AUTO else cadence.checkpoint_interval_s
        best_s = interval_of(blocked_s, written_s, rollback_s)
        steps = cadence.checkpoint_interval_steps(min(best_s, work.work_s), work.step_time_s)

    def step_time_s(spec: RunSpec, candidate: Candidate) -> float:
        return expect_work(spec, candidate).step_time_s

    # A run on several kinds of nodes is planned for all of them.
    plans_fewer = not spec.cluster.pools and spec.cluster.num_nodes > 1
    speed_on = speeds_on_fewer(spec, candidate, machine, step_time_s) if plans_fewer else lambda nodes: None
    copies = spec.checkpoint.memory_interval_steps
    return goodput.SimulatedJob(
        work_s=work.work_s,
        step_time_s=work.step_time_s,
        devices=plan.world_size,
        replica_groups=groups,
        interval_s=steps * work.step_time_s,
        blocked_s=blocked_s,
        written_s=written_s,
        state_bytes_per_device=size_bytes / (plan.world_size / groups),
        load_s=written_s,
        nodes=spec.cluster.num_nodes,
        speed_on=speed_on,
        copy_interval_s=copies * work.step_time_s if copies else math.inf,
        # As for a checkpoint written in the background, training waits for the copy to host memory.
        copy_s=size_bytes / (plan.world_size * spec.cluster.host_link_gb_per_s * 1e9) if copies else 0.0,
    )


def checkpoint_bytes(spec: RunSpec, params: int) -> float:
    """Return the size of a checkpoint: all parameters, and the optimizer state of those that are not frozen (LoRA,
    `optim.groups`)."""
    if not spec.lora.rank:
        trained = params - frozen_params(spec.model, spec.optim.groups)
        return VALUE_BYTES * params + moment_bytes(spec.model, spec.optim.kept_state, spec.lora) * trained
    quantised = quantised_params(spec.model, spec.lora)
    return VALUE_BYTES * (params - quantised) + NF4_BYTES * quantised


def checkpoint_times(spec: RunSpec, plan: CapacityPlan, size_bytes: float | None = None) -> tuple[float, float]:
    """Return (seconds that training waits for a checkpoint, seconds until it is complete on disk). Training waits until
    the checkpoint is written or, with `checkpoint.mode=async`, copied to host memory. Reading takes as long as writing.
    Writing is divided among all nodes, and copying among all devices."""
    size = size_bytes or checkpoint_bytes(spec, plan.params)
    cluster = spec.cluster
    written_s = size / (cluster.num_nodes * cluster.storage_gb_per_s * 1e9)
    copied_s = size / (plan.world_size * cluster.host_link_gb_per_s * 1e9)
    return copied_s if spec.checkpoint.mode == "async" else written_s, written_s


def _notes(spec: RunSpec, candidate: Candidate, useful: Goodput) -> list[str]:
    notes = []
    missed = useful.lost.get("restart", 0.0) + useful.lost.get("shrunk", 0.0)
    if not spec.cluster.reliability.spare_nodes and missed > NOTED_LOSS:
        notes.append(
            f"cluster.reliability.spare_nodes is {spec.cluster.reliability.spare_nodes or 0}: a lost node is missing "
            f"until it is repaired, and {missed:.0%} of the time is lost to restarts and missing nodes"
        )
    if spec.checkpoint.interval_steps is None:
        best = useful.checkpoint_interval_steps
        notes.append(f"checkpoint.interval_steps is null; this assumes {best}, the best interval")
    if spec.resilience.mode == "elastic" and candidate.layout.dp_replicate == 1:
        notes.append("resilience.mode=elastic needs layout.dp_replicate above 1: a single group can only restart")
    if spec.batching.schedule.kind == "noise":
        largest = spec.batching.schedule.max_global_batch_size
        notes.append(
            "the batch size depends on measurements during the run; this assumes "
            f"{spec.batching.global_batch_size:,} samples per step throughout; "
            f"larger batches, up to {largest:,}, take fewer steps"
        )
    return notes


def _quantile(ordered: list[float], part: float) -> float:
    """Return a quantile, interpolated linearly between the ordered values."""
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def gather_assumptions(spec: RunSpec, candidate: Candidate) -> tuple[Assumption, ...]:
    """Return the assumptions that `forecast_run` makes, in the order time, energy, money."""
    cluster = spec.cluster
    step_time_s = expect_work(spec, candidate).step_time_s
    elastic = ELASTIC_KEYS if candidate.layout.dp_replicate > 1 else ()
    spares = ("spare_nodes",) if cluster.reliability.spare_nodes is not None else ()
    fabric = cluster.fabric
    planes = []
    for key in ("network_fraction", "fatal_fraction", "flap_s") if fabric.planes else ():
        source = fabric.sources.get(key, fabric.sources.get("default", ""))
        planes.append(Assumption(f"cluster.fabric.planes.{key}", getattr(fabric.planes, key), source=source))
    return (
        Assumption("step_time_s", step_time_s, *_step_time_knowledge(spec)),
        Assumption("peak_memory_bytes", candidate.peak_memory_bytes, *_memory_knowledge(spec)),
        Assumption("cluster.storage_gb_per_s", cluster.storage_gb_per_s, source=STORAGE_SOURCE),
        *_of("cluster.reliability", cluster.reliability, (*RESTART_KEYS, *spares, *elastic)),
        *planes,
        *_of_accelerators(cluster, "tdp_w"),
        *_of("cluster.power", cluster.power, ("busy", "waiting", "idle", "host")),
        *_of("cluster.site", cluster.site, ("pue", "carbon_g_per_kwh")),
        *_of_price(cluster),
    )


def _step_time_knowledge(spec: RunSpec) -> tuple[float, str]:
    """Return (the uncertainty factor of a predicted step time, its source)."""
    chips: list[AcceleratorSpec | None] = [pool.accelerator for pool in spec.cluster.pools]
    chips = chips or [spec.cluster.accelerator]
    new = [chip.name for chip in chips if chip and chip.vendor != "cpu" and chip.name not in MEASURED_CHIPS]
    if new:
        return UNMEASURED_CHIP_WITHIN, f"predicted; no measured run of {', '.join(new)} stands behind it"
    return STEP_TIME_KNOWN_WITHIN, "predicted; see trainspec backtest"


def _memory_knowledge(spec: RunSpec) -> tuple[float, str]:
    """Return (the uncertainty factor of a predicted peak, a description of what the peak includes besides tensors)."""
    chip = spec.cluster.accelerator
    grows = spec.framework.expandable_segments and (chip is None or chip.vendor in GROWS_SEGMENTS)
    idle = FRAGMENTATION
    again = RECOMPUTE_FRAGMENTATION
    of = "the activations"
    if grows:
        idle = GROWN_FRAGMENTATION
        again = GROWN_RECOMPUTE_FRAGMENTATION
        of = "all tensors"
    source = (
        f"predicted, {RESERVE:.0%} added for the spread between identical runs; {idle:.0%} of {of} reserved but unused "
        f"({idle + again:.0%} where all are recomputed), {CONTEXT_BYTES / GIB:.1f} GiB for the device's "
        f"context, {GROUP_BYTES / GIB:.2f} GiB for each communicator"
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


def _of_accelerators(cluster: ClusterSpec, key: str, known_within: float = 1.0) -> list[Assumption]:
    """Return the assumption about the cluster's accelerator, or about each pool's accelerator."""
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
    within = cluster.cost.known_within.get("price_usd_per_device_hour", 1.0)
    stated = cluster.cost.price_usd_per_device_hour is not None
    of_cluster = _of("cluster.cost", cluster.cost, ("price_usd_per_device_hour",)) if stated else []
    if not cluster.pools:
        return of_cluster or _of_accelerators(cluster, "price_usd_per_hour", within)
    # A pool's price takes precedence, then the cluster's (listed once), then the catalogue's.
    found = []
    for place, pool in enumerate(cluster.pools):
        path = f"cluster.pools.{place}"
        if pool.price_usd_per_device_hour is not None:
            key = f"{path}.price_usd_per_device_hour"
            found.append(Assumption(key, pool.price_usd_per_device_hour, source="the recipe"))
        elif stated:
            found += of_cluster if place == 0 else []
        else:
            found += _of_accelerator(f"{path}.accelerator", pool.accelerator, "price_usd_per_hour", within)
    return found


@dataclass(frozen=True)
class RunWork:
    """The steps of a run without failures."""

    steps: int
    time: StepTime
    """The mean step time."""
    step_time_s: float
    batches: tuple[BatchForecast, ...] = ()
    """The steps with each batch size; empty if the batch size is constant or its changes are not known yet."""

    @property
    def work_s(self) -> float:
        return self.steps * self.step_time_s


def expect_work(spec: RunSpec, candidate: Candidate) -> RunWork:
    """Return the run's steps with `candidate`'s layout, over all batch sizes."""
    if not candidate.sized_steps:
        return RunWork(spec.train.max_steps, candidate.time, candidate.step_time_s)
    phases = run_phases(schedule_batches(spec))
    times = []
    for phase in phases:
        # Interpolate linearly between the predicted sizes: a step is a fixed time plus a time per micro-batch.
        time = candidate.sized_steps[-1].time
        for below, above in pairwise(candidate.sized_steps):
            if phase.step_samples <= above.samples:
                part = (phase.step_samples - below.samples) / (above.samples - below.samples)
                time = weigh_times((below.time, above.time), (1 - part, part))
                break
        times.append(time)
    steps = sum(phase.steps for phase in phases)
    shares = [phase.steps / steps for phase in phases]
    mean = weigh_times(times, shares)
    batches = tuple(
        BatchForecast(phase.step_samples, phase.steps, time.total_s) for phase, time in zip(phases, times, strict=True)
    )
    return RunWork(steps, mean, mean.total_s, batches)


JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0
HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True)
class Occupation:
    """Fractions of a device's wall time, which sum to 1."""

    busy: float
    """Fraction of the time spent computing."""
    waiting: float
    """Fraction of the time spent waiting for a collective, a pipeline stage, data or a checkpoint."""
    idle: float
    """Fraction of the time during which the job is down."""


def operation_usd_per_year(device_price_usd: float, cost: CostSpec) -> float:
    """Return the yearly cost of an owned device excluding electricity: repairs, staff and space."""
    ratio_usd = device_price_usd * cost.operation_ratio
    return ratio_usd + cost.staff_usd_per_device_year + cost.space_usd_per_device_year


# Energy, carbon and money in a forecast, with intervals


WAITING_PHASES = ("tp_comm_s", "cp_comm_s", "ep_comm_s", "pp_comm_s", "dp_comm_s", "bubble_s", "data_s", "host_s")


def occupation(useful: Goodput, time: StepTime) -> Occupation:
    """Return how a device spends the run, based on the phases of a step. Checkpoints and stalls count as waiting,
    restarts as idle."""
    waiting_part = sum(getattr(time, phase) for phase in WAITING_PHASES) / time.total_s if time.total_s else 0.0
    lost = useful.lost
    idle = lost.get("restart", 0.0) + lost.get("shrunk", 0.0)
    held_up = lost.get("checkpoint", 0.0) + lost.get("stall", 0.0)
    training = 1 - idle - held_up
    return Occupation(training * (1 - waiting_part), training * waiting_part + held_up, idle)


def spare_devices(cluster: ClusterSpec, devices: int) -> float:
    """Return the number of devices of the spare nodes of a job on `devices` devices."""
    return (cluster.reliability.spare_nodes or 0) * devices / cluster.num_nodes


def expect_energy(
    cluster: ClusterSpec, devices: int, wall_time_s: Interval, spent: Occupation
) -> tuple[Interval | None, dict[str, float]]:
    """Return the energy and its parts by consumer; None if the accelerator's power is unknown.

    The ratio of an accelerator's mean power to its thermal design power (TDP) is linear in the time spent in each
    state. An accelerator that is always busy has a ratio of 1.35 including its host; an eight-H100 node in training was
    measured at 1.38 (76% of 10.2 kW over 8 x 700 W, arXiv:2506.14551). The building adds (PUE - 1) times the machines'
    energy. Spare nodes are on and idle.
    """
    if cluster.accelerator is None or not cluster.accelerator.tdp_w:
        return None, {}
    tdp_w = cluster.accelerator.tdp_w
    power = cluster.power

    def parts(of: Mapping[str, float]) -> dict[str, float]:
        ratio = of["busy"] * spent.busy + of["waiting"] * spent.waiting + of["idle"] * spent.idle
        full_joules = devices * tdp_w * of["wall_s"]
        spares_joules = spare_devices(cluster, devices) * tdp_w * of["wall_s"]
        accelerators_joules = full_joules * ratio + spares_joules * of["idle"]
        hosts_joules = (full_joules + spares_joules) * of["host"]
        return {
            "accelerators": accelerators_joules,
            "hosts": hosts_joules,
            "building": (accelerators_joules + hosts_joules) * (max(1.0, of["pue"]) - 1),
        }

    known = power.known_within
    inputs = {name: within(getattr(power, name), known.get(name, 1)) for name in ("busy", "waiting", "idle", "host")}
    inputs["wall_s"] = wall_time_s
    inputs["pue"] = within(cluster.site.pue, cluster.site.known_within.get("pue", 1))
    middle = parts({name: interval.value for name, interval in inputs.items()})
    return propagate(lambda of: sum(parts(of).values()), inputs), middle


Cost = tuple[Interval | None, dict[str, float]]
"""An energy or a price with its parts; None if unknown."""


def add_costs(costs: Sequence[Cost]) -> Cost:
    """Return the total cost of several pools, which share the wall time; None if any cost is unknown."""
    # All pools share the wall time, so their costs change together, and the bounds of the intervals are summed.
    known = [interval for interval, _ in costs if interval is not None]
    if len(known) < len(costs):
        return None, {}
    parts: dict[str, float] = {}
    for _, own in costs:
        parts = {name: parts.get(name, 0.0) + value for name, value in own.items()}
    return Interval(*(sum(getattr(interval, end) for interval in known) for end in ("value", "low", "high"))), parts


def expect_carbon(cluster: ClusterSpec, energy: Interval | None) -> Interval | None:
    """Return the emissions in kg of CO2 equivalent, based on the site's grid (location-based); manufacturing is not
    included."""
    if energy is None:
        return None
    grid = within(cluster.site.carbon_g_per_kwh, cluster.site.known_within.get("carbon_g_per_kwh", 1))
    inputs = {"energy": energy, "grid": grid}
    return propagate(lambda of: of["energy"] / JOULES_PER_KWH * of["grid"] / 1000, inputs)


def expect_money(
    cluster: ClusterSpec, devices: int, wall_time_s: Interval, energy: Interval | None
) -> tuple[Interval | None, dict[str, float]]:
    """Return the cost and its parts: rent (including down time), or the run's share of purchased machines, depreciated
    linearly over the hours of use. None if the price or, for owned machines, the energy is unknown. Spare nodes on
    standby are included."""
    paid_devices = devices + spare_devices(cluster, devices)
    cost = cluster.cost
    price = cost.device_price_usd if cost.owned else rental_price(cluster)
    if not price or (cost.owned and energy is None):
        return None, {}
    keys = ("device_price_usd", "useful_years", "utilisation", "operation_ratio") if cost.owned else ()
    inputs = {key: within(getattr(cost, key), cost.known_within.get(key, 1)) for key in keys}
    inputs["wall_s"] = wall_time_s
    if cost.owned and energy is not None:
        inputs["energy"] = energy
    else:
        inputs["price"] = within(price, cost.known_within.get("price_usd_per_device_hour", 1))

    def parts(of: Mapping[str, float]) -> dict[str, float]:
        if not cost.owned:
            return {"rent": paid_devices * of["wall_s"] / SECONDS_PER_HOUR * of["price"]}
        used_years = paid_devices * of["wall_s"] / SECONDS_PER_HOUR / HOURS_PER_YEAR / of["utilisation"]
        bought_usd = of["device_price_usd"]
        yearly_usd = operation_usd_per_year(bought_usd, replace(cost, operation_ratio=of["operation_ratio"]))
        return {
            "machines": used_years * bought_usd * (1 - cost.resale_ratio) / of["useful_years"],
            "operation": used_years * yearly_usd,
            "electricity": of["energy"] / JOULES_PER_KWH * cluster.site.electricity_usd_per_kwh,
        }

    middle = parts({name: interval.value for name, interval in inputs.items()})
    return propagate(lambda of: sum(parts(of).values()), inputs), middle


def rental_price(cluster: ClusterSpec) -> float:
    """Return the price in dollars per device-hour: the cluster's, otherwise the accelerator's; 0 if both are
    unknown."""
    if cluster.cost.price_usd_per_device_hour is not None:
        return cluster.cost.price_usd_per_device_hour
    return cluster.accelerator.price_usd_per_hour if cluster.accelerator else 0.0
