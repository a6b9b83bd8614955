"""A run on several hosts, seen from the first of them: begun or resumed, watched, and told of."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console

from trainspec_cli.cli.resume import check_unfinished, newest_step, read_plan
from trainspec_cli.cli.train import train
from trainspec_cli.doctor.judge import refuse_unfit
from trainspec_cli.errors import MachineError, Problem, WorkerError
from trainspec_cli.launch.claim import claim
from trainspec_cli.launch.folder import storage, write_resume
from trainspec_cli.launch.nodes.agent import run_agent
from trainspec_cli.launch.nodes.executor import JOIN_TIMEOUT_S, Examination, NodesExecutor, Reach, build_nodes_job
from trainspec_cli.launch.signals import StopRequests
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.plan import Plan

RETRY_S = 0.5
RESULT_TIMEOUT_S = 30.0


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
            executor = NodesExecutor(
                plan, reach, examination=_preflight(plan, run) if plan.spec.run.preflight else None
            )
            return train(job, plan, console, as_json=as_json, executor=executor, requests=requests)


def _preflight(plan: Plan, run: RunDir) -> Examination:
    """The doctor's short form, on every host."""
    command = (sys.executable, "-m", "trainspec_cli.doctor.host", str(run.root), plan.device, plan.compute)
    return Examination(command, refuse_unfit)


def join(arguments_dir: str, node: int, console: Console) -> int:
    """As host `node` (not the first) of a run that the first host starts; -> the run's exit code.

    Waits for the first host to write where it is. Raises MachineError where it does not come.
    """
    run = RunDir(Path(arguments_dir).absolute())
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    console.print(f"node {node}: waiting for the first host in {run.root}")
    while True:
        generation = generations.newest(run)
        try:
            if generation:
                run_agent(run, generation, node)
                return _exit_code(run)
        except MachineError as error:
            refusal: MachineError | None = error
        else:
            refusal = None
        if time.monotonic() > deadline:
            hint = "start the first host too: --node-rank 0, with the same run.dir on a file system that all share"
            message = f"no first host was found in {run.root} within {JOIN_TIMEOUT_S:g} s"
            raise refusal or MachineError(Problem("no_first_host", message, hint=hint, environment=True))
        time.sleep(RETRY_S)


def _exit_code(run: RunDir) -> int:
    """Of the whole run, once the first host has written it."""
    deadline = time.monotonic() + RESULT_TIMEOUT_S
    while not run.result_json.is_file():
        if time.monotonic() > deadline:
            return WorkerError.exit_code
        time.sleep(RETRY_S)
    return int(read_json(run.result_json)["exit_code"])
