"""own_job.json: the Slurm job of a command of the user's own, as `trainspec sbatch` was asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.reading.files import unreadable
from trainspec_cli.recipe.canonical import from_plain, to_plain
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.versioned import read_versioned, write_versioned
from trainspec_cli.wings.own_script.job import Wanted


@dataclass(frozen=True)
class OwnJob:
    num_nodes: int
    wanted: Wanted
    max_requeues: int
    exclude: str | None
    """Nodes that the user avoids."""


def write_own_job(run: RunDir, job: OwnJob) -> None:
    write_versioned(run.own_job_json, to_plain(job))


def read_own_job(run: RunDir) -> OwnJob:
    """Raises UnreadableFileError."""
    try:
        return from_plain(OwnJob, read_versioned(run.own_job_json))
    except RecipeError as error:
        hint = "it is damaged, or another version of trainspec wrote it"
        raise unreadable(run.own_job_json, f"is no job of this version: {error}", hint) from error
