"""The Slurm options of a job; null leaves an option to the site's default."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.spec.numbers import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class SlurmSpec:
    job_name: str | None = None
    """null: trainspec-<recipe>."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """`2:00:00` or `3-00:00:00`; text, so quote it in YAML."""
    gpus_per_node: str | None = None
    """`h100:8`; null: `cluster.devices_per_node`, if the device is cuda."""
    cpus_per_task: PositiveInt | None = None
    """CPUs per node; null: all of a whole node (see `exclusive`)."""
    mem: str | None = None
    """Memory per node, such as `512G`; `0G` is all of it."""
    exclusive: bool = True
    """Take whole nodes."""
    constraint: str | None = None
    exclude: str | None = None
    """Nodes to avoid, such as `node[3,7]`."""
    dependency: str | None = None
    """`afterok:1234`, `singleton`."""
    array_parallel: PositiveInt | None = None
    """Jobs of a sweep's array that may run at once; null: all."""
    container_image: str | None = None
    """For srun with the pyxis plugin; trainspec must be installed outside it too, at the same path."""
    container_mounts: str | None = None
    sbatch_lines: tuple[str, ...] = ()
    """Further options, copied verbatim after `#SBATCH` into job.sbatch."""
    setup: tuple[str, ...] = ()
    """Shell commands before the job begins, such as `module load cuda` or `export NCCL_IB_HCA=mlx5`. They run as you:
    `trainspec sbatch` shows them, and submits those of a file that another user owns, or that everyone may write, only
    with --allow-setup. The same goes for `sbatch_lines`."""
    warn_s: NonNegativeInt = 120
    """How long before the time limit (or a preemption that sends the job's signal) the run saves and ends."""
    max_requeues: NonNegativeInt = 10
    """How often a job that met its time limit, was preempted or lost a node is requeued and resumes."""
