"""`resume`: a session that continues a run in its own folder, with the values that may change."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainspec_cli.core.errors import EXIT_DONE, Problem, RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import Relief
from trainspec_cli.recipe.rules.check import check, check_engine, check_kernels, close_axes
from trainspec_cli.recipe.rules.run import describe_other_blocks
from trainspec_cli.reporter.console import PrintableConsole, RunConsole, make_console
from trainspec_cli.reporter.runs import ALIVE
from trainspec_cli.run.backend.nodes.backend import Reach, build_nodes_job
from trainspec_cli.run.channel.folders import nodes_secret
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.memory import newest_copy
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir, read_plan, read_plan_of_all_nodes, read_run_record
from trainspec_cli.run.job.folder import claim, is_running, storage, write_resume
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.notify import NOBODY, Notify
from trainspec_cli.run.recovery.memory import rank_setting, with_reliefs
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.commands import HOSTFILE, arrange, has_switches
from trainspec_cli.run.slurm.queue import job_of
from trainspec_cli.run.slurm.script import places_nodes
from trainspec_cli.session.launching.changes import (
    count_more_steps,
    describe_changes,
    differences,
    find_fixed,
    prepare_changed_data,
    trained_samples,
)
from trainspec_cli.session.launching.kinds import command_to_resume, kind_of, quoted
from trainspec_cli.session.launching.nodes import NodeOptions, join
from trainspec_cli.session.launching.session import (
    JOINED,
    Session,
    check_detachable,
    describe_detached,
    resume_detached,
    start,
)
from trainspec_cli.session.manager import manager_of
from trainspec_cli.session.recipe.data import check_data_of
from trainspec_cli.session.recipe.load import (
    Loaded,
    follows,
    machine_of_job,
    plan_for,
    plan_on,
    require,
    this_machine,
)
from trainspec_cli.session.runs.find import find_own_run, status_of_run

MANAGER = "cluster.manager"
OF_MEMORY = ("batching", "recompute", "offload")
"""Recipe sections that determine the memory use of a step."""


def resume(
    name: str,
    changes: Sequence[str],
    nodes: NodeOptions,
    notify: Notify = NOBODY,
    *,
    force: bool,
    as_json: bool,
    detach: bool = False,
) -> int:
    """Continue a run, as its first node or as a node that joins; return the run's exit code. With `detach`, return 0 as
    soon as a separate process has continued it."""
    joins = nodes.endpoint is not None and not nodes.is_first and nodes_secret() is not None
    try:
        run = find_own_run(name)
    except RecipeError:  # a node without a shared disk copies the run folder when it joins
        if not joins:
            raise
        return join(name, nodes.node_rank, make_console(as_json=as_json), joined=JOINED, address=nodes.address)
    return kind_of(run).resume(run, changes, nodes, notify, force=force, as_json=as_json, detach=detach)


def resume_recipe(
    run: RunDir,
    changes: Sequence[str],
    nodes: NodeOptions,
    notify: Notify,
    *,
    force: bool,
    as_json: bool,
    detach: bool,
) -> int:
    console = make_console(as_json=as_json)
    old = read_plan_of_all_nodes(run)
    if old.spec.cluster.manager != "none" or any(change.startswith(f"{MANAGER}=") for change in changes):
        values = [*changes, *nodes.as_arguments]
        changed = _change_values_and_data(run, old, values, console) if values else None
        spec = changed[0].spec if changed else old.spec
        if manager := manager_of(spec):
            nodes.check_managed(spec)
            check_unfinished(run, spec)
            record = partial(_record_changes, run, old, *changed, console) if changed else None
            return manager.resume(run, spec, record, notify, force=force, as_json=as_json, detach=detach)
    if changes and _is_of_slurm_alone(run, nodes) and not detach and notify == NOBODY:
        change_submitted(run, changes, console)
        return EXIT_DONE
    if nodes.endpoint and not detach:
        # A node without a shared disk may have an older plan than the first node.
        if not nodes.is_first and nodes_secret() is not None:
            return join(str(run.root), nodes.node_rank, console, joined=JOINED, address=nodes.address)
        # The first node prepares changed values for all. If another one has taken over from it, it joins like the rest.
        plan = read_plan_of_all_nodes(run)
        may_be_running = plan.num_nodes > 1 and plan.spec.resilience.survives_first_node
        if (changes and not nodes.is_first) or (not changes and may_be_running and is_running(run)):
            return join(str(run.root), nodes.node_rank, console, wait_s=plan.spec.run.join_timeout_s, joined=JOINED)
    session = replace(prepare_resume(run, changes, nodes, console, force=force, as_json=as_json), notify=notify)
    if not nodes.is_first and session.reach:
        wait_s = session.plan.spec.run.join_timeout_s
        return join(str(run.root), nodes.node_rank, console, wait_s=wait_s, joined=JOINED)
    if not detach:
        return start(session)
    check_detachable(session)
    pid = resume_detached(run, [*changes, *nodes.as_arguments, *notify.options], force=force)
    print(describe_detached(run, pid, as_json=as_json))
    return EXIT_DONE


def prepare_resume(
    run: RunDir,
    changes: Sequence[str],
    nodes: NodeOptions,
    console: RunConsole,
    *,
    force: bool = False,
    as_json: bool = False,
) -> Session:
    """Return the session for the run's next start, on as many nodes as `nodes` states. Raises RecipeError for changed
    fixed values and for a finished run, and MachineError if something is missing on this node."""
    old = read_plan_of_all_nodes(run)
    changes = [*changes, *nodes.as_arguments]
    loaded, data_folder = _change_values_and_data(run, old, changes, console)
    if _is_of_slurm_alone(run, nodes):
        message = f"the run in {run.root} was created for {loaded.spec.cluster.num_nodes} Slurm nodes"
        again = command_to_resume(run)
        if changes:  # a job has no options for changes
            again = f"trainspec resume {quoted(run)} {shlex.join(changes)}, which records the changes, and then {again}"
        raise RecipeError(Problem("several_hosts", message, hint=f"run {again}"))
    reach = nodes.reach(loaded.spec, str(run.root))
    if reach and loaded.spec == old.spec:
        return prepare_unchanged(run, reach, console, force=force, as_json=as_json)
    machine = this_machine(loaded.spec)
    plan = _keep_choices(run, plan_on(loaded, machine), old, loaded, machine)
    return Session(plan, machine, run, console, reach, data_folder, force=force, as_json=as_json)


def change_submitted(run: RunDir, changes: Sequence[str], console: RunConsole) -> None:
    """Record changes to a multi-node Slurm run, for the next job that the user submits. Raises RecipeError for changed
    fixed values, and for a run that is running or queued."""
    if (status := status_of_run(run)) in ALIVE:
        message = f"the run in {run.root} is {status}, and keeps its current values"
        raise RecipeError(Problem("still_running", message, hint=f"end its job first: scancel {job_of(run) or 'JOB'}"))
    old = read_plan_of_all_nodes(run)
    loaded, data_folder = _change_values_and_data(run, old, changes, console)
    problems = []
    for path in differences(to_plain(old.spec), to_plain(loaded.spec)):
        if path.startswith("cluster."):
            message = f"`{path}` is part of the job script, which a resume does not change"
            problems.append(Problem("fixed_value", message, path, f"edit {run.job_sbatch} if it is a Slurm option"))
    require(loaded.composed.locate(problems))
    _record_changes(run, old, loaded, data_folder, console, machine_of_job(loaded), ("sbatch", str(run.job_sbatch)))
    console.report(f"the next job of the run continues with the changes: {command_to_resume(run)}")


def _record_changes(
    run: RunDir,
    old: Plan,
    loaded: Loaded,
    data_folder: Path | None,
    console: RunConsole,
    machine: Machine,
    command: tuple[str, ...],
) -> None:
    """Record the changes, for a start that `command` brings about on nodes like `machine`."""
    plan = _keep_choices(run, plan_for(loaded, machine), old, loaded, machine)
    job = build_nodes_job(plan, run.root, Reach("", command))
    step = run.newest_step
    with storage(str(run.root)), claim(run, job.launch_id):
        write_resume(job, plan, sys.argv[1:], step, data_folder=data_folder)
    console.report(*describe_changes(old.spec, plan.spec, step, trained_samples(run, plan.spec, step)))


def _is_of_slurm_alone(run: RunDir, nodes: NodeOptions) -> bool:
    """Return whether a Slurm job starts the run on several nodes."""
    several = read_plan_of_all_nodes(run).spec.cluster.num_nodes > 1
    return several and run.job_sbatch.is_file() and nodes.endpoint is None


def prepare_unchanged(
    run: RunDir, reach: Reach, console: RunConsole, *, force: bool = False, as_json: bool = False
) -> Session:
    """Return the session of a run on several nodes that starts or continues exactly as planned. Raises RecipeError for
    a finished run."""
    plan = read_plan_of_all_nodes(run)
    check_unfinished(run, plan.spec)
    machine = detect(look_for_gpus=plan.device == "cuda")
    return Session(plan, machine, run, console, reach, force=force, as_json=as_json)


def run_recipe_in_job(run: RunDir, reach: Reach, console: RunConsole, requests: StopRequests, *, force: bool) -> int:
    """Start or continue the run on the nodes of its Slurm job; return its exit code. Raises TrainspecError if the run
    is rejected or fails."""
    place_nodes(run, read_plan(run), console)
    return start(prepare_unchanged(run, reach, console, force=force), requests)


def place_nodes(run: RunDir, plan: Plan, console: PrintableConsole) -> None:
    """Number the job's nodes by switch if the plan depends on the numbering. Raises MachineError."""
    if plan.blueprint is None or not places_nodes(plan):
        return
    addresses = slurm.topology_addresses(plan.num_nodes)
    if not has_switches(addresses):
        console.print("nodes keep Slurm's order, because Slurm does not know their switches (topology/tree)")
    hosts = arrange(addresses, slurm.own_name(), plan.blueprint.node_places)
    with storage(str(run.root)):
        write_text(run.hosts_txt, "\n".join(hosts) + "\n")
    os.environ[HOSTFILE] = str(run.hosts_txt.absolute())


def _change_values_and_data(
    run: RunDir, old: Plan, changes: Sequence[str], console: RunConsole
) -> tuple[Loaded, Path | None]:
    """Return the changed recipe, and the folder of its data if the data changes. Raises RecipeError."""
    from trainspec_cli.recipe.compose.compose import amend  # deferred: loads hydra, which --help does not need
    from trainspec_cli.session.recipe.complete import (  # also deferred
        absolute_code,  # also deferred
        complete_changed_steps,
        complete_warmup,
    )

    values = to_plain(old.spec)
    complete = partial(complete_changed_steps, own=values, folder=read_data_dir(run))
    recipe = read_run_record(run).recipe
    composed = amend(recipe, values, count_more_steps(old.spec, changes), (*absolute_code(), complete, complete_warmup))
    draft, mistyped = build(RunSpec, composed.data)
    mistyped = [problem for problem in mistyped if not follows(problem, composed)]
    broken = [*check(close_axes(draft)), *check_engine(draft)]
    if values["data"] == composed.data.get("data"):
        # The data was read when the run first started, so its source may no longer exist.
        broken = [problem for problem in broken if not problem.path.startswith("data.")]
    problems = [*mistyped, *broken, *find_fixed(run, recipe, values, composed.data)]
    require([*composed.problems, *composed.locate(problems)])
    loaded = Loaded(draft, composed)
    check_unfinished(run, loaded.spec)
    if loaded.spec.data != old.spec.data:
        return prepare_changed_data(run, loaded, console)
    check_data_of(run, loaded.spec.data)
    return loaded, None


def _keep_choices(run: RunDir, plan: Plan, old: Plan, loaded: Loaded, machine: Machine) -> Plan:
    """Return the plan with the choices made when the run first started. Raises RecipeError if the state cannot be
    loaded in the plan's layout, and MachineError if this machine cannot run the kernels."""
    if plan.spec.kernels == old.spec.kernels:
        require(list(check_kernels(replace(plan.spec, kernels=old.kernels), machine)))
        plan = replace(plan, kernels=old.kernels)
    # If the run started with a setting that saves more memory than the recipe's, because earlier runs had run out of
    # memory, keep it. A changed batch, setting or layout, or `scheduler=off`, overrides it.
    asks_the_same = all(getattr(plan.spec, key) == getattr(old.spec, key) for key in OF_MEMORY)
    is_alike = (plan.layout, plan.replica_groups) == (old.layout, old.replica_groups)
    if plan.spec.scheduler.mode != "off" and asks_the_same and is_alike:
        if rank_setting(old.memory_setting) > rank_setting(plan.memory_setting):
            plan = with_reliefs(plan, [Relief(plan.memory_setting, old.memory_setting)])
        if plan.spec.scheduler == old.spec.scheduler and plan.memory_setting == old.memory_setting:
            plan = replace(plan, largest_micro_batch_size=old.largest_micro_batch_size, changes=old.changes)
    has_saved = run.newest_step or newest_copy(run)
    if has_saved and (message := describe_other_blocks(plan.spec, old.layout.tp, plan.layout.tp)):
        hint = f"set layout.tp={old.layout.tp}, as in the saved state"
        require(loaded.composed.locate([Problem("unsupported", message, "layout.tp", hint)]))
    return plan


def check_unfinished(run: RunDir, spec: RunSpec) -> None:
    """Raise RecipeError if the run has completed all of its steps or trained on all of its samples."""
    step = run.newest_step
    wanted = spec.train.max_steps
    train = spec.train
    path = "train.max_steps"
    start = spec.batching.global_batch_size
    if not spec.ends_by_samples:
        trained = step
        run_samples = wanted
        what = f"`{path}` is {wanted}"
    else:  # the batch-size schedule may have changed, so samples are compared, not steps
        trained = trained_samples(run, spec, step)
        run_samples = wanted * start
        what = (
            f"has trained on {trained:,} samples; `{path}` {wanted:,} times `batching.global_batch_size` "
            f"{start:,} is {run_samples:,}"
        )
    if trained >= run_samples:
        factor = 2 * -(-trained // run_samples)  # a resume may request fewer samples than have been trained
        more = f"{path}={factor * wanted}"
        if train.tokens is not None:
            path = "train.tokens"
            more = f"train.tokens={factor * train.tokens}"
        elif train.epochs is not None:
            path = "train.epochs"
            more = f"train.epochs={factor * train.epochs:g}"
        message = f"the run is at step {step}, and {what}: nothing is left to do"
        raise RecipeError(Problem("nothing_left", message, path, f"to continue: trainspec resume {run.root} {more}"))
