"""The work of a worker: join the other workers, build its part of the model, and train it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from trainspec_cli.core.environment_names import GROUP
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.reading.files import read_field
from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.initial import load_initial
from trainspec_cli.engine.checkpoint.nodes import NodeDisks
from trainspec_cli.engine.comm.joining import join_processes, leave_processes
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.run.coordinator import open_coordinator
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.shortage import recall_reliefs
from trainspec_cli.engine.run.sources import open_source
from trainspec_cli.engine.run.startup import Startup
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.layout import joined
from trainspec_cli.run.channel.worker import SupervisorConnection
from trainspec_cli.run.folder.files import read_versioned
from trainspec_cli.run.folder.own_code import check_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan


def work(run_dir: RunDir, stop: StopRequest, startup: Startup) -> None:
    """Train according to the folder's plan.json and run.json. Does not return if the run succeeds."""
    startup.end("import")
    plan = read_plan(run_dir)
    about = read_versioned(run_dir.run_json)
    data_dir = None if about["data_dir"] is None else read_field(run_dir.run_json, about, "data_dir", str)
    digest = read_field(run_dir.run_json, about, "digest", str)
    device = join_processes(plan.device)
    startup.end("join")
    refuse_buckets(plan, device)
    group = int(os.environ[GROUP]) if plan.replica_groups > 1 else None
    rank = (group or 0) * plan.group_size + dist.get_rank()
    supervisor = SupervisorConnection.of_worker(rank)  # connect now, so that messages arrive before the first step
    plan = recall_reliefs(plan, run_dir)
    check_code(plan.spec, run_dir)
    state = build_train_state(plan, device)
    disks = NodeDisks.of_worker(run_dir)
    if disks:
        disks.agree_on_newest(remove_newer=group is None)
    if disks.newest_step < 0 if disks else not run_dir.checkpoint_steps():
        load_initial(plan, state)
    journal = Journal(run_dir, dist.get_rank(), plan.spec, group)
    run = TrainingRun(plan, state, run_dir, digest, stop, journal, group, supervisor, startup, disks)
    source = open_source(run, data_dir)
    startup.end("build")
    Trainer(run, source, open_coordinator(run, source)).train()
    leave_processes()


def refuse_buckets(plan: Plan, device: torch.device) -> None:
    """Raise RecipeError if the recipe's bucket size has no effect: the plan was checked for CPUs, but a device plug-in
    is used."""
    if on_chip(device) and (problems := list(joined(plan.spec, plan.layout, "cuda"))):
        raise RecipeError(problems)
