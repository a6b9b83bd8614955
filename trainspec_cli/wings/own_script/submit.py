"""Submit a user's command as a Slurm job: check the cluster, create the run folder and write the batch script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from trainspec_cli.cli.options import CommandOptions
from trainspec_cli.cli.sbatch import PreparedJob
from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.recipe.compose.folders import RECIPE, locate
from trainspec_cli.recipe.compose.values import parse_arguments
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec, SlurmSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.rules.check import apply
from trainspec_cli.recipe.rules.run import SLURM_RULES, TEXT_RULES, forget_out_of_range
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_run_record
from trainspec_cli.run.job.folder import RUNS, check_free, make_folder, storage
from trainspec_cli.run.slurm.container import mounts
from trainspec_cli.run.slurm.script import check_folder, log_of, render_own_script
from trainspec_cli.session.recipe.load import DEFAULTS, Loaded, require
from trainspec_cli.session.slurm.container import unseen_image
from trainspec_cli.session.slurm.submit import Submission, is_previewed
from trainspec_cli.wings.own_script.commands.run import settings_of
from trainspec_cli.wings.own_script.job import (
    CommandSettings,
    OwnJob,
    build_own_nodes_job,
    check_command,
    check_for_nodes,
    check_script,
    read_own_job,
    script_name,
    wasted_gpus,
    write_own_job,
)
from trainspec_cli.wings.own_script.launching import FOLDER, write_own_launch

SBATCH = "sbatch"
CLUSTER, SLURM = "cluster", "slurm"
"""The config groups of a job without a recipe. The job's keys start with these words."""
STARTERS = {
    "srun": "remove srun: the job starts the command once on each node",
    "sbatch": "remove sbatch: trainspec writes the batch script",
    "trainspec": "remove `trainspec run`: the job already does the same",
}
"""Programs that the command must not start with, because the job already calls them -> advice."""


def prepare_command(
    command: Sequence[str], arguments: Sequence[str], folder: str | None, options: CommandOptions
) -> PreparedJob:
    """Return the checked job for a command. Raises RecipeError."""
    loaded = load_cluster(arguments)
    wanted = settings_of(options)
    # Reject a command that the job could not start or could not warn in time.
    cluster = loaded.spec.cluster
    slurm = cluster.slurm
    if command and (hint := STARTERS.get(Path(command[0]).name)):
        raise RecipeError(Problem("usage", f"the command starts with {command[0]}", "COMMAND", hint))
    if not command or (slurm.container_image is None and not slurm.setup):  # otherwise it may exist only in the job
        check_command(command, f"trainspec {SBATCH}")
    elif slurm.container_image is None and not any("cd " in line for line in slurm.setup):
        check_script(command)
    if cluster.num_nodes > 1:
        check_for_nodes(command, cluster.num_nodes, "cluster.num_nodes")
    if wanted.grace_s > slurm.warn_s:
        message = f"--grace-s is {wanted.grace_s:g}, but the job is warned only {slurm.warn_s} s before its time limit"
        hint = f"set cluster.slurm.warn_s={wanted.grace_s:.0f} or more"
        raise RecipeError(Problem("out_of_range", message, "cluster.slurm.warn_s", hint))
    write = partial(write_own_submission, command, folder, wanted, loaded)
    devices = cluster.devices_per_node
    takes_all = cluster.device == "cuda" and slurm.gpus_per_node is None and isinstance(devices, int)
    wasted = wasted_gpus(command, int(devices)) if takes_all else ""
    return PreparedJob([loaded], [*unseen_image(slurm), *([wasted] if wasted else [])], write)


def load_cluster(arguments: Sequence[str]) -> Loaded:
    """Compose the job's keys from `key=value` arguments and the files that they refer to. Raises RecipeError with every
    problem and its location."""
    from trainspec_cli.recipe.compose.compose import (
        compose_arguments,
    )  # deferred: loads hydra, which --help does not need

    parsed, _ = parse_arguments(arguments)
    foreign = []
    for argument in parsed:
        key = argument.key
        root = key.partition(".")[0]
        if root == CLUSTER or key == SLURM:
            continue  # errors in keys below `cluster.` are found later
        value = argument.text.partition("=")[2]
        hint = "remove it: the command has its own options, and the job's keys start with cluster."
        if root == SLURM:
            hint = f"set cluster.{argument.text}"
        elif near := closest(root, [*(field.name for field in fields(SlurmSpec)), "nodes"]):
            hint = f"set {'cluster.num_nodes' if near == 'nodes' else f'cluster.slurm.{near}'}={value}"
        elif near := closest(root, [field.name for field in fields(ClusterSpec)]):
            hint = f"set cluster.{near}={value}"
        elif key == "run.dir":
            hint = f"pass --dir {value}"
        elif key == RECIPE:
            hint = "remove it, or remove -- and the command: a job has either a recipe or a command"
        foreign.append(argument.origin.problem("unknown_key", f"`{key}` is not a key for a command's job", hint, key))
    require(locate(foreign, {}, arguments, Path.cwd()))
    # If no cluster is specified, use a cluster without values. The values that the job needs are checked below.
    usual = [] if any(argument.key == CLUSTER for argument in parsed) else [f"{CLUSTER}=auto"]
    composed = compose_arguments([*arguments, f"{RECIPE}={DEFAULTS}", *usual])
    draft, mistyped = build(RunSpec, composed.data)
    found = [*mistyped, *forget_out_of_range(draft)[1], *apply([*SLURM_RULES, *TEXT_RULES], draft)]
    of_job = [problem for problem in found if problem.path.startswith(f"{CLUSTER}.")]
    require([*composed.problems, *composed.locate(of_job)])
    cluster = draft.cluster
    slurm = cluster.slurm
    if slurm.gpus_per_node is None and slurm.gpu_request != "none" and cluster.device != "cpu":
        # A job without a GPU request would wait in the queue and then fail.
        if cluster.device == AUTO:
            message = "it is not known whether the command needs GPUs: the job's nodes cannot be examined in advance"
            gpus = "cluster=h100 or another cluster, or cluster.device=cuda cluster.devices_per_node=8"
            hint = f"set {gpus}; without GPUs set cluster.device=cpu"
            raise RecipeError(Problem("left_open", message, "cluster.device", hint))
        if cluster.devices_per_node == AUTO:
            message = "`cluster.devices_per_node` is auto, but the job requests a fixed number of GPUs"
            hint = "set cluster.devices_per_node=8"
            raise RecipeError(Problem("left_open", message, "cluster.devices_per_node", hint))
    return Loaded(draft, composed)


def write_own_submission(
    command: Sequence[str], folder: str | None, wanted: CommandSettings, loaded: Loaded, *, dry_run: bool = False
) -> Submission:
    """Create the run folder and its script. Submitting the script again continues the run. If the same job was written
    before but not submitted, reuse its folder. `dry_run`: create nothing. Raises RecipeError if the folder is in use,
    or if a container cannot see it."""
    name = script_name(command)
    cluster = loaded.spec.cluster
    here = Path.cwd()
    check_folder(Path(folder).absolute() if folder else here, FOLDER)
    if cluster.slurm.container_image is not None:
        mounts(cluster.slurm, [here, *([Path(folder).absolute()] if folder else [])])
    own_job = OwnJob(cluster.num_nodes, wanted, cluster.slurm.max_requeues, cluster.slurm.exclude)
    root = Path(folder).absolute() if folder else (RUNS / name / "TIME").absolute()
    text = render_own_script(cluster, root, name, sys.argv[1:], here)
    if is_previewed(RunDir(root), text):
        is_same = read_run_record(RunDir(root)).command == tuple(command) and read_own_job(RunDir(root)) == own_job
        if is_same:
            return Submission([root], RunDir(root).job_sbatch, text)
    if dry_run:
        check_free(folder or AUTO, FOLDER)
        return Submission([root], RunDir(root).job_sbatch, text)
    with storage(folder or AUTO, FOLDER):
        run = RunDir(make_folder(folder or AUTO, name, FOLDER).absolute())
        log_of(run.root).parent.mkdir(parents=True, exist_ok=True)
        write_own_job(run, own_job)
        text = render_own_script(cluster, run.root, name, sys.argv[1:], here)
        write_text(run.job_sbatch, text)
        job = build_own_nodes_job(command, run.root, Reach("", (SBATCH, str(run.job_sbatch))), own_job, wanted)
        write_own_launch(job, command)
    return Submission([run.root], run.job_sbatch, text, is_new=True)
