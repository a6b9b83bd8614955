"""The worker's door: `torchrun -m trainspec_cli.engine RUNDIR`. Reads plan.json and run.json; composes nothing."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING

from trainspec_cli.engine.run.signals import StopRequest
from trainspec_cli.errors import TrainspecError
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.results.plan import Plan

if TYPE_CHECKING:
    from trainspec_cli.engine.run.trainer import Trainer


def main() -> None:
    stop = StopRequest().listen()
    run_dir = RunDir(sys.argv[1])
    try:
        work(run_dir, stop)
    except Exception as error:
        leave_error(run_dir, error)
        raise


def work(run_dir: RunDir, stop: StopRequest) -> None:
    """Torch is imported here, when a request to stop is already heard."""
    from trainspec_cli.engine.build.initial import load_initial
    from trainspec_cli.engine.build.train_state import build_train_state
    from trainspec_cli.engine.comm.joining import join_processes, leave_processes
    from trainspec_cli.engine.run.sources import open_source

    plan = from_plain(Plan, read_json(run_dir.plan_json))
    run = read_json(run_dir.run_json)
    device = join_processes(plan.device)
    state = build_train_state(plan, device)
    if not run_dir.checkpoint_steps():
        load_initial(plan, state)
    source = open_source(plan, run["data_dir"], state)
    make = trainer_of(plan)
    make(plan, run_dir, source, run["digest"], state, stop).run()
    leave_processes()


def trainer_of(plan: Plan) -> type[Trainer]:
    """Replica groups are imported where there are some, and not elsewhere."""
    if plan.replica_groups > 1:
        from trainspec_cli.engine.run.elastic_trainer import ElasticTrainer

        return ElasticTrainer
    from trainspec_cli.engine.run.trainer import Trainer

    return Trainer


def leave_error(run_dir: RunDir, error: Exception) -> None:
    """This worker's own words, for the supervisor to show; not for that of a newer start."""
    if Fence.of_worker(run_dir).is_closed():
        return
    group, size = (int(os.environ.get(name, "0")) for name in ("TRAINSPEC_GROUP", "WORLD_SIZE"))
    rank = group * size + int(os.environ.get("RANK", "0"))
    problem = error.problems[0] if isinstance(error, TrainspecError) else None
    write_json(
        run_dir.error(rank),
        {
            "rank": rank,
            "host": socket.gethostname(),
            "time": time.time(),
            "type": type(error).__name__,
            "message": str(error),
            "code": problem.code if problem else None,
            "exit_code": error.exit_code if isinstance(error, TrainspecError) else None,
            "hint": problem.hint if problem else None,
            "traceback": traceback.format_exc(),
        },
    )


if __name__ == "__main__":
    main()
