"""A job: everything needed to start the processes of one launch, on paper."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.environment_names import GENERATION, LAUNCH_ID
from trainspec_cli.launch.job.command import ENGINE, node_command, torchrun_command
from trainspec_cli.launch.job.environment import job_environment, node_environment
from trainspec_cli.launch.job.place import NodePlace
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.plan import Plan


@dataclass(frozen=True)
class Job:
    root: Path
    """The run folder, absolute."""
    command: tuple[str, ...]
    """torchrun and the workers it starts."""
    environment: Mapping[str, str]
    """Set on top of what the command line's own environment holds."""
    world_size: int
    stop_grace_s: float
    logs: Path
    """The folder of this launch's output."""
    worker: tuple[str, ...] = ()
    """What torchrun starts on every device."""
    ranks: range | None = None
    """Those of a replica group, among all of the run's; None: all."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.root)

    @property
    def torchrun_log(self) -> Path:
        """The output of torchrun itself."""
        return self.logs / "torchrun.log"

    @property
    def launch_id(self) -> str:
        """Every process of the job carries it in its environment, and is found by it."""
        return self.environment[LAUNCH_ID]


def build_job(plan: Plan, root: Path, machine: Machine, worker: Sequence[str] = ENGINE) -> Job:
    """`worker` is what torchrun starts on every device; it gets the run folder as its last argument."""
    root = root.absolute()
    logs = next_log_folder(RunDir(root).logs)
    return Job(
        root=root,
        worker=(*worker, str(root)),
        command=torchrun_command(plan.group_size, logs, (*worker, str(root))),
        environment=job_environment(plan, machine, launch_id=secrets.token_hex(8)),
        world_size=plan.world_size,
        stop_grace_s=plan.spec.run.stop_grace_s,
        logs=logs,
    )


def build_node_job(
    plan: Plan,
    root: Path,
    machine: Machine,
    place: NodePlace,
    rendezvous: Mapping[str, str],
    generation: int,
    launch_id: str,
    logs: Path,
    worker: Sequence[str],
) -> Job:
    """Return one node's part of a job of several. `rendezvous`: the variables that say where its processes meet.

    Raises MachineError where the first node's name is not known here.
    """
    environment = {**node_environment(plan, machine, launch_id, place), **rendezvous}
    return Job(
        root=root,
        worker=(*worker, str(root)),
        command=node_command(place, "workers", plan.devices_per_node, logs, (*worker, str(root))),
        environment={**environment, GENERATION: str(generation)},
        world_size=plan.world_size,
        stop_grace_s=plan.spec.run.stop_grace_s,
        logs=logs,
    )


def next_log_folder(logs: Path) -> Path:
    """logs/launch_01, and one more for every resume."""
    taken = [path.name for path in logs.glob("launch_*")]
    return logs / f"launch_{len(taken) + 1:02d}"
