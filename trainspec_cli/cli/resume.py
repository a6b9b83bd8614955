"""`trainspec resume`: go on with a run from its newest whole checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspec_cli.cli.options import AsJson, Endpoint, Force, NodeRank, NumNodes
from trainspec_cli.cli.runs import RunArgument
from trainspec_cli.errors import MachineError, Problem, RecipeError

if TYPE_CHECKING:
    from rich.console import Console

    from trainspec_cli.cli.load import Loaded
    from trainspec_cli.launch.job.job import Job
    from trainspec_cli.rundir.paths import RunDir
    from trainspec_cli.spec.recipe.cluster import Machine
    from trainspec_cli.spec.results.plan import Plan

app = typer.Typer(add_completion=False)

FIXED = ("model", "data", "optim.name", "batching.global_batch_size", "train.seed", "run.dir")
"""What the checkpoint, and the position in the data, depend on."""

MACHINE_BOUND = ("device", "world_size", "compute", "micro_batch_size", "grad_accum_steps")
"""What a plan resolves from the machine, which may be another one now."""

Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="What to change, such as train.max_steps=800.", show_default=False),
]


@app.command()
def resume(
    run: RunArgument,
    changes: Changes = None,
    force: Force = False,
    nnodes: NumNodes = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Go on with a run in its own folder, from its newest whole checkpoint.

    On several hosts without Slurm, give the same command on each, with --node-rank.
    """
    from trainspec_cli.cli.load import detect_machine, plan_on
    from trainspec_cli.cli.predict import predict
    from trainspec_cli.cli.preflight import examine_here
    from trainspec_cli.cli.runs import find_own_run
    from trainspec_cli.cli.settle_kernels import settle_kernels
    from trainspec_cli.cli.train import make_console, train
    from trainspec_cli.launch.job.claim import claim
    from trainspec_cli.launch.job.folder import storage, write_resume
    from trainspec_cli.launch.job.job import build_job
    from trainspec_cli.launch.signals import interrupt, on_stop_signal
    from trainspec_cli.rundir.record import read_plan

    with on_stop_signal(interrupt):
        run_dir, console = find_own_run(run), make_console(as_json=as_json)
        old = read_plan(run_dir)
        loaded = _change(run_dir, old, changes or [])
        check_unfinished(run_dir, loaded.spec.train.max_steps)
        _check_data(run_dir, loaded)
        if loaded.spec.cluster.num_nodes > 1:
            endpoint = _check_several(run_dir, loaded, changes or [], nnodes, node_rank, rdzv_endpoint)
            return _resume_on_several(run_dir, node_rank, endpoint, console, as_json=as_json)
        machine = detect_machine(loaded.spec)
        assert machine is not None, "a run that was started says what device it wants"
        plan = predict(_keep_kernels(plan_on(loaded, machine), old, machine), machine, console, force=force)
        examine_here(plan, run_dir.root, console, force=force)
        plan, kernels = settle_kernels(plan, machine, console)
        with storage(str(run_dir.root)):
            job = build_job(plan, run_dir.root, machine)
            with claim(run_dir, job.launch_id):
                write_resume(job, plan, sys.argv[1:], newest_step(run_dir), kernels)
                _tell_start(job, old, plan, console)
                return train(job, plan, console, as_json=as_json)


def _check_several(
    run_dir: RunDir, loaded: Loaded, changes: list[str], nnodes: int | None, node_rank: int, endpoint: str | None
) -> str:
    """-> the endpoint. Raises RecipeError."""
    from trainspec_cli.cli.launch import check_reachable

    if run_dir.job_sbatch.is_file() and endpoint is None:
        message = f"the run in {run_dir.root} was made for Slurm, on {loaded.spec.cluster.num_nodes} hosts"
        raise RecipeError(Problem("several_hosts", message, hint=f"type sbatch {run_dir.job_sbatch}"))
    spec = replace(loaded.spec, run=replace(loaded.spec.run, dir=str(run_dir.root)))
    check_reachable(spec, nnodes, node_rank, endpoint)
    if changes:
        message = f"a run on several hosts goes on as it was: `{changes[0]}` cannot be changed"
        raise RecipeError(Problem("unsupported", message, hint="leave it out, or start a new run"))
    return str(endpoint)


def _resume_on_several(run_dir: RunDir, node_rank: int, endpoint: str, console: Console, *, as_json: bool) -> int:
    from trainspec_cli.cli.nodes import drive, join
    from trainspec_cli.launch.backend.nodes.backend import reach_from_here

    if node_rank:
        return join(str(run_dir.root), node_rank, console)
    return drive(run_dir, reach_from_here(endpoint), console, as_json=as_json)


def newest_step(run_dir: RunDir) -> int:
    """0 where there is no checkpoint."""
    return max(run_dir.checkpoint_steps(), default=0)


def _change(run_dir: RunDir, old: Plan, changes: list[str]) -> Loaded:
    """The run's own spec with `changes`. Raises RecipeError with every problem of theirs."""
    from trainspec_cli.cli.load import Loaded, require
    from trainspec_cli.compose.compose import amend
    from trainspec_cli.rundir.record import read_about
    from trainspec_cli.spec.canonical import to_plain
    from trainspec_cli.spec.recipe.run import RunSpec
    from trainspec_cli.spec.rules.check import check
    from trainspec_cli.spec.rules.engine import check_engine
    from trainspec_cli.spec.structure import build

    values = to_plain(old.spec)
    composed = amend(read_about(run_dir)["recipe"], values, changes)
    draft, mistyped = build(RunSpec, composed.data)
    # The data was read when the run began; where it came from need not be there any more.
    broken = [problem for problem in [*check(draft), *check_engine(draft)] if not problem.path.startswith("data.")]
    problems = [*mistyped, *broken, *_fixed(values, composed.data)]
    require([*composed.problems, *composed.locate(problems)])
    return Loaded(draft, composed)


def _keep_kernels(plan: Plan, old: Plan, machine: Machine) -> Plan:
    """What was chosen when the run began holds for all of it, unless another choice is asked for now. Raises
    MachineError where this machine cannot run it."""
    from trainspec_cli.cli.load import require
    from trainspec_cli.spec.rules.kernels import check_kernels

    if plan.spec.kernels != old.spec.kernels:
        return plan
    require(list(check_kernels(replace(plan.spec, kernels=old.kernels), machine)))
    return replace(plan, kernels=old.kernels)


def _fixed(old: dict[str, object], new: dict[str, object]) -> list[Problem]:
    """Changes to what a resumed run cannot change."""
    from trainspec_cli.compose.render import flatten

    before, after = flatten(old), flatten(new)
    changed = [path for path in after if after[path] != before.get(path)]
    return [
        Problem(
            code="fixed_value",
            message=f"`{path}` cannot change in a run that goes on: its checkpoint depends on it",
            path=path,
            hint=f"leave it out, or start a new run: trainspec launch recipe=NAME {path}={after[path]}",
        )
        for path in changed
        if any(path == key or path.startswith(f"{key}.") for key in FIXED)
    ]


def check_unfinished(run_dir: RunDir, max_steps: int) -> None:
    step = newest_step(run_dir)
    if step >= max_steps:
        raise RecipeError(
            Problem(
                code="nothing_left",
                message=f"the run is at step {step}, and `train.max_steps` is {max_steps}: nothing is left to do",
                path="train.max_steps",
                hint=f"to train on: trainspec resume {run_dir.root} train.max_steps={2 * step}",
            )
        )


def _check_data(run_dir: RunDir, loaded: Loaded) -> None:
    """The folder that the run began with is there, or is made again just as it was; phantoms have none."""
    from trainspec_cli.corpus.prepare import prepare
    from trainspec_cli.rundir.record import read_data_dir

    data_dir, data = read_data_dir(run_dir), loaded.spec.data
    if data_dir is None or (folder := Path(data_dir)).is_dir():
        return
    if data.unit == "samples" or data.source == "tokens" or prepare(data) != folder:
        raise MachineError(
            Problem(
                code="missing_data",
                message=f"the data folder of this run is gone ({folder}), and its source is not what it was",
                path="data",
                hint="put it back, or start a new run",
                environment=True,
            )
        )


def _tell_start(job: Job, old: Plan, new: Plan, console: Console) -> None:
    from trainspec_cli.rundir.memory import newest_copy

    step = newest_step(job.run)
    lines = [f"goes on from step {step}" if step else "there is no checkpoint: it starts from the first step again"]
    if new.spec.checkpoint.memory_interval_steps and newest_copy(job.run):
        lines = [f"goes on from the newest copy in memory that is whole, else from step {step}"]
    for name in MACHINE_BOUND:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            lines.append(f"{name} is {after} on this machine, and was {before}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
