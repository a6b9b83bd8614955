"""A run on several hosts, seen from the first of them: begun or resumed, watched, and told of."""

from __future__ import annotations

import sys

from rich.console import Console

from trainspec_cli.cli.resume import check_unfinished, newest_step, read_plan
from trainspec_cli.cli.train import train
from trainspec_cli.launch.claim import claim
from trainspec_cli.launch.folder import storage, write_resume
from trainspec_cli.launch.nodes.executor import NodesExecutor, Reach, build_nodes_job
from trainspec_cli.launch.signals import StopRequests
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.paths import RunDir


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
            return train(job, plan, console, as_json=as_json, executor=NodesExecutor(plan, reach), requests=requests)
