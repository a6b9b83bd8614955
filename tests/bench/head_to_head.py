"""Plan the published comparison of live migration, restarts and torchft with trainspec's own mechanisms.

`python tests/bench/head_to_head.py`

Source: Clockwork, "Keeping Distributed Training Running Through Failures" (clockwork.io/blog), by the vendor of the
migration. TorchTitan, Llama-4 Scout (109B parameters), 8 nodes of 8 H200, 3,000 steps, a checkpoint every 100 steps, a
failure every 2,700 to 4,500 s. Minutes to the last step: migration to spare GPUs 405, restart 818, torchft 930.

One figure is fitted: the step time, as if migration cost nothing. The source states neither it, nor the time of a
restart, nor the layout. All other inputs are the planner's defaults.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trainspec_cli.planner.run.goodput import FailureAt, SimulatedJob, SimulatedRun, simulate
from trainspec_cli.recipe.keys.cluster import ClusterSpec, ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery.reliability import auto_interval_s, daly_interval_s, durations

STEPS = 3_000
NODES = 8
DEVICES = 64
INTERVAL_STEPS = 100
APART_S = (2_700.0, 4_500.0)
PARAMS = 109e9
PUBLISHED_MIN: Mapping[str, float] = {"migration": 405.0, "restart": 818.0, "torchft": 930.0}
STEP_S = 60 * PUBLISHED_MIN["migration"] / STEPS
CLUSTER = ClusterSpec()
STATE_BYTES = 12 * PARAMS
"""fp32 weights and AdamW's moments, as in `planner.run.forecast`."""
NIC_BYTES_PER_S = 50e9
"""400 Gbit/s for each device, the usual network of H200 nodes."""
SPARED = ReliabilitySpec(spare_nodes=1, repair_s=0.0)
"""A spare is there for every failure, as in the source."""
FAILOVER_S: Mapping[str, float] = {"detect_s": 4.0, "swap_s": 0.0, "start_s": 5.0}
"""The phases that issue 41 asks for on four emulated nodes: a standby process has imported torch. Not measured on
GPUs."""
SEEDS = 20


@dataclass(frozen=True)
class Mechanism:
    name: str
    compared_with: str
    """The published mechanism."""
    cluster: ReliabilitySpec
    resilience: ResilienceSpec
    change: Callable[[SimulatedJob], SimulatedJob] = lambda job: job


def describe_job() -> SimulatedJob:
    """Return the job of the source, with its checkpoint interval. Training waits for a copy of the state to host
    memory."""
    written_s = STATE_BYTES / (NODES * CLUSTER.storage_gb_per_s * 1e9)
    return SimulatedJob(
        work_s=STEPS * STEP_S,
        step_time_s=STEP_S,
        devices=DEVICES,
        replica_groups=1,
        interval_s=INTERVAL_STEPS * STEP_S,
        blocked_s=_copy_s(),
        written_s=written_s,
        state_bytes_per_device=STATE_BYTES / DEVICES,
        load_s=written_s,
        nodes=NODES,
        # Expert parallelism divides the nodes in any number, at a speed proportional to it.
        speed_on=lambda nodes: nodes / NODES,
    )


def _copy_s() -> float:
    return STATE_BYTES / (DEVICES * CLUSTER.host_link_gb_per_s * 1e9)


def _often(job: SimulatedJob) -> SimulatedJob:
    return replace(job, interval_s=auto_interval_s(job.blocked_s, job.written_s, statistics.mean(APART_S)))


def _copied(job: SimulatedJob) -> SimulatedJob:
    steps = max(1, round(daly_interval_s(_copy_s(), statistics.mean(APART_S)) / STEP_S))
    return replace(_often(job), copy_interval_s=steps * STEP_S, copy_s=_copy_s())


def _in_groups(job: SimulatedJob) -> SimulatedJob:
    """Return the job in two replica groups, which exchange fp32 gradients over the network in each step."""
    exchange_s = 4 * PARAMS / (DEVICES / 2) / NIC_BYTES_PER_S
    step_s = STEP_S + exchange_s
    return replace(
        _often(job),
        work_s=STEPS * step_s,
        step_time_s=step_s,
        replica_groups=2,
        state_bytes_per_device=2 * STATE_BYTES / DEVICES,
    )


RESTART = ResilienceSpec("restart")
QUICK = replace(SPARED, **FAILOVER_S)
MECHANISMS = (
    Mechanism("restart, checkpoint every 100 steps", "restart", SPARED, RESTART),
    Mechanism("restart, interval_steps=auto", "restart", SPARED, RESTART, _often),
    Mechanism("restart from copies in memory", "restart", SPARED, RESTART, _copied),
    Mechanism("the same, with standby processes", "migration", QUICK, RESTART, _copied),
    Mechanism("two replica groups", "torchft", SPARED, ResilienceSpec("elastic"), _in_groups),
    Mechanism("no spare: on fewer nodes, repair in a day", "restart", ReliabilitySpec(), RESTART, _often),
)


@dataclass(frozen=True)
class Planned:
    mechanism: Mechanism
    minutes: float
    """Median over the seeds."""
    failures: float
    lost_min: dict[str, float]
    """By cause, of the median run."""
    step_min: float
    """More time than in the source's undisturbed steps, because steps are longer."""


def plan(mechanism: Mechanism) -> Planned:
    job = mechanism.change(describe_job())
    runs = sorted((_run(mechanism, job, seed) for seed in range(SEEDS)), key=lambda run: run.wall_s)
    run = runs[SEEDS // 2]
    lost = {cause: lost_s / 60 for cause, lost_s in run.lost_s.items() if lost_s > 1}
    return Planned(mechanism, run.wall_s / 60, run.failures, lost, (job.work_s - STEPS * STEP_S) / 60)


def _run(mechanism: Mechanism, job: SimulatedJob, seed: int) -> SimulatedRun:
    chance = random.Random(seed)
    at_s = 0.0
    failures = []
    for _ in range(200):
        at_s += chance.uniform(*APART_S)
        failures.append(FailureAt(at_s, chance.randrange(NODES)))
    return simulate(job, mechanism.cluster, mechanism.resilience, failures=failures)


def implied_failure_s(published_min: float) -> float:
    """Return the time that each failure costs in a published run, if its steps are as long as in the migrated run."""
    lost_s = 60 * (published_min - PUBLISHED_MIN["migration"])
    return lost_s * statistics.mean(APART_S) / (60 * published_min)


def implied_step_s(published_min: float) -> float:
    """Return how much longer a step is in a published run, if failures cost nothing."""
    return 60 * published_min / STEPS - STEP_S


def main() -> None:
    job = describe_job()
    rework_s = job.interval_s / 2
    restart_s = durations(SPARED, job.state_bytes_per_device, job.load_s).restart_s
    print(f"step time (fitted): {STEP_S:.2f} s; state {STATE_BYTES / 1e12:.2f} TB, read in {job.load_s:.0f} s")
    each_s = implied_failure_s(PUBLISHED_MIN["restart"])
    print(f"published restart: {each_s:.0f} s per failure, of which {rework_s:.0f} s undo work")
    print(f"planned restart: {restart_s:.0f} s until new work")
    grown_s = implied_step_s(PUBLISHED_MIN["torchft"])
    rate = 4 * PARAMS / (DEVICES / 2) / grown_s / 1e9
    print(f"published torchft: {grown_s:.1f} s more per step, {rate:.2f} GB/s per device for fp32 gradients\n")
    print(f"{'mechanism':<43}{'min':>6}{'published':>18}{'failures':>10}  lost (min)")
    for mechanism in MECHANISMS:
        planned = plan(mechanism)
        lost = ", ".join(f"{cause} {minutes:.0f}" for cause, minutes in planned.lost_min.items() if minutes >= 0.5)
        lost += f", longer steps {planned.step_min:.0f}" if planned.step_min else ""
        beside = f"{mechanism.compared_with} {PUBLISHED_MIN[mechanism.compared_with]:.0f}"
        print(f"{mechanism.name:<43}{planned.minutes:>6.0f}{beside:>18}{planned.failures:>10}  {lost}")


if __name__ == "__main__":
    main()
