"""Whether a job's time limit is as long as its run is predicted to train."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainspec_cli.core.units import format_duration
from trainspec_cli.plan.this_machine import is_known, is_predictable, predict_device, predict_local
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.slurm import time_limit_s
from trainspec_cli.run.measuring import known_probe


def short_limit(plan: Plan, machine: Machine) -> Iterator[str]:
    """Yield a warning with both figures where the limit is shorter; nothing where no prediction can be made."""
    slurm = plan.spec.cluster.slurm
    limit_s = None if slurm.time is None else time_limit_s(slurm.time)
    if limit_s is None:
        return
    trains_s = _predicted_s(plan, machine)
    if trains_s is None or trains_s <= limit_s - slurm.warn_s:
        return
    shorter = (
        f"cluster.slurm.time is {slurm.time} ({format_duration(limit_s)}, of which the last {slurm.warn_s} s are for "
        f"the checkpoint), and the run is predicted to train for {format_duration(trains_s)}"
    )
    # Each start goes on from the newest checkpoint, so that all starts together train for as long as one would.
    requeues = math.ceil(trains_s / (limit_s - slurm.warn_s)) - 1
    if slurm.max_requeues == 0:
        follows = "it will be stopped there, and not be requeued (cluster.slurm.max_requeues=0)"
    elif requeues > slurm.max_requeues:
        follows = f"it needs at least {requeues:,} requeues, and gets {slurm.max_requeues} (cluster.slurm.max_requeues)"
    else:
        follows = f"it will be requeued at least {'once' if requeues == 1 else f'{requeues} times'}"
    yield f"{shorter}: {follows}"


def _predicted_s(plan: Plan, machine: Machine) -> float | None:
    """Return the time of all steps, without start, checkpoints and evaluations: on GPUs that the catalogue knows, and
    on CPUs like this machine's where that was probed."""
    plan = plan.as_one_group
    if is_known(plan, machine):
        step_s = predict_device(plan, machine).step_time_s
    elif is_predictable(plan) and (probe := known_probe(plan, machine)) is not None:
        step_s = predict_local(plan, probe).step_time_s
    else:
        return None
    return step_s * plan.spec.train.max_steps
