"""`trainspec launch`: train a recipe on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspec_cli.cli.options import AsJson, Endpoint, Force, NodeRank, NumNodes, RecipeArguments
from trainspec_cli.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.json_text import json_text

if TYPE_CHECKING:
    from rich.console import Console

    from trainspec_cli.cli.load import Loaded
    from trainspec_cli.launch.job.folder import Origin
    from trainspec_cli.spec.recipe.cluster import Machine
    from trainspec_cli.spec.recipe.run import RunSpec
    from trainspec_cli.spec.results.plan import Plan

app = typer.Typer(add_completion=False)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show command, environment and plan; start nothing.")]


@app.command()
def launch(
    arguments: RecipeArguments,
    dry_run: DryRun = False,
    force: Force = False,
    nnodes: NumNodes = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Train a recipe. Ctrl-C writes a checkpoint and stops (exit code 6); a second one stops at once.

    On several hosts without Slurm, give the same command on each, with --node-rank and a run.dir that all share.
    """
    from trainspec_cli.cli.load import detect_machine, load, plan_on
    from trainspec_cli.launch.signals import interrupt, on_stop_signal

    with on_stop_signal(interrupt):
        loaded = load([*arguments, *([f"cluster.num_nodes={nnodes}"] if nnodes else [])])
        if loaded.spec.cluster.num_nodes > 1:
            check_reachable(loaded.spec, nnodes, node_rank, rdzv_endpoint)
            if node_rank:
                return _join(loaded, node_rank)
        machine = detect_machine(loaded.spec)
        assert machine is not None, "a recipe without problems says what device it wants"
        plan = plan_on(loaded, machine)
        if dry_run:
            _show(loaded, plan, machine, force=force, as_json=as_json)
            return 0
        if plan.num_nodes > 1:
            return _launch_on_several(loaded, plan, str(rdzv_endpoint), as_json=as_json)
        return _launch(loaded, plan, machine, force=force, as_json=as_json)


def check_reachable(spec: RunSpec, nnodes: int | None, node_rank: int, endpoint: str | None) -> None:
    """Raises RecipeError where it is not said how several hosts find one another."""
    hosts = spec.cluster.num_nodes
    example = f"--nnodes {hosts} --node-rank I --rdzv-endpoint HOST:PORT run.dir=<a shared folder>"
    hint = f"under Slurm: trainspec sbatch; else on each host: {example}"
    if nnodes is None or endpoint is None:
        message = f"`cluster.num_nodes` is {hosts}, and this command starts one host"
        raise RecipeError(Problem("several_hosts", message, "cluster.num_nodes", hint))
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise RecipeError(Problem("usage", f"--rdzv-endpoint is `{endpoint}`; HOST:PORT is needed", hint=hint))
    if not 0 <= node_rank < hosts:
        message = f"--node-rank is {node_rank}; of {hosts} hosts it is 0 to {hosts - 1}"
        raise RecipeError(Problem("usage", message, hint=hint))
    if spec.run.dir == AUTO:
        message = "`run.dir` is auto, and the hosts would each make a folder of their own"
        raise RecipeError(Problem("missing_value", message, "run.dir", "type run.dir=<a folder that all hosts share>"))


def _join(loaded: Loaded, node_rank: int) -> int:
    from trainspec_cli.cli.nodes import join
    from trainspec_cli.cli.train import make_console

    return join(loaded.spec.run.dir, node_rank, make_console(as_json=False))


def _launch_on_several(loaded: Loaded, plan: Plan, endpoint: str, *, as_json: bool) -> int:
    """As the first of them."""
    from trainspec_cli.cli.nodes import drive
    from trainspec_cli.cli.train import make_console
    from trainspec_cli.launch.backend.nodes.backend import build_nodes_job, reach_from_here
    from trainspec_cli.launch.job.folder import check_free, make_folder, storage, write_launch

    console, wanted = make_console(as_json=as_json), plan.spec.run.dir
    reach = reach_from_here(endpoint)
    check_free(wanted)
    data_folder = prepare_data(loaded, console)
    with storage(wanted):
        job = build_nodes_job(plan, make_folder(wanted, loaded.composed.recipe), reach)
        write_launch(job, plan, origin_of(loaded), data_folder)
    return drive(job.run, reach, console, as_json=as_json)


def _launch(loaded: Loaded, plan: Plan, machine: Machine, *, force: bool, as_json: bool) -> int:
    from trainspec_cli.cli.predict import predict
    from trainspec_cli.cli.preflight import examine_here
    from trainspec_cli.cli.settle_kernels import settle_kernels
    from trainspec_cli.cli.train import make_console, train
    from trainspec_cli.launch.job.claim import claim
    from trainspec_cli.launch.job.folder import RUNS, check_free, make_folder, storage, write_launch
    from trainspec_cli.launch.job.job import build_job

    console, wanted = make_console(as_json=as_json), plan.spec.run.dir
    check_free(wanted)
    plan = predict(plan, machine, console, force=force)
    examine_here(plan, RUNS if wanted == AUTO else Path(wanted), console, force=force)
    plan, kernels = settle_kernels(plan, machine, console)
    data_folder = prepare_data(loaded, console)
    with storage(wanted):
        job = build_job(plan, make_folder(wanted, loaded.composed.recipe), machine)
        with claim(job.run, job.launch_id):
            write_launch(job, plan, origin_of(loaded), data_folder, kernels)
            return train(job, plan, console, as_json=as_json)


def prepare_data(loaded: Loaded, console: Console) -> Path | None:
    """The folder to read, of tokens made now if need be; None where nothing is read. Problems are located as the
    recipe's own are."""
    from trainspec_cli.corpus.collection import Collection
    from trainspec_cli.corpus.labelled import find_samples
    from trainspec_cli.corpus.prepare import prepare
    from trainspec_cli.report.live import showing_progress

    spec = loaded.spec
    try:
        if spec.model.unit == "samples":
            return find_samples(spec.data, spec.model)
        with showing_progress(console) as on_progress:
            folder = prepare(spec.data, on_progress)
        for note in Collection.open(folder).check(spec.data, spec.model.vocab_size):
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        return folder
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error


def origin_of(loaded: Loaded) -> Origin:
    from trainspec_cli.compose.render import render_yaml
    from trainspec_cli.launch.job.folder import Origin

    return Origin(loaded.composed.recipe, sys.argv[1:], render_yaml(loaded.composed))


def _show(loaded: Loaded, plan: Plan, machine: Machine, *, force: bool, as_json: bool) -> None:
    """What would be started, and where; refused as the launch would be. Nothing is probed for it."""
    from trainspec_cli.cli.predict import predict
    from trainspec_cli.cli.settle_kernels import settle_kernels
    from trainspec_cli.cli.train import make_console
    from trainspec_cli.launch.job.command import render_command
    from trainspec_cli.launch.job.dry import describe
    from trainspec_cli.launch.job.folder import RUNS
    from trainspec_cli.launch.job.job import build_job
    from trainspec_cli.report.text import describe_plan

    wanted = plan.spec.run.dir
    root = RUNS / loaded.composed.recipe / "TIME" if wanted == AUTO else Path(wanted)
    console = make_console(as_json=as_json)
    plan = predict(plan, machine, console, force=force, may_probe=False)
    plan, _ = settle_kernels(plan, machine, console, may_measure=False)
    job = build_job(plan, root, machine)
    if as_json:
        print(json_text(describe(job, plan)))
        return
    print(f"{describe_plan(plan)}\n\n{render_command(job.command, job.environment, Path.cwd())}", end="")
