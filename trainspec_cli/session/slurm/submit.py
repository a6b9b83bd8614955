"""Submit runs as Slurm jobs: record each run as a launch does before its workers start, and write its batch script.

A recipe may contain shell lines and container images. If they come from a file that belongs to another user or is
world-writable, they are only submitted with --allow-setup. Root's files and the command line are trusted."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.node import private_files, why_not_trusted
from trainspec_cli.core.printable import format_duration
from trainspec_cli.core.reading.files import read_text
from trainspec_cli.planner.this_machine import is_known, is_predictable, predict_device, predict_local
from trainspec_cli.recipe.compose.folders import COMMAND_LINE, Origin, find_origin
from trainspec_cli.recipe.compose.values import assign, find_argument
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine, SlurmSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import digest
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.run import time_limit_s
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.backend.nodes.backend import Reach, build_nodes_job
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.generations import newest as newest_generation
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir, read_run_record
from trainspec_cli.run.job.folder import RUNS, check_free, make_folder, storage, write_launch
from trainspec_cli.run.slurm.commands import SILENT
from trainspec_cli.run.slurm.commands import submit as submit_to_slurm
from trainspec_cli.run.slurm.queue import job_of, note_job
from trainspec_cli.run.slurm.script import array_log, check_folder, log_of, render_script
from trainspec_cli.run.tools import known_probe
from trainspec_cli.session.launching.sweep import Sweep, load_points
from trainspec_cli.session.recipe.data import prepare_data
from trainspec_cli.session.recipe.load import Loaded, check_start, machine_of_job, plan_for
from trainspec_cli.session.recipe.load import load as load_recipe
from trainspec_cli.session.slurm.container import check_container, folders_read, unseen_image

# Compare a job's time limit with the predicted training time.


def short_limit(plan: Plan, machine: Machine) -> Iterator[str]:
    """Yield a warning with both times if the limit is shorter than the prediction; nothing if there is no
    prediction."""
    slurm = plan.spec.cluster.slurm
    limit_s = None if slurm.time is None else time_limit_s(slurm.time)
    if limit_s is None:
        return
    # The prediction covers the steps, but not start-up, checkpoints or evaluations. It is available for GPUs in the
    # catalogue and, if this machine has been probed, for CPUs like its own.
    group = plan.as_one_group
    if is_known(group, machine):
        step_s = predict_device(group, machine).step_time_s
    elif is_predictable(group) and (probe := known_probe(group, machine)) is not None:
        step_s = predict_local(group, probe).step_time_s
    else:
        return
    trains_s = step_s * plan.spec.train.max_steps
    if trains_s <= limit_s - slurm.warn_s:
        return
    shorter = (
        f"cluster.slurm.time is {slurm.time} ({format_duration(limit_s)}, of which the last {slurm.warn_s} s are for "
        f"the checkpoint), but the run is predicted to train for {format_duration(trains_s)}"
    )
    # Each start continues from the newest checkpoint, so all starts together train for as long as a single start would.
    requeues = math.ceil(trains_s / (limit_s - slurm.warn_s)) - 1
    if slurm.max_requeues == 0:
        follows = "it will be stopped at the limit, and not requeued (cluster.slurm.max_requeues=0)"
    elif requeues > slurm.max_requeues:
        follows = (
            f"it needs at least {requeues:,} requeues, but only gets {slurm.max_requeues} (cluster.slurm.max_requeues)"
        )
    else:
        follows = f"it will be requeued at least {'once' if requeues == 1 else f'{requeues} times'}"
    yield f"{shorter}: {follows}"


RUN_DIR = "run.dir"
DEFAULT_PYTHON = SlurmSpec.container_python
"""Python in the image, which is shown together with the image."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a job or of a job array."""

    loaded: Loaded
    plan: Plan


def plan_runs(arguments: Sequence[str], sweeps: Sequence[Sweep]) -> list[PlannedRun]:
    """Plan a run for each combination of the swept values. Raises RecipeError."""
    given = find_argument(arguments, RUN_DIR)

    def load(values: tuple[str, ...], point: list[str]) -> Loaded:
        if (
            sweeps and given and not any(key == RUN_DIR for key, _ in sweeps)
        ):  # each run gets a subfolder named after its values
            label = ",".join(
                f"{key.rpartition('.')[2]}={value}" for (key, _), value in zip(sweeps, values, strict=True)
            )
            folder = Path(str(given.value)) / re.sub(r"[^\w.=,+-]+", "_", label)
            point = [*(one for one in point if one != given.text), assign(RUN_DIR, str(folder))]
        return load_recipe(point)

    loaded = [one for _, one in load_points(arguments, sweeps, load)]
    for one in loaded:
        check_start(one.spec)
    named = [one.spec.run.dir for one in loaded if one.spec.run.dir != AUTO]
    if len(set(named)) < len(named):
        message = f"`run.dir` is {named[0]}, and each run of a sweep needs a separate folder"
        raise RecipeError(
            Problem("usage", message, RUN_DIR, "set run.dir on the command line: each run gets a subfolder of it")
        )
    runs = [PlannedRun(one, plan_for(one, machine_of_job(one))) for one in loaded]
    # All runs of an array share one script, and therefore the same job size.
    plans = [run.plan for run in runs]
    if len({(one.num_nodes, one.devices_per_node, one.device, one.spec.cluster.slurm) for one in plans}) > 1:
        message = "the runs of the sweep need different nodes or Slurm options, but a job array has only one set"
        raise RecipeError(Problem("usage", message, hint="sweep them one by one"))
    return runs


def warnings(runs: Sequence[PlannedRun]) -> list[str]:
    """Return the warnings about the job, each only once: a short time limit, a missing image."""
    found = (
        line
        for run in runs
        for line in (*short_limit(run.plan, machine_of_job(run.loaded)), *unseen_image(run.plan.spec.cluster.slurm))
    )
    return list(dict.fromkeys(found))


def shell_lines(spec: RunSpec) -> dict[str, list[str]]:
    """Return the recipe's lines that the batch script contains verbatim, and the container's image and Python."""
    slurm = spec.cluster.slurm
    lines = {"setup": list(slurm.setup), "sbatch_lines": list(slurm.sbatch_lines)}
    if slurm.container_image is not None:
        lines["container_image"] = [slurm.container_image]
        if slurm.container_python != DEFAULT_PYTHON:
            lines["container_python"] = [slurm.container_python]
    return lines


def render_shell_lines(loaded: Loaded) -> str:
    """Return the lines with their key and file; empty if there are none."""
    paragraphs = []
    for name, lines in shell_lines(loaded.spec).items():
        if lines:
            written = indent("\n".join(lines), "  ")
            paragraphs.append(f"cluster.slurm.{name} ({_origin(name, loaded)}):\n{written}\n")
    return "".join(paragraphs)


def check_own_lines(loaded: Iterable[Loaded]) -> None:
    """Raise RecipeError for lines that another user may have written: lines in a file that belongs to neither this user
    nor root, or that others can write to."""
    problems: list[Problem] = []
    for one in loaded:
        found = []
        for name, lines in shell_lines(one.spec).items():
            origin = _origin(name, one)
            why = ""
            if origin is None:
                why = "its file is unknown"
            elif origin.file != COMMAND_LINE and (reason := why_not_trusted((one.composed.cwd / origin.file).stat())):
                why = f"{origin.file} {reason}"
            if lines and why:
                message = f"`cluster.slurm.{name}` would run as you, and {why}"
                hint = (
                    "read the lines above, and add --allow-setup; or copy the file, or specify the lines on the "
                    "command line"
                )
                found.append(Problem("not_own", message, f"cluster.slurm.{name}", hint))
        problems += one.composed.locate(found)
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))


def _origin(name: str, loaded: Loaded) -> Origin | None:
    return find_origin(f"cluster.slurm.{name}", loaded.composed.origins)


@dataclass(frozen=True)
class Submission:
    """The recorded runs that share one script."""

    roots: Sequence[Path]
    script: Path
    text: str
    is_new: bool = False
    """True if this command created the runs."""


def is_previewed(run: RunDir, text: str) -> bool:
    """Return whether the run has the same script, except for the comment with the command line, and has been neither
    submitted nor started."""
    if not run.job_sbatch.is_file() or job_of(run) is not None or newest_generation(run):
        return False
    without_comment = [
        [*lines[:1], *lines[2:]] for lines in (text.splitlines(), read_text(run.job_sbatch).splitlines())
    ]
    return without_comment[0] == without_comment[1]


def _find_preview(run: PlannedRun, *, force: bool) -> Submission | None:
    """Return the submission that an earlier `write_submission` created from the same recipe, if it has not been
    submitted."""
    plan = run.plan
    if plan.spec.run.dir == AUTO or not RunDir(Path(plan.spec.run.dir)).run_json.is_file():
        return None
    made = RunDir(Path(plan.spec.run.dir).absolute())
    data_dir = read_data_dir(made)
    needed = folders_read(plan, Path(data_dir) if data_dir else None)
    text = render_script(plan, [made.root], run.loaded.composed.recipe, [], Path.cwd(), needed, force=force)
    is_same = is_previewed(made, text) and read_run_record(made).digest == digest(plan.spec)
    return Submission([made.root], made.job_sbatch, read_text(made.job_sbatch)) if is_same else None


def write_submission(runs: Sequence[PlannedRun], *, force: bool = False, dry_run: bool = False) -> Submission:
    """Create each run's folder and script; submitting the script again continues the run. An array's script is in the
    parent folder of its runs. An earlier run that has not been submitted is reused. `dry_run`: create nothing, and
    prepare no data."""
    first = runs[0]
    check_container(first.plan)
    if len(runs) == 1 and (preview := _find_preview(first, force=force)):
        return preview
    made = [_make_run(run, dry_run=dry_run) for run in runs]
    roots = [root for root, _ in made]
    recipe = first.loaded.composed.recipe
    argv = sys.argv[1:]
    cwd = Path.cwd()
    if dry_run:
        needed = [folder for _, folders in made for folder in folders]
        script = RunDir(roots[0]).job_sbatch if len(roots) == 1 else array_log(roots).parent / f"{roots[0].name}.sbatch"
        return Submission(roots, script, render_script(first.plan, roots, recipe, argv, cwd, needed, force=force))
    with private_files():
        for root, needed in made:
            text = render_script(first.plan, [root], recipe, argv, cwd, needed, force=force)
            write_text(RunDir(root).job_sbatch, text)
        if len(roots) == 1:
            return Submission(roots, RunDir(roots[0]).job_sbatch, text, is_new=True)
        needed = [folder for _, folders in made for folder in folders]
        text = render_script(first.plan, roots, recipe, argv, cwd, needed, force=force)
        script = array_log(roots).parent / f"{roots[0].name}.sbatch"
        write_text(script, text)
        return Submission(roots, script, text, is_new=True)


def submit(submission: Submission) -> str:
    """Submit the script to Slurm, and record the job number in the run folders; return the number. Raises MachineError
    if Slurm rejects the script. In that case new runs are removed, so that the corrected command can use their
    folders."""
    roots = submission.roots
    with private_files():  # Slurm applies this process's umask to the job and its log
        try:
            job_id = submit_to_slurm(submission.script)
        except MachineError as error:
            if submission.is_new and error.problems[0].code != SILENT:
                submission.script.unlink()
                for root in roots:
                    shutil.rmtree(root)
            raise
        for task, root in enumerate(roots):
            note_job(RunDir(root), f"{job_id}_{task}" if len(roots) > 1 else job_id)
    return job_id


def _make_run(run: PlannedRun, *, dry_run: bool) -> tuple[Path, list[Path]]:
    """Record the run as a launch does before its workers start, and create the folder for the job's logs. Return the
    run's folder, and other folders that a container must mount. `dry_run`: create nothing."""
    plan = run.plan
    wanted = plan.spec.run.dir
    recipe = run.loaded.composed.recipe
    check_folder(Path.cwd() if wanted == AUTO else Path(wanted).absolute())
    if dry_run:
        check_free(wanted)
        root = RUNS / recipe / "TIME" if wanted == AUTO else Path(wanted)
        return root.absolute(), folders_read(plan, None)
    data_folder = prepare_data(run.loaded, PrintableConsole(stderr=True))
    with storage(wanted):
        root = make_folder(wanted, recipe).absolute()
        log_of(root).parent.mkdir(parents=True, exist_ok=True)
        job = build_nodes_job(plan, root, Reach("", ("sbatch", str(root / "job.sbatch"))))
        write_launch(job, plan, run.loaded.origin, data_folder)
    return root, folders_read(plan, data_folder)
