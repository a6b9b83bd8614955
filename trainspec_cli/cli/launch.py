"""`trainspec launch`: train a recipe on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainspec_cli.cli.options import AsJson, Force, RecipeArguments
from trainspec_cli.errors import TrainspecError
from trainspec_cli.spec.auto import AUTO

if TYPE_CHECKING:
    from rich.console import Console

    from trainspec_cli.cli.load import Loaded
    from trainspec_cli.launch.folder import Origin
    from trainspec_cli.spec.cluster import Machine
    from trainspec_cli.spec.plan import Plan

app = typer.Typer(add_completion=False)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show command, environment and plan; start nothing.")]


@app.command()
def launch(
    arguments: RecipeArguments,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: AsJson = False,
) -> int:
    """Train a recipe. Ctrl-C writes a checkpoint and stops (exit code 6); a second one stops at once."""
    from trainspec_cli.cli.load import detect_machine, load, plan_on
    from trainspec_cli.launch.signals import interrupt, on_stop_signal

    with on_stop_signal(interrupt):
        loaded = load(arguments)
        machine = detect_machine(loaded.spec)
        assert machine is not None, "a recipe without problems says what device it wants"
        plan = plan_on(loaded, machine)
        if dry_run:
            _show(loaded, plan, machine, force=force, as_json=as_json)
            return 0
        return _launch(loaded, plan, machine, force=force, as_json=as_json)


def _launch(loaded: Loaded, plan: Plan, machine: Machine, *, force: bool, as_json: bool) -> int:
    from trainspec_cli.cli.predict import predict
    from trainspec_cli.cli.train import make_console, train
    from trainspec_cli.launch.claim import claim
    from trainspec_cli.launch.folder import check_free, make_folder, storage, write_launch
    from trainspec_cli.launch.job import build_job

    console, wanted = make_console(as_json=as_json), plan.spec.run.dir
    check_free(wanted)
    plan = predict(plan, machine, console, force=force)
    data_folder = prepare_data(loaded, console)
    with storage(wanted):
        job = build_job(plan, make_folder(wanted, loaded.composed.recipe), machine)
        with claim(job.run, job.launch_id):
            write_launch(job, plan, origin_of(loaded), data_folder)
            return train(job, plan, console, as_json=as_json)


def prepare_data(loaded: Loaded, console: Console) -> Path | None:
    """The folder to read, of tokens made now if need be; None where nothing is read. Problems are located as the
    recipe's own are."""
    from trainspec_cli.corpus.labelled import find_samples
    from trainspec_cli.corpus.prepare import prepare
    from trainspec_cli.report.live import showing_progress
    from trainspec_cli.spec.model import ConvModel

    spec = loaded.spec
    try:
        if isinstance(spec.model, ConvModel):
            return find_samples(spec.data, spec.model)
        with showing_progress(console) as on_progress:
            return prepare(spec.data, on_progress)
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error


def origin_of(loaded: Loaded) -> Origin:
    from trainspec_cli.compose.render import render_yaml
    from trainspec_cli.launch.folder import Origin

    return Origin(loaded.composed.recipe, sys.argv[1:], render_yaml(loaded.composed))


def _show(loaded: Loaded, plan: Plan, machine: Machine, *, force: bool, as_json: bool) -> None:
    """What would be started, and where; refused as the launch would be. Nothing is probed for it."""
    from trainspec_cli.cli.predict import predict
    from trainspec_cli.cli.train import make_console
    from trainspec_cli.launch.command import render_command
    from trainspec_cli.launch.dry import describe
    from trainspec_cli.launch.folder import RUNS
    from trainspec_cli.launch.job import build_job
    from trainspec_cli.report.text import describe_plan

    wanted = plan.spec.run.dir
    root = RUNS / loaded.composed.recipe / "TIME" if wanted == AUTO else Path(wanted)
    plan = predict(plan, machine, make_console(as_json=as_json), force=force, may_probe=False)
    job = build_job(plan, root, machine)
    if as_json:
        typer.echo(json.dumps(describe(job, plan), indent=2))
        return
    typer.echo(f"{describe_plan(plan)}\n\n{render_command(job.command, job.environment, Path.cwd())}", nl=False)
