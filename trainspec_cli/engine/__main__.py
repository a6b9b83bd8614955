"""A worker: `torchrun -m trainspec_cli.engine RUNDIR` trains by the folder's plan.json and run.json."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

from trainspec_cli.engine.run.signals import StopRequest
from trainspec_cli.environment_names import GROUP
from trainspec_cli.errors import TrainspecError
from trainspec_cli.policy.memory import with_reliefs
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import WorkerErrorRecord, write_error
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.results.plan import Plan


def main() -> None:
    stop = StopRequest().listen()
    run_dir = RunDir(sys.argv[1])
    try:
        work(run_dir, stop)
    except Exception as error:
        leave_error(run_dir, error)
        raise


def work(run_dir: RunDir, stop: StopRequest) -> None:
    """Train. Torch is imported here, when a request to stop is already heard."""
    from trainspec_cli.engine.build.initial import load_initial
    from trainspec_cli.engine.build.train_state import build_train_state
    from trainspec_cli.engine.comm.joining import join_processes, leave_processes
    from trainspec_cli.engine.run.coordinator import RunContext, open_coordinator
    from trainspec_cli.engine.run.relief import recall_reliefs
    from trainspec_cli.engine.run.sources import open_source
    from trainspec_cli.engine.run.trainer import Trainer

    plan = from_plain(Plan, read_json(run_dir.plan_json))
    about = read_json(run_dir.run_json)
    device = join_processes(plan.device)
    plan = with_reliefs(plan, recall_reliefs(plan, run_dir))
    state = build_train_state(plan, device)
    if not run_dir.checkpoint_steps():
        load_initial(plan, state)
    source = open_source(plan, about["data_dir"], state)
    run = RunContext(plan, run_dir, source, state, about["digest"], stop)
    Trainer(run, open_coordinator(run)).run()
    leave_processes()


def leave_error(run_dir: RunDir, error: Exception) -> None:
    """Write this worker's error for its supervisor, unless a newer start owns the run."""
    if Fence.of_worker(run_dir).is_closed():
        return
    group, size = (int(os.environ.get(name, "0")) for name in (GROUP, "WORLD_SIZE"))
    rank = group * size + int(os.environ.get("RANK", "0"))
    shortage = getattr(error, "shortage", None)
    problem = error.problems[0] if isinstance(error, TrainspecError) else None
    record = WorkerErrorRecord(
        rank=rank,
        host=socket.gethostname(),
        time=time.time(),
        type=type(error).__name__,
        message=str(error),
        code=problem.code if problem else None,
        exit_code=error.exit_code if isinstance(error, TrainspecError) else None,
        hint=problem.hint if problem else None,
        traceback=traceback.format_exc(),
        shortage=shortage,
    )
    write_error(run_dir.error(rank), record)


if __name__ == "__main__":
    main()
