"""What a job asks of Slurm; null leaves a thing to the site's own default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmSpec:
    job_name: str | None = None
    """null: trainspec-<recipe>."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """`2:00:00` or `3-00:00:00`; text, so in YAML it stands in quotes."""
    gpus_per_node: str | None = None
    """`h100:8`; null: as many as `cluster.devices_per_node`, where the device is cuda."""
    cpus_per_task: int | None = None
    """A node's; null: all of a whole node (see `exclusive`)."""
    mem: str | None = None
    """A node's, such as `512G`; `0G` is all of it."""
    exclusive: bool = True
    """Take whole nodes."""
    constraint: str | None = None
    exclude: str | None = None
    """Hosts to stay away from, such as `node[3,7]`."""
    dependency: str | None = None
    """`afterok:1234`, `singleton`."""
    array_parallel: int | None = None
    """Jobs of a sweep's array that may run at once; null: all."""
    container_image: str | None = None
    """For srun with the pyxis plugin; trainspec stands outside it too, at the same place."""
    container_mounts: str | None = None
    sbatch_lines: tuple[str, ...] = ()
    """Further options, as behind `#SBATCH`: they stand in job.sbatch as they are."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the job begins, such as `module load cuda` or `export NCCL_IB_HCA=mlx5`. They run as you:
    `trainspec sbatch` shows them, and submits those of a file that another user owns, or that everyone may write, only
    with --allow-setup. The same goes for `sbatch_lines`."""
    warn_s: int = 120
    """Before the time limit (or a preemption that sends the job's signal) the run saves and ends, so long before."""
    max_requeues: int = 10
    """A job that met its time limit, was preempted or lost a host goes back to the queue and resumes, so many times."""
