"""`hanging_worker.py RANK FOLDER`: two ranks take steps together; in step 8 rank 1 sleeps instead."""

import faulthandler
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.run.folder.paths import RunDir

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])


def oversleep() -> None:
    time.sleep(600)


def main() -> None:
    faulthandler.enable()
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/rendezvous", rank=RANK, world_size=2)
    run_dir = RunDir(FOLDER)
    watch = StepWatch(run_dir, Journal(run_dir, RANK, None), floor_s=2.0, first_s=1800.0)
    watch.start()
    for step in range(1, 100):
        if step == 8 and RANK == 1:
            oversleep()
        time.sleep(0.01)
        dist.all_reduce(torch.ones(3, 5))
        watch.beat(step)


main()
