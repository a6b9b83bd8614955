"""Where a process stands in a Slurm job that srun has started it in, as the environment says it (srun(1))."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainspec_cli.core.errors import Problem, RecipeError

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps from this number on are Slurm's own, such as the shell of `salloc`; srun's are counted from 0."""


@dataclass(frozen=True)
class Step:
    """A step of srun's with one task on each of its nodes."""

    job_id: str
    number: int
    node: int
    """This node's number among the step's, from 0."""
    num_nodes: int


def read_step(environ: Mapping[str, str]) -> Step | None:
    """Return the step that this process is a task of; None where srun has not started it. Raises RecipeError where a
    node has several tasks."""
    number, tasks = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_STEP_NUM_TASKS", "")
    if (
        not number.isdigit()
        or int(number) >= FIRST_SPECIAL_STEP
        or not tasks.isdigit()
        or "SLURM_PROCID" not in environ
    ):
        return None
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if int(tasks) != nodes:
        message = f"srun has started this command {tasks} times on {nodes} {'node' if nodes == 1 else 'nodes'}"
        hint = "start it once on each: srun --ntasks-per-node=1 trainspec run -- torchrun --nproc-per-node N train.py"
        raise RecipeError(Problem("usage", message, "--ntasks-per-node", hint))
    return Step(environ["SLURM_JOB_ID"], int(number), int(environ["SLURM_PROCID"]), nodes)


def idle_nodes(environ: Mapping[str, str]) -> int:
    """Return how many of the job's nodes have no part in a command that is started without srun."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    is_task = environ.get("SLURM_STEP_ID", "").isdigit() and int(environ["SLURM_STEP_ID"]) < FIRST_SPECIAL_STEP
    return int(nodes) - 1 if nodes.isdigit() and not is_task else 0
