"""`memory_worker.py RANK WORLD FOLDER ACT`: ranks on hosts of one rank each, whose memory is FOLDER/host<RANK>.

ACT is `keep` (copies of steps 4 and 6 are kept in memory, then all are killed), or `resume`: prints the step and a
digest of what was restored.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainspec_cli.engine.checkpoint.files import Held, TensorPart
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.memory import CopyLocation
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.run.folder.paths import RunDir

RANK, WORLD, FOLDER, ACT = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
CPU = torch.device("cpu")


class Rows(Held):
    """Each rank holds rows of one matrix, and a scalar that all have."""

    def parts(self):
        return [TensorPart("w", self.rows, (RANK * (12 // WORLD), 0), (12, 5)), TensorPart.whole("count", self.count)]


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/rendezvous{ACT}{WORLD}", rank=RANK, world_size=WORLD)
    held = Rows([], [], None)
    vars(held)["rows"] = torch.zeros(12 // WORLD, 5)
    vars(held)["count"] = torch.zeros(())
    place = CopyLocation(FOLDER / f"host{RANK}", RANK, WORLD, ranks_per_node=1)
    run_dir = RunDir(FOLDER)
    if ACT == "keep":
        keep(held, Saver(run_dir, held, CPU, keep_last=2, memory=place))
    restored = load_newest(run_dir, held, CPU, place)
    print(
        restored and restored.manifest.step, hashlib.sha256(held.rows.numpy().tobytes()).hexdigest(), held.count.item()
    )
    leave_processes()


def keep(held: Rows, saver: Saver) -> None:
    for step in (4, 6):
        held.rows.copy_(torch.arange(60).view(12, 5)[RANK * (12 // WORLD) : (RANK + 1) * (12 // WORLD)] + step)
        held.count.fill_(step)
        saver.begin(About(step, step, 1, "d"), to_disk=False)
        saver.wait()
    dist.barrier()
    print(6, hashlib.sha256(held.rows.numpy().tobytes()).hexdigest(), held.count.item(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


main()
