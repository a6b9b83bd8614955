"""A run on several hosts, seen from the first of them: begun or resumed, watched, and told of."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from rich.console import Console

from trainspec_cli.cli.preflight import examine_all, examine_here
from trainspec_cli.cli.resume import check_unfinished, newest_step
from trainspec_cli.cli.settle_kernels import settle_kernels
from trainspec_cli.cli.train import train
from trainspec_cli.errors import MachineError, Problem, WorkerError
from trainspec_cli.launch.backend.nodes.agent import run_agent
from trainspec_cli.launch.backend.nodes.backend import JOIN_TIMEOUT_S, NodesBackend, Reach, build_nodes_job
from trainspec_cli.launch.job.claim import claim
from trainspec_cli.launch.job.folder import storage, write_resume
from trainspec_cli.launch.job.machine import detect
from trainspec_cli.launch.signals import StopRequests
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_plan
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.trust import check_tree

RETRY_S = 0.5
RESULT_TIMEOUT_S = 30.0
"""The first host has told how the run ended, or started it again, this long after this one's part."""


def drive(
    run: RunDir, reach: Reach, console: Console, *, as_json: bool = False, requests: StopRequests | None = None
) -> int:
    """-> the run's exit code. Raises TrainspecError where it failed, or cannot begin."""
    plan = read_plan(run)
    step = newest_step(run)
    check_unfinished(run, plan.spec.train.max_steps)
    with storage(str(run.root)):
        job = build_nodes_job(plan, run.root, reach)
        with claim(run, job.launch_id):
            if generations.newest(run):
                write_resume(job, plan, sys.argv[1:], step)
                console.print(f"goes on from step {step}" if step else "there is no checkpoint: it starts anew")
            if plan.num_nodes == 1:
                examine_here(plan, run.root, console)
            plan = _settle(plan, run, console)
            examination = examine_all(plan, run, console) if plan.num_nodes > 1 else None
            backend = partial(NodesBackend, reach=reach, examination=examination)
            return train(job, plan, console, as_json=as_json, backend=backend, requests=requests)


def _settle(plan: Plan, run: RunDir, console: Console) -> Plan:
    """Kernels that are left open are measured on this host, at the run's first start; the others take its choice."""
    if not plan.kernels.open_ops:
        return plan
    plan, table = settle_kernels(plan, detect(look_for_gpus=plan.device == "cuda"), console)
    write_json(run.kernels_json, to_plain(table))
    write_json(run.plan_json, to_plain(plan))
    return plan


def join(run_dir: str, node: int, console: Console) -> int:
    """As host `node` (not the first) of a run that the first host starts; -> the run's exit code.

    Takes part in every start that the first host makes, until the run has a result. Raises MachineError where the
    first host is not found, and where others can write in the run's folder.
    """
    run, served = RunDir(Path(run_dir).absolute()), 0
    deadline, refusal = time.monotonic() + JOIN_TIMEOUT_S, _no_first_host(run)
    console.print(f"node {node}: waiting for the first host in {run.root}")
    while time.monotonic() < deadline and not (served and run.result_json.is_file()):
        generation = generations.newest(run)
        if generation > served:
            check_tree(run.root)
            try:
                run_agent(run, generation, node)
                served, deadline = generation, time.monotonic() + RESULT_TIMEOUT_S
            except MachineError as error:  # it may be an earlier start's, for which nobody answers any more
                refusal = error
        time.sleep(RETRY_S)
    if not served:
        raise refusal
    return int(read_json(run.result_json)["exit_code"]) if run.result_json.is_file() else WorkerError.exit_code


def _no_first_host(run: RunDir) -> MachineError:
    message = f"no first host was found in {run.root} within {JOIN_TIMEOUT_S:g} s"
    hint = "start the first host too: --node-rank 0, with the same run.dir on a file system that all share"
    return MachineError(Problem("no_first_host", message, hint=hint, environment=True))
