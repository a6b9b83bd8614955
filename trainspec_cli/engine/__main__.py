"""The entry point of a worker: `torchrun -m trainspec_cli.engine RUNDIR` trains according to plan.json and run.json in
RUNDIR."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

from trainspec_cli.core.environment_names import GROUP
from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.startup import Startup
from trainspec_cli.run.folder.generations import Fence
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import WorkerErrorRecord, write_error


def main() -> None:
    startup = Startup()
    stop = StopRequest().listen()
    run_dir = RunDir(sys.argv[1])
    try:
        from trainspec_cli.engine.run.worker import work  # import errors are also reported to the supervisor

        work(run_dir, stop, startup)
    except Exception as error:
        if Fence.of_worker(run_dir).is_closed():  # the run was restarted, and the newer start has taken over
            raise
        group, size = (int(os.environ.get(name, "0")) for name in (GROUP, "WORLD_SIZE"))
        rank = group * size + int(os.environ.get("RANK", "0"))
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
            shortage=getattr(error, "shortage", None),
        )
        write_error(run_dir.error(rank), record)
        raise


if __name__ == "__main__":
    main()
