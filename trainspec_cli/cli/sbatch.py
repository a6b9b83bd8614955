"""`trainspec sbatch`: a run as a Slurm job."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspec_cli.cli.options import AsJson, RecipeArguments
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.trust import private_files

if TYPE_CHECKING:
    from trainspec_cli.cli.load import Loaded
    from trainspec_cli.spec.recipe.cluster import Machine
    from trainspec_cli.spec.results.plan import Plan

app = typer.Typer(add_completion=False)

Submit = Annotated[bool, typer.Option("--submit", help="Give it to sbatch, and print the job's number.")]
AllowSetup = Annotated[
    bool,
    typer.Option(
        "--allow-setup", help="Submit shell lines of a recipe's file that another user owns or everyone may write."
    ),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="KEY=A,B,...", help="A run for each value (of several, each pair), as one array."),
]


@app.command()
def sbatch(
    arguments: RecipeArguments,
    submit: Submit = False,
    allow_setup: AllowSetup = False,
    sweep: Sweeps = None,
    as_json: AsJson = False,
) -> None:
    """Make a run's folder and the script that trains it on Slurm, and print or submit that.

    The folder must be where every host sees it (run.dir). What the job asks of Slurm is cluster.slurm.
    Lines of shell that a recipe brings (cluster.slurm.setup) are shown on the error output.
    The script may be submitted again: the run goes on.
    """
    from trainspec_cli.cli.shell_lines import check_own_lines, render_shell_lines, shell_lines

    points = list(_points(arguments, sweep or []))
    loaded = [_load(point) for point in points]
    plans = [_plan(one) for one in loaded]
    _check_alike(plans)
    print(render_shell_lines(loaded[0]), end="", file=sys.stderr)
    if submit and not allow_setup:
        check_own_lines(loaded)
    roots = [_make_run(one, plan) for one, plan in zip(loaded, plans, strict=True)]
    with private_files():  # Slurm gives the umask of this process to the job, and so to its log
        script, text = _write_script(plans[0], roots, loaded[0].composed.recipe)
        job_id = _submit(script, roots) if submit else None
    told = {
        "script": str(script),
        "runs": [str(root) for root in roots],
        "job_id": job_id,
        **shell_lines(loaded[0].spec),
    }
    if as_json:
        print(json_text(told))
    elif submit:
        print(job_id)
    else:
        print(text, end="")
    print("".join(f"run folder  {root}\n" for root in roots) + f"script      {script}", file=sys.stderr)


def _points(arguments: Sequence[str], sweeps: Sequence[str]) -> Iterator[list[str]]:
    """One command line a point of the sweep."""
    from trainspec_cli.cli.plan import read_sweep

    swept = [read_sweep(sweep) for sweep in sweeps]
    keys = {key for key, _ in swept}
    others = [argument for argument in arguments if argument.partition("=")[0] not in keys]
    for values in product(*(values for _, values in swept)):
        yield [*others, *(f"{key}={value}" for (key, _), value in zip(swept, values, strict=True))]


def _load(arguments: Sequence[str]) -> Loaded:
    from trainspec_cli.cli.load import load

    return load(arguments)


def _plan(loaded: Loaded) -> Plan:
    """For the hosts of the job, which need not be like this one."""
    from trainspec_cli.cli.load import plan_for

    return plan_for(loaded, _machine_of_job(loaded))


def _machine_of_job(loaded: Loaded) -> Machine:
    """Raises RecipeError where the recipe leaves open what only the job's hosts could tell."""
    from trainspec_cli.launch.job.machine import detect
    from trainspec_cli.spec.recipe.cluster import Machine

    cluster = loaded.spec.cluster
    open_keys = [key for key in ("device", "devices_per_node") if getattr(cluster, key) == AUTO]
    if open_keys:
        problems = [_left_open(key) for key in open_keys]
        raise RecipeError(loaded.composed.locate(problems))
    if cluster.device == "cpu":
        return detect(look_for_gpus=False)
    chip, devices = cluster.accelerator, int(cluster.devices_per_node)
    names = (chip.name if chip else "GPU",) * devices
    return Machine(
        hostname="the job's hosts",
        cpu_cores=1,
        memory_bytes=int(cluster.host_memory_gb * 1e9),
        gpu_names=names,
        gpu_memory_bytes=int(chip.memory_gb * 1e9) if chip else 0,
        bf16=chip is None or chip.bf16_tflops > 0,
        fp8=chip is not None and chip.fp8_tflops > 0,
    )


def _left_open(key: str) -> Problem:
    message = f"`cluster.{key}` is auto, and the job's hosts cannot be looked at before they are given"
    hint = "choose a cluster, such as cluster=h100, or type cluster.device=cuda cluster.devices_per_node=8"
    return Problem("left_open", message, f"cluster.{key}", hint)


def _check_alike(plans: Sequence[Plan]) -> None:
    """One script asks for one size of job."""
    sizes = {(plan.num_nodes, plan.devices_per_node, plan.device, plan.spec.cluster.slurm) for plan in plans}
    if len(sizes) > 1:
        message = "the runs of the sweep ask for different hosts or options of Slurm, and an array has one of each"
        raise RecipeError(Problem("usage", message, hint="sweep them one by one"))


def _make_run(loaded: Loaded, plan: Plan) -> Path:
    """The run on paper: all that a launch writes before its workers start, and the folder of the job's logs."""
    from trainspec_cli.cli.console import PrintableConsole
    from trainspec_cli.cli.launch import origin_of, prepare_data
    from trainspec_cli.launch.backend.nodes.backend import Reach, build_nodes_job
    from trainspec_cli.launch.job.folder import make_folder, storage, write_launch
    from trainspec_cli.launch.slurm.script import check_folder, log_of

    wanted = plan.spec.run.dir
    check_folder(Path.cwd() if wanted == AUTO else Path(wanted).absolute())
    data_folder = prepare_data(loaded, PrintableConsole(stderr=True))
    with storage(wanted):
        root = make_folder(wanted, loaded.composed.recipe).absolute()
        log_of(root).parent.mkdir(parents=True, exist_ok=True)
        job = build_nodes_job(plan, root, Reach("", ("sbatch", str(root / "job.sbatch"))))
        write_launch(job, plan, origin_of(loaded), data_folder)
    return root


def _write_script(plan: Plan, roots: Sequence[Path], recipe: str) -> tuple[Path, str]:
    """Into each run's folder, where submitting it again goes on with the run; an array's lies beside its runs."""
    from trainspec_cli.launch.slurm.script import array_log, render_script
    from trainspec_cli.rundir.files import write_text
    from trainspec_cli.rundir.paths import RunDir

    for root in roots:
        text = render_script(plan, [root], recipe, sys.argv[1:], Path.cwd())
        write_text(RunDir(root).job_sbatch, text)
    if len(roots) == 1:
        return RunDir(roots[0]).job_sbatch, text
    text = render_script(plan, roots, recipe, sys.argv[1:], Path.cwd())
    script = array_log(roots).parent / f"{roots[0].name}.sbatch"
    write_text(script, text)
    return script, text


def _submit(script: Path, roots: Sequence[Path]) -> str:
    """-> the job's number, which the runs keep."""
    from trainspec_cli.launch.slurm.commands import submit
    from trainspec_cli.launch.slurm.queue import note_job
    from trainspec_cli.rundir.paths import RunDir

    job_id = submit(script)
    for task, root in enumerate(roots):
        note_job(RunDir(root), f"{job_id}_{task}" if len(roots) > 1 else job_id)
    return job_id
