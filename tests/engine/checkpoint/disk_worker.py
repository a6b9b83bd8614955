"""`disk_worker.py RANK HOSTS FOLDER ACT`: ranks on hosts of one rank each, whose disk is FOLDER/host<NUMBER>.

HOSTS lists the hosts by rank, such as 0,1,2; the first one serves its folder to the others. ACT is `save` (checkpoints
of steps 4 and 6), `save again` (the same steps with other values), `save lost` (the second host's folder cannot be
reached), or `resume`: prints the step and a digest of what was restored. `resume with 1 2` has hosts 1 and 2 as spares.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainspec_cli.core.environment_names import GENERATION, NODE, NODES_SECRET
from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.engine.checkpoint.files import Held, TensorPart
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.nodes import NodeDisks
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.run.channel.folders import FolderServer, RemoteFolder, nodes_secret
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import listen

RANK, FOLDER, ACT = int(sys.argv[1]), Path(sys.argv[3]), sys.argv[4]
HOSTS = list(map(int, sys.argv[2].split(",")))
SPARES = [int(word) for word in ACT.split() if word.isdigit()]
WORLD = len(HOSTS)
CPU = torch.device("cpu")


class Rows(Held):
    """Each rank holds rows of one matrix, and a scalar that all have."""

    def parts(self):
        return [TensorPart("w", self.rows, (RANK * (12 // WORLD), 0), (12, 5)), TensorPart.whole("count", self.count)]


def main() -> None:
    store = f"file://{FOLDER}/rendezvous_{ACT.replace(' ', '_')}_{'_'.join(sys.argv[2].split(','))}"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=WORLD)
    held = Rows([], [], None)
    vars(held)["rows"] = torch.zeros(12 // WORLD, 5)
    vars(held)["count"] = torch.zeros(())
    run_dir = RunDir(FOLDER / f"host{HOSTS[RANK]}")
    run_dir.root.mkdir(exist_ok=True)
    os.environ |= {NODES_SECRET: str(FOLDER / "secret"), GENERATION: "1", NODE: str(HOSTS[RANK])}
    secret = nodes_secret()
    assert secret is not None
    server = FolderServer(run_dir, secret, listen("127.0.0.1"))
    ports = [torch.zeros(1, dtype=torch.int64) for _ in HOSTS]
    dist.all_gather(ports, torch.tensor([server.port]))
    first = ("127.0.0.1", int(ports[0]))
    folder = f"{first[0]}:{first[1]}"
    generations.describe(run_dir, GenerationRecord(1, 0.0, "h", "h", 1, {}, WORLD, "l", "", (), (), folder=folder))
    connections = [RemoteFolder(first, secret)]
    if RANK:
        connections[0].register(HOSTS[RANK], server.port)
    for spare in SPARES:
        theirs = FolderServer(RunDir(FOLDER / f"host{spare}"), secret, listen("127.0.0.1"))
        connections.append(RemoteFolder(first, secret))
        connections[-1].register(spare, theirs.port)
    dist.barrier()
    disks = NodeDisks.of_worker(run_dir)
    assert disks is not None
    try:
        disks.agree_on_newest(remove_newer=True)
        if ACT == "save lost" and RANK == 1:
            server.close()
        dist.barrier()
        if ACT.startswith("save"):
            save(held, Saver(run_dir, held, CPU, keep_last=2, disks=disks))
        else:
            restored = load_newest(run_dir, held, CPU, disks=disks)
            rows = [torch.zeros_like(held.rows) for _ in HOSTS]
            dist.all_gather(rows, held.rows)
            digest = hashlib.sha256(torch.cat(rows).numpy().tobytes()).hexdigest()
            print(restored and restored.manifest.step, digest, held.count.item())
    except TrainspecError as error:
        print(error.problems[0].code)
    dist.barrier()
    for connection in connections:
        connection.close()
    leave_processes()


def save(held: Rows, saver: Saver) -> None:
    for step in (4, 6):
        value = step + 100 * (ACT == "save again")
        held.rows.copy_(torch.arange(60).view(12, 5)[RANK * (12 // WORLD) : (RANK + 1) * (12 // WORLD)] + value)
        held.count.fill_(value)
        saved = saver.save(About(step, step, 1, "d"))
        assert saved.error is None, saved.error
    digest = hashlib.sha256((torch.arange(60).view(12, 5) + value).float().numpy().tobytes()).hexdigest()
    print(6, digest, held.count.item())


if __name__ == "__main__":
    main()
